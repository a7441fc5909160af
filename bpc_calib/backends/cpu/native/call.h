// One call of the kernels: sizes, rules, and where tensors lie. Python fills it by the names below.
//
// A tensor is its address and its strides in elements: `_b` over sequences (or pages), `_h` over KV heads, `_g` over query
// heads, `_n` over tokens (or rows of the projection), `_r` over rows. The address 0 stands for a tensor that is not
// given. A row is a KV head of a sequence.
#pragma once
#include <cstdint>

// clang-format off
#define BPC_NUMBERS(F) \
    F(stages)   /* which ones run, see Stages */ \
    F(threads)  /* at most so many work */ \
    F(element)  /* of query, projection, keys and values: see Element */ \
    F(batch) F(kv_heads) F(heads) F(dim) F(bits) F(words) F(tokens) \
    F(nibbles)  /* whether codes are nibbles instead of signs, with 4 times as many rows of the projection */ \
    F(query) F(query_b) F(query_h) F(query_g) \
    F(projection) F(projection_b) F(projection_h) F(projection_n) \
    F(keys) F(keys_b) F(keys_h) F(keys_n) \
    F(values) F(values_b) F(values_h) F(values_n) \
    F(mapped)  /* whether both lie in a mapped file, the value of a token behind its key */ \
    F(codes) F(codes_b) F(codes_h)  /* int64 [.., tokens, words], contiguous from the tokens on */ \
    F(gain) F(gain_b) F(gain_h)     /* uint8 */ \
    F(error) F(error_b) F(error_h)  /* float32, written when keys are hashed */ \
    F(valid) F(valid_b)             /* bool [B, tokens] */ \
    F(lengths)                      /* int64 [B] */ \
    F(worst) F(worst_count)         /* int32 [rows, worst_count] */ \
    F(ks) F(ks_b) F(ks_h)           /* int64 [B, H_KV] */ \
    F(width)                        /* of the lists */ \
    F(gained)                       /* whether scores count the gain */ \
    F(group)                        /* 0: relative, 1: max */ \
    F(recent) F(sink) F(numerator) F(denominator) \
    /* Hashing: float32 matrices, but `matrix` may be of the element of the keys; of the first `codebooks` rows; */ \
    /* sequences may share those of a KV head. */ \
    F(codebooks) \
    F(fresh) F(fresh_b) F(fresh_h) F(fresh_n) F(fresh_tokens)  /* keys without codes */ \
    /* Where their codes go: int64 [fresh_tokens]; without, from slot `first` on, or with a block table to the slot of */ \
    /* the newest token of each sequence. */ \
    F(slots) F(first) \
    F(copied)                       /* whether they are written among the keys, too */ \
    F(matrix) F(matrix_r) F(matrix_element) F(gram) F(gram_r) F(squares) F(metric) F(metric_r) F(mean) F(mean_r) \
    /* Pages: tokens of a sequence lie in pages of `page` tokens, named by int32 `table [B, pages]`. */ \
    F(table) F(pages) F(page) \
    /* int64 [page, dim / run], where each run of the numbers of a value begins in a page, of numbers 2 apart; without, */ \
    /* values lie in rows. */ \
    F(values_at) F(run) \
    /* Results. */ \
    F(entries) F(scale)             /* int16 [rows, heads, bits / 4, 16], float32 [rows], or 0 */ \
    F(indices)                      /* int64 [rows, width], ascending, -1 behind; 0 to attend: to every token */ \
    F(out)                          /* [rows, heads, dim], of `element` */
// clang-format on

namespace bpc {

enum Stages { HASH = 1, PROJECT = 2, SCORE = 4, SELECT = 8, ATTEND = 16 };

struct Call {
#define BPC_FIELD(name) int64_t name;
    BPC_NUMBERS(BPC_FIELD)
#undef BPC_FIELD
    double scaling;
};

}  // namespace bpc
