// Reads experts into slots: spreads an expert's chunks over the drives that hold its pieces, checks digests, and reads a
// piece that failed once more before it gives up.
//
// A job belongs to its owner, who may not touch it between start() and the last `piece done`, except through promote()
// and try_cancel(). Thread-safe.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "catalog.h"
#include "drive.h"

namespace k3::store {

// Reads of one piece before it is given up. Links and caches fail once; a bad drive fails again.
constexpr int kAttempts = 2;

struct PieceRead {
    PiecePlan plan;
    uint32_t root = 0;
    std::vector<Read> reads;
    std::atomic<uint32_t> reads_left{0};
    int attempt = 1;
    std::atomic<int> error{0};   // errno of the first read that failed
    uint64_t error_offset = 0;   // of that read; written before its reads_left is counted down
    Status outcome = Status::ok;  // ok, io_error or damaged; valid when the piece is done
};

struct Job {
    std::deque<PieceRead> pieces;  // never moved
    uint64_t reads = 0;
    std::atomic<bool> demand{true};
    bool check = true;
};

struct ReaderOptions {
    bool uring = false;
    uint32_t depth = 4;  // reads in progress per drive
    uint32_t checkers = 2;  // threads that compute digests
};

// Called for each piece when it is complete or given up, by one of the reader's threads.
using PieceDone = std::function<void(Job&, PieceRead&)>;

class Reader {
public:
    Reader(const ReaderOptions& options, uint32_t drives, Files& files, Faults& faults, PieceDone done);
    ~Reader() { stop(); }

    // What backend is really used, and why not the one asked for (empty when it is).
    const std::string& backend() const { return backend_; }
    const std::string& notice() const { return notice_; }

    void prepare(Job& job, const ExpertPlan& plan, const Files& files) const;
    void start(Job& job);
    void promote(Job& job);
    // True when nothing of the job had begun: then it never will, and no piece is ever done.
    bool try_cancel(Job& job);
    // Ends after what is in progress; jobs that are not complete stay incomplete. Joins all threads.
    void stop();

    const std::vector<std::unique_ptr<Drive>>& drives() const { return drives_; }
    uint64_t checked_bytes() const { return checked_bytes_.load(std::memory_order_relaxed); }
    uint64_t check_ns() const { return check_ns_.load(std::memory_order_relaxed); }

private:
    void read_done(Read& read, int error);
    void check(PieceRead& piece, Job& job);
    void attempt_over(Job& job, PieceRead& piece);
    void serve_checks();
    static PieceRead& piece_of(Read& read) { return read.job->pieces[read.chunk.piece]; }

    Files& files_;
    PieceDone done_;
    std::string backend_, notice_;
    std::vector<std::unique_ptr<Drive>> drives_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::pair<Job*, PieceRead*>> unchecked_;
    bool stopping_ = false;
    std::vector<std::thread> checkers_;
    std::atomic<uint64_t> checked_bytes_{0}, check_ns_{0};
};

}  // namespace k3::store
