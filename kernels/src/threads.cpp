#include "threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

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
    PlainFloat() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked, nearest, no flushing
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

// One of the parts that a call's work is cut into, on a cache line of its own.
struct alignas(64) Span {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
};

// One call's work. Each thread has a span of neighbouring pieces and takes them in order, so that what it
// reads is one stretch of memory; who is done with his own helps the others.
struct Job {
    int64_t piece;
    const std::function<void(int64_t, int64_t)>* work;
    std::vector<Span> spans;
    std::atomic<bool> failed{false};
    std::exception_ptr error{};  // written by whoever sets `failed` first

    Job(int64_t count, int64_t piece_length, int64_t threads, const std::function<void(int64_t, int64_t)>* what)
        : piece(piece_length), work(what), spans(static_cast<size_t>(threads)) {
        const int64_t pieces = (count + piece - 1) / piece;
        for (int64_t i = 0; i < threads; ++i) {
            spans[static_cast<size_t>(i)].next.store(pieces * i / threads * piece, std::memory_order_relaxed);
            spans[static_cast<size_t>(i)].end = std::min(count, pieces * (i + 1) / threads * piece);
        }
    }

    void run(size_t own) noexcept {
        const PlainFloat mode;
        for (size_t i = 0; i < spans.size(); ++i) drain(spans[(own + i) % spans.size()]);
    }

private:
    void drain(Span& span) noexcept {
        while (!failed.load(std::memory_order_relaxed)) {
            const int64_t begin = span.next.fetch_add(piece, std::memory_order_relaxed);
            if (begin >= span.end) return;
            try {
                (*work)(begin, std::min(span.end, begin + piece));
            } catch (...) {
                if (!failed.exchange(true)) error = std::current_exception();
            }
        }
    }
};

void relax() {
#if defined(__SSE2__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Looks at `done` until it is true, for at most `limit`; whether it was.
template <class Done>
bool spin(std::chrono::microseconds limit, const Done& done) {
    const auto start = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < 32; ++i) {
            if (done()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() - start < limit);
    return done();
}

// The order of things, all of it sequentially consistent: a caller publishes job_, then turn_; a helper
// announces itself in inside_, then reads job_; the caller takes job_ back, then waits until inside_ is 0. So
// no helper touches a job whose caller has gone. Sleepers count themselves before they look a last time,
// wakers look at the count after they have changed what is slept on.
class Pool {
public:
    std::mutex caller;  // held by the call that uses the pool

    int threads() const { return wanted_.load(std::memory_order_relaxed); }
    void set(int n) { wanted_.store(n, std::memory_order_relaxed); }

    // Only while `caller` is held. The caller's span is the first, helper i has span i + 1.
    void run(Job& job, int helpers) {
        start(helpers);
        keep_off(threads() <= cpus_ ? sched_getcpu() : -1);
        helpers_.store(helpers);
        job_.store(&job);
        turn_.fetch_add(1);
        if (sleepers_.load() > 0) {
            {
                const std::lock_guard<std::mutex> lock(mutex_);
            }
            wake_.notify_all();
        }
        job.run(0);
        job_.store(nullptr);  // who has not begun yet need not
        const auto all_left = [this] { return inside_.load() == 0; };
        if (spin(patience(), all_left)) return;
        std::unique_lock<std::mutex> lock(mutex_);
        waiting_.store(true);
        idle_.wait(lock, all_left);
        waiting_.store(false);
    }

private:
    // How long to look for work before sleeping. To be woken takes longer than many a call, and the threads
    // are on their CPUs; but only where every one of them has a CPU, and never longer than a pause between
    // two calls.
    std::chrono::microseconds patience() const {
        return std::chrono::microseconds(threads() <= cpus_ ? kPatienceUs : 0);
    }

    // Helpers do not run on the caller's CPU. Left alone, the scheduler may wake one just there and leave it
    // there for the length of a call, which then takes as long as with one thread. Where the caller may not
    // run, its helpers may not either: taskset may have moved the process since it began.
    void keep_off(int cpu) {
        if (cpu == kept_off_) return;
        kept_off_ = cpu;
        const CpuMask callers;
        for (const pthread_t helper : started_) callers.give_to(helper, cpu);
    }

    void start(int helpers) {
        while (static_cast<int>(started_.size()) < helpers) {
            // A thread that cannot be had is a smaller pool, not an error: the caller works in any case.
            try {
                std::thread helper(&Pool::serve, this, static_cast<int>(started_.size()), turn_.load());
                started_.push_back(helper.native_handle());
                helper.detach();
            } catch (const std::system_error&) {
                break;
            }
            kept_off_ = -1;
        }
    }

    void serve(int index, uint64_t seen) {
        while (true) {
            const auto called = [&] { return turn_.load() != seen; };
            if (!spin(patience(), called)) {
                std::unique_lock<std::mutex> lock(mutex_);
                sleepers_.fetch_add(1);
                wake_.wait(lock, called);
                sleepers_.fetch_sub(1);
            }
            seen = turn_.load();
            inside_.fetch_add(1);
            Job* const job = job_.load();
            if (job != nullptr && index < helpers_.load()) job->run(static_cast<size_t>(index) + 1);
            if (inside_.fetch_sub(1) == 1 && waiting_.load()) {
                {
                    const std::lock_guard<std::mutex> lock(mutex_);
                }
                idle_.notify_one();
            }
        }
    }

    static constexpr int kPatienceUs = 50;
    const int cpus_ = usable_cpus();
    std::mutex mutex_;  // for sleeping only
    std::condition_variable wake_, idle_;
    std::atomic<int> wanted_{cpus_};
    std::vector<pthread_t> started_;  // they never end
    int kept_off_ = -1;
    std::atomic<int> helpers_{0}, inside_{0}, sleepers_{0};
    std::atomic<uint64_t> turn_{0};
    std::atomic<bool> waiting_{false};
    std::atomic<Job*> job_{nullptr};
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
    // About eight pieces per thread even out threads of unequal speed.
    const int64_t piece = std::max<int64_t>(1, grains / (8 * threads)) * grain;
    const int64_t parts = std::min<int64_t>(threads, (count + piece - 1) / piece);
    std::unique_lock<std::mutex> turn(shared.caller, std::defer_lock);
    const bool together = parts > 1 && turn.try_lock();
    Job job(count, piece, together ? parts : 1, &work);
    if (together) {
        shared.run(job, static_cast<int>(parts) - 1);
    } else {
        job.run(0);
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
