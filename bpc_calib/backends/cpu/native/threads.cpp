#include "threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(_WIN32)
static int getpid() { return 0; }  // no fork there
#else
#include <unistd.h>
#endif

namespace bpc {
namespace {

// How often a waiting thread looks before it sleeps: the stages of one step follow each other within microseconds.
constexpr int LOOKS = 2000;

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

struct Pool {
    std::mutex mutex;
    std::condition_variable woken;
    std::vector<std::thread> workers;
    std::atomic<int64_t> job{0};      // counts the calls
    std::atomic<int64_t> next{0};     // the first item that nobody has taken
    std::atomic<int64_t> working{0};  // workers that may still take items
    int64_t wanted = 0, items = 0;
    void (*work)(const void *, int64_t) = nullptr;
    const void *with = nullptr;

    void take_items() {
        for (int64_t item; (item = next.fetch_add(1)) < items;) work(with, item);
    }

    void wait(int64_t index, int64_t seen) {
        for (;;) {
            for (int i = 0; i < LOOKS && job.load() == seen; i++) pause();
            if (job.load() == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                woken.wait(lock, [&] { return job.load() != seen; });
            }
            seen = job.load();
            if (index < wanted) take_items();
            working.fetch_sub(1);
        }
    }
};

Pool *pool = nullptr;
int pool_of = 0;  // the process that has these threads: a forked child has none

}  // namespace

void parallel(int64_t threads, int64_t items, void (*work)(const void *, int64_t), const void *with) {
    if (threads > items) threads = items;
    if (threads <= 1) {
        for (int64_t item = 0; item < items; item++) work(with, item);
        return;
    }
    if (!pool || pool_of != getpid()) {
        pool = new Pool;  // never freed: its threads wait until the process ends
        pool_of = getpid();
    }
    while ((int64_t)pool->workers.size() < threads - 1) {
        int64_t index = (int64_t)pool->workers.size();
        pool->workers.emplace_back([pool = pool, index, seen = pool->job.load()] { pool->wait(index, seen); });
    }
    pool->wanted = threads - 1;
    pool->items = items;
    pool->work = work;
    pool->with = with;
    pool->next.store(0);
    pool->working.store((int64_t)pool->workers.size());
    {
        std::lock_guard<std::mutex> lock(pool->mutex);  // none may fall asleep in between
        pool->job.fetch_add(1);
    }
    pool->woken.notify_all();
    pool->take_items();
    for (int looks = 0; pool->working.load(); looks++) looks < LOOKS ? pause() : std::this_thread::yield();
}

}  // namespace bpc
