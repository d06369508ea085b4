#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

#include "cpu.h"

namespace k3 {

namespace {

// The floating-point mode that all kernels are defined in, for the life of this object.
class PlainFloat {
public:
#if defined(__SSE2__)
    PlainFloat() : saved_(_mm_getcsr()) {
        _mm_setcsr(0x1f80);
    }  // all exceptions masked, nearest, no flushing
    ~PlainFloat() { _mm_setcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    PlainFloat() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~PlainFloat() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

private:
    uint64_t saved_;
#endif
};

// One call's work: pieces are handed out by a counter.
struct Job {
    int64_t count;
    int64_t piece;
    const std::function<void(int64_t, int64_t)>* work;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};  // written by whoever sets `failed` first

    void run() noexcept {
        const PlainFloat mode;
        while (!failed.load(std::memory_order_relaxed)) {
            const int64_t begin = next.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= count) return;
            try {
                (*work)(begin, std::min(count, begin + piece));
            } catch (...) {
                if (!failed.exchange(true)) error = std::current_exception();
            }
        }
    }
};

class Pool {
public:
    std::mutex caller;  // held by the call that uses the pool

    int threads() const { return wanted_.load(std::memory_order_relaxed); }
    void set(int n) { wanted_.store(n, std::memory_order_relaxed); }

    // Only while `caller` is held.
    void run(Job& job, int helpers) {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (started_ < helpers) {
                // A thread that cannot be had is a smaller pool, not an error: the caller works in any case.
                try {
                    std::thread(&Pool::serve, this, started_, turn_).detach();
                } catch (const std::system_error&) {
                    break;
                }
                ++started_;
            }
            job_ = &job;
            helpers_ = helpers;
            ++turn_;
        }
        wake_.notify_all();
        job.run();
        std::unique_lock<std::mutex> lock(mutex_);
        job_ = nullptr;  // who has not begun yet need not
        idle_.wait(lock, [this] { return inside_ == 0; });
    }

private:
    void serve(int index, uint64_t seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            wake_.wait(lock, [&] { return turn_ != seen; });
            seen = turn_;
            if (job_ == nullptr || index >= helpers_) continue;
            Job& job = *job_;
            ++inside_;
            lock.unlock();
            job.run();
            lock.lock();
            if (--inside_ == 0) idle_.notify_one();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::atomic<int> wanted_{usable_cpus()};
    int started_ = 0;
    int helpers_ = 0;
    int inside_ = 0;
    uint64_t turn_ = 0;
    Job* job_ = nullptr;
};

std::atomic<Pool*> current{nullptr};
std::atomic<int> inherited{0};

// In a forked child none of the pool's threads exist and its locks may be held for ever: leave it, take a new
// one.
void leave_pool() {
    Pool* old = current.exchange(nullptr);
    if (old != nullptr) inherited.store(old->threads());
}

// Pools are never destroyed: their threads may outlive every static object.
Pool& pool() {
    Pool* have = current.load(std::memory_order_acquire);
    if (have != nullptr) return *have;
    static const int registered = pthread_atfork(nullptr, nullptr, leave_pool);
    (void)registered;
    Pool* fresh = new Pool;
    if (inherited.load() > 0) fresh->set(inherited.load());
    if (current.compare_exchange_strong(have, fresh, std::memory_order_acq_rel)) return *fresh;
    delete fresh;  // another thread was first; this one never started anything
    return *have;
}

}  // namespace

void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& work) {
    if (count <= 0) return;
    Pool& shared = pool();
    const int64_t threads = shared.threads();
    const int64_t grains = (count + grain - 1) / grain;
    // About four pieces per thread even out threads of unequal speed.
    const int64_t piece = std::max<int64_t>(1, grains / (4 * threads)) * grain;
    Job job{count, piece, &work};
    const int helpers = static_cast<int>(std::min<int64_t>(threads, (count + piece - 1) / piece) - 1);
    std::unique_lock<std::mutex> turn(shared.caller, std::defer_lock);
    if (helpers > 0 && turn.try_lock()) {
        shared.run(job, helpers);
    } else {
        job.run();
    }
    if (job.error) std::rethrow_exception(job.error);
}

int get_threads() { return pool().threads(); }

void set_threads(int n) {
    Pool& shared = pool();
    std::lock_guard<std::mutex> turn(shared.caller);
    shared.set(n);
}

}  // namespace k3
