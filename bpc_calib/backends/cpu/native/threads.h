// A few threads that wait for work: starting them for each layer would take longer than its step.
#pragma once
#include <cstdint>

namespace bpc {

// Calls `work(with, item)` for every item below `items`, on at most `threads` threads, this one among them.
void parallel(int64_t threads, int64_t items, void (*work)(const void *, int64_t), const void *with);

template <class Work>
static void parallel(int64_t threads, int64_t items, const Work &work) {
    parallel(threads, items, [](const void *with, int64_t item) { (*static_cast<const Work *>(with))(item); }, &work);
}

}  // namespace bpc
