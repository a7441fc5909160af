// Where the tokens of a sequence lie.
namespace BPC_ISA {

// Tokens in use of a sequence.
INLINE i64 length_of(const bpc::Call &call, i64 b) {
    return least_of(call.tokens, ((const i64 *)call.lengths)[b]);
}

// Where a token lies: its sequence or page, and its place there.
struct Where {
    i64 b, n;
};

INLINE Where where_of(const bpc::Call &call, i64 b, i64 token) {
    if (!call.page) return {b, token};
    return {((const i32 *)call.table)[b * call.pages + token / call.page], token % call.page};
}

}  // namespace BPC_ISA
