// Scores of products and gains, and ranks of scores (`group_scores`): the best score of each stripe, the denominators
// that follow from them, and one integer per key.
namespace BPC_ISA {

constexpr i64 STRIPES = 64;        // key `i` is in stripe `i % STRIPES`
constexpr i32 LEAST = -(1 << 23);  // below every score
constexpr i64 BOTH = 2 * LANES;    // keys whose products are one vector
constexpr i64 MOST_HEADS = 16;

typedef i16 shorts __attribute__((vector_size(BPC_BYTES)));
typedef u8 bytes __attribute__((vector_size(BPC_BYTES / 2)));  // as many as `shorts`

INLINE shorts widen_bytes(const u8 *at) {
#if defined(__AVX512BW__)
    return (shorts)_mm512_cvtepu8_epi16(load<__m256i>(at));
#elif defined(__AVX2__)
    return (shorts)_mm256_cvtepu8_epi16(load<__m128i>(at));
#else
    return __builtin_convertvector(load<bytes>(at), shorts);
#endif
}

// What the products of `BOTH` keys are multiplied with, and two vectors of such 32-bit products: with x86 of the keys of
// even number and those of odd number, because there it is one instruction.
#if defined(__x86_64__)
struct Weights {
    shorts even, odd;
};
INLINE Weights weights_of(shorts of_each) {
    return {(shorts)((words)of_each & 0xFFFF), (shorts)((words)of_each & 0xFFFF0000)};
}
INLINE ints sums_of_pairs(shorts a, shorts b) {
#if defined(__AVX512BW__)
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (ints)_mm_madd_epi16((__m128i)a, (__m128i)b);
#endif
}
INLINE void multiply(shorts products, const Weights &weights, ints &one, ints &other) {
    one = sums_of_pairs(products, weights.even), other = sums_of_pairs(products, weights.odd);
}
INLINE void put_in_turn(ints one, ints other, i32 *out) {
#if defined(__AVX512F__)
    __m512i places = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    store(out, _mm512_permutex2var_epi32((__m512i)one, places, (__m512i)other));
    places = _mm512_add_epi32(places, _mm512_set1_epi32(8));
    store(out + LANES, _mm512_permutex2var_epi32((__m512i)one, places, (__m512i)other));
#elif defined(__AVX2__)
    __m256i low = _mm256_unpacklo_epi32((__m256i)one, (__m256i)other), high = _mm256_unpackhi_epi32((__m256i)one, (__m256i)other);
    store(out, _mm256_permute2x128_si256(low, high, 0x20));
    store(out + LANES, _mm256_permute2x128_si256(low, high, 0x31));
#else
    store(out, _mm_unpacklo_epi32((__m128i)one, (__m128i)other));
    store(out + LANES, _mm_unpackhi_epi32((__m128i)one, (__m128i)other));
#endif
}
#else
using Weights = shorts;
INLINE Weights weights_of(shorts of_each) { return of_each; }
INLINE void multiply(shorts products, const Weights &weights, ints &one, ints &other) {
    typedef i16 half __attribute__((vector_size(BPC_BYTES / 2)));
    half a[2], b[2];
    std::memcpy(a, &products, sizeof a), std::memcpy(b, &weights, sizeof b);
    one = __builtin_convertvector(a[0], ints) * __builtin_convertvector(b[0], ints);
    other = __builtin_convertvector(a[1], ints) * __builtin_convertvector(b[1], ints);
}
INLINE void put_in_turn(ints one, ints other, i32 *out) { store(out, one), store(out + LANES, other); }
#endif

INLINE Weights weights_at(const u8 *gains) {
    return weights_of(gains ? widen_bytes(gains) + (i16)GAIN_OFFSET : shorts{} + (i16)1);
}

// Raise the best scores of a head's stripes to those of `count` keys, the first of which is in stripe 0. `best` has the
// stripes in an order of its own.
template <bool MASKED>
INLINE void raise_some(const i16 *products, const u8 *gains, const u8 *valid, i64 count, i32 *best) {
    constexpr i64 VECTORS = STRIPES / LANES;
    ints most[VECTORS];
    for (i64 n = 0; n < VECTORS; n++) most[n] = load<ints>(best + n * LANES);
    for (i64 i = 0; i + STRIPES <= count; i += STRIPES)
#pragma GCC unroll 8
        for (i64 n = 0; n < VECTORS; n += 2) {
            i64 at = i + n * LANES;
            ints one, other;
            multiply(load<shorts>(products + at), weights_at(gains ? gains + at : nullptr), one, other);
            if (MASKED) {
                ints real, also;
                multiply(widen_bytes(valid + at), weights_of(shorts{} + (i16)1), real, also);
                one = real ? one : ints{} + LEAST, other = also ? other : ints{} + LEAST;
            }
            most[n] = larger(one, most[n]), most[n + 1] = larger(other, most[n + 1]);
        }
    for (i64 n = 0; n < VECTORS; n++) store(best + n * LANES, most[n]);
}

static void raise_stripes(const i16 *products, const u8 *gains, const u8 *valid, i64 count, i32 *best) {
    i64 whole = count / STRIPES * STRIPES, left = count - whole;
    if (valid)
        raise_some<true>(products, gains, valid, whole, best);
    else
        raise_some<false>(products, gains, valid, whole, best);
    if (!left) return;
    i16 last[STRIPES] = {};
    u8 last_gains[STRIPES] = {}, real[STRIPES] = {};
    std::memcpy(last, products + whole, 2 * left);
    if (gains) std::memcpy(last_gains, gains + whole, left);
    for (i64 i = 0; i < left; i++) real[i] = valid ? valid[whole + i] : 1;
    raise_some<true>(last, gains ? last_gains : nullptr, real, STRIPES, best);
}

// The logarithm of the denominator of a head: `_denominator` of `group_scores`.
static i32 denominator(const i32 *stripes, float octave) {
    i32 best = stripes[0], total = 0, bits;
    for (i64 stripe = 1; stripe < STRIPES; stripe++) best = stripes[stripe] > best ? stripes[stripe] : best;
    for (i64 stripe = 0; stripe < STRIPES; stripe++) {
        i32 below = (i32)((float)(best - stripes[stripe]) * (128 / octave)), halved = below >> 7;
        total += ((256 - (below & 127)) << 15) >> (halved < 31 ? halved : 31);
    }
    float sum = (float)total;
    std::memcpy(&bits, &sum, sizeof bits);
    return best + (i32)((float)((bits >> 16) - (150 << 7)) * (octave / 128));
}

// How scores become ranks. The relative score is without the clamp to int32, which 16 heads never reach.
struct Ranker {
    i64 heads;
    bool relative;
    i32 whole[MOST_HEADS], limit;  // denominators, 0 if not `relative`
};

template <bool RELATIVE>
INLINE void rank_both(const Ranker &by, const i16 *products, i64 stride, const u8 *gains, i32 *ranks) {
    Weights weights = weights_at(gains);
    ints most = ints{} + INT32_MIN, more = most, total = {}, sum = {};
    for (i64 g = 0; g < by.heads; g++) {
        ints one, other;
        multiply(load<shorts>(products + g * stride), weights, one, other);
        one -= by.whole[g], other -= by.whole[g];
        most = larger(one, most), more = larger(other, more);
        if (RELATIVE) total += larger(one, ints{} + by.limit), sum += larger(other, ints{} + by.limit);
    }
    i32 times = (i32)(4 * by.heads);
    if (RELATIVE) most = most * times + total, more = more * times + sum;
    put_in_turn(most, more, ranks);
}

// The ranks of `count` keys, whose products are int16 `[heads, stride]`. Behind both there is room for `BOTH` more.
static void rank_keys(const Ranker &by, const i16 *products, i64 stride, const u8 *gains, i64 count, i32 *ranks) {
    u8 last[BOTH] = {};
    for (i64 i = 0; i < count; i += BOTH) {
        const u8 *these = gains ? gains + i : nullptr;
        if (gains && i + BOTH > count) std::memcpy(last, these, count - i), these = last;
        if (by.relative)
            rank_both<true>(by, products + i, stride, these, ranks + i);
        else
            rank_both<false>(by, products + i, stride, these, ranks + i);
    }
}

}  // namespace BPC_ISA
