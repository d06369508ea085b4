// One drive: `depth` threads that each do one pread after the other, what is asked for before everything else.
//
// The queue is bounded by construction: an expert has a fixed number of chunks, and there are no more experts
// being read than slots. Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "catalog.h"
#include "faults.h"
#include "files.h"
#include "read_queue.h"

namespace k3::store {

// In place of an errno: a read that was called off before it began; one whose file is not the one that was
// checked.
constexpr int kCalledOff = -1;
constexpr int kFileChanged = -2;

// Called once for each read by the thread that did it; `error` is an errno, one of the above or 0.
using ReadDone = std::function<void(Read&, int error)>;

// Upper bounds of the classes that reads are counted in by how long they took; one more class is for the rest.
// From what a fast drive needs for a small read to what a drive in trouble takes.
constexpr uint64_t kReadBoundsNs[] = {100'000,     250'000,     500'000,       1'000'000,     2'500'000,
                                      5'000'000,   10'000'000,  25'000'000,    50'000'000,    100'000'000,
                                      250'000'000, 500'000'000, 1'000'000'000, 2'500'000'000, 10'000'000'000};
constexpr size_t kReadClasses = std::size(kReadBoundsNs) + 1;

struct DriveCounters {
    std::atomic<uint64_t> reads{0};
    std::atomic<uint64_t> read_bytes{0};    // that were asked for and came
    std::atomic<uint64_t> extent_bytes{0};  // of extents that were asked for, failed reads included
    std::atomic<uint64_t> read_ns{0};       // summed over reads
    std::atomic<uint64_t> read_classes[kReadClasses] = {};  // reads by their time
    std::atomic<uint64_t> errors{0};                        // reads that failed, and pieces whose digest was wrong
    std::atomic<uint64_t> damaged{0};                       // of these: pieces whose digest was wrong
    std::atomic<uint64_t> re_reads{0};                      // pieces that were read a second time
    std::atomic<bool> direct{true};                         // no read went through the page cache
};

class Bounce;

class Drive {
public:
    // At most `background` reads that nobody waits for are in progress at a time. std::system_error when threads
    // cannot be had.
    Drive(uint32_t depth, uint32_t background, Files& files, Faults& faults, ReadDone done);
    ~Drive() { stop(); }
    Drive(const Drive&) = delete;
    Drive& operator=(const Drive&) = delete;

    // Queues reads of one job, by what the job is at that moment. False when it has been called off: nothing is
    // queued.
    bool push(const std::vector<Read*>& reads, const Job& job, bool first);
    // What is still queued of these goes with what is asked for.
    void promote(std::vector<Read>& reads);
    // Takes what is still queued of these out of the queue, into `taken`.
    void take_back(std::vector<Read>& reads, std::vector<Read*>& taken);
    // For whoever locks several drives at once, in ascending order.
    std::mutex& mutex() { return mutex_; }
    bool is_queued(const Read& read) const {
        return read.queue != nullptr && read.queue != &in_progress_;
    }  // under it
    // Ends after the reads in progress; what is queued is never read. Joins the threads.
    void stop();

    void throttle(uint64_t bytes_per_s) { rate_.store(bytes_per_s, std::memory_order_relaxed); }
    uint64_t queued() const;
    uint32_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }
    uint64_t busy_ns() const;  // time with at least one read in progress
    uint64_t oldest_read_ns()
        const;  // age of the read that has been in progress for longest; 0 when there is none
    DriveCounters counters;

private:
    void serve();
    // The next read that may begin; nullptr when there is none. Under mutex_.
    Read* next();
    int run(Read& read, Bounce& bounce);
    void ended(Read& read, int error);
    void wait_for_rate(uint64_t bytes, uint64_t began_ns);

    Files& files_;
    Faults& faults_;
    ReadDone done_;
    const uint32_t background_max_;
    mutable std::mutex mutex_;
    std::condition_variable more_;
    bool stopping_ = false;
    ReadQueue demand_, background_;  // background: pins and prefetches, in the order in which they came
    ReadQueue in_progress_;          // the longest first
    std::atomic<uint32_t> in_flight_{0};
    uint32_t background_in_flight_ = 0;
    uint64_t busy_since_ns_ = 0;
    uint64_t busy_ns_ = 0;
    std::atomic<uint64_t> rate_{0};
    uint64_t rate_free_ns_ = 0;
    std::vector<std::thread> threads_;
};

// The system calls of one read: where the next one begins, and what its result means.
class Progress {
public:
    Progress(Read& read, std::shared_ptr<OpenFile> file, uint8_t* bounce, Faults& faults);

    // Decides the next call; false when the read has failed already (error()).
    bool prepare();
    int fd() const { return file_->fd(); }
    bool direct() const { return file_->direct(); }
    uint8_t* target() const { return into_ + done_; }
    size_t length() const { return length_; }
    uint64_t position() const { return read_.chunk.offset + done_; }

    // `result` is what the call returned: bytes, or a negative errno. True when another call is needed.
    bool advance(int64_t result);
    int error() const { return error_; }

private:
    void finish_page_buffered(uint64_t page);

    Read& read_;
    std::shared_ptr<OpenFile> file_;
    uint8_t* into_;
    Faults& faults_;
    Fault fault_;
    uint64_t done_ = 0;
    size_t length_ = 0;
    int error_ = 0;
};

// Page-aligned memory for one bounced chunk, made on first use.
class Bounce {
public:
    ~Bounce();
    uint8_t* get();

private:
    uint8_t* memory_ = nullptr;
};

}  // namespace k3::store
