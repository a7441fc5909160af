// Attention of the newest tokens of each sequence to all tokens before them and to themselves, which reads those once.
//
// The lanes of a vector are queries: a logit needs no sum over lanes, and the weights of all queries are computed at once.
namespace BPC_ISA {

constexpr i64 TILE = 16;           // tokens that are widened at once
constexpr i64 LEAST_DENSE = 1024;  // tokens that are worth a thread

struct Dense {
    i64 wide, stride;        // heads and numbers of a row, both whole vectors
    float *queries;          // [wide / LANES, dim, LANES]; of pairs, [wide / LANES, dim / 2, LANES, 2] of bfloat16
    i32 *limits;             // [wide], tokens that each query sees
    float *keys, *values;    // [TILE, stride]; of pairs, bfloat16 [TILE, dim] and [TILE / 2, stride, 2]
    float *weights;          // [TILE, wide]; once they are pairs, bfloat16 [TILE / 2, wide, 2]
    float *most, *total;     // [wide]
    float *sums;             // [wide, stride]
};

static Dense dense_from(Bytes &bytes, const bpc::Call &call) {
    Dense part{};
    i64 wide = part.wide = ceil_to(call.heads, LANES), stride = part.stride = ceil_to(call.dim, LANES);
    part.queries = bytes.take<float>(wide * call.dim);
    part.limits = bytes.take<i32>(wide);
    part.keys = bytes.take<float>(TILE * stride);
    part.values = bytes.take<float>(TILE * stride);
    part.weights = bytes.take<float>(TILE * wide);
    part.most = bytes.take<float>(wide);
    part.total = bytes.take<float>(wide);
    part.sums = bytes.take<float>(wide * stride);
    return part;
}

template <Element E, bool PAIRS>
INLINE void begin_dense(const bpc::Call &call, i64 row, Dense &part) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, dim = call.dim, seen = call.tokens - call.newest;
    std::memset(part.queries, 0, 4 * part.wide * dim);
    for (i64 g = 0; g < part.wide; g++) {
        part.limits[g] = g < call.heads ? (i32)(seen + g % call.newest + 1) : 0;
        part.most[g] = -1e30f, part.total[g] = 0;
        if (g >= call.heads) continue;
        const char *query = (const char *)call.query + size_of(E) * (b * call.query_b + h * call.query_h + g * call.query_g);
        if constexpr (PAIRS) {
            float *to = part.queries + g / LANES * LANES * (dim / 2) + g % LANES;
            for (i64 d = 0; d < dim; d += 2) to[d / 2 * LANES] = load<float>(query + 2 * d);
        } else {
            float *to = part.queries + g / LANES * LANES * dim + g % LANES;
            for (i64 d = 0; d < dim; d++) to[d * LANES] = number<E>(query + size_of(E) * d) * (float)call.scaling;
        }
    }
    std::memset(part.keys, 0, 4 * TILE * part.stride);
    std::memset(part.values, 0, 4 * TILE * part.stride);
    std::memset(part.sums, 0, 4 * part.wide * part.stride);
}

// Logits of the keys of a tile with the queries of one vector, `[TILE, wide]`.
INLINE void logits_of_tile(const Dense &part, i64 dim, i64 vector) {
    constexpr i64 SIDE = 8;  // sums that do not wait for each other
    const float *queries = part.queries + vector * dim * LANES;
    for (i64 first = 0; first < TILE; first += SIDE) {
        const float *keys = part.keys + first * part.stride;
        floats sums[SIDE] = {};
        for (i64 d = 0; d < dim; d++) {
            floats query = load<floats>(queries + d * LANES);
#pragma GCC unroll 8
            for (i64 i = 0; i < SIDE; i++) sums[i] = fma(splat(keys[i * part.stride + d]), query, sums[i]);
        }
        for (i64 i = 0; i < SIDE; i++) store(part.weights + (first + i) * part.wide + vector * LANES, sums[i]);
    }
}

// To the nearest bfloat16.
INLINE floats rounded(floats x) {
    words bits = (words)x;
    return (floats)((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}

// Turn the logits of one vector of queries into weights, and scale the earlier sums to match.
template <bool PAIRS>
INLINE void weigh_tile(Dense &part, i64 vector, i64 token, bool all, const u8 *valid, i64 heads) {
    float *logits = part.weights + vector * LANES, *most = part.most + vector * LANES, *total = part.total + vector * LANES;
    floats before = load<floats>(most), top = before, none = splat(-INFINITY);
    ints limits = load<ints>(part.limits + vector * LANES);
    for (i64 i = 0; i < TILE; i++) {
        floats logit = load<floats>(logits + i * part.wide);
        if (!all) {
            bool there = !valid || valid[least_of(token + i, part.limits[heads - 1] - 1)];
            logit = limits > (ints{} + (i32)(token + i)) && (ints{} + -(i32)there) ? logit : none;
            store(logits + i * part.wide, logit);
        }
        top = logit > top ? logit : top;
    }
    floats down = exponential(before - top), sum = {};
    for (i64 i = 0; i < TILE; i++) {
        floats logit = load<floats>(logits + i * part.wide);
        floats weight = exponential(logit - top);
        if (PAIRS) weight = rounded(weight);
        if (!all) weight = logit > none ? weight : floats{};
        store(logits + i * part.wide, weight);
        sum += weight;
    }
    store(most, top);
    store(total, load<floats>(total) * down + sum);
    float scales[LANES];
    store(scales, down);
    for (i64 lane = 0; lane < LANES && vector * LANES + lane < heads; lane++) {
        if (scales[lane] == 1) continue;
        float *sums = part.sums + (vector * LANES + lane) * part.stride;
        for (i64 d = 0; d < part.stride; d += LANES) store(sums + d, load<floats>(sums + d) * scales[lane]);
    }
}

// The values of a tile, weighted, added to the sums of four queries: `WIDE` vectors of numbers from `d` on.
template <i64 WIDE>
INLINE void add_tile(Dense &part, i64 g, i64 d) {
    floats sums[4][WIDE];
    for (i64 n = 0; n < 4; n++)
        for (i64 v = 0; v < WIDE; v++) sums[n][v] = load<floats>(part.sums + (g + n) * part.stride + d + v * LANES);
    for (i64 i = 0; i < TILE; i++) {
        floats values[WIDE];
        for (i64 v = 0; v < WIDE; v++) values[v] = load<floats>(part.values + i * part.stride + d + v * LANES);
#pragma GCC unroll 4
        for (i64 n = 0; n < 4; n++) {
            floats weight = splat(part.weights[i * part.wide + g + n]);
            for (i64 v = 0; v < WIDE; v++) sums[n][v] = fma(weight, values[v], sums[n][v]);
        }
    }
    for (i64 n = 0; n < 4; n++)
        for (i64 v = 0; v < WIDE; v++) store(part.sums + (g + n) * part.stride + d + v * LANES, sums[n][v]);
}

// Attention to the tokens from `begin`, a multiple of `TILE`, to `end`.
template <Element E>
static void attend_all(const bpc::Call &call, i64 row, i64 begin, i64 end, Dense &part) {
    constexpr i64 size = size_of(E), VECTORS = 4;
    i64 b = row / call.kv_heads, h = row % call.kv_heads, dim = call.dim, seen = call.tokens - call.newest;
    const char *keys = (const char *)call.keys + size * (b * call.keys_b + h * call.keys_h);
    const char *values = (const char *)call.values + size * (b * call.values_b + h * call.values_h);
    const u8 *valid = call.valid ? (const u8 *)call.valid + b * call.valid_b : nullptr;
    begin_dense<E, false>(call, row, part);
    for (i64 token = begin; token < end; token += TILE) {
        for (i64 i = 0; i < TILE && token + i < end; i++) {
            i64 soon = least_of(token + i + TILE, call.tokens - 1);
            prefetch_row(keys + size * soon * call.keys_n, size * dim);
            prefetch_row(values + size * soon * call.values_n, size * dim);
            widen_row<E>(keys + size * (token + i) * call.keys_n, dim, part.keys + i * part.stride);
            widen_row<E>(values + size * (token + i) * call.values_n, dim, part.values + i * part.stride);
        }
        bool all = !valid && token + TILE <= seen;
        for (i64 vector = 0; vector < part.wide / LANES; vector++) {
            logits_of_tile(part, dim, vector);
            weigh_tile<false>(part, vector, token, all, valid, call.heads);
        }
        for (i64 g = 0; g < call.heads; g += 4) {
            i64 d = 0;
            for (; d + VECTORS * LANES <= part.stride; d += VECTORS * LANES) add_tile<VECTORS>(part, g, d);
            for (; d < part.stride; d += LANES) add_tile<1>(part, g, d);
        }
    }
}

#if defined(BPC_PAIRS)
static void attend_pairs(const bpc::Call &call, i64 row, i64 begin, i64 end, Dense &part);  // pairs.h
#endif

template <Element E>
static void dense_of(const bpc::Call &call, char *(*memory)(i64)) {
    i64 rows = call.batch * call.kv_heads, shares = 1;
    if (call.threads > 1 && rows < 2 * call.threads)
        shares = most_of(1, least_of((2 * call.threads + rows - 1) / rows, call.tokens / LEAST_DENSE));
    i64 each = ceil_to((call.tokens + shares - 1) / shares, TILE);
    Bytes counted{nullptr};
    dense_from(counted, call);
    i64 bytes = (i64)counted.at;
    char *all = memory(rows * shares * bytes);
    auto part_of = [&](i64 task) {
        Bytes taken{all + task * bytes};
        return dense_from(taken, call);
    };
    bpc::parallel(call.threads, rows * shares, [&](i64 task) {
        i64 begin = task % shares * each;
        Dense part = part_of(task);
        i64 end = least_of(call.tokens, begin + each);
#if defined(BPC_PAIRS)
        if (E == BFLOAT16 && bpc::has_pairs && call.dim % 2 == 0)
            return attend_pairs(call, task / shares, begin, end, part);
#endif
        attend_all<E>(call, task / shares, begin, end, part);
    });
    bpc::parallel(call.threads, rows, [&](i64 row) {
        auto *some = new Part[shares];
        for (i64 i = 0; i < shares; i++) {
            Dense part = part_of(row * shares + i);
            some[i].sums = part.sums, some[i].most = part.most, some[i].total = part.total;
        }
        i64 stride = ceil_to(call.dim, LANES);
        put_together(some, shares, call.heads, call.dim, stride, (float *)call.out + row * call.heads * call.dim);
        delete[] some;
    });
}

}  // namespace BPC_ISA
