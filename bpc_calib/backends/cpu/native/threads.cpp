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

struct Job {
    void (*work)(const void *, int64_t);
    const void *with;
    int64_t items;
    std::atomic<int64_t> next{0};  // the first item that nobody has taken

    void take_items() {
        for (int64_t item; (item = next.fetch_add(1)) < items;) work(with, item);
    }
};

// Threads of our own, where there is no OpenMP.
struct Pool {
    std::mutex mutex;
    std::condition_variable woken;
    std::vector<std::thread> workers;
    std::atomic<int64_t> count{0};    // of the jobs so far
    std::atomic<int64_t> working{0};  // workers that may still take items
    int64_t wanted = 0;
    Job *job = nullptr;

    void wait(int64_t index, int64_t seen) {
        for (;;) {
            for (int i = 0; i < LOOKS && count.load() == seen; i++) pause();
            if (count.load() == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                woken.wait(lock, [&] { return count.load() != seen; });
            }
            seen = count.load();
            if (index < wanted) job->take_items();
            working.fetch_sub(1);
        }
    }

    void run(int64_t threads, Job &given) {
        while ((int64_t)workers.size() < threads - 1) {
            int64_t index = (int64_t)workers.size();
            workers.emplace_back([this, index, seen = count.load()] { wait(index, seen); });
        }
        wanted = threads - 1;
        job = &given;
        working.store((int64_t)workers.size());
        {
            std::lock_guard<std::mutex> lock(mutex);  // none may fall asleep in between
            count.fetch_add(1);
        }
        woken.notify_all();
        given.take_items();
        for (int looks = 0; working.load(); looks++) looks < LOOKS ? pause() : std::this_thread::yield();
    }
};

Region region = nullptr;
int region_of = 0;  // the process that has these threads: a forked child has none
Pool *pool = nullptr;
int pool_of = 0;

}  // namespace

void share_threads(Region found) {
    region = found;
    region_of = getpid();
}

void parallel(int64_t threads, int64_t items, void (*work)(const void *, int64_t), const void *with) {
    Job job{work, with, items};
    if (threads > items) threads = items;
    if (threads <= 1) return job.take_items();
    if (region && region_of == getpid()) {
        return region([](void *job) { static_cast<Job *>(job)->take_items(); }, &job, (unsigned)threads, 0);
    }
    if (!pool || pool_of != getpid()) {
        pool = new Pool;  // never freed: its threads wait until the process ends
        pool_of = getpid();
    }
    pool->run(threads, job);
}

}  // namespace bpc
