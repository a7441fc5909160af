// Rows of a mapped file: the pages that are not in memory are asked for before the first is read. A thread that met them
// one after the other would wait for the disk at each, and each time the system would read ahead what nobody asks for.
#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace BPC_ISA {

constexpr i64 WINDOW = 4096;  // pages that are looked up at once

// Ask for the pages of `rows`, ascending, of `bytes` each.
static void fetch_pages(const char *const *rows, i64 count, i64 bytes) {
#if defined(__linux__)
    static const i64 page = sysconf(_SC_PAGESIZE);
    unsigned char held[WINDOW];  // bit 0: whether a page is in memory
    auto page_of = [](const char *at) { return (i64)at / page; };
    i64 first = 0, after = 0, wanted = 0, end = 0;  // pages: those looked up, and those to ask for together
    auto ask = [&] {
        if (wanted < end) madvise((void *)(wanted * page), (size_t)((end - wanted) * page), MADV_WILLNEED);
    };
    for (i64 i = 0; i < count; i++) {
        for (i64 at = page_of(rows[i]); at <= page_of(rows[i] + bytes - 1); at++) {
            if (at < end) continue;
            if (at >= after) {
                first = at, after = least_of(at + WINDOW, page_of(rows[count - 1] + bytes - 1) + 1);
                if (mincore((void *)(first * page), (size_t)((after - first) * page), held)) return;
            }
            if (held[at - first] & 1) continue;
            if (at > end) ask(), wanted = at;
            end = at + 1;
        }
    }
    ask();
#else
    (void)rows, (void)count, (void)bytes;
#endif
}

}  // namespace BPC_ISA
