// What each instruction set offers. The file that includes this names it: `BPC_ISA` is its namespace.
#include "table.h"
#include "threads.h"
// In this order.
#include "simd.h"
#include "dots.h"
#include "encode.h"
#include "nibbles.h"
#include "where.h"
#include "hash.h"
#include "lookup.h"
#include "rank.h"
#include "score.h"
#include "take.h"
#include "fetch.h"
#include "attend.h"
#include "step.h"
#include "fit.h"
#include "amx.h"
#include "linear.h"

namespace BPC_ISA {
extern const bpc::Kernels kernels;
const bpc::Kernels kernels = {step, greedy, search_codes, squared_norm, decompose, products, linear};
}  // namespace BPC_ISA
