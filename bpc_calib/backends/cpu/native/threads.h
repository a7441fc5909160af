// Torch's own threads: while they wait for work they hold the cores, so threads of ours would have to wait for them.
#pragma once
#include <cstdint>

namespace bpc {

// OpenMP's `GOMP_parallel(work, with, threads, flags)`: calls `work(with)` on so many threads, this one among them.
using Region = void (*)(void (*)(void *), void *, unsigned, unsigned);

// Calls `work(with, item)` for every item below `items`, on at most `threads` threads, this one among them.
void parallel(int64_t threads, int64_t items, void (*work)(const void *, int64_t), const void *with);

template <class Work>
static void parallel(int64_t threads, int64_t items, const Work &work) {
    parallel(threads, items, [](const void *with, int64_t item) { (*static_cast<const Work *>(with))(item); }, &work);
}

}  // namespace bpc
