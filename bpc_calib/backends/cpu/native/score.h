// Steps 1 and 2: the queries projected, rounded and made into tables, and one ranked integer per key from its code alone.
//
// Ranking a key takes the denominator of each head (`group_scores`), so a first pass leaves the products, as int16, and
// the best score of each stripe, and a second pass ranks.
namespace BPC_ISA {

constexpr float LARGEST_QUERY = 127, RELATIVE_LIMIT = 16, LARGEST_LIMIT = 1 << 24;
constexpr i64 LARGEST_SCORE = 29216;  // of a code; times the largest gain it is below 2^23
constexpr float LN2 = 0.6931471805599453f, LARGEST_OCTAVE = 1 << 17;
constexpr i64 BLOCK = 1024;        // keys whose products are in the nearest cache
constexpr i64 SAMPLE = 1024;       // keys of each row that are ranked first
constexpr i64 PAD = 64;            // tokens of room behind each row of products
constexpr i64 PAGES_AHEAD = 8;     // how many pages ahead codes are prefetched
constexpr i64 AHEAD = 4096;        // bytes of codes between what is read and what is prefetched

// The memory of one row at a time.
struct Room {
    i16 *tables;      // in the order of `put_entries`
    float *projected; // [heads, vectors], the products of the queries, then rounded
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

// Whether bit `b` of `i` is set: all ones or zero.
struct BitsSet {
    i16 of[6][64];
    constexpr BitsSet() : of{} {
        for (int b = 0; b < 6; b++)
            for (int i = 0; i < 64; i++) of[b][i] = i >> b & 1 ? -1 : 0;
    }
};
constexpr BitsSet BITS_SET;

// What each choice of some signs adds to `c = p . u`, from their rounded products; of nibbles the products themselves.
template <bool SIGNS, int BITS>
INLINE void put_sums(const float *rounded, i16 *entries) {
    if (SIGNS) {
        i16 all = 0, twice[BITS];
        for (int bit = 0; bit < BITS; bit++) all = (i16)(all + (i16)rounded[bit]), twice[bit] = (i16)(2 * (i16)rounded[bit]);
        for (i64 i = 0; i < 1 << BITS; i++) {
            i16 sum = (i16)-all;
#pragma GCC unroll 6
            for (int bit = 0; bit < BITS; bit++) sum = (i16)(sum + (BITS_SET.of[bit][i] & twice[bit]));
            entries[i] = sum;
        }
    } else {
        for (i64 i = 0; i < 16; i++) entries[i] = (i16)(i32)rounded[i];
    }
}

// The tables of queries from their rounded products, `[heads, bits]` or `[heads, 4 * bits]`.
template <bool SIGNS>
static void put_tables(const bpc::Call &call, i64 row, const float *rounded, i16 *tables) {
    constexpr i64 numbers = SIGNS ? 1 : 4;  // products of each bit
    for (i64 head = 0; head < call.heads; head++, rounded += numbers * call.bits) {
        const float *from = rounded;
        i64 at = 0;
        for (i64 slice = 0; slice < call.bits / SLICE; slice++)
            unrolled<count_fields(SIGNS)>([&](auto field) __attribute__((always_inline)) {
                constexpr int bits = fields_of(SIGNS)[field];
                alignas(64) i16 entries[1 << bits];
                put_sums<SIGNS, bits>(from, entries);
                put_entries(entries, bits, head, at, room_of_tables(SIGNS, call.bits), tables);
                at += room_of_field(bits), from += numbers * bits;
            });
        if (!call.entries) continue;
        i16 *plain = (i16 *)call.entries + (row * call.heads + head) * call.bits * 4;
        for (i64 bit = 0; bit < call.bits; bit += 4) put_sums<SIGNS, 4>(rounded + numbers * bit, plain + 4 * bit);
    }
}

// The queries of a row times its projection, `[heads, vectors]`; the largest absolute value.
template <Element E>
static float project_row(const bpc::Call &call, i64 row, float *projected) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, heads = call.heads, dim = call.dim, count = vectors_of(call);
    constexpr i64 size = size_of(E);
    alignas(64) float wide[16 * 256];
    for (i64 g = 0; g < heads; g++) {
        i64 at = b * call.query_b + h * call.query_h + g * call.query_g;
        widen_row<E>((const char *)call.query + size * at, dim, wide + g * dim);
    }
    const char *projection = (const char *)call.projection + size * (b * call.projection_b + h * call.projection_h);
    i64 g = 0, apart = size * call.projection_n;
    for (; g + 4 <= heads; g += 4) all_dots<E, 4>(wide + g * dim, dim, projection, apart, count, projected + g * count, count);
    for (; g < heads; g++) all_dots<E, 1>(wide + g * dim, dim, projection, apart, count, projected + g * count, count);
    // Floats without their signs are in the order of their bits.
    i32 largest = 0;
    for (i64 i = 0; i < heads * count; i++) {
        i32 bits = load<i32>(projected + i) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return as_float((u32)largest);
}

// `quantize_query` of a row.
template <Element E>
static void prepare_row(const bpc::Call &call, i64 row, Room &room) {
    float largest = project_row<E>(call, row, room.projected);
    float most = call.nibbles ? (float)(LARGEST_SCORE / (call.bits / 4)) : LARGEST_QUERY;
    float inverse = largest > 0 ? most / largest : 0;
    room.scale = largest / most;
    for (i64 i = 0; i < call.heads * vectors_of(call); i++) {
        float value = __builtin_rintf(room.projected[i] * inverse);
        room.projected[i] = value > most ? most : value < -most ? -most : value;
    }
    if (call.nibbles)
        put_tables<false>(call, row, room.projected, room.tables);
    else
        put_tables<true>(call, row, room.projected, room.tables);
    if (call.scale) ((float *)call.scale)[row] = room.scale;
}

// The products of `count` keys, of any number.
template <int BITS, int N, bool SIGNS>
static void products_of(const i64 *codes, i64 count, const i16 *tables, i16 *out, i64 stride) {
    constexpr i64 words = (BITS + 63) / 64;
    i64 i = 0;
    for (; i + AT_ONCE <= count; i += AT_ONCE) {
        // The processor's own prefetching stops at the end of a page.
        const i64 *from = codes + words * i;
        for (i64 byte = 0; byte < 8 * words * AT_ONCE; byte += 64) prefetch((const char *)from + AHEAD + byte);
        products_at_once<BITS, N, SIGNS>(from, tables, out + i, stride);
    }
    if (i == count) return;
    i64 padded[AT_ONCE * words] = {};
    std::memcpy(padded, codes + words * i, 8 * words * (count - i));
    products_at_once<BITS, N, SIGNS>(padded, tables, out + i, stride);  // into the room behind the row
}

template <int N, bool SIGNS>
static void products_of_bits(i64 bits, const i64 *codes, i64 count, const i16 *tables, i16 *out, i64 stride) {
    if (bits == 32) return products_of<32, N, SIGNS>(codes, count, tables, out, stride);
    if (bits == 64) return products_of<64, N, SIGNS>(codes, count, tables, out, stride);
    products_of<128, N, SIGNS>(codes, count, tables, out, stride);
}

template <bool SIGNS>
static void products_of_heads(i64 heads, i64 bits, const i64 *codes, i64 count, const i16 *tables, i16 *out, i64 stride) {
    switch (heads) {
    case 1: return products_of_bits<1, SIGNS>(bits, codes, count, tables, out, stride);
    case 2: return products_of_bits<2, SIGNS>(bits, codes, count, tables, out, stride);
    case 3: return products_of_bits<3, SIGNS>(bits, codes, count, tables, out, stride);
    default: products_of_bits<4, SIGNS>(bits, codes, count, tables, out, stride);
    }
}

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
    Ranker ranker{call.heads, call.group == 0, {}, 0};
    for (i64 g = 0; g < call.heads && ranker.relative; g++) ranker.whole[g] = room.whole[g];
    float limit = RELATIVE_LIMIT * logit_of(call, room);
    ranker.limit = (i32) - (limit < LARGEST_LIMIT ? limit : LARGEST_LIMIT);
    return ranker;
}

INLINE i64 sample_step(i64 length) { return most_of(16, (length + SAMPLE - 1) / SAMPLE); }

INLINE const u8 *valid_of(const bpc::Call &call, i64 b) { return call.valid ? (const u8 *)call.valid + b * call.valid_b : nullptr; }

// Whether nothing there is a token; then nothing there is scored, so a short sequence costs less than a long one beside it.
INLINE bool only_padding(const u8 *valid, i64 begin, i64 count) { return valid && !std::memchr(valid + begin, 1, count); }

INLINE const i64 *codes_of(const bpc::Call &call, i64 b, i64 h, const Room &room) {
    return call.page ? room.codes : (const i64 *)call.codes + b * call.codes_b + h * call.codes_h;
}

INLINE const u8 *gain_of(const bpc::Call &call, i64 b, i64 h, const Room &room) {
    if (!call.gained) return nullptr;
    return call.page ? room.gain : (const u8 *)call.gain + b * call.gain_b + h * call.gain_h;
}

// Codes and gains of the tokens from `begin` to `end` of a row, page after page.
static void copy_codes(const bpc::Call &call, i64 row, i64 begin, i64 end, Room &room) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, words = call.words, size = call.page;
    const i32 *table = (const i32 *)call.table + b * call.pages;
    const i64 *codes = (const i64 *)call.codes + h * call.codes_h;
    const u8 *gain = (const u8 *)call.gain + h * call.gain_h;
    end = least_of(end, length_of(call, b));
    i64 pages = (end + size - 1) / size;
    auto ask = [&](i64 i) {
        if (i >= pages) return;
        prefetch_row(codes + table[i] * call.codes_b, 8 * size * words);
        if (call.gained) prefetch_row(gain + table[i] * call.gain_b, size);
    };
    for (i64 i = 0; i < PAGES_AHEAD; i++) ask(begin / size + i);
    while (begin < end) {
        i64 i = begin / size, place = begin % size, count = least_of(size - place, end - begin);
        ask(i + PAGES_AHEAD);
        std::memcpy(room.codes + begin * words, codes + table[i] * call.codes_b + place * words, 8 * count * words);
        if (call.gained) std::memcpy(room.gain + begin, gain + table[i] * call.gain_b + place, count);
        begin += count;
    }
}

// The products of the tokens from `begin` to `end` of a row, and the best score of each stripe among them.
static void score_part(const bpc::Call &call, i64 row, i64 begin, i64 end, Room &room, i32 *best) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, heads = call.heads, stride = room.stride;
    i64 length = length_of(call, b), step = sample_step(length);
    const i64 *codes = codes_of(call, b, h, room);
    const u8 *gains = gain_of(call, b, h, room), *valid = valid_of(call, b);
    if (call.page) copy_codes(call, row, begin, end, room);
    for (i64 i = 0; i < heads * STRIPES; i++) best[i] = LEAST;
    for (; begin < least_of(length, end); begin += BLOCK) {
        i64 count = least_of(BLOCK, least_of(length, end) - begin);
        if (only_padding(valid, begin, count)) continue;
        for (i64 g = 0; g < heads; g += 4) {
            const i16 *tables = room.tables + g * room_of_tables(!call.nibbles, call.bits);
            const i64 *from = codes + begin * call.words;
            i16 *to = room.products + g * stride + begin;
            if (SIGNS_APART && !call.nibbles)
                products_of_heads<SIGNS_APART>(heads - g, call.bits, from, count, tables, to, stride);
            else
                products_of_heads<false>(heads - g, call.bits, from, count, tables, to, stride);
        }
        for (i64 g = 0; g < heads; g++) {
            const i16 *products = room.products + g * stride + begin;
            const u8 *weights = gains ? gains + begin : nullptr, *real = valid ? valid + begin : nullptr;
            raise_stripes(products, weights, real, count, best + g * STRIPES);
        }
        for (i64 i = (begin + step - 1) / step; i * step < begin + count; i++) {
            for (i64 g = 0; g < heads; g++) room.sampled[g * SAMPLE + i] = room.products[g * stride + i * step];
            if (gains) room.weights[i] = gains[i * step];
        }
    }
}

}  // namespace BPC_ISA
