// Inner products of many rows with few vectors. `LANES` of them are summed at once, and each as `sum` sums one alone.
namespace BPC_ISA {

constexpr i64 NEXT_ROWS = 16384;  // bytes of rows that are prefetched

// The sums of `LANES` vectors, in their order.
INLINE floats sums(const floats *x) {
#if defined(__AVX512F__)
    // Each round adds the two halves of what is left of every vector, like `_mm512_reduce_add_ps`. The last two rounds
    // work within quarters, so vectors enter in the order 0 4 8 12, 1 5 9 13, ...
    __m512 quarters[4], pairs[2];
    for (i64 i = 0; i < 4; i++) {
        __m512 a = (__m512)x[i], b = (__m512)x[i + 4], c = (__m512)x[i + 8], d = (__m512)x[i + 12];
        __m512 low = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
        __m512 high = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
        quarters[i] = _mm512_add_ps(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xDD));
    }
    for (i64 i = 0; i < 2; i++) {
        __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
        pairs[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xEE));
    }
    return (floats)_mm512_add_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88), _mm512_shuffle_ps(pairs[0], pairs[1], 0xDD));
#else
    float lanes[LANES];
    for (i64 i = 0; i < LANES; i++) lanes[i] = sum(x[i]);
    return load<floats>(lanes);
#endif
}

// `LANES / N` rows, `stride` bytes apart, times `N` vectors `[N, dim]`: the products `[N, apart]`.
template <Element E, int N>
INLINE void dots(const float *vectors, i64 dim, const char *rows, i64 stride, float *products, i64 apart) {
    constexpr i64 count = LANES / N;
    floats parts[LANES] = {};
    i64 d = 0;
    for (; d + LANES <= dim; d += LANES) {
#pragma GCC unroll 16
        for (i64 r = 0; r < count; r++) {
            floats row = numbers<E>(rows + r * stride + size_of(E) * d);
#pragma GCC unroll 4
            for (i64 n = 0; n < N; n++)
                parts[n * count + r] = fma(load<floats>(vectors + n * dim + d), row, parts[n * count + r]);
        }
    }
    float totals[LANES];
    store(totals, sums(parts));
    for (i64 n = 0; n < N; n++)
        for (i64 r = 0; r < count; r++) {
            float total = totals[n * count + r];
            for (i64 rest = d; rest < dim; rest++) total += vectors[n * dim + rest] * number<E>(rows + r * stride + size_of(E) * rest);
            products[n * apart + r] = total;
        }
}

// The same for any number `count` of rows that is divisible by `LANES`. The cache may hold another layer's, and more rows
// than the next ones would push each other out of it.
template <Element E, int N>
INLINE void all_dots(const float *vectors, i64 dim, const char *rows, i64 stride, i64 count, float *products, i64 apart) {
    i64 end = count * stride, step = LANES / N * stride;
    prefetch_row(rows, least_of(end, NEXT_ROWS));
    for (i64 r = 0; r < count; r += LANES / N, rows += step) {
        for (i64 byte = NEXT_ROWS; byte < least_of(NEXT_ROWS + step, end - r * stride); byte += 64) prefetch(rows + byte);
        dots<E, N>(vectors, dim, rows, stride, products + r, apart);
    }
}

}  // namespace BPC_ISA
