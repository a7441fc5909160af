// The product of a code and a query by tables: each nibble of the code looks up one of 16 int16, and the product is their
// sum. Many keys look up at once, in a table that lies in a register (Andre, Kermarrec, Le Scouarnec, "Quicker ADC",
// 2019). Sums are modulo 2^16, so any tables serve whose totals fit int16.
namespace BPC_ISA {

#if defined(__AVX2__) || defined(__aarch64__)
typedef u8 u8s __attribute__((vector_size(BPC_BYTES)));
typedef u16 u16s __attribute__((vector_size(BPC_BYTES)));

#if defined(__AVX512BW__)
// A lane has 32 bits of a code, and looks up the entries of two heads.
constexpr i64 SLICE = 32, HEADS = 2;

// Every other lane of two vectors, from lane 0 or lane 1 on.
INLINE words every_other(words a, words b, int first) {
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return (words)_mm512_permutex2var_epi32((__m512i)a, _mm512_add_epi32(even, _mm512_set1_epi32(first)), (__m512i)b);
}

struct Sums {
    u16s even, odd;  // of the keys with such numbers
};

INLINE void add(Sums &to, const i16 *table, const words *at) {
    to.even += (u16s)_mm512_permutexvar_epi32((__m512i)at[0], load<__m512i>(table));
    to.odd += (u16s)_mm512_permutexvar_epi32((__m512i)at[1], load<__m512i>(table));
}

INLINE void put(const Sums &sums, i16 *out, i16 *second) {
    words even = (words)sums.even, odd = (words)sums.odd;
    store(out, (even & 0xFFFF) | odd << 16);
    if (second) store(second, even >> 16 | (odd & 0xFFFF0000));
}

INLINE void put_table(const i16 *entries, i64 nibbles, i64 head, i64 nibble, i16 *tables) {
    __m512i wide = _mm512_cvtepu16_epi32(load<__m256i>(entries)), *table = (__m512i *)tables + head / 2 * nibbles + nibble;
    if (head % 2)
        _mm512_mask_storeu_epi16(table, 0xAAAAAAAA, _mm512_slli_epi32(wide, 16));
    else
        _mm512_mask_storeu_epi16(table, 0x55555555, wide);
}
#else
// A lane has 8 bits of a code, and looks up the low bytes and the high bytes of a head's entries.
constexpr i64 SLICE = 8, HEADS = 1;

#if defined(__AVX2__)
INLINE words every_other(words a, words b, int first) {  // of each half
    __m256i parted = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
    __m256i x = _mm256_shuffle_epi8((__m256i)a, parted), y = _mm256_shuffle_epi8((__m256i)b, parted);
    return (words)(first ? _mm256_unpackhi_epi64(x, y) : _mm256_unpacklo_epi64(x, y));
}
INLINE u8s look_up(const i16 *table, u8s at) {
    return (u8s)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(load<__m128i>(table)), (__m256i)at);
}
INLINE void put_in_turn(u16s even, u16s odd, i16 *out) {
    __m256i low = _mm256_unpacklo_epi16((__m256i)even, (__m256i)odd);
    __m256i high = _mm256_unpackhi_epi16((__m256i)even, (__m256i)odd);
    store(out, _mm256_permute2x128_si256(low, high, 0x20));
    store(out + 16, _mm256_permute2x128_si256(low, high, 0x31));
}
#else
INLINE words every_other(words a, words b, int first) {
    return (words)(first ? vuzp2q_u8((uint8x16_t)a, (uint8x16_t)b) : vuzp1q_u8((uint8x16_t)a, (uint8x16_t)b));
}
INLINE u8s look_up(const i16 *table, u8s at) { return (u8s)vqtbl1q_u8(load<uint8x16_t>(table), (uint8x16_t)at); }
INLINE void put_in_turn(u16s even, u16s odd, i16 *out) {
    store(out, vzip1q_u16((uint16x8_t)even, (uint16x8_t)odd));
    store(out + 8, vzip2q_u16((uint16x8_t)even, (uint16x8_t)odd));
}
#endif

struct Sums {
    u16s low, odd;  // low bytes: of an even and an odd key as one number, and of the odd key
    u8s high;
};

INLINE void add(Sums &to, const i16 *table, const words *at) {
    u16s low = (u16s)look_up(table, (u8s)*at & 15);
    to.low += low;
    to.odd += low >> 8;
    to.high += look_up(table + 8, (u8s)*at & 15);
}

INLINE void put(const Sums &sums, i16 *out, i16 *) {
    u16s high = (u16s)sums.high;
    put_in_turn(sums.low + ((high - sums.odd) << 8), sums.odd + (high & 0xFF00), out);
}

INLINE void put_table(const i16 *entries, i64 nibbles, i64 head, i64 nibble, i16 *tables) {
    u8 *table = (u8 *)(tables + (head * nibbles + nibble) * 16);
    for (i64 i = 0; i < 16; i++) table[i] = (u8)entries[i], table[16 + i] = (u8)(entries[i] >> 8);
}
#endif

constexpr i64 AT_ONCE = HEADS * 8 * BPC_BYTES / SLICE;  // keys

// The products of `AT_ONCE` keys for `N` heads, as int16 `[N, stride]`.
template <int BITS, int N>
INLINE void products_at_once(const i64 *codes, const i16 *tables, i16 *out, i64 stride) {
    constexpr i64 rows = (BITS < 64 ? 64 : BITS) / SLICE * HEADS, sets = (N + HEADS - 1) / HEADS;
    words keys[rows], next[rows];
    for (i64 i = 0; i < rows; i++) {
#if BPC_BYTES == 32  // its halves stay apart, so each has keys of its own
        __m256i low = _mm256_castsi128_si256(load<__m128i>((const char *)codes + 16 * i));
        keys[i] = (words)_mm256_inserti128_si256(low, load<__m128i>((const char *)codes + 16 * (rows + i)), 1);
#else
        keys[i] = load<words>((const char *)codes + BPC_BYTES * i);
#endif
    }
    // Each round parts lanes by the lowest bit of their number. At last row `i` has slice `i` of every key; where a lane
    // serves two heads, of even keys, and the rows behind those of odd keys.
#pragma GCC unroll 4
    for (i64 round = 1; round < rows; round *= 2) {
#pragma GCC unroll 16
        for (i64 i = 0; i < rows; i++) next[i] = every_other(keys[2 * i % rows], keys[2 * i % rows + 1], 2 * i >= rows);
#pragma GCC unroll 16
        for (i64 i = 0; i < rows; i++) keys[i] = next[i];
    }
    Sums sums[sets] = {};
    for (i64 row = 0; row < BITS / SLICE; row++) {
        words at[HEADS];
        for (i64 i = 0; i < HEADS; i++) at[i] = keys[row + rows / 2 * i];
#pragma GCC unroll 2
        for (i64 nibble = 0; nibble < SLICE / 4; nibble++, tables += 16 * HEADS) {
#pragma GCC unroll 4
            for (i64 set = 0; set < sets; set++) add(sums[set], tables + HEADS * BITS * 4 * set, at);
            for (i64 i = 0; i < HEADS; i++) at[i] >>= 4;
        }
    }
    for (i64 set = 0; set < sets; set++)
        put(sums[set], out + HEADS * set * stride, HEADS * set + 1 < N ? out + (HEADS * set + 1) * stride : nullptr);
}
#else
constexpr i64 AT_ONCE = 1, HEADS = 1;

INLINE void put_table(const i16 *entries, i64 nibbles, i64 head, i64 nibble, i16 *tables) {
    std::memcpy(tables + (head * nibbles + nibble) * 16, entries, 32);
}

template <int BITS, int N>
INLINE void products_at_once(const i64 *codes, const i16 *tables, i16 *out, i64 stride) {
    i32 sums[N] = {};
    for (i64 nibble = 0; nibble < BITS / 4; nibble++, tables += 16)
        for (i64 head = 0; head < N; head++)
            sums[head] += tables[BITS * 4 * head + ((u64)codes[nibble / 16] >> 4 * (nibble % 16) & 15)];
    for (i64 head = 0; head < N; head++) out[stride * head] = (i16)sums[head];
}
#endif

}  // namespace BPC_ISA
