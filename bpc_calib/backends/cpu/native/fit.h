// Fitting a projection to the keys of one head `[count, dim]`, which lie one after the other. `dim` is a multiple of
// `WIDE`, `bits` of 32, and rows of zeros fill the keys up to a multiple of `WORD`.
//
// Every sum has one order for all instruction sets, so that a projection does not depend on the machine. One difference
// is left: `fma` rounds twice where the set has no such instruction, as "base" of x86; a function would be slow.
#include <cstdlib>

namespace BPC_ISA {

constexpr i64 WORD = 64;  // keys per word of a plane: the signs of one bit
constexpr i64 WIDE = 16;  // sums over a row are 16 sums
constexpr i64 SOME = 8;   // vectors that stay in registers, with room for others
constexpr i64 TALL = BPC_BYTES == 64 ? 8 : 4;  // rows of a tile, two vectors wide: half of the registers
constexpr double UNIT = 0x1p-24;               // the relative rounding error of float32
constexpr double SLACK = 1e-12;                // more than the rounding of float64
constexpr double SMALL = 1e-30, LARGE = 1e30;  // far from where float32 underflows and overflows

// Zeros, from a cache line on.
template <class T>
struct Zeros {
    void *all;
    T *at;

    explicit Zeros(i64 count) : all(std::calloc(count * sizeof(T) + 64, 1)) {
        if (!all) std::abort();
        at = (T *)((char *)all + 64 - (uintptr_t)all % 64);
    }
    Zeros(const Zeros &) = delete;
    ~Zeros() { std::free(all); }
    operator T *() const { return at; }
};

// Calls `work(vectors, column)` until it has had all columns, a multiple of `WIDE`.
template <class Work>
INLINE void by_vectors(i64 columns, const Work &work) {
    i64 j = 0;
    for (; j + SOME * DOUBLES <= columns; j += SOME * DOUBLES) work(std::integral_constant<i64, SOME>(), j);
    for (; j < columns; j += WIDE) work(std::integral_constant<i64, WIDE / DOUBLES>(), j);
}

// The next `LANES` numbers in float64.
template <Element E>
INLINE void widen_exactly(const void *at, doubles *two) {
    floats found = numbers<E>(at);
#if defined(__AVX512F__)
    two[0] = (doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)found));
    two[1] = (doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)found, 1));
#elif defined(__AVX2__)
    two[0] = (doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)found));
    two[1] = (doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)found, 1));
#else
    single_halves parts[2];
    std::memcpy(parts, &found, sizeof found);
    for (int i = 0; i < 2; i++) two[i] = __builtin_convertvector(parts[i], doubles);
#endif
}

// A bit for each of `WORD` numbers: whether it is below 0.
INLINE u64 negative(const double *numbers) {
    u64 bits = 0;
    for (i64 x = 0; x < WORD; x++) bits |= (u64)(numbers[x] < 0) << x;
    return bits;
}

// The sum of products of two vectors of signs, from their planes.
static double agreement(const u64 *one, const u64 *two, i64 words, i64 count) {
    i64 differ = 0;
    for (i64 word = 0; word < words; word++) differ += __builtin_popcountll(one[word] ^ two[word]);
    return (double)(count - 2 * differ);
}

// Add `vector [rows]` times a matrix `[rows, columns]` to `out`, row by row. Rows of the matrix lie `next` apart.
static void add_product(const double *vector, i64 rows, const double *matrix, i64 next, i64 columns, double *out) {
    by_vectors(columns, [&](auto vectors, i64 j) {
        doubles sums[vectors];
        for (i64 v = 0; v < vectors; v++) sums[v] = load<doubles>(out + j + v * DOUBLES);
        for (i64 i = 0; i < rows; i++)
            for (i64 v = 0; v < vectors; v++)
                sums[v] += vector[i] * load<doubles>(matrix + i * next + j + v * DOUBLES);
        for (i64 v = 0; v < vectors; v++) store(out + j + v * DOUBLES, sums[v]);
    });
}

// A matrix in memory, transposed or not.
struct Matrix {
    const double *at;
    i64 row, column;  // strides
};

// Add `a b` to `c [rows, columns]`, in the order of the `count` columns of `a`; `rows` is a multiple of `TALL`.
static void multiply(Matrix a, const double *b, double *c, i64 rows, i64 columns, i64 count) {
    for (i64 i = 0; i < rows; i += TALL)
        for (i64 j = 0; j < columns; j += 2 * DOUBLES) {
            doubles sums[TALL][2];
            for (i64 y = 0; y < TALL; y++)
                for (i64 v = 0; v < 2; v++) sums[y][v] = load<doubles>(c + (i + y) * columns + j + v * DOUBLES);
            for (i64 n = 0; n < count; n++) {
                const double *left = a.at + i * a.row + n * a.column, *right = b + n * columns + j;
                doubles two[2] = {load<doubles>(right), load<doubles>(right + DOUBLES)};
                for (i64 y = 0; y < TALL; y++)
                    for (i64 v = 0; v < 2; v++) sums[y][v] = fma(splat(left[y * a.row]), two[v], sums[y][v]);
            }
            for (i64 y = 0; y < TALL; y++)
                for (i64 v = 0; v < 2; v++) store(c + (i + y) * columns + j + v * DOUBLES, sums[y][v]);
        }
}

// The decomposition, `bpc_calib.method.decomposition`, without a copy of its residual.
//
// The residual is `R = (K - mean) L - U P`, so products and sums of its rows follow from those of the keys as they are
// in memory: `R v = K w - mean w - U (P v)` with `w = L v`, and `u R = (u K - (sum of u) mean) L - (u U) P`. Within the
// steps of a bit, only keys whose sign changed add to `u K`. `u U` counts bits. Signs follow products `K w` in float32
// where a bound on their rounding proves them, and float64 for the few other keys.

// What keys are multiplied with to find the signs of a bit.
struct Direction {
    const double *weights;        // [dim]
    const float *single;          // [dim], the same in float32
    double offset;                // their product with the mean
    double error;                 // times the length of a key: more than its product in float32 can be off
    const double (*tables)[256];  // [used], see `fill_tables`: what earlier bits explain of the product
    i64 used;
};

// All sums of 8 products with signs: `tables[b][byte]` for the products `8 b` to `8 b + 7`, those from `count` on 0.
static void fill_tables(const double *products, i64 count, double (*tables)[256]) {
    for (i64 first = 0; first < count; first += 8, tables++) {
        double *table = *tables;
        table[0] = 0;
        for (i64 place = 0; place < 8; place++) {
            i64 size = (i64)1 << place;
            double product = first + place < count ? products[first + place] : 0;
            for (i64 x = 0; x < size; x++) {
                table[size + x] = table[x] + product;
                table[x] -= product;
            }
        }
    }
}

// The product of a key with the weights.
template <Element E>
static double exact_product(const char *key, i64 dim, const double *weights) {
    constexpr i64 vectors = WIDE / DOUBLES;
    doubles sums[vectors] = {}, two[2];
    for (i64 d = 0; d < dim; d += WIDE)
        for (i64 v = 0; v < vectors; v += 2) {
            i64 at = d + v * DOUBLES;
            widen_exactly<E>(key + size_of(E) * at, two);
            for (i64 i = 0; i < 2; i++)
                sums[v + i] = fma(two[i], load<doubles>(weights + at + i * DOUBLES), sums[v + i]);
        }
    double lanes[WIDE];
    std::memcpy(lanes, sums, sizeof lanes);
    for (i64 half = WIDE / 2; half; half /= 2)
        for (i64 i = 0; i < half; i++) lanes[i] += lanes[i + half];
    return lanes[0];
}

// The signs of the products of `WORD` keys' residuals with a direction. `codes [WORD, bytes]` are their earlier bits.
template <Element E>
static u64 new_signs(const char *keys, i64 dim, const double *lengths, const u8 *codes, i64 bytes,
                     const Direction &to) {
    i64 size = dim * size_of(E);
    float near[WORD];
    double known[WORD];
    for (i64 x = 0; x < WORD; x += 4) {
        const char *key = keys + x * size;
        floats a = {}, b = {}, c = {}, d = {};
        for (i64 i = 0; i < dim; i += LANES) {
            floats weights = load<floats>(to.single + i);
            const char *at = key + size_of(E) * i;
            a = fma(numbers<E>(at), weights, a);
            b = fma(numbers<E>(at + size), weights, b);
            c = fma(numbers<E>(at + 2 * size), weights, c);
            d = fma(numbers<E>(at + 3 * size), weights, d);
        }
        sum_four(a, b, c, d, near + x, 1);
        double totals[4] = {};
        for (i64 i = 0; i < to.used; i++)
            for (i64 y = 0; y < 4; y++) totals[y] += to.tables[i][codes[(x + y) * bytes + i]];
        for (i64 y = 0; y < 4; y++) known[x + y] = to.offset + totals[y];
    }
    u64 signs = 0, doubtful = 0;
    for (i64 x = 0; x < WORD; x++) {
        double product = near[x] - known[x], bound = to.error * lengths[x];
        bool sure = __builtin_fabs(product) > bound + SLACK * __builtin_fabs(known[x]) + SMALL && bound < LARGE;
        signs |= (u64)(product >= 0) << x;
        doubtful |= (u64)!sure << x;
    }
    for (; doubtful; doubtful &= doubtful - 1) {
        i64 x = __builtin_ctzll(doubtful);
        u64 positive = exact_product<E>(keys + x * size, dim, to.weights) >= known[x];
        signs = (signs & ~((u64)1 << x)) | positive << x;
    }
    return signs;
}

// Add to `sums` those of `WORD` keys that have a bit in `which`, times `factor`, or minus that without a bit in `plus`.
template <Element E>
static void add_keys(const char *keys, i64 dim, u64 which, u64 plus, double factor, double *sums) {
    double factors[2] = {-factor, factor};
    by_vectors(dim, [&](auto vectors, i64 d) {
        doubles part[vectors] = {}, two[2];
        for (u64 left = which; left; left &= left - 1) {
            i64 x = __builtin_ctzll(left);
            const char *key = keys + size_of(E) * (x * dim + d);
            doubles times = splat(factors[plus >> x & 1]);
            for (i64 v = 0; v < vectors; v += 2) {
                widen_exactly<E>(key + size_of(E) * v * DOUBLES, two);
                for (i64 i = 0; i < 2; i++) part[v + i] = fma(two[i], times, part[v + i]);
            }
        }
        for (i64 v = 0; v < vectors; v++)
            store(sums + d + v * DOUBLES, load<doubles>(sums + d + v * DOUBLES) + part[v]);
    });
}

template <Element E>
static void decompose_head(const char *keys, i64 count, i64 dim, const double *mean, const double *root,
                           const double *draws, i64 bits, i64 iterations, double *projection) {
    i64 words = (count + WORD - 1) / WORD, block = WORD * dim * size_of(E), bytes = bits / 8;
    Zeros<u64> planes(bits * words), positive(words);
    Zeros<u8> codes(words * WORD * bytes);
    Zeros<double> all(dim), sums(dim), centred(dim), weights(dim), products(bits), common(bits), lengths(words * WORD);
    Zeros<double> root_columns(dim * dim), columns(dim * bits);  // `root` and `projection` transposed
    Zeros<double[256]> tables(bytes);
    Zeros<float> single(dim);
    for (i64 d = 0; d < dim; d++)
        for (i64 e = 0; e < dim; e++) root_columns[e * dim + d] = root[d * dim + e];
    for (i64 word = 0; word < words; word++) {
        positive[word] = ~(u64)0 >> (WORD - least_of(WORD, count - word * WORD));
        add_keys<E>(keys + word * block, dim, positive[word], positive[word], 1, all);
    }
    for (i64 i = 0; i < count; i++) {
        double squares = 0;
        for (i64 d = 0; d < dim; d++) {
            double x = number<E>(keys + size_of(E) * (i * dim + d));
            squares += x * x;
        }
        lengths[i] = __builtin_sqrt(squares);
    }
    for (i64 bit = 0; bit < bits; bit++) {
        u64 *plane = planes + bit * words;
        double *direction = projection + bit * dim;
        std::memcpy(plane, positive, 8 * words);
        std::memcpy(sums, all, 8 * dim);
        std::memcpy(direction, draws + bit * dim, 8 * dim);
        for (i64 step = 0; step < iterations; step++) {
            std::memset(weights, 0, 8 * dim);
            add_product(direction, dim, root_columns, dim, dim, weights);
            double offset = 0, squares = 0;
            for (i64 d = 0; d < dim; d++) {
                offset += mean[d] * weights[d];
                squares += weights[d] * weights[d];
                single[d] = (float)weights[d];
            }
            std::memset(products, 0, 8 * bits);
            add_product(direction, dim, columns, bits, ceil_to(bit, WIDE), products);
            fill_tables(products, bit, tables);
            // A float32 product of `dim` numbers, with weights that were rounded, is off by at most so much.
            double error = (double)(dim + 4) * UNIT * __builtin_sqrt(squares);
            Direction to{weights, single, offset, error, tables, (bit + 7) / 8};
            for (i64 word = 0; word < words; word++) {
                const char *some = keys + word * block;
                i64 first = word * WORD;
                u64 signs = new_signs<E>(some, dim, lengths + first, codes + first * bytes, bytes, to);
                signs &= positive[word];
                add_keys<E>(some, dim, plane[word] ^ signs, signs, 2, sums);
                plane[word] = signs;
            }
            double total = agreement(plane, positive, words, count);
            for (i64 d = 0; d < dim; d++) centred[d] = sums[d] - total * mean[d];
            for (i64 j = 0; j < bit; j++) common[j] = -agreement(plane, planes + j * words, words, count);
            std::memset(direction, 0, 8 * dim);
            add_product(centred, dim, root, dim, dim, direction);
            add_product(common, bit, projection, dim, dim, direction);
            for (i64 d = 0; d < dim; d++) direction[d] /= (double)count;
        }
        for (i64 d = 0; d < dim; d++) columns[d * bits + bit] = direction[d];
        for (i64 i = 0; i < count; i++) codes[i * bytes + bit / 8] |= (plane[i / WORD] >> (i % WORD) & 1) << (bit % 8);
    }
}

// Find `projection [bits, dim]` in the space of `K L`, for at least one key: from `mean [dim]`, `root [dim, dim]`, which
// is `L`, and `draws [bits, dim]`, the first directions. All are float64.
static void decompose(i64 element, const void *keys, i64 count, i64 dim, const double *mean, const double *root,
                      const double *draws, i64 bits, i64 iterations, double *projection) {
    with_element(element, [&](auto e) {
        decompose_head<e>((const char *)keys, count, dim, mean, root, draws, bits, iterations, projection);
    });
}

// Up to `WORD` keys minus their mean, as `rows [WORD, dim]` and as `columns [dim, WORD]`, 0 behind the last key.
template <Element E>
static void centre(const char *keys, i64 count, i64 dim, const double *mean, double *rows, double *columns) {
    for (i64 x = 0; x < WORD; x++)
        for (i64 d = 0; d < dim; d++)
            rows[x * dim + d] = x < count ? number<E>(keys + size_of(E) * (x * dim + d)) - mean[d] : 0;
    for (i64 first = 0; first < WORD; first += 8)  // a cache line at a time
        for (i64 d = 0; d < dim; d++)
            for (i64 x = first; x < first + 8; x++) columns[d * WORD + x] = rows[x * dim + d];
}

// Minus the signs of the greedy pass of `bpc_calib.method.encoding` over products `running [bits, WORD]`.
static void greedy_word(double *running, const double *gram, i64 bits, double *signs) {
    for (i64 i = 0; i < bits; i += SOME) {
        for (i64 x = 0; x < WORD; x += DOUBLES) {
            doubles left[SOME];
            for (i64 j = 0; j < SOME; j++) left[j] = load<doubles>(running + (i + j) * WORD + x);
#pragma GCC unroll 8
            for (i64 j = 0; j < SOME; j++) {
                doubles sign = left[j] >= 0 ? splat(-1.0) : splat(1.0);
                for (i64 k = j + 1; k < SOME; k++) left[k] += sign * gram[(i + j) * bits + i + k];
                store(signs + (i + j) * WORD + x, sign);
            }
        }
        i64 rest = i + SOME;
        multiply({gram + i * bits + rest, 1, bits}, signs + i * WORD, running + rest * WORD, bits - rest, WORD, SOME);
    }
}

template <Element E>
static void products_of_head(const char *keys, i64 count, i64 dim, const double *mean, const double *matrix,
                             const double *gram, i64 bits, double *squares, double *cross) {
    i64 words = (count + WORD - 1) / WORD;
    Zeros<u64> planes(bits * words);
    Zeros<double> rows(WORD * dim), columns(dim * WORD), running(bits * WORD), signs(bits * WORD);
    std::memset(cross, 0, 8 * bits * dim);
    for (i64 word = 0; word < words; word++) {
        i64 first = word * WORD, here = least_of(WORD, count - first);
        centre<E>(keys + first * dim * size_of(E), here, dim, mean, rows, columns);
        std::memset(running, 0, 8 * bits * WORD);
        multiply({matrix, 1, bits}, columns, running, bits, WORD, dim);
        greedy_word(running, gram, bits, signs);
        for (i64 i = 0; i < bits; i++)
            planes[i * words + word] = negative(signs + i * WORD) & ~(u64)0 >> (WORD - here);
        multiply({signs, WORD, 1}, rows, cross, bits, dim, WORD);
    }
    for (i64 i = 0; i < bits * dim; i++) cross[i] = -cross[i];
    for (i64 i = 0; i < bits; i++)
        for (i64 j = 0; j <= i; j++)
            squares[i * bits + j] = squares[j * bits + i] =
                agreement(planes + i * words, planes + j * words, words, count);
}

// What least squares needs: `squares [bits, bits]`, which is `U^T U`, and `cross [bits, dim]`, `U^T (K - mean)`. All
// are float64: `mean [dim]`, `matrix [dim, bits]` and `gram [bits, bits]`, the latter two as in an `Encoder`.
static void products(i64 element, const void *keys, i64 count, i64 dim, const double *mean, const double *matrix,
                     const double *gram, i64 bits, double *squares, double *cross) {
    with_element(element, [&](auto e) {
        products_of_head<e>((const char *)keys, count, dim, mean, matrix, gram, bits, squares, cross);
    });
}

template <Element E>
static double squared_norm_of_head(const char *keys, i64 count, i64 dim, const double *mean, const double *metric) {
    Zeros<double> rows(WORD * dim), columns(dim * WORD), in_metric(dim * WORD);
    double total = 0;
    for (i64 first = 0; first < count; first += WORD) {
        centre<E>(keys + first * dim * size_of(E), least_of(WORD, count - first), dim, mean, rows, columns);
        std::memset(in_metric, 0, 8 * dim * WORD);
        multiply({metric, dim, 1}, columns, in_metric, dim, WORD, dim);
        double part = 0;
        for (i64 i = 0; i < dim * WORD; i++) part += in_metric[i] * columns[i];
        total += part;
    }
    return total;
}

// The sum of squared norms of keys minus `mean [dim]` in a metric `[dim, dim]`, all float64.
static double squared_norm(i64 element, const void *keys, i64 count, i64 dim, const double *mean,
                           const double *metric) {
    return with_element(element, [&](auto e) {
        return squared_norm_of_head<e>((const char *)keys, count, dim, mean, metric);
    });
}

}  // namespace BPC_ISA
