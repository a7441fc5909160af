// Hashing keys: Algorithm 2 in Gram form, see `bpc_calib.method.encoding`. Every sum that decides a sign has one order.
namespace BPC_ISA {

constexpr i64 SIDE = 64;  // keys hashed at once
constexpr float GAIN_OFFSET = 32, GAIN_UNIT = 64, GAIN_ONE = 32, GAIN_MAX = 255;

INLINE u8 gain_of(float norm, float dot) {
    float byte = GAIN_MAX;
    if (norm <= 0)
        byte = GAIN_ONE;
    else if (dot > 0)
        byte = __builtin_rintf(GAIN_UNIT * norm / dot - GAIN_OFFSET);
    return (u8)(byte < 0 ? 0 : byte > GAIN_MAX ? GAIN_MAX : byte);
}

INLINE float error_of(float left) { return (float)__builtin_sqrt((double)(left > 0 ? left : 0)); }

// Where the code, the gain and the error of one key go; the latter two may be missing.
struct Place {
    i64 *code;
    u8 *gain;
    float *error;
};

// The greedy pass for one key with products `given [bits]`.
static void greedy_one(const float *given, float norm, const float *gram, i64 bits, Place to) {
    float running[128], dot = 0, left = norm;
    std::memcpy(running, given, 4 * bits);
    for (i64 w = 0; w < (bits + 63) / 64; w++) to.code[w] = 0;
    for (i64 i = 0; i < bits; i++) {
        float sign = running[i] >= 0 ? 1.0f : -1.0f;
        const float *row = gram + i * bits;
        for (i64 j = i + 1; j < bits; j++) running[j] -= sign * row[j];
        left -= 2 * __builtin_fabsf(running[i]) - row[i];
        dot += sign * given[i];
        to.code[i / 64] |= (i64)((u64)(sign > 0) << (i % 64));
    }
    if (to.error) *to.error = error_of(left);
    if (to.gain) *to.gain = gain_of(norm, dot);
}

// The same for up to `SIDE` keys at once: products `given [count, bits]`, results `[count, ..]`.
static void greedy_many(const float *given, const float *norms, const float *gram, i64 count, i64 bits, i64 *codes,
                        float *errors, u8 *gains) {
    i64 words = (bits + 63) / 64;
    alignas(64) static thread_local float running[128][SIDE];
    alignas(64) float signs[SIDE], dot[SIDE] = {}, left[SIDE] = {};
    for (i64 x = 0; x < SIDE; x++)
        for (i64 j = 0; j < bits; j++) running[j][x] = x < count ? given[x * bits + j] : 0;
    std::memcpy(left, norms, 4 * count);
    std::memset(codes, 0, 8 * count * words);
    for (i64 i = 0; i < bits; i++) {
        for (i64 x = 0; x < SIDE; x++) signs[x] = running[i][x] >= 0 ? 1.0f : -1.0f;
        for (i64 j = i + 1; j < bits; j++) {
            float entry = gram[i * bits + j];
            for (i64 x = 0; x < SIDE; x++) running[j][x] -= signs[x] * entry;
        }
        float own = gram[i * bits + i];
        for (i64 x = 0; x < SIDE; x++) left[x] -= 2 * __builtin_fabsf(running[i][x]) - own;
        for (i64 x = 0; x < count; x++) {
            dot[x] += signs[x] * given[x * bits + i];
            codes[x * words + i / 64] |= (i64)((u64)(signs[x] > 0) << (i % 64));
        }
    }
    for (i64 x = 0; x < count; x++) {
        errors[x] = error_of(left[x]);
        gains[x] = gain_of(norms[x], dot[x]);
    }
}

INLINE float dot(const float *a, const float *b, i64 dim) {
    floats sums = {};
    i64 d = 0;
    for (; d + LANES <= dim; d += LANES) sums = fma(load<floats>(a + d), load<floats>(b + d), sums);
    float total = sum(sums);
    for (; d < dim; d++) total += a[d] * b[d];
    return total;
}

// Where the codes of the fresh key `token` of a row go: a slot of the row, or of a page.
static Place place_of(const bpc::Call &call, i64 row, i64 token, i64 *nowhere) {
    i64 slot = call.slots ? ((const i64 *)call.slots)[token] : call.first + token;
    i64 b = row / call.kv_heads, h = row % call.kv_heads;
    if (slot < 0) return {nowhere, nullptr, nullptr};
    if (call.page) b = slot / call.page, slot = slot % call.page;
    return {
        (i64 *)call.codes + b * call.codes_b + h * call.codes_h + slot * call.words,
        call.gain ? (u8 *)call.gain + b * call.gain_b + h * call.gain_h + slot : nullptr,
        call.error ? (float *)call.error + b * call.error_b + h * call.error_h + slot : nullptr,
    };
}

// Hash the fresh keys of a row.
template <Element E>
static void hash_row(const bpc::Call &call, i64 row) {
    i64 dim = call.dim, bits = call.bits, b = row / call.kv_heads, h = row % call.kv_heads;
    i64 own = row % call.codebooks;  // sequences may share them
    const float *matrix = (const float *)call.matrix + own * call.matrix_r;
    const float *gram = (const float *)call.gram + own * call.gram_r;
    const float *metric = call.metric ? (const float *)call.metric + own * call.metric_r : nullptr;
    const float *mean = call.mean ? (const float *)call.mean + own * call.mean_r : nullptr;
    prefetch_row(matrix, 4 * bits * dim);  // the cache holds another layer's
    if (metric) prefetch_row(metric, 4 * dim * dim);
    prefetch_row(gram, 4 * bits * bits);
    alignas(64) float key[256], products[128];
    i64 nowhere[2];
    for (i64 token = 0; token < call.fresh_tokens; token++) {
        i64 at = b * call.fresh_b + h * call.fresh_h + token * call.fresh_n;
        widen_row<E>((const char *)call.fresh + size_of(E) * at, dim, key);
        if (mean)
            for (i64 d = 0; d < dim; d++) key[d] -= mean[d];
        for (i64 j = 0; j < bits; j++) products[j] = dot(key, matrix + j * dim, dim);
        float norm = 0;
        if (metric)
            for (i64 d = 0; d < dim; d++) norm += key[d] * dot(key, metric + d * dim, dim);
        else
            norm = dot(key, key, dim);
        greedy_one(products, norm, gram, bits, place_of(call, row, token, nowhere));
    }
}

}  // namespace BPC_ISA
