// The functions that every instruction set has.
#pragma once
#include "call.h"

#if defined(__x86_64__) && defined(__linux__) && (defined(__clang__) || __GNUC__ > 10)
#define BPC_AMX  // the compiler knows it, and programs may ask for it
#endif

namespace bpc {

using Memory = char *(*)(int64_t bytes);

// What a processor may have for bfloat16 beside its instruction set.
struct Extras {
    bool bf16_dots, amx;
};

struct Kernels {
    // The stages of a call in turn; whether an index was beyond the tokens there are.
    bool (*step)(const Call &, Memory);
    // The greedy pass over products `[rows, tokens, bits]`.
    void (*greedy)(int64_t threads, const float *products, const float *norms, const float *gram, int64_t rows,
                   int64_t tokens, int64_t bits, int64_t *codes, float *errors, uint8_t *gains);
    // The search for nibbles over products `[rows, tokens, 4 * bits]`. Of a Gram matrix `gram`, the products with the
    // vectors of each nibble lie together; `squares` is its diagonal.
    void (*search)(int64_t threads, const float *products, const float *norms, const float *gram, const float *squares,
                   int64_t codebooks, int64_t rows, int64_t tokens, int64_t bits, int64_t *codes, float *errors, uint8_t *gains);
    // Fitting, see fit.h.
    double (*squared_norm)(int64_t element, const void *keys, int64_t count, int64_t dim, const double *mean,
                           const double *metric);
    void (*decompose)(int64_t element, const void *keys, int64_t count, int64_t dim, const double *mean,
                      const double *root, const double *draws, int64_t bits, int64_t iterations, double *projection);
    void (*products)(int64_t element, const void *keys, int64_t count, int64_t dim, const double *mean,
                     const double *matrix, const double *gram, int64_t bits, double *squares, double *cross);
    // Linear layers of a few tokens, see linear.h.
    void (*linear)(int64_t threads, int64_t element, const char *tokens, int64_t count, const char *matrix,
                   int64_t outputs, int64_t columns, Extras extras, float *out, Memory memory);
};

}  // namespace bpc
