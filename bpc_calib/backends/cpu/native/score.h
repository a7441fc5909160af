// Steps 1 and 2: the queries projected, rounded and made into tables, and one ranked integer per key from its code alone.
//
// Ranking a key takes the denominator of each head (`group_scores`), so a first pass leaves the products, as int16, and
// the best score of each stripe, and a second pass ranks.
namespace BPC_ISA {

constexpr float LARGEST_QUERY = 127, RELATIVE_LIMIT = 16, LARGEST_LIMIT = 1 << 24;
constexpr i64 LARGEST_SCORE = 29216;  // of a code; times the largest gain it is below 2^23
constexpr float LN2 = 0.6931471805599453f, LARGEST_OCTAVE = 1 << 17;
constexpr i64 STRIPES = 64;          // key `i` is in stripe `i % STRIPES`
constexpr i32 LEAST = -(1 << 23);  // below every score
constexpr i64 BLOCK = 1024;        // keys whose products are in the nearest cache
constexpr i64 SAMPLE = 1024;       // keys of each row that are ranked first
constexpr i64 PAD = 64;            // tokens of room behind each row of products
constexpr i64 AHEAD = 4096;        // bytes of codes between what is read and what is prefetched

// The memory of one row at a time.
struct Room {
    i16 *tables;      // [heads, bits / 4, 16], in the order of `put_table`
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

// What the four bits of a nibble add to `c = p . u`, of four rounded products.
INLINE void sums_of_signs(const float *rounded, i16 *entries) {
    entries[0] = (i16) - (rounded[0] + rounded[1] + rounded[2] + rounded[3]);
    for (i64 i = 1; i < 16; i++) entries[i] = (i16)(entries[i & (i - 1)] + 2 * (i16)rounded[__builtin_ctzll(i)]);
}

// The tables of queries from their rounded products, `[heads, bits]` or `[heads, 4 * bits]`.
static void put_tables(const bpc::Call &call, i64 row, const float *rounded, i16 *tables) {
    i64 nibbles = call.bits / 4, count = call.heads * nibbles;
    i16 *plain = call.entries ? (i16 *)call.entries + row * count * 16 : nullptr;
    for (i64 place = 0; place < count; place++) {
        i16 entries[16];
        if (call.nibbles)
            for (i64 i = 0; i < 16; i++) entries[i] = (i16)rounded[16 * place + i];
        else
            sums_of_signs(rounded + 4 * place, entries);
        put_table(entries, nibbles, place / nibbles, place % nibbles, tables);
        if (plain) std::memcpy(plain + 16 * place, entries, sizeof entries);
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
    put_tables(call, row, room.projected, room.tables);
    if (call.scale) ((float *)call.scale)[row] = room.scale;
}

// The products of `count` keys, of any number.
template <int BITS, int N>
static void products_of(const i64 *codes, i64 count, const i16 *tables, i16 *out, i64 stride) {
    constexpr i64 words = (BITS + 63) / 64;
    i64 i = 0;
    for (; i + AT_ONCE <= count; i += AT_ONCE) {
        // The processor's own prefetching stops at the end of a page.
        const i64 *from = codes + words * i;
        for (i64 byte = 0; byte < 8 * words * AT_ONCE; byte += 64) prefetch((const char *)from + AHEAD + byte);
        products_at_once<BITS, N>(from, tables, out + i, stride);
    }
    if (i == count) return;
    i64 padded[AT_ONCE * words] = {};
    std::memcpy(padded, codes + words * i, 8 * words * (count - i));
    products_at_once<BITS, N>(padded, tables, out + i, stride);  // into the room behind the row
}

template <int N>
static void products_of_bits(i64 bits, const i64 *codes, i64 count, const i16 *tables, i16 *out, i64 stride) {
    if (bits == 32) return products_of<32, N>(codes, count, tables, out, stride);
    if (bits == 64) return products_of<64, N>(codes, count, tables, out, stride);
    products_of<128, N>(codes, count, tables, out, stride);
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
    return least_of(call.tokens, ((const i64 *)call.lengths)[b]);
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

// The products of the tokens from `begin` to `end` of a row, and the best score of each stripe among them.
static void score_part(const bpc::Call &call, i64 row, i64 begin, i64 end, Room &room, i32 *best) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, heads = call.heads, stride = room.stride;
    i64 length = length_of(call, b), step = sample_step(length);
    const i64 *codes = codes_of(call, b, h, room);
    const u8 *gains = gain_of(call, b, h, room), *valid = valid_of(call, b);
    for (i64 i = 0; i < heads * STRIPES; i++) best[i] = LEAST;
    for (; begin < least_of(length, end); begin += BLOCK) {
        i64 count = least_of(BLOCK, least_of(length, end) - begin);
        if (only_padding(valid, begin, count)) continue;
        for (i64 g = 0; g < heads; g += 4) {
            const i16 *tables = room.tables + g * call.bits * 4;
            const i64 *from = codes + begin * call.words;
            i16 *to = room.products + g * stride + begin;
            switch (heads - g) {
            case 1: products_of_bits<1>(call.bits, from, count, tables, to, stride); break;
            case 2: products_of_bits<2>(call.bits, from, count, tables, to, stride); break;
            case 3: products_of_bits<3>(call.bits, from, count, tables, to, stride); break;
            default: products_of_bits<4>(call.bits, from, count, tables, to, stride);
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
