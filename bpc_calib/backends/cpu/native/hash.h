// Hashing the few fresh keys of a step, from their own products.
namespace BPC_ISA {

constexpr i64 MOST_VECTORS = MOST_NIBBLES * NIBBLE;

INLINE float dot(const float *a, const float *b, i64 dim) {
    floats sums = {};
    i64 d = 0;
    for (; d + LANES <= dim; d += LANES) sums = fma(load<floats>(a + d), load<floats>(b + d), sums);
    float total = sum(sums);
    for (; d < dim; d++) total += a[d] * b[d];
    return total;
}

// Where what is kept of the fresh key `token` of a row goes; a place below 0: nowhere.
static Where slot_of(const bpc::Call &call, i64 row, i64 token) {
    if (call.table && !call.slots) return where_of(call, token, length_of(call, token) - 1);
    i64 slot = call.slots ? ((const i64 *)call.slots)[token] : call.first + token;
    if (call.page && slot >= 0) return {slot / call.page, slot % call.page};
    return {row / call.kv_heads, slot};
}

// Where the codes of a fresh key go.
static Place place_of(const bpc::Call &call, i64 h, Where at, i64 *nowhere) {
    if (at.n < 0) return {nowhere, nullptr, nullptr};
    return {
        (i64 *)call.codes + at.b * call.codes_b + h * call.codes_h + at.n * call.words,
        call.gain ? (u8 *)call.gain + at.b * call.gain_b + h * call.gain_h + at.n : nullptr,
        call.error ? (float *)call.error + at.b * call.error_b + h * call.error_h + at.n : nullptr,
    };
}

// The rows of the projection.
INLINE i64 vectors_of(const bpc::Call &call) { return call.nibbles ? 4 * call.bits : call.bits; }

// Hash the fresh keys from `begin` to `end` of a row.
template <Element E>
static void hash_row(const bpc::Call &call, i64 row, i64 begin, i64 end) {
    i64 dim = call.dim, size = vectors_of(call), b = row / call.kv_heads, h = row % call.kv_heads;
    i64 own = row % call.codebooks;  // sequences may share them
    const char *matrix = (const char *)call.matrix + own * call.matrix_r * (call.matrix_element == FLOAT32 ? 4 : 2);
    const float *gram = (const float *)call.gram + own * call.gram_r;
    const float *metric = call.metric ? (const float *)call.metric + own * call.metric_r : nullptr;
    const float *mean = call.mean ? (const float *)call.mean + own * call.mean_r : nullptr;
    if (metric) prefetch_row(metric, 4 * dim * dim);
    const float *squares = call.squares ? (const float *)call.squares + own * size : nullptr;
    if (!call.nibbles) prefetch_row(gram, 4 * size * size);
    alignas(64) float key[256], products[MOST_VECTORS];
    i64 nowhere[2];
    for (i64 token = begin; token < end; token++) {
        const char *given = (const char *)call.fresh + size_of(E) * (b * call.fresh_b + h * call.fresh_h + token * call.fresh_n);
        Where at = slot_of(call, row, token);
        if (call.copied && at.n >= 0) {
            i64 to = at.b * call.keys_b + h * call.keys_h + at.n * call.keys_n;
            std::memcpy((char *)call.keys + size_of(E) * to, given, size_of(E) * dim);
        }
        widen_row<E>(given, dim, key);
        if (mean)
            for (i64 d = 0; d < dim; d++) key[d] -= mean[d];
        if (call.matrix_element == E)
            all_dots<E, 1>(key, dim, matrix, size_of(E) * dim, size, products, 0);
        else
            all_dots<FLOAT32, 1>(key, dim, matrix, 4 * dim, size, products, 0);
        float norm = 0;
        if (metric)
            for (i64 d = 0; d < dim; d++) norm += key[d] * dot(key, metric + d * dim, dim);
        else
            norm = dot(key, key, dim);
        Place to = place_of(call, h, at, nowhere);
        if (call.nibbles)
            search_one(products, norm, {gram, size, NIBBLE, squares}, size / NIBBLE, to);
        else
            greedy_one(products, norm, gram, size, to);
    }
}

}  // namespace BPC_ISA
