// Steps 1 and 2: the queries projected and rounded to int8, and one ranked integer per key from its code alone.
//
// Ranking a key takes the denominator of each head (`group_scores`), so a first pass leaves the products, as int16, and
// the best score of each stripe, and a second pass ranks.
namespace BPC_ISA {

constexpr float LARGEST_QUERY = 127, RELATIVE_LIMIT = 16, LARGEST_LIMIT = 1 << 24;
constexpr float LN2 = 0.6931471805599453f, LARGEST_OCTAVE = 1 << 17;
constexpr i64 STRIPES = 64;          // key `i` is in stripe `i % STRIPES`
constexpr i32 LEAST = -(1 << 23);  // below every score
constexpr i64 BLOCK = 1024;        // keys whose products are in the nearest cache
constexpr i64 SAMPLE = 1024;       // keys of each row that are ranked first
constexpr i64 PAD = 64;            // tokens of room behind each row of products
constexpr i64 AHEAD = 4096;        // bytes of codes between what is read and what is prefetched

// The memory of one row at a time.
struct Room {
    char *table;      // [fours, table_bytes]: what scoring reads of four heads
    i32 *totals;      // [heads], sums of the rounded queries
    i8 *rounded;      // [heads, bits]
    i16 *products;    // [heads, stride]
    i32 *best;        // [parts, heads, STRIPES], the best score of each stripe
    i32 *whole;       // [heads], the denominators
    i16 *sampled;     // [heads, SAMPLE]
    u8 *weights;      // [SAMPLE], gains of the sample
    u64 *marks;       // [stride / 64], a bit per token: whether it is forced
    i32 *places;      // [stride], candidates
    i32 *values;      // [stride], their ranks
    i64 *counts;      // [parts], how many there are
    i64 *codes;       // [stride, words], of pages
    u8 *gain;         // [stride], of pages
    float scale;      // of the rounded queries
    i32 least;        // the rank from which on a key is a candidate
    i64 stride;
};

#if defined(__AVX512VNNI__)
constexpr i64 AT_ONCE = 32;
#elif defined(__AVX2__)
constexpr i64 AT_ONCE = 8;
#else
constexpr i64 AT_ONCE = 1;
#endif

// For products of bytes: int32 `[words, 2, 8, 4]`, for each half word, shift and head the four bytes of the query whose
// bits that shift brings to the lowest bits of the four bytes of the half word.
INLINE i64 table_bytes(i64 words) { return words * 64 * 4; }

static void fill_table(const i8 *rounded, i64 heads, i64 bits, i64 words, i32 *table) {
    for (i64 place = 0; place < words * 64; place++) {
        i64 head = place & 3, shift = (place >> 2) & 7, half = place >> 5;
        u32 packed = 0;
        for (i64 i = 0; i < 4; i++) {
            i64 bit = 32 * half + 8 * i + shift;
            if (head < heads && bit < bits) packed |= (u32)(u8)rounded[head * bits + bit] << (8 * i);
        }
        table[place] = (i32)packed;
    }
}

// `quantize_query` of a row, the sums of its queries, and its tables.
template <Element E>
static void prepare_row(const bpc::Call &call, i64 row, Room &room) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, heads = call.heads, dim = call.dim, bits = call.bits;
    constexpr i64 size = size_of(E);
    alignas(64) float wide[16 * 256], line[256], projected[16 * 128];
    for (i64 g = 0; g < heads; g++) {
        i64 at = b * call.query_b + h * call.query_h + g * call.query_g;
        widen_row<E>((const char *)call.query + size * at, dim, wide + g * dim);
    }
    const char *projection = (const char *)call.projection + size * (b * call.projection_b + h * call.projection_h);
    prefetch_row(projection, size * bits * dim);  // the cache holds another layer's
    float largest = 0;
    for (i64 j = 0; j < bits; j++) {
        widen_row<E>(projection + size * j * call.projection_n, dim, line);
        for (i64 g = 0; g < heads; g++) {
            float product = dot(wide + g * dim, line, dim);
            projected[g * bits + j] = product;
            largest = __builtin_fabsf(product) > largest ? __builtin_fabsf(product) : largest;
        }
    }
    float inverse = largest > 0 ? LARGEST_QUERY / largest : 0;
    room.scale = largest / LARGEST_QUERY;
    for (i64 g = 0; g < heads; g++) {
        room.totals[g] = 0;
        for (i64 j = 0; j < bits; j++) {
            float value = __builtin_rintf(projected[g * bits + j] * inverse);
            value = value > LARGEST_QUERY ? LARGEST_QUERY : value < -LARGEST_QUERY ? -LARGEST_QUERY : value;
            room.rounded[g * bits + j] = (i8)value;
            room.totals[g] += (i32)value;
        }
    }
    for (i64 first = 0; first < heads; first += 4)
        fill_table(room.rounded + first * bits, least_of(4, heads - first), bits, call.words,
                   (i32 *)(room.table + first / 4 * table_bytes(call.words)));
    if (call.rounded) std::memcpy((i8 *)call.rounded + row * heads * bits, room.rounded, heads * bits);
    if (call.scale) ((float *)call.scale)[row] = room.scale;
}

// `c = 2 p . b - sum(p)` of `AT_ONCE` keys for `N` heads, as int16 `[N, stride]`.
#if defined(__AVX512VNNI__)
template <int WORDS>
INLINE __m512i half_of(const __m512i *codes, int half) {
    if constexpr (WORDS == 1) {
        alignas(64) static constexpr i32 even[2][16] = {
            {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30},
            {1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31},
        };
        return _mm512_permutex2var_epi32(codes[0], _mm512_load_si512(even[half]), codes[1]);
    } else {
        __m512i places = _mm512_add_epi32(_mm512_set1_epi32(half),
                                          _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 0, 0, 0, 0, 0, 0, 0));
        __m512i low = _mm512_permutex2var_epi32(codes[0], places, codes[1]);
        __m512i high = _mm512_permutex2var_epi32(codes[2], places, codes[3]);
        return _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
    }
}

template <int WORDS, int N>
INLINE void products_at_once(const i64 *codes, const i32 *table, const i32 *totals, i16 *out, i64 stride) {
    __m512i loaded[2][2 * WORDS], sums[2][N];
    for (int v = 0; v < 2; v++) {
        for (int i = 0; i < 2 * WORDS; i++) loaded[v][i] = _mm512_loadu_si512(codes + 16 * WORDS * v + 8 * i);
        for (int head = 0; head < N; head++) sums[v][head] = _mm512_setzero_si512();
    }
#pragma GCC unroll 4
    for (int half = 0; half < 2 * WORDS; half++) {
        __m512i one = half_of<WORDS>(loaded[0], half), two = half_of<WORDS>(loaded[1], half);
        __m512i ones = _mm512_set1_epi32(0x01010101);
#pragma GCC unroll 8
        for (int shift = 0; shift < 8; shift++) {
            __m512i a = _mm512_and_si512(_mm512_srli_epi32(one, shift), ones);
            __m512i b = _mm512_and_si512(_mm512_srli_epi32(two, shift), ones);
#pragma GCC unroll 4
            for (int head = 0; head < N; head++) {
                __m512i weights = _mm512_set1_epi32(table[(8 * half + shift) * 4 + head]);
                sums[0][head] = _mm512_dpbusd_epi32(sums[0][head], a, weights);
                sums[1][head] = _mm512_dpbusd_epi32(sums[1][head], b, weights);
            }
        }
    }
    for (int v = 0; v < 2; v++)
        for (int head = 0; head < N; head++) {
            __m512i total = _mm512_sub_epi32(_mm512_slli_epi32(sums[v][head], 1), _mm512_set1_epi32(totals[head]));
            _mm256_storeu_si256((__m256i *)(out + head * stride + 16 * v), _mm512_cvtepi32_epi16(total));
        }
}
#elif defined(__AVX2__)
template <int WORDS, int N>
INLINE void products_at_once(const i64 *codes, const i32 *table, const i32 *totals, i16 *out, i64 stride) {
    __m256i sums[N], ones = _mm256_set1_epi32(0x01010101);
    for (int head = 0; head < N; head++) sums[head] = _mm256_setzero_si256();
    for (int half = 0; half < 2 * WORDS; half++) {
        __m256i place = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        place = _mm256_add_epi32(_mm256_mullo_epi32(place, _mm256_set1_epi32(2 * WORDS)), _mm256_set1_epi32(half));
        __m256i part = _mm256_i32gather_epi32((const int *)codes, place, 4);
        for (int shift = 0; shift < 8; shift++) {
            __m256i bits = _mm256_and_si256(_mm256_srli_epi32(part, shift), ones);
            for (int head = 0; head < N; head++) {  // sums of bytes stay within int16: 127 times 64 bits
                __m256i weights = _mm256_set1_epi32(table[(8 * half + shift) * 4 + head]);
                sums[head] = _mm256_add_epi16(sums[head], _mm256_maddubs_epi16(bits, weights));
            }
        }
    }
    for (int head = 0; head < N; head++) {
        __m256i total = _mm256_madd_epi16(sums[head], _mm256_set1_epi16(1));
        total = _mm256_sub_epi32(_mm256_slli_epi32(total, 1), _mm256_set1_epi32(totals[head]));
        __m128i low = _mm256_castsi256_si128(total), high = _mm256_extracti128_si256(total, 1);
        _mm_storeu_si128((__m128i *)(out + head * stride), _mm_packs_epi32(low, high));
    }
}
#else
template <int WORDS, int N>
INLINE void products_at_once(const i64 *codes, const i32 *table, const i32 *totals, i16 *out, i64 stride) {
    i32 sums[N] = {};
    for (int half = 0; half < 2 * WORDS; half++) {
        u32 part = (u32)((u64)codes[half / 2] >> (32 * (half % 2)));
        for (int shift = 0; shift < 8; shift++, part >>= 1)
            for (int head = 0; head < N; head++) {
                u32 weights = (u32)table[(8 * half + shift) * 4 + head];
                for (int i = 0; i < 4; i++) sums[head] += (part >> (8 * i) & 1) ? (i32)(i8)(weights >> (8 * i)) : 0;
            }
    }
    for (int head = 0; head < N; head++) out[head * stride] = (i16)(2 * sums[head] - totals[head]);
}
#endif

// The products of `count` keys, of any number.
template <int WORDS, int N>
static void products_of(const i64 *codes, i64 count, const i32 *table, const i32 *totals, i16 *out, i64 stride) {
    i64 i = 0;
    for (; i + AT_ONCE <= count; i += AT_ONCE) {
        // The processor's own prefetching stops at the end of a page.
        for (i64 byte = 0; byte < 8 * WORDS * AT_ONCE; byte += 64) prefetch((const char *)(codes + WORDS * i) + AHEAD + byte);
        products_at_once<WORDS, N>(codes + WORDS * i, table, totals, out + i, stride);
    }
    if (i == count) return;
    i64 padded[AT_ONCE * WORDS] = {};
    std::memcpy(padded, codes + WORDS * i, 8 * WORDS * (count - i));
    products_at_once<WORDS, N>(padded, table, totals, out + i, stride);  // into the room behind the row
}

template <int N>
static void products_of_words(i64 words, const i64 *codes, i64 count, const i32 *table, const i32 *totals, i16 *out,
                              i64 stride) {
    if (words == 1)
        products_of<1, N>(codes, count, table, totals, out, stride);
    else
        products_of<2, N>(codes, count, table, totals, out, stride);
}

// Raise the best scores of the stripes of a head to those of `count` keys, the first of which is in stripe 0.
template <bool GAINED, bool MASKED>
static void raise_stripes(const i16 *products, const u8 *gains, const u8 *valid, i64 count, i32 *__restrict best) {
    auto raise = [&](i64 i, i64 stripe) {
        i32 score = products[i + stripe];
        if (GAINED) score *= (i32)gains[i + stripe] + (i32)GAIN_OFFSET;
        if (MASKED) score = valid[i + stripe] ? score : LEAST;
        best[stripe] = score > best[stripe] ? score : best[stripe];
    };
    i64 i = 0;
    for (; i + STRIPES <= count; i += STRIPES)
        for (i64 stripe = 0; stripe < STRIPES; stripe++) raise(i, stripe);
    for (i64 stripe = 0; stripe < count - i; stripe++) raise(i, stripe);
}

// `rank_block` for up to four heads: the largest score and, relative to the denominators, the sum of those within the limit.
template <int N, bool RELATIVE, bool GAINED, bool FIRST, bool LAST>
static void rank_heads(const i16 *__restrict products, i64 stride, const u8 *__restrict gains, const i32 *whole, i32 limit,
                       i64 count, i32 all, i32 *__restrict top, i32 *__restrict total, i32 *__restrict ranks) {
    i32 most[N];
    for (int g = 0; g < N; g++) most[g] = RELATIVE ? whole[g] : 0;
    const i16 *a = products, *b = products + (N > 1) * stride, *c = products + 2 * (N > 2) * stride,
              *d = products + 3 * (N > 3) * stride;
    for (i64 i = 0; i < count; i++) {
        i32 weight = GAINED ? (i32)gains[i] + (i32)GAIN_OFFSET : 1;
        i32 scores[4] = {a[i], b[i], c[i], d[i]};
        i32 largest = FIRST ? -(1 << 30) : top[i], within = FIRST || !RELATIVE ? 0 : total[i];
#pragma GCC unroll 4
        for (int g = 0; g < N; g++) {
            i32 score = scores[g] * weight - most[g];
            largest = score > largest ? score : largest;
            if (RELATIVE) within += score > limit ? score : limit;
        }
        if (LAST)
            ranks[i] = RELATIVE ? all * largest + within : largest;
        else
            top[i] = largest, total[i] = within;
    }
}

template <int N, bool RELATIVE, bool GAINED>
static void rank_some(bool first, bool last, const i16 *products, i64 stride, const u8 *gains, const i32 *whole, i32 limit,
                      i64 count, i32 all, i32 *top, i32 *total, i32 *ranks) {
    if (first && last)
        rank_heads<N, RELATIVE, GAINED, true, true>(products, stride, gains, whole, limit, count, all, top, total, ranks);
    else if (first)
        rank_heads<N, RELATIVE, GAINED, true, false>(products, stride, gains, whole, limit, count, all, top, total, ranks);
    else if (last)
        rank_heads<N, RELATIVE, GAINED, false, true>(products, stride, gains, whole, limit, count, all, top, total, ranks);
    else
        rank_heads<N, RELATIVE, GAINED, false, false>(products, stride, gains, whole, limit, count, all, top, total, ranks);
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

// How scores become ranks, see `group_scores`. The relative score is without the clamp to int32, which 16 heads never
// reach.
struct Ranker {
    i64 heads;
    bool relative, gained;
    i32 whole[16], limit;

    // The ranks of at most `BLOCK` keys whose products are int16 `[heads, stride]`.
    void rank(const i16 *products, i64 stride, const u8 *gains, i64 count, i32 *ranks) const {
        alignas(64) i32 top[BLOCK], total[BLOCK];
        for (i64 begin = 0; begin < heads; begin += 4) {
            bool first = begin == 0, last = begin + 4 >= heads;
            const i16 *from = products + begin * stride;
            i32 all = (i32)(4 * heads);
#define BPC_RANK(N)                                                                                                \
    if (relative && gained)                                                                                        \
        rank_some<N, true, true>(first, last, from, stride, gains, whole + begin, limit, count, all, top, total, ranks); \
    else if (relative)                                                                                             \
        rank_some<N, true, false>(first, last, from, stride, gains, whole + begin, limit, count, all, top, total, ranks); \
    else if (gained)                                                                                               \
        rank_some<N, false, true>(first, last, from, stride, gains, whole + begin, limit, count, all, top, total, ranks); \
    else                                                                                                           \
        rank_some<N, false, false>(first, last, from, stride, gains, whole + begin, limit, count, all, top, total, ranks)
            switch (heads - begin) {
            case 1: BPC_RANK(1); break;
            case 2: BPC_RANK(2); break;
            case 3: BPC_RANK(3); break;
            default: BPC_RANK(4);
            }
#undef BPC_RANK
        }
    }
};

// One logit, in the unit of the scores.
INLINE float logit_of(const bpc::Call &call, const Room &room) {
    return (call.gained ? GAIN_UNIT : 1.0f) / (room.scale * (float)call.scaling);
}

// The denominators of a row whose parts are scored.
static void put_whole(const bpc::Call &call, i64 parts, Room &room) {
    float octave = LN2 * logit_of(call, room);
    octave = (float)(i32)(octave < 1 ? 1 : octave < LARGEST_OCTAVE ? octave : LARGEST_OCTAVE);
    for (i64 g = 0; g < call.heads; g++) {
        i32 *stripes = room.best + g * STRIPES;
        for (i64 part = 1; part < parts; part++) {
            const i32 *others = stripes + part * call.heads * STRIPES;
            for (i64 stripe = 0; stripe < STRIPES; stripe++) stripes[stripe] = others[stripe] > stripes[stripe] ? others[stripe] : stripes[stripe];
        }
        room.whole[g] = denominator(stripes, octave);
    }
}

static Ranker ranker_of(const bpc::Call &call, const Room &room) {
    Ranker ranker{call.heads, call.group == 0, call.gained != 0, {}, 0};
    for (i64 g = 0; g < call.heads; g++) ranker.whole[g] = room.whole[g];
    float limit = RELATIVE_LIMIT * logit_of(call, room);
    ranker.limit = (i32) - (limit < LARGEST_LIMIT ? limit : LARGEST_LIMIT);
    return ranker;
}

// Tokens in use of a sequence.
INLINE i64 length_of(const bpc::Call &call, i64 b) {
    return call.lengths ? least_of(call.tokens, ((const i64 *)call.lengths)[b]) : call.tokens;
}

INLINE i64 sample_step(i64 length) { return most_of(16, (length + SAMPLE - 1) / SAMPLE); }

INLINE const u8 *valid_of(const bpc::Call &call, i64 b) { return call.valid ? (const u8 *)call.valid + b * call.valid_b : nullptr; }

INLINE const i64 *codes_of(const bpc::Call &call, i64 b, i64 h, const Room &room) {
    return call.page ? room.codes : (const i64 *)call.codes + b * call.codes_b + h * call.codes_h;
}

INLINE const u8 *gain_of(const bpc::Call &call, i64 b, i64 h, const Room &room) {
    if (!call.gained) return nullptr;
    return call.page ? room.gain : (const u8 *)call.gain + b * call.gain_b + h * call.gain_h;
}

// The products of the tokens from `begin` to `end` of a row, and the best score of each stripe among them.
static void score_part(const bpc::Call &call, i64 row, i64 begin, i64 end, Room &room, i32 *best) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, heads = call.heads, stride = room.stride;
    i64 length = length_of(call, b), step = sample_step(length);
    const i64 *codes = codes_of(call, b, h, room);
    const u8 *gains = gain_of(call, b, h, room), *valid = valid_of(call, b);
    for (i64 i = 0; i < heads * STRIPES; i++) best[i] = LEAST;
    for (; begin < least_of(length, end); begin += BLOCK) {
        i64 count = least_of(BLOCK, least_of(length, end) - begin);
        for (i64 g = 0; g < heads; g += 4) {
            const i32 *table = (const i32 *)(room.table + g / 4 * table_bytes(call.words));
            const i64 *from = codes + begin * call.words;
            i16 *to = room.products + g * stride + begin;
            switch (heads - g) {
            case 1: products_of_words<1>(call.words, from, count, table, room.totals + g, to, stride); break;
            case 2: products_of_words<2>(call.words, from, count, table, room.totals + g, to, stride); break;
            case 3: products_of_words<3>(call.words, from, count, table, room.totals + g, to, stride); break;
            default: products_of_words<4>(call.words, from, count, table, room.totals + g, to, stride);
            }
        }
        for (i64 g = 0; g < heads; g++) {
            const i16 *products = room.products + g * stride + begin;
            const u8 *weights = gains ? gains + begin : nullptr, *real = valid ? valid + begin : nullptr;
            i32 *stripes = best + g * STRIPES;
            if (gains && valid)
                raise_stripes<true, true>(products, weights, real, count, stripes);
            else if (gains)
                raise_stripes<true, false>(products, weights, real, count, stripes);
            else if (valid)
                raise_stripes<false, true>(products, weights, real, count, stripes);
            else
                raise_stripes<false, false>(products, weights, real, count, stripes);
        }
        for (i64 i = (begin + step - 1) / step; i * step < begin + count; i++) {
            for (i64 g = 0; g < heads; g++) room.sampled[g * SAMPLE + i] = room.products[g * stride + i * step];
            if (gains) room.weights[i] = gains[i * step];
        }
    }
}

}  // namespace BPC_ISA
