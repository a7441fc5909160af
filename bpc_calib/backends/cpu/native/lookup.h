// The product of a code and a query by tables: a field of the code, some bits beside each other, looks up one of so many
// int16, and the product is their sum. Many keys look up at once, in tables that lie in registers (Andre, Kermarrec,
// Le Scouarnec, "Quicker ADC", 2019). Sums are modulo 2^16, so any tables serve whose totals fit int16.
//
// A nibble is a field. Signs may lie in wider fields, which are fewer: a table holds what each choice of them adds up to.
namespace BPC_ISA {

#if defined(__AVX2__) || defined(__aarch64__)
typedef u8 u8s __attribute__((vector_size(BPC_BYTES)));
typedef u16 u16s __attribute__((vector_size(BPC_BYTES)));

#if defined(__AVX512BW__)
constexpr i64 BATCHES = 2;  // of keys that share a table while it lies in registers
constexpr bool SIGNS_APART = true;  // whether signs have other fields than nibbles
// The compiler would look up much before it adds anything, and would keep that on the stack.
#define BPC_NOW(what) asm("" : "+v"(what))

#if defined(BPC_WORDS)
// A lane has 16 bits of a code. AMD's processors look up 16-bit numbers as fast as 32-bit ones.
constexpr i64 SLICE = 16, HEADS = 1;
constexpr int SIGN_FIELDS[] = {6, 6, 4};

// Every other lane of two vectors, from lane 0 or lane 1 on.
INLINE words every_other(words a, words b, int first) {
    alignas(64) static const u16 even[] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                           32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
    __m512i places = _mm512_add_epi16(load<__m512i>(even), _mm512_set1_epi16((short)first));
    return (words)_mm512_permutex2var_epi16((__m512i)a, places, (__m512i)b);
}

using Sums = u16s;
constexpr i64 LEAST_ROOM = 32;  // entries of one register

template <int BITS>
INLINE void add(Sums *sums, const i16 *table, const words (*at)[HEADS]) {
    __m512i low = load<__m512i>(table), high = BITS == 6 ? load<__m512i>(table + 32) : low;
    BPC_NOW(low);
    if (BITS == 6) BPC_NOW(high);
#pragma GCC unroll 2
    for (i64 i = 0; i < BATCHES; i++) {
        __m512i keys = (__m512i)at[i][0];
        sums[i] += (u16s)(BITS == 6 ? _mm512_permutex2var_epi16(low, keys, high) : _mm512_permutexvar_epi16(keys, low));
        BPC_NOW(sums[i]);
    }
}

INLINE words next_field(words keys, int bits) { return (words)((u16s)keys >> bits); }

INLINE void put(const Sums &sums, i16 *out, i16 *) { store(out, sums); }

INLINE void put_entries(const i16 *entries, int bits, i64 head, i64 at, i64 per_head, i16 *tables) {
    i16 *table = tables + head * per_head + at;
    std::memcpy(table, entries, (size_t)2 << bits);
    if (bits == 4) std::memcpy(table + 16, entries, 32);  // the fifth bit is the next field's
}
#else
// A lane has 32 bits of a code, and looks up the entries of two heads.
constexpr i64 SLICE = 32, HEADS = 2;
constexpr int SIGN_FIELDS[] = {5, 5, 5, 5, 4, 4, 4};

// Every other lane of two vectors, from lane 0 or lane 1 on.
INLINE words every_other(words a, words b, int first) {
    __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return (words)_mm512_permutex2var_epi32((__m512i)a, _mm512_add_epi32(even, _mm512_set1_epi32(first)), (__m512i)b);
}

struct Sums {
    u16s even, odd;  // of the keys with such numbers
};
constexpr i64 LEAST_ROOM = 16;

template <int BITS>
INLINE void add(Sums *sums, const i16 *table, const words (*at)[HEADS]) {
    __m512i low = load<__m512i>(table), high = BITS == 5 ? load<__m512i>(table + 32) : low;
    auto look_up = [&](words keys) {
        return (u16s)(BITS == 5 ? _mm512_permutex2var_epi32(low, (__m512i)keys, high)
                                : _mm512_permutexvar_epi32((__m512i)keys, low));
    };
    BPC_NOW(low);
    if (BITS == 5) BPC_NOW(high);
#pragma GCC unroll 2
    for (i64 i = 0; i < BATCHES; i++) {
        sums[i].even += look_up(at[i][0]), sums[i].odd += look_up(at[i][1]);
        BPC_NOW(sums[i].even);
        BPC_NOW(sums[i].odd);
    }
}

INLINE words next_field(words keys, int bits) { return keys >> bits; }

INLINE void put(const Sums &sums, i16 *out, i16 *second) {
    words even = (words)sums.even, odd = (words)sums.odd;
    store(out, (even & 0xFFFF) | odd << 16);
    if (second) store(second, even >> 16 | (odd & 0xFFFF0000));
}

INLINE void put_entries(const i16 *entries, int bits, i64 head, i64 at, i64 per_head, i16 *tables) {
    for (i64 i = 0; i < 1 << bits; i += 16) {
        __m512i wide = _mm512_cvtepu16_epi32(load<__m256i>(entries + i));
        i16 *table = tables + 2 * (head / 2 * per_head + at + i);
        if (head % 2)
            _mm512_mask_storeu_epi16(table, 0xAAAAAAAA, _mm512_slli_epi32(wide, 16));
        else
            _mm512_mask_storeu_epi16(table, 0x55555555, wide);
    }
}
#endif
#else
// A lane has 8 bits of a code, and looks up the low bytes and the high bytes of a head's entries.
constexpr i64 SLICE = 8, HEADS = 1, BATCHES = 1;
constexpr bool SIGNS_APART = false;
constexpr int SIGN_FIELDS[] = {4, 4};
constexpr i64 LEAST_ROOM = 16;
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

template <int BITS>
INLINE void add(Sums *sums, const i16 *table, const words (*at)[HEADS]) {
    u8s keys = (u8s)at[0][0] & 15;
    u16s low = (u16s)look_up(table, keys);
    sums->low += low;
    sums->odd += low >> 8;
    sums->high += look_up(table + 8, keys);
}

INLINE words next_field(words keys, int bits) { return keys >> bits; }

INLINE void put(const Sums &sums, i16 *out, i16 *) {
    u16s high = (u16s)sums.high;
    put_in_turn(sums.low + ((high - sums.odd) << 8), sums.odd + (high & 0xFF00), out);
}

INLINE void put_entries(const i16 *entries, int, i64 head, i64 at, i64 per_head, i16 *tables) {
    typedef u16 all __attribute__((vector_size(32)));
    typedef u8 part __attribute__((vector_size(16)));
    i16 *table = tables + head * per_head + at;
    all found = load<all>(entries);
    store(table, __builtin_convertvector(found & 255, part)), store(table + 8, __builtin_convertvector(found >> 8, part));
}
#endif

constexpr i64 AT_ONCE = BATCHES * HEADS * 8 * BPC_BYTES / SLICE;  // keys
constexpr int FIELD_BITS[] = {4, 4, 4, 4, 4, 4, 4, 4};

constexpr const int *fields_of(bool signs) { return signs ? SIGN_FIELDS : FIELD_BITS; }
constexpr i64 count_fields(bool signs) { return signs ? sizeof SIGN_FIELDS / sizeof *SIGN_FIELDS : SLICE / 4; }
constexpr i64 room_of_field(int bits) { return 1 << bits < LEAST_ROOM ? LEAST_ROOM : 1 << bits; }

// The numbers of a head's tables, for each slice of the codes.
constexpr i64 room_of_slice(bool signs) {
    i64 room = 0;
    for (i64 field = 0; field < count_fields(signs); field++) room += room_of_field(fields_of(signs)[field]);
    return room;
}
constexpr i64 room_of_tables(bool signs, i64 bits) { return bits / SLICE * room_of_slice(signs); }

// The codes of keys, `SLICE` bits in a lane: row `i` has slice `i` of every key; where a lane serves two heads, of even
// keys, and the rows behind those of odd keys.
template <i64 ROWS>
INLINE void part(const i64 *codes, words *keys) {
    words next[ROWS];
    for (i64 i = 0; i < ROWS; i++) {
#if BPC_BYTES == 32  // its halves stay apart, so each has keys of its own
        __m256i low = _mm256_castsi128_si256(load<__m128i>((const char *)codes + 16 * i));
        keys[i] = (words)_mm256_inserti128_si256(low, load<__m128i>((const char *)codes + 16 * (ROWS + i)), 1);
#else
        keys[i] = load<words>((const char *)codes + BPC_BYTES * i);
#endif
    }
    // Each round parts lanes by the lowest bit of their number.
#pragma GCC unroll 4
    for (i64 round = 1; round < ROWS; round *= 2) {
#pragma GCC unroll 16
        for (i64 i = 0; i < ROWS; i++) next[i] = every_other(keys[2 * i % ROWS], keys[2 * i % ROWS + 1], 2 * i >= ROWS);
#pragma GCC unroll 16
        for (i64 i = 0; i < ROWS; i++) keys[i] = next[i];
    }
}

// The products of `AT_ONCE` keys for `N` heads, as int16 `[N, stride]`.
template <int BITS, int N, bool SIGNS>
INLINE void products_at_once(const i64 *codes, const i16 *tables, i16 *out, i64 stride) {
    constexpr i64 rows = (BITS < 64 ? 64 : BITS) / SLICE * HEADS, sets = (N + HEADS - 1) / HEADS;
    constexpr i64 per_set = HEADS * room_of_tables(SIGNS, BITS), keys_of = AT_ONCE / BATCHES;
    words keys[BATCHES][rows];
    for (i64 i = 0; i < BATCHES; i++) part<rows>(codes + keys_of * (BITS < 64 ? 64 : BITS) / 64 * i, keys[i]);
    Sums sums[sets][BATCHES] = {};
    for (i64 row = 0; row < BITS / SLICE; row++) {
        words at[BATCHES][HEADS];
        for (i64 i = 0; i < BATCHES; i++)
            for (i64 n = 0; n < HEADS; n++) at[i][n] = keys[i][row + rows / 2 * n];
        unrolled<count_fields(SIGNS)>([&](auto field) __attribute__((always_inline)) {
            constexpr int bits = fields_of(SIGNS)[field];
            for (i64 set = 0; set < sets; set++) add<bits>(sums[set], tables + per_set * set, at);
            tables += HEADS * room_of_field(bits);
            for (i64 i = 0; i < BATCHES; i++)
                for (i64 n = 0; n < HEADS; n++) at[i][n] = next_field(at[i][n], bits);
        });
    }
    for (i64 set = 0; set < sets; set++)
        for (i64 i = 0; i < BATCHES; i++) {
            i16 *to = out + HEADS * set * stride + keys_of * i;
            put(sums[set][i], to, HEADS * set + 1 < N ? to + stride : nullptr);
        }
}
#else
constexpr i64 AT_ONCE = 1, HEADS = 1, SLICE = 4;
constexpr bool SIGNS_APART = false;
constexpr int FIELD_BITS[] = {4};

constexpr const int *fields_of(bool) { return FIELD_BITS; }
constexpr i64 count_fields(bool) { return 1; }
constexpr i64 room_of_field(int) { return 16; }
constexpr i64 room_of_tables(bool, i64 bits) { return 4 * bits; }

INLINE void put_entries(const i16 *entries, int, i64 head, i64 at, i64 per_head, i16 *tables) {
    std::memcpy(tables + head * per_head + at, entries, 32);
}

template <int BITS, int N, bool>
INLINE void products_at_once(const i64 *codes, const i16 *tables, i16 *out, i64 stride) {
    i32 sums[N] = {};
    for (i64 nibble = 0; nibble < BITS / 4; nibble++, tables += 16)
        for (i64 head = 0; head < N; head++)
            sums[head] += tables[BITS * 4 * head + ((u64)codes[nibble / 16] >> 4 * (nibble % 16) & 15)];
    for (i64 head = 0; head < N; head++) out[stride * head] = (i16)sums[head];
}
#endif

}  // namespace BPC_ISA
