// Linear layers of a few tokens: products of their numbers with every row of a matrix. Reading the matrix takes the time,
// so a row meets all tokens while it is near, and rows behind it are prefetched: processors do that too late by themselves.
namespace BPC_ISA {

#if BPC_BYTES == 64 || defined(__aarch64__)
constexpr int TOKENS_AT_ONCE = 8;  // tokens; the sums of `ROWS_AT_ONCE` rows with them fit in the registers
#else
constexpr int TOKENS_AT_ONCE = 4;
#endif
constexpr int ROWS_AT_ONCE = 3;      // rows
constexpr i64 DISTANCE = 4096;    // bytes that are prefetched at least
constexpr i64 PART = 1 << 17;  // bytes of the matrix that a thread takes at once
constexpr i64 PAIR = 2 * LANES;

// The next `PAIR` numbers; of bfloat16 first those of even place, since that takes no shuffles.
template <Element E>
INLINE void next_numbers(const char *at, floats &first, floats &second) {
    if constexpr (E == BFLOAT16) {
        words both = load<words>(at);
        first = (floats)(both << 16), second = (floats)(both & 0xFFFF0000);
    } else {
        first = numbers<E>(at), second = numbers<E>(at + size_of(E) * LANES);
    }
}

INLINE void prefetch_step(const char *at, i64 bytes) {
    for (i64 line = 0; line < bytes; line += 64) prefetch(at + line);
}

// Rows of the matrix, contiguous, and tokens `[columns / PAIR, B, PAIR]`. `out` has `outputs` numbers of each token.
template <Element E, int N, int B>
static void tile(const char *rows, i64 columns, const float *tokens, float *out, i64 outputs) {
    constexpr i64 BYTES = size_of(E) * PAIR;
    i64 row = size_of(E) * columns, ahead = ceil_to(DISTANCE, N * row);
    constexpr int CHAINS = N * B < 6 ? 2 : 1;  // a sum waits for the one before
    floats sums[CHAINS][N][B] = {}, first, second;
    for (const char *end = rows + row; rows < end; rows += BYTES, tokens += B * PAIR)
        for (int n = 0; n < N; n++) {
            prefetch_step(rows + n * row + ahead, BYTES);
            next_numbers<E>(rows + n * row, first, second);
            for (int b = 0; b < B; b++) {
                floats &one = sums[0][n][b], &other = sums[CHAINS - 1][n][b];
                one = fma(first, load<floats>(tokens + b * PAIR), one);
                other = fma(second, load<floats>(tokens + b * PAIR + LANES), other);
            }
        }
    for (int n = 0; n < N; n++)
        for (int b = 0; b < B; b++)
            out[b * outputs + n] = sum(CHAINS > 1 ? sums[0][n][b] + sums[CHAINS - 1][n][b] : sums[0][n][b]);
}

#if BPC_BYTES == 64 && (defined(__clang__) || __GNUC__ > 9)
#define BPC_DOTS
// The same with AVX512-BF16, which adds up pairs of products; tokens stay bfloat16.
template <int N, int B>
__attribute__((target("avx512bf16"))) static void tile_of_dots(const char *rows, i64 columns, const char *tokens,
                                                               float *out, i64 outputs) {
    i64 row = 2 * columns, ahead = ceil_to(DISTANCE, N * row);
    __m512 sums[N][B];
    for (int n = 0; n < N; n++)
        for (int b = 0; b < B; b++) sums[n][b] = _mm512_setzero_ps();
    for (const char *end = rows + row; rows < end; rows += 64, tokens += B * 64)
        for (int n = 0; n < N; n++) {
            prefetch(rows + n * row + ahead);
            __m512bh numbers = (__m512bh)load<ints>(rows + n * row);
            for (int b = 0; b < B; b++)
                sums[n][b] = _mm512_dpbf16_ps(sums[n][b], numbers, (__m512bh)load<ints>(tokens + b * 64));
        }
    for (int n = 0; n < N; n++)
        for (int b = 0; b < B; b++) out[b * outputs + n] = _mm512_reduce_add_ps(sums[n][b]);
}
#endif

// A task of `linear`, whose tokens were arranged for tiles.
struct Product {
    const char *matrix;
    i64 columns, outputs;
    float *out;
    bool dots;
};

template <Element E, int N, int B>
INLINE void products_of_rows(const Product &what, i64 n, const char *tokens, i64 token) {
    const char *rows = what.matrix + n * what.columns * size_of(E);
    float *out = what.out + token * what.outputs + n;
#if defined(BPC_DOTS)
    if constexpr (E == BFLOAT16 && B > 2)
        if (what.dots) return tile_of_dots<N, B>(rows, what.columns, tokens, out, what.outputs);
#endif
    tile<E, N, B>(rows, what.columns, (const float *)tokens, out, what.outputs);
}

template <Element E, int B>
static void products_of_tokens(const Product &what, i64 count, i64 first, i64 last, const char *tokens, i64 token) {
    if constexpr (B > 1)
        if (count < B) return products_of_tokens<E, B - 1>(what, count, first, last, tokens, token);
    constexpr int N = B == 1 ? 2 : ROWS_AT_ONCE;
    i64 n = first;
    for (; n + N <= last; n += N) products_of_rows<E, N, B>(what, n, tokens, token);
    for (; n < last; n++) products_of_rows<E, 1, B>(what, n, tokens, token);
}

// Tokens `[count, columns]` as tiles read them, in float32; for dots as they are.
template <Element E>
static void arrange(const char *tokens, i64 count, i64 columns, bool dots, char *to) {
    for (i64 d = 0; d < columns; d += PAIR)
        for (i64 b = 0; b < count; b++) {
            const char *at = tokens + (b * columns + d) * size_of(E);
            if (dots) {
                store(to, load<ints>(at));
                to += sizeof(ints);
                continue;
            }
            floats first, second;
            next_numbers<E>(at, first, second);
            store(to, first), store(to + sizeof(floats), second);
            to += 2 * sizeof(floats);
        }
}

// `out [count, outputs] = tokens [count, columns] * matrix [outputs, columns]^T`, in float32; `columns` is a multiple of
// 32. `extras`: what the processor has for bfloat16.
static void linear(i64 threads, i64 element, const char *tokens, i64 count, const char *matrix, i64 outputs,
                   i64 columns, bpc::Extras extras, float *out, bpc::Memory memory) {
    char *arranged = memory(4 * count * columns);
#if defined(BPC_AMX) && BPC_BYTES == 64
    if (extras.amx && element == BFLOAT16) {
        i64 row = 2 * columns, rows = ceil_to(most_of(1, PART / row), 2 * EDGE);
        for (i64 token = 0; token < count; token += EDGE)
            arrange_pairs(tokens + token * row, least_of(EDGE, count - token), columns, arranged + token * row);
        return bpc::parallel(threads, (outputs + rows - 1) / rows, [&](i64 item) {
            i64 first = item * rows, last = least_of(first + rows, outputs);
            for (i64 token = 0; token < count; token += EDGE)
                rows_by_amx(matrix, columns, first, last, arranged + token * row, least_of(EDGE, count - token),
                            out + token * outputs, outputs);
        });
    }
#endif
    with_element(element, [&](auto e) {
        constexpr Element E = e;
        auto by_dots = [&](i64 token) { return extras.bf16_dots && E == BFLOAT16 && count - token > 2; };
        for (i64 token = 0; token < count; token += TOKENS_AT_ONCE)
            arrange<E>(tokens + token * columns * size_of(E), least_of(TOKENS_AT_ONCE, count - token), columns,
                       by_dots(token), arranged + 4 * token * columns);
        i64 rows = ceil_to(most_of(1, PART / (columns * size_of(E))), ROWS_AT_ONCE);
        bpc::parallel(threads, (outputs + rows - 1) / rows, [&](i64 item) {
            i64 first = item * rows, last = least_of(first + rows, outputs);
            for (i64 token = 0; token < count; token += TOKENS_AT_ONCE)
                products_of_tokens<E, TOKENS_AT_ONCE>({matrix, columns, outputs, out, by_dots(token)},
                                               least_of(TOKENS_AT_ONCE, count - token), first, last,
                                               arranged + 4 * token * columns, token);
        });
    });
}

}  // namespace BPC_ISA
