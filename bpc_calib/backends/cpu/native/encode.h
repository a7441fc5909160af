// Hashing keys with signs: Algorithm 2 in Gram form, see `bpc_calib.method.encoding`. Every sum that decides a sign has one order.
namespace BPC_ISA {

constexpr i64 SIDE = 64;  // keys hashed at once
constexpr float GAIN_OFFSET = 32, GAIN_UNIT = 64, GAIN_ONE = 32, GAIN_MAX = 255;

INLINE u8 gain_of(float norm, float dot) {
    float byte = GAIN_MAX;
    if (!(norm > 0))  // NaN, too
        byte = GAIN_ONE;
    else if (dot > 0)
        byte = __builtin_rintf(GAIN_UNIT * norm / dot - GAIN_OFFSET);
    return (u8)(byte < 0 ? 0 : byte > GAIN_MAX ? GAIN_MAX : byte);
}

INLINE float error_of(float left) { return (float)__builtin_sqrt((double)(left < 0 ? 0 : left)); }

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

}  // namespace BPC_ISA
