// Step 4: exact attention over the tokens chosen, read where they lie.
namespace BPC_ISA {

constexpr i64 CHUNK = 16;        // tokens whose weights are computed at once; nothing is prefetched meanwhile
constexpr i64 ROWS_AHEAD = 16;   // how many tokens ahead keys and values are prefetched
constexpr i64 SOON = 8;          // how many tokens ahead packed numbers are prefetched
constexpr i64 PACKED = 16;       // numbers of a value in a cache line beside those of another, in vLLM's packing for AMX

// Attention of a part of a list, to be put together: `[fours]` heads, whole fours.
struct Part {
    float *sums;           // [fours, dim], of values weighted by exponentials
    float *most, *total;   // [heads], the largest logit and the sum of the exponentials
    float *queries;        // [fours, dim]
    float *logits;         // [fours, CHUNK]
    const char **keys;     // [tokens], where they lie
    const char **values;
    char *unpacked;        // [tokens, dim], values of packed pages
};

// e^x for x of at most 0, to 2 units in the last place.
INLINE floats exponential(floats given) {
    constexpr float LOG2E = 1.4426950408889634f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.1219444e-4f;
    constexpr float LEAST_LOGIT = -87;  // e^-87 is nearly 0, and still a normal number
    constexpr float ROUND = 12582912;   // adding it to a small number rounds that to an integer
    // 2^n e^r with r in [-ln 2 / 2, ln 2 / 2], ln 2 in two parts, and the Taylor series of the latter.
    given = given < LEAST_LOGIT ? splat(LEAST_LOGIT) : given;  // NaN stays
    floats whole = (given * LOG2E + ROUND) - ROUND;
    floats r = (given - whole * LN2_HIGH) - whole * LN2_LOW;
    floats series = splat(1.0f / 5040);
    series = fma(series, r, splat(1.0f / 720));
    series = fma(series, r, splat(1.0f / 120));
    series = fma(series, r, splat(1.0f / 24));
    series = fma(series, r, splat(1.0f / 6));
    series = fma(series, r, splat(1.0f / 2));
    series = fma(series, r, splat(1.0f));
    series = fma(series, r, splat(1.0f));
    ints power = (__builtin_convertvector(whole, ints) + 127) << 23;
    return series * (floats)power;
}

// The sums of four vectors.
INLINE void sum_four(floats a, floats b, floats c, floats d, float *out, i64 stride) {
#if defined(__AVX512F__) || defined(__AVX2__)
#if defined(__AVX512F__)
    auto folded = [](floats x) {
        __m512 v = (__m512)x;
        return _mm256_add_ps(_mm512_castps512_ps256(v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(v), 1)));
    };
#else
    auto folded = [](floats x) { return (__m256)x; };
#endif
    __m256 one = _mm256_hadd_ps(folded(a), folded(b)), two = _mm256_hadd_ps(folded(c), folded(d));
    __m256 all = _mm256_hadd_ps(one, two);
    alignas(16) float sums[4];
    _mm_store_ps(sums, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
    for (i64 g = 0; g < 4; g++) out[g * stride] = sums[g];
#else
    out[0] = sum(a), out[stride] = sum(b), out[2 * stride] = sum(c), out[3 * stride] = sum(d);
#endif
}

template <Element E>
INLINE void prefetch_token(const Part &part, i64 i, i64 dim) {
    prefetch_row(part.keys[i], size_of(E) * dim);
    prefetch_row(part.values[i], size_of(E) * dim);
}

// Logits `[4, CHUNK]` of the keys from `begin` on with the queries of 4 heads, `[4, dim]`.
template <Element E>
INLINE void logits_of(const Part &part, i64 begin, i64 count, i64 found, i64 dim, const float *queries, float *logits,
                      bool ahead) {
    for (i64 i = begin; i < begin + count; i++) {
        if (ahead) prefetch_token<E>(part, least_of(i + ROWS_AHEAD, found - 1), dim);
        const char *key = part.keys[i];
        floats a = {}, b = {}, c = {}, d = {};
        i64 at = 0;
        for (; at + LANES <= dim; at += LANES) {
            floats x = numbers<E>(key + size_of(E) * at);
            a = fma(load<floats>(queries + at), x, a);
            b = fma(load<floats>(queries + dim + at), x, b);
            c = fma(load<floats>(queries + 2 * dim + at), x, c);
            d = fma(load<floats>(queries + 3 * dim + at), x, d);
        }
        float *out = logits + i - begin;
        sum_four(a, b, c, d, out, CHUNK);
        for (; at < dim; at++)
            for (i64 g = 0; g < 4; g++) out[g * CHUNK] += queries[g * dim + at] * number<E>(key + size_of(E) * at);
    }
}

// Turn the logits `[CHUNK]` of a head into weights, and scale the earlier sums to match.
INLINE void weigh(float *logits, i64 count, i64 dim, float *most, float *total, float *sums) {
    for (i64 i = count; i < CHUNK; i++) logits[i] = -INFINITY;
    floats tops = load<floats>(logits), weights = {};
    for (i64 i = LANES; i < CHUNK; i += LANES) {
        floats more = load<floats>(logits + i);
        tops = more > tops ? more : tops;
    }
    float top = largest(tops);
    if (top > *most) {
        float down = __builtin_expf(*most - top);
        *most = top, *total *= down;
        for (i64 d = 0; d < dim; d++) sums[d] *= down;
    }
    for (i64 i = 0; i < CHUNK; i += LANES) store(logits + i, exponential(load<floats>(logits + i) - *most));
    for (i64 i = count; i < CHUNK; i++) logits[i] = 0;
    for (i64 i = 0; i < CHUNK; i += LANES) weights += load<floats>(logits + i);
    *total += sum(weights);
}

// The values from `begin` on, weighted by `weights [4, CHUNK]`, added to `sums [4, dim]`: 4 values at once.
template <Element E>
INLINE void add_values(const Part &part, i64 begin, i64 count, i64 dim, const float *weights, float *sums) {
    for (i64 i = 0; i < count; i += 4) {
        const char *rows[4];
        for (i64 n = 0; n < 4; n++) rows[n] = part.values[begin + least_of(i + n, count - 1)];  // of weight 0
        floats spread[4][4];
#pragma GCC unroll 4
        for (i64 g = 0; g < 4; g++)
#pragma GCC unroll 4
            for (i64 n = 0; n < 4; n++) spread[g][n] = splat(weights[g * CHUNK + i + n]);
        i64 d = 0;
        for (; d + LANES <= dim; d += LANES) {
            floats x[4];
#pragma GCC unroll 4
            for (i64 n = 0; n < 4; n++) x[n] = numbers<E>(rows[n] + size_of(E) * d);
#pragma GCC unroll 4
            for (i64 g = 0; g < 4; g++) {
                floats total = load<floats>(sums + g * dim + d);
#pragma GCC unroll 4
                for (i64 n = 0; n < 4; n++) total = fma(spread[g][n], x[n], total);
                store(sums + g * dim + d, total);
            }
        }
        for (; d < dim; d++)
            for (i64 g = 0; g < 4; g++)
                for (i64 n = 0; n < 4; n++) sums[g * dim + d] += weights[g * CHUNK + i + n] * number<E>(rows[n] + size_of(E) * d);
    }
}

// Gather a value whose numbers lie apart, in runs of 1 or PACKED.
template <Element E>
INLINE void unpack(const char *page, const i64 *at, i64 dim, i64 run, char *value) {
    using Stored = typename std::conditional<E == FLOAT32, u32, u16>::type;
    if (E != FLOAT32 && run == PACKED) {
        for (i64 d = 0; d < dim; d += LANES) {
            i64 from = at[d / PACKED] + 2 * (d % PACKED);
            words pairs = load<words>((const Stored *)page + (from & -2));
            store(value + 2 * d, __builtin_convertvector(pairs >> (u32)(from % 2 * 16), halves));
        }
        return;
    }
    for (i64 d = 0; d < dim; d++) ((Stored *)value)[d] = ((const Stored *)page)[at[d]];
}

// Attention over the tokens from `begin` to `end` of a list, or of the row itself where no list is given; whether one is
// beyond the tokens there are.
template <Element E>
static bool attend_part(const bpc::Call &call, i64 row, const i64 *indices, i64 begin, i64 end, Part &part) {
    i64 b = row / call.kv_heads, h = row % call.kv_heads, heads = call.heads, dim = call.dim, fours = ceil_to(heads, 4);
    constexpr i64 size = size_of(E);
    const u8 *valid = indices ? nullptr : valid_of(call, b);
    if (!indices) end = least_of(end, length_of(call, b));
    const char *keys = (const char *)call.keys, *values = (const char *)call.values;
    const i64 *places = (const i64 *)call.values_at;
    bool beyond = false;
    i64 found = 0;
    for (i64 i = begin; i < end; i++) {
        i64 token = indices ? indices[i] : i;
        if (token < 0 || (valid && !valid[i])) continue;
        if (token >= call.tokens) {
            beyond = true;
            continue;
        }
        Where at = where_of(call, b, token);
        part.keys[found] = keys + size * (at.b * call.keys_b + h * call.keys_h + at.n * call.keys_n);
        const char *page = values + size * (at.b * call.values_b + h * call.values_h);
        if (places) {
            if (i64 next = i + SOON < end ? (indices ? indices[i + SOON] : i + SOON) : -1; next >= 0) {
                Where soon = where_of(call, b, next);
                const char *then = values + size * (soon.b * call.values_b + h * call.values_h);
                for (i64 d = 0; d < dim; d += PACKED) prefetch(then + size * places[(soon.n * dim + d) / call.run]);
            }
            char *value = part.unpacked + size * dim * found;
            unpack<E>(page, places + at.n * dim / call.run, dim, call.run, value);
            part.values[found] = value;
        } else {
            part.values[found] = page + size * at.n * call.values_n;
        }
        found++;
    }
    if (call.mapped) fetch_pages(part.keys, found, size * call.keys_n);
    float scaling = (float)call.scaling;
    for (i64 g = 0; g < fours; g++) {
        float *query = part.queries + g * dim;
        i64 at = b * call.query_b + h * call.query_h + g * call.query_g;
        if (g < heads) widen_row<E>((const char *)call.query + size * at, dim, query);
        for (i64 d = 0; d < dim; d++) query[d] = g < heads ? query[d] * scaling : 0;
    }
    std::memset(part.sums, 0, 4 * fours * dim);
    std::memset(part.logits, 0, 4 * fours * CHUNK);  // heads that are not there weigh nothing
    for (i64 g = 0; g < heads; g++) part.most[g] = -INFINITY, part.total[g] = 0;
    for (i64 i = 0; i < least_of(ROWS_AHEAD, found); i++) prefetch_token<E>(part, i, dim);
    for (i64 first = 0; first < found; first += CHUNK) {
        i64 count = least_of(CHUNK, found - first);
        for (i64 g = 0; g < fours; g += 4)
            logits_of<E>(part, first, count, found, dim, part.queries + g * dim, part.logits + g * CHUNK, g == 0);
        for (i64 g = 0; g < heads; g++)
            weigh(part.logits + g * CHUNK, count, dim, part.most + g, part.total + g, part.sums + g * dim);
        for (i64 g = 0; g < fours; g += 4)
            add_values<E>(part, first, count, dim, part.logits + g * CHUNK, part.sums + g * dim);
    }
    return beyond;
}

// The result `[heads, dim]` of a row from its parts; 0 where nothing was attended.
template <Element E>
static void put_together(const Part *some, i64 parts, i64 heads, i64 dim, char *out) {
    float sums[256];
    for (i64 g = 0; g < heads; g++, out += size_of(E) * dim) {
        float largest = -INFINITY, total = 0;
        for (i64 i = 0; i < parts; i++) largest = some[i].most[g] > largest ? some[i].most[g] : largest;
        for (i64 d = 0; d < dim; d++) sums[d] = 0;
        for (i64 i = 0; i < parts; i++) {
            if (some[i].total[g] == 0) continue;
            float down = __builtin_expf(some[i].most[g] - largest);
            total += down * some[i].total[g];
            for (i64 d = 0; d < dim; d++) sums[d] += down * some[i].sums[g * dim + d];
        }
        if (total != 0)
            for (i64 d = 0; d < dim; d++) sums[d] /= total;
        for (i64 d = 0; d < dim; d++) narrow<E>(sums[d], out + size_of(E) * d);
    }
}

}  // namespace BPC_ISA
