// Vectors as wide as the registers of one instruction set. Included once per set, inside a namespace of its own, so no
// function here may be `inline` with external linkage: the linker would keep the copy of one set for all of them.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define BPC_BYTES 64
#elif defined(__AVX2__)
#define BPC_BYTES 32
#else
#define BPC_BYTES 16  // SSE2, NEON
#endif
#define INLINE static inline __attribute__((always_inline))

namespace BPC_ISA {

using u8 = uint8_t;
using i16 = int16_t;
using u16 = uint16_t;
using i32 = int32_t;
using u32 = uint32_t;
using i64 = int64_t;
using u64 = uint64_t;

typedef float floats __attribute__((vector_size(BPC_BYTES)));
typedef double doubles __attribute__((vector_size(BPC_BYTES)));
typedef i32 ints __attribute__((vector_size(BPC_BYTES)));
typedef u32 words __attribute__((vector_size(BPC_BYTES)));
typedef u16 halves __attribute__((vector_size(BPC_BYTES / 2)));  // as many as `floats`
typedef float single_halves __attribute__((vector_size(BPC_BYTES / 2)));

constexpr i64 LANES = BPC_BYTES / 4;   // numbers of 32 bits in a vector
constexpr i64 DOUBLES = BPC_BYTES / 8;

// How the numbers of keys, values and queries are stored.
enum Element { BFLOAT16 = 0, FLOAT16 = 1, FLOAT32 = 2 };

template <class T>
INLINE T load(const void *at) {
    T found;
    std::memcpy(&found, at, sizeof(T));
    return found;
}

template <class T>
INLINE void store(void *at, T what) {
    std::memcpy(at, &what, sizeof(T));
}

INLINE floats splat(float x) {  // as an integer: 0 + x would be computed
    u32 bits;
    std::memcpy(&bits, &x, sizeof bits);
    return (floats)(words{} + bits);
}
INLINE doubles splat(double x) { return doubles{} + x; }

// a * b + c, rounded once where the processor can.
INLINE floats fma(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE doubles fma(doubles a, doubles b, doubles c) {
#if defined(__AVX512F__)
    return (doubles)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(__AVX2__)
    return (doubles)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(__aarch64__)
    return (doubles)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

INLINE float sum(floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#else
    float lanes[LANES], total = 0;
    store(lanes, x);
    for (i64 i = 0; i < LANES; i++) total += lanes[i];
    return total;
#endif
}

INLINE float largest(floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float lanes[LANES];
    store(lanes, x);
    for (i64 half = LANES / 2; half; half /= 2)
        for (i64 i = 0; i < half; i++) lanes[i] = lanes[i + half] > lanes[i] ? lanes[i + half] : lanes[i];
    return lanes[0];
#endif
}

INLINE double sum(doubles x) {
    double lanes[DOUBLES], total = 0;
    store(lanes, x);
    for (i64 i = 0; i < DOUBLES; i++) total += lanes[i];
    return total;
}

INLINE ints smaller(ints a, ints b) {
#if defined(__AVX512F__)
    return (ints)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    return a < b ? a : b;
#endif
}

INLINE ints larger(ints a, ints b) {
#if defined(__AVX512F__)
    return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return a > b ? a : b;
#endif
}

// 0, 1, 2, ...
INLINE ints counting() {
    i32 lanes[LANES];
    for (i64 i = 0; i < LANES; i++) lanes[i] = (i32)i;
    return load<ints>(lanes);
}

// The lanes of even number of two vectors, one after the other, and those of odd number.
INLINE void part_lanes(ints a, ints b, ints &even, ints &odd) {
#if defined(__AVX512F__)
    __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    even = (ints)_mm512_permutex2var_epi32((__m512i)a, places, (__m512i)b);
    odd = (ints)_mm512_permutex2var_epi32((__m512i)a, _mm512_add_epi32(places, _mm512_set1_epi32(1)), (__m512i)b);
#elif defined(__AVX2__)
    // A shuffle parts each half alone: its results are lanes 0 2 of a, b, then 4 6 of a, b.
    __m256 low = _mm256_shuffle_ps((__m256)a, (__m256)b, 0x88), high = _mm256_shuffle_ps((__m256)a, (__m256)b, 0xDD);
    even = (ints)_mm256_permute4x64_epi64((__m256i)low, 0xD8);
    odd = (ints)_mm256_permute4x64_epi64((__m256i)high, 0xD8);
#else
    i32 lanes[2 * LANES], parted[2 * LANES];
    store(lanes, a), store(lanes + LANES, b);
    for (i64 i = 0; i < 2 * LANES; i++) parted[i % 2 * LANES + i / 2] = lanes[i];
    even = load<ints>(parted), odd = load<ints>(parted + LANES);
#endif
}

INLINE float as_float(u32 bits) {
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

// One number as float32.
template <Element E>
INLINE float number(const void *at) {
    if constexpr (E == FLOAT32) return load<float>(at);
    u16 bits = load<u16>(at);
    if constexpr (E == BFLOAT16) return as_float((u32)bits << 16);
    u32 wide = (u32)(bits & 0x7FFF) << 13;  // exponent and fraction in their places, the exponent 112 too small
    float positive = wide >= 0x0F800000 ? as_float(wide | 0x7F800000) : as_float(wide) * 0x1p112f;
    return bits >> 15 ? -positive : positive;
}

// The nearest number of an element; between two, the even one.
template <Element E>
INLINE void narrow(float x, void *at) {
    if constexpr (E == FLOAT32) return store(at, x);
    u32 bits, positive;
    std::memcpy(&bits, &x, 4);
    positive = bits & 0x7FFFFFFF;
    if constexpr (E == BFLOAT16) {
        u32 rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
        return store(at, (u16)(positive > 0x7F800000 ? 0x7FC0 : rounded));
    }
    u32 normal = (positive - (112u << 23) + 0xFFF + (positive >> 13 & 1)) >> 13;
    u32 tiny;  // below 2^-14: in units of 2^-24, which are those of a fraction beside 0.5
    float beside = as_float(positive) + 0.5f;
    std::memcpy(&tiny, &beside, 4);
    u32 found = positive > 0x7F800000 ? 0x7E00 : positive >= 0x47800000 ? 0x7C00
              : positive < 0x38800000 ? tiny - 0x3F000000 : normal;
    store(at, (u16)(bits >> 16 & 0x8000 | found));
}

// The next `LANES` numbers as float32.
template <Element E>
INLINE floats numbers(const void *at) {
    if constexpr (E == FLOAT32) return load<floats>(at);
    if constexpr (E == BFLOAT16) {
#if defined(__AVX512F__)
        words wide = (words)_mm512_cvtepu16_epi32(load<__m256i>(at));
#elif defined(__AVX2__)
        words wide = (words)_mm256_cvtepu16_epi32(load<__m128i>(at));
#else
        words wide = __builtin_convertvector(load<halves>(at), words);
#endif
        return (floats)(wide << 16);
    }
#if defined(__AVX512F__)
    return (floats)_mm512_cvtph_ps(load<__m256i>(at));
#elif defined(__AVX2__)
    return (floats)_mm256_cvtph_ps(load<__m128i>(at));
#else
    float lanes[LANES];
    for (i64 i = 0; i < LANES; i++) lanes[i] = number<E>((const char *)at + 2 * i);
    return load<floats>(lanes);
#endif
}

template <class Work>
INLINE auto with_element(i64 element, const Work &work) {
    if (element == BFLOAT16) return work(std::integral_constant<Element, BFLOAT16>());
    if (element == FLOAT16) return work(std::integral_constant<Element, FLOAT16>());
    return work(std::integral_constant<Element, FLOAT32>());
}

// `work` of 0 to `N - 1`, each a constant.
template <class Work, i64... I>
INLINE void each_of(std::integer_sequence<i64, I...>, const Work &work) {
    (work(std::integral_constant<i64, I>()), ...);
}
template <i64 N, class Work>
INLINE void unrolled(const Work &work) {
    each_of(std::make_integer_sequence<i64, N>(), work);
}

constexpr i64 size_of(Element e) { return e == FLOAT32 ? 4 : 2; }

// A row of `dim` numbers as float32.
template <Element E>
INLINE void widen_row(const void *from, i64 dim, float *to) {
    i64 d = 0;
    for (; d + LANES <= dim; d += LANES) store(to + d, numbers<E>((const char *)from + size_of(E) * d));
    for (; d < dim; d++) to[d] = number<E>((const char *)from + size_of(E) * d);
}

// Into the second cache: an EPYC fetches rows that lie apart a third faster so than into the nearest one.
INLINE void prefetch(const void *at) { __builtin_prefetch(at, 0, 2); }

// All cache lines of a row of so many bytes.
INLINE void prefetch_row(const void *at, i64 bytes) {
    for (u64 line = (u64)at & -64; line < (u64)at + bytes; line += 64) prefetch((const void *)line);
}

INLINE i64 least_of(i64 a, i64 b) { return a < b ? a : b; }
INLINE i64 most_of(i64 a, i64 b) { return a > b ? a : b; }
INLINE i64 ceil_to(i64 x, i64 step) { return (x + step - 1) / step * step; }

}  // namespace BPC_ISA
