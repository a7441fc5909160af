// What Python calls: plain C, so that one library serves every version of Python and of torch.
#include <atomic>
#include <cstdlib>
#include <mutex>
#include <string_view>

#include "table.h"
#include "threads.h"
#if defined(__linux__)
#include <sys/mman.h>
#include <sys/syscall.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(_WIN32)
static int getpid() { return 0; }  // no fork there
#else
#include <pthread.h>
#include <unistd.h>
#endif

namespace bpc {
namespace {

struct Job {
    void (*work)(const void *, int64_t);
    const void *with;
    int64_t items;
    std::atomic<int64_t> next{0};  // the first item that nobody has taken

    void take_items() {
        for (int64_t item; (item = next.fetch_add(1)) < items;) work(with, item);
    }
};

Region region = nullptr;
int process = 0;  // the one that has these threads: a forked child has none

}  // namespace

void parallel(int64_t threads, int64_t items, void (*work)(const void *, int64_t), const void *with) {
    Job job{work, with, items};
    if (threads > items) threads = items;
    if (threads <= 1 || !region || process != getpid()) return job.take_items();
    region([](void *job) { static_cast<Job *>(job)->take_items(); }, &job, (unsigned)threads, 0);
}

}  // namespace bpc

namespace base {
extern const bpc::Kernels kernels;
}
#if defined(__x86_64__)
namespace avx2 {
extern const bpc::Kernels kernels;
}
namespace avx512 {
extern const bpc::Kernels kernels;
}
namespace zen4 {
extern const bpc::Kernels kernels;
}
#endif

namespace {

const char *name = "base";
bpc::Extras extras = {};

#if defined(__x86_64__)
bool all(unsigned found, unsigned wanted) { return (found & wanted) == wanted; }

// Whether the system saves all these registers of a program, named by bits of XCR0.
bool saved(unsigned registers) {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return all(low, registers);
}

// Whether the kernels have loops for AMX, and Linux lets this process use its tiles, which it must ask for.
bool tiles_granted() {
#if defined(BPC_AMX)
    constexpr long REQUEST = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return saved(0x60000) && syscall(SYS_arch_prctl, REQUEST, TILES) == 0;
#else
    return false;
#endif
}
#endif

// Not by `__builtin_cpu_supports`: where zig links it, it denies everything.
const bpc::Kernels &chosen() {
#if defined(__x86_64__)
    const char *most = std::getenv("BPC_ISA");
    unsigned a, b, c, d, features, more, extended;
    bool has_avx2 = __get_cpuid(1, &a, &b, &features, &d) && __get_cpuid_count(7, 0, &a, &more, &c, &d) &&
                    __get_cpuid(0x80000001, &a, &b, &extended, &d) &&
                    all(features, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C | bit_POPCNT) &&
                    all(more, bit_AVX2 | bit_BMI | bit_BMI2) && all(extended, bit_LZCNT) && saved(0x06);
    bool has_avx512 = has_avx2 && all(more, bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ) && saved(0xE6);
    std::string_view wanted = most && *most ? most : "all";
    auto may = [&](const char *each) { return wanted == "all" || wanted == each; };
    if (has_avx512 && wanted != "avx2" && wanted != "base") {
        constexpr unsigned BF16_DOTS = 1 << 5, AMX = 1 << 22 | 1 << 24;  // of bfloat16, and of tiles
        extras.bf16_dots = __get_cpuid_count(7, 1, &a, &b, &c, &d) && all(a, BF16_DOTS);
        extras.amx = may("amx") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && all(d, AMX) && tiles_granted();
        bool is_amd = __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx;
        if (is_amd && may("zen4")) return name = "zen4", zen4::kernels;
        return name = extras.amx ? "amx" : "avx512", avx512::kernels;
    }
    if (has_avx2 && wanted != "base") return name = "avx2", avx2::kernels;
#endif
    return base::kernels;
}

const bpc::Kernels &kernels = chosen();
std::mutex one_at_a_time;  // the memory below serves one step

// Memory that steps share: fresh pages would cost more than what is done in them.
char *memory(int64_t bytes) {
    constexpr int64_t LARGE_PAGE = 1 << 21;
    static char *kept = nullptr;
    static int64_t size = 0;
    if (bytes > size) {
        std::free(kept);
        size = (bytes + bytes / 16 + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
        kept = static_cast<char *>(std::aligned_alloc(LARGE_PAGE, size));
        if (!kept) std::abort();
#if defined(__linux__)
        madvise(kept, size, MADV_HUGEPAGE);  // if Linux refuses, pages stay small
#endif
    }
    return kept;
}

}  // namespace

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

// The names of the fields of a `Call` in their order, each an int64, and behind them a double, `scaling`.
EXPORT const char *bpc_fields() {
#define BPC_NAME(name) #name " "
    return BPC_NUMBERS(BPC_NAME);
}

// The instruction set that serves.
EXPORT const char *bpc_isa() { return name; }

// Makes `parallel` use the threads of this OpenMP; without a call there is one thread.
EXPORT void bpc_share_threads(bpc::Region found) {
    bpc::region = found;
    bpc::process = getpid();
#if !defined(_WIN32)
    // A fork waits for the step that runs: its child would wait for ever.
    pthread_atfork([] { one_at_a_time.lock(); }, [] { one_at_a_time.unlock(); }, [] { one_at_a_time.unlock(); });
#endif
}

EXPORT int64_t bpc_step(const bpc::Call *call) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    return kernels.step(*call, memory);
}

EXPORT void bpc_greedy(int64_t threads, const float *products, const float *norms, const float *gram, int64_t rows,
                       int64_t tokens, int64_t bits, int64_t *codes, float *errors, uint8_t *gains) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    kernels.greedy(threads, products, norms, gram, rows, tokens, bits, codes, errors, gains);
}

EXPORT void bpc_search(int64_t threads, const float *products, const float *norms, const float *gram,
                       const float *squares, int64_t codebooks, int64_t rows, int64_t tokens, int64_t bits, int64_t *codes,
                       float *errors, uint8_t *gains) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    kernels.search(threads, products, norms, gram, squares, codebooks, rows, tokens, bits, codes, errors, gains);
}

EXPORT void bpc_linear(int64_t threads, int64_t element, const char *tokens, int64_t count, const char *matrix,
                       int64_t outputs, int64_t columns, float *out) {
    std::lock_guard<std::mutex> lock(one_at_a_time);
    kernels.linear(threads, element, tokens, count, matrix, outputs, columns, extras, out, memory);
}

// Fitting: each call is one head's, and several threads call at once.
EXPORT double bpc_squared_norm(int64_t element, const void *keys, int64_t count, int64_t dim, const double *mean,
                               const double *metric) {
    return kernels.squared_norm(element, keys, count, dim, mean, metric);
}

EXPORT void bpc_decompose(int64_t element, const void *keys, int64_t count, int64_t dim, const double *mean,
                          const double *root, const double *draws, int64_t bits, int64_t iterations,
                          double *projection) {
    kernels.decompose(element, keys, count, dim, mean, root, draws, bits, iterations, projection);
}

EXPORT void bpc_products(int64_t element, const void *keys, int64_t count, int64_t dim, const double *mean,
                         const double *matrix, const double *gram, int64_t bits, double *squares, double *cross) {
    kernels.products(element, keys, count, dim, mean, matrix, gram, bits, squares, cross);
}
