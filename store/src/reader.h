// Reads experts into slots: spreads an expert's chunks over the drives that hold its pieces, checks digests, and
// reads a piece that failed once more before it gives up.
//
// Digests are computed by threads of their own (checkers), so that hashing never keeps a drive waiting, and of the
// chunks as they arrive: a chunk that overtakes another waits for it in its place. One checker at a time has a
// piece.
//
// A job belongs to its owner, who may not touch it between start() and the last `piece done`, except through
// promote() and call_off(). Thread-safe.
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
#include "xxh3.h"

namespace k3::store {

// Reads of one piece before it is given up. Links and caches fail once; a bad drive fails again.
constexpr int kAttempts = 2;

// One piece on its way. What says so belongs to the reader, under its mutex, until the piece is done.
struct PieceRead {
    PieceRead(const PiecePlan& planned, uint32_t on_root)
        : plan(planned), root(on_root), digest(planned.stored, planned.record.stored_bytes) {}

    // Bytes of the piece that are there when all reads before the one after `read` have arrived.
    uint64_t bytes_up_to(size_t read) const {
        return reads[read].chunk.offset + reads[read].chunk.need - plan.record.offset;
    }

    const PiecePlan plan;
    const uint32_t root;
    uint64_t version = 0;     // of its file when the job was prepared
    bool check = true;        // its digest is compared
    std::vector<Read> reads;  // in the order of the piece's bytes
    int attempt = 1;
    size_t reads_left = 0;
    std::vector<bool>
        arrived;             // by read: its bytes are in place. Only for pieces that are checked, as what follows
    size_t in_order = 0;     // reads that have arrived with all before them
    size_t hashed = 0;       // reads of these that are in the digest
    bool checking = false;   // a checker has it, or it waits for one
    Xxh3Stream digest;       // not under the mutex: of the checker that has it
    uint8_t found[16] = {};  // the digest that the bytes have, when they were compared

    int error = 0;                // errno of the first read that failed
    bool is_open = true;          // its file could be opened
    uint64_t error_offset = 0;    // of that read, or of the piece when its digest is wrong
    Status outcome = Status::ok;  // ok, io_error, damaged or cancelled; valid when the piece is done
};

struct Job {
    std::deque<PieceRead> pieces;  // never moved
    uint64_t reads = 0;
    std::atomic<bool> demand{true};
    std::atomic<bool> called_off{false};
    bool check = true;  // the digests of its pieces are compared; changed only before start()
};

// Which reads are compared with their digests: all, the first of each expert, or none.
enum class Verify : uint8_t { always, first, never };

struct ReaderOptions {
    uint32_t depth = 4;                // reads in progress per drive
    uint32_t background = UINT32_MAX;  // of these, reads that nobody waits for
    // Threads that compute digests; 0: one per drive, on at most half of the processors. One keeps up with a fast
    // drive, and each that hashes is a processor that does not start the next read.
    uint32_t checkers = 0;
};

// Called for each piece when it is complete or given up, by one of the reader's threads.
using PieceDone = std::function<void(Job&, PieceRead&)>;

class Reader {
public:
    Reader(const ReaderOptions& options, uint32_t drives, Files& files, Faults& faults, PieceDone done);
    ~Reader() { stop(); }

    void prepare(Job& job, const ExpertPlan& plan, const Files& files) const;
    void start(Job& job);
    void promote(Job& job);
    // Nothing of the job begins from here on. True when nothing was in progress: then no piece is ever done.
    // Otherwise each piece is done when what is in progress of it has ended, as cancelled if that is not all of
    // the piece.
    bool call_off(Job& job);
    // True when nothing of the job had begun: then no piece is ever done. Otherwise it goes on as if not asked.
    bool call_off_if_not_begun(Job& job);
    // Ends after what is in progress; jobs that are not complete stay incomplete. Joins all threads.
    void stop();

    const std::vector<std::unique_ptr<Drive>>& drives() const { return drives_; }
    uint64_t call_off_steps() const { return call_off_steps_.load(std::memory_order_relaxed); }  // reads looked at
    uint64_t checked_bytes() const { return checked_bytes_.load(std::memory_order_relaxed); }
    uint64_t check_ns() const { return check_ns_.load(std::memory_order_relaxed); }

private:
    void read_done(Read& read, int error);
    void begin_attempt(PieceRead& piece) const;
    void set_check(PieceRead& piece, bool check) const;
    void arrive(PieceRead& piece, const Read& read);
    bool has_more_to_hash(const PieceRead& piece) const {
        return piece.error == 0 && piece.in_order > piece.hashed;
    }
    void hash(PieceRead& piece, uint64_t arrived_bytes);
    void compare(PieceRead& piece);
    static Status outcome_of(const PieceRead& piece);
    void attempt_over(Job& job, PieceRead& piece);
    void serve_checks();
    static PieceRead& piece_of(Read& read) { return read.job->pieces[read.chunk.piece]; }

    Files& files_;
    PieceDone done_;
    std::vector<std::unique_ptr<Drive>> drives_;
    std::mutex mutex_;
    std::condition_variable more_;
    std::deque<std::pair<Job*, PieceRead*>> unchecked_;  // pieces with something to hash, and no checker
    bool stopping_ = false;
    std::vector<std::thread> checkers_;
    std::atomic<uint64_t> checked_bytes_{0}, check_ns_{0}, call_off_steps_{0};
};

}  // namespace k3::store
