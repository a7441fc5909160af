// As dense.h, for bfloat16 where a processor multiplies pairs of them and adds both products in float32: two at once, and
// nothing is widened. Weights are rounded to bfloat16, and their sum is that of the rounded ones.
#if defined(BPC_PAIRS)
#define PAIRED __attribute__((target("avx512bf16")))

namespace BPC_ISA {

PAIRED INLINE floats add_products(floats sum, const void *pairs, const void *pair) {
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)load<__m512i>(pairs), (__m512bh)_mm512_set1_epi32(load<i32>(pair)));
}

// Logits of a tile of keys, `stride` bytes apart, with the queries of one vector, `[TILE, wide]`.
PAIRED INLINE void logits_of_pairs(const Dense &part, const char *keys, i64 stride, i64 dim, i64 vector, float scaling) {
    constexpr i64 SIDE = 8;  // sums that do not wait for each other
    const float *queries = part.queries + vector * dim / 2 * LANES;
    for (i64 first = 0; first < TILE; first += SIDE, keys += SIDE * stride) {
        floats sums[SIDE] = {};
        for (i64 d = 0; d < dim / 2; d++)
#pragma GCC unroll 8
            for (i64 i = 0; i < SIDE; i++) sums[i] = add_products(sums[i], queries + d * LANES, keys + i * stride + 4 * d);
        for (i64 i = 0; i < SIDE; i++) store(part.weights + (first + i) * part.wide + vector * LANES, sums[i] * scaling);
    }
}

INLINE floats paired(floats even, floats odd) { return (floats)((words)even >> 16 | (words)odd); }

// Put the rounded weights of each two tokens side by side; row `i` was read before it is written.
INLINE void pair_weights(Dense &part, i64 vector) {
    float *weights = part.weights + vector * LANES;
    for (i64 i = 0; i < TILE; i += 2)
        store(weights + i / 2 * part.wide, paired(load<floats>(weights + i * part.wide), load<floats>(weights + (i + 1) * part.wide)));
}

// Put the numbers of two rows side by side.
INLINE void pair_rows(const char *even, const char *odd, i64 dim, float *to) {
    i64 d = 0;
    for (; d + LANES <= dim; d += LANES)
        store(to + d, paired(numbers<BFLOAT16>(even + 2 * d), numbers<BFLOAT16>(odd + 2 * d)));
    for (; d < dim; d++) to[d] = as_float(load<u16>(even + 2 * d) | (u32)load<u16>(odd + 2 * d) << 16);
}

// The values of a tile, weighted, added to the sums of four queries: `WIDE` vectors of numbers from `d` on.
template <i64 WIDE>
PAIRED INLINE void add_pairs(Dense &part, i64 g, i64 d) {
    floats sums[4][WIDE];
    for (i64 n = 0; n < 4; n++)
        for (i64 v = 0; v < WIDE; v++) sums[n][v] = load<floats>(part.sums + (g + n) * part.stride + d + v * LANES);
    for (i64 i = 0; i < TILE / 2; i++)
#pragma GCC unroll 4
        for (i64 n = 0; n < 4; n++)
            for (i64 v = 0; v < WIDE; v++)
                sums[n][v] = add_products(sums[n][v], part.values + i * part.stride + d + v * LANES, part.weights + i * part.wide + g + n);
    for (i64 n = 0; n < 4; n++)
        for (i64 v = 0; v < WIDE; v++) store(part.sums + (g + n) * part.stride + d + v * LANES, sums[n][v]);
}

// Attention to the tokens from `begin`, a multiple of `TILE`, to `end`.
PAIRED static void attend_pairs(const bpc::Call &call, i64 row, i64 begin, i64 end, Dense &part) {
    constexpr i64 VECTORS = 4;
    i64 b = row / call.kv_heads, h = row % call.kv_heads, dim = call.dim, seen = call.tokens - call.newest;
    const char *keys = (const char *)call.keys + 2 * (b * call.keys_b + h * call.keys_h);
    const char *values = (const char *)call.values + 2 * (b * call.values_b + h * call.values_h);
    const u8 *valid = call.valid ? (const u8 *)call.valid + b * call.valid_b : nullptr;
    begin_dense<BFLOAT16, true>(call, row, part);
    for (i64 token = begin; token < end; token += TILE) {
        // Tokens behind the last weigh nothing, and are read as if they were the last.
        for (i64 i = 0; i < TILE; i += 2)
            pair_rows(values + 2 * least_of(token + i, end - 1) * call.values_n,
                      values + 2 * least_of(token + i + 1, end - 1) * call.values_n, dim, part.values + i / 2 * part.stride);
        const char *tile = keys + 2 * token * call.keys_n;
        i64 stride = 2 * call.keys_n;
        if (token + TILE > end) {
            for (i64 i = 0; i < TILE && token + i < end; i++)
                std::memcpy((char *)part.keys + 2 * i * dim, tile + i * stride, 2 * dim);
            tile = (const char *)part.keys, stride = 2 * dim;
        }
        bool all = !valid && token + TILE <= seen;
        for (i64 vector = 0; vector < part.wide / LANES; vector++) {
            logits_of_pairs(part, tile, stride, dim, vector, (float)call.scaling);
            weigh_tile<true>(part, vector, token, all, valid, call.heads);
            pair_weights(part, vector);
        }
        for (i64 g = 0; g < call.heads; g += 4) {
            i64 d = 0;
            for (; d + VECTORS * LANES <= part.stride; d += VECTORS * LANES) add_pairs<VECTORS>(part, g, d);
            for (; d < part.stride; d += LANES) add_pairs<1>(part, g, d);
        }
    }
}

}  // namespace BPC_ISA
#endif
