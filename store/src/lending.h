// The data plane inside one process: experts of any extents, read into the caller's memory and lent from there.
//
// One lock (`mutex_`) guards all state. Reads and digests run in the reader's threads, which take the lock when a
// piece is done; so it is never held while a job is called off, and never while anything waits.
//
//   * A slot that is being read belongs to its flight until every read of it has ended, also after an error, or
//     when no request wants the expert any more: no late read lands in the slot of another expert.
//   * Only a slot whose pieces were all read, and checked where that was asked for, is ever lent or kept.
//   * Two requests for one expert share one flight, and one slot.
//   * A ticket is the right to hold one expert. There are as many as slots that are not for guesses, and whoever
//     reads or holds has one, so a read that has a ticket always finds a slot that nobody holds or reads into.
//   * Guesses (flights of prefetches, and what they brought in that nobody has asked for) are at most
//     `prefetch_slots` and have no ticket. A drive reads them when nothing else is queued.
//
// A request is admitted with tickets for all of its experts, or for `working_slots` of them; more reads start as
// loans come back. A caller that holds them all and asks for more is lent tickets at the cost of the cache.
// Requests are admitted in the order they came.
//
// Threads are started for the first read. All calls from any thread.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "catalog.h"
#include "faults.h"
#include "files.h"
#include "reader.h"
#include "slots.h"

namespace k3::store {

struct LendingOptions {
    uint64_t slot_bytes = 0;  // whole pages
    uint32_t slots = 0;       // all of them: for what is held, for the cache and for guesses
    uint32_t working_slots = 0;
    uint32_t prefetch_slots = 0;
    std::string policy;
    LayerCounts counts;
    Verify verify = Verify::always;
    ReaderOptions reader;
    uint64_t chunk_bytes = kChunkBytes;
    bool direct = true;
    uint32_t open_files = 0;
    uint64_t patience_ns = 0;  // for tickets that others hold
};

// An expert that is lent: its payload is `payload_bytes` from `at` in the memory.
struct Loan {
    uint32_t layer, expert, slot;
    uint64_t at, payload_bytes;
};

// Why an expert did not come.
struct LoanFailure {
    Key key;
    Status status;  // io_error or damaged
    int error;      // errno
    bool is_open;   // the file could be opened
    uint64_t offset;
    Record record;  // of the piece
    uint8_t found[16];
};

struct LendingStats {
    uint64_t hits, joined, misses, evictions, retries, reads, read_bytes, read_ns, prefetched, prefetch_hits,
        wait_ns, checked_bytes, unchecked_bytes, open_files, faults;
    std::vector<std::pair<uint32_t, bool>> opened;  // file, and whether it is read past the page cache
};

class Lending {
public:
    enum class Outcome : uint8_t { ready, over, closed, no_room, waiting };

    // What somebody asked for and has not got yet. Belongs to one thread at a time.
    class Request {
        friend class Lending;
        std::deque<Key> unstarted;
        std::deque<uint32_t> ready;  // slots, held
        std::deque<std::shared_ptr<const LoanFailure>> failures;
        uint64_t in_flight = 0, tickets = 0;
        uint64_t waits_since_ns = 0;  // 0: it does not wait
        bool in_line = false;         // for its admission
        bool closed = false;
    };
    using RequestPtr = std::shared_ptr<Request>;

    // `memory` holds `slots` * `slot_bytes`, begins on a page and outlives this. std::invalid_argument when the
    // numbers do not fit together.
    Lending(const LendingOptions& options, uint8_t* memory);
    ~Lending();
    Lending(const Lending&) = delete;
    Lending& operator=(const Lending&) = delete;

    const LendingOptions& options() const { return options_; }

    uint32_t add_file(const std::string& path);
    // Says where an expert lies. std::invalid_argument when that makes up no expert of the payload. Has to come
    // before the expert is asked for; the first word counts.
    void place(Key key, uint64_t payload_bytes, std::vector<Record> records, std::vector<bool> has_digest);

    // A request for placed experts, all different. std::system_error when threads cannot be had.
    RequestPtr request(uint32_t layer, const std::vector<uint32_t>& experts);
    // Waits at most `slice_ns` for the request's turn and begins it then. `waiting`: to be called again.
    Outcome admit(const RequestPtr& request, uint64_t slice_ns);
    // Waits at most `slice_ns` for the next expert, which is in `loan`, or when that is ready too, `failure`.
    Outcome next(const RequestPtr& request, uint64_t slice_ns, Loan& loan,
                 std::shared_ptr<const LoanFailure>& failure);
    // Gives back what a request has not handed out; nothing more comes of it.
    void give_up(const RequestPtr& request);
    void release(const RequestPtr& request, uint32_t slot);
    uint64_t held_tickets() const;
    uint64_t all_tickets() const { return options_.slots - options_.prefetch_slots; }

    // Names placed experts that may be asked for; returns a number by which that is taken back. 0 and nothing else
    // when it was closed.
    uint64_t prefetch(uint32_t layer, const std::vector<uint32_t>& experts);
    void take_back(uint64_t hint);

    LendingStats stats() const;
    uint32_t refused_direct() const { return files_.refused_direct(); }

    Faults& faults() { return faults_; }

    // True in a forked child of the process that has the threads: nothing may be asked for there, giving back does
    // nothing, and the object must be left alone and not be destroyed.
    bool is_inherited() const;

    // Nothing begins from here on, and whoever waits is told; returns when the reads in progress have ended.
    void close();

private:
    struct Placed {
        uint64_t payload_bytes;
        std::vector<Record> records;
        std::vector<bool> has_digest;
    };

    struct Flight : Job {
        Key key;
        uint32_t slot;
        uint64_t hint = 0;  // of the prefetch that it is a guess of; 0: somebody asked for it
        std::vector<RequestPtr> waiters;
        uint64_t pieces_left;
        uint64_t payload_at;
        uint64_t versions = 0;  // sum of its files'; it grows with each of them
        const PieceRead* failure = nullptr;
    };
    using FlightPtr = std::shared_ptr<Flight>;

    void begin_reading();
    void advance(const RequestPtr& request);
    FlightPtr take_off(Key key, uint64_t hint);
    bool must_check(const Flight& flight) const;
    void piece_done(Job& job, PieceRead& piece);
    void end(Flight& flight);
    void land(Flight& flight);
    void fail(Flight& flight);
    void call_off(const std::vector<FlightPtr>& flights);
    void begin_guesses();
    void give_back(Request& request);
    void leave_line(Request& request);
    void stop_waiting(Request& request);
    bool is_out_of_patience(const Request& request) const;

    const LendingOptions options_;
    uint8_t* const memory_;
    Files files_;
    Faults faults_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool closed_ = false;
    Slots slots_;
    std::unordered_map<Key, Placed, KeyHash> placed_;
    std::unordered_map<Key, FlightPtr, KeyHash> flights_;
    std::unordered_map<Key, uint64_t, KeyHash> verified_;  // -> Flight::versions
    std::deque<Request*> line_;
    std::deque<std::pair<uint64_t, Key>> hints_;  // prefetches that were not begun
    uint64_t tickets_;
    uint64_t guesses_ = 0;  // flights with a hint
    uint64_t last_hint_ = 0;
    LendingStats counted_{};

    std::mutex closing_;
    std::atomic<pid_t> process_{0};   // that has the reader's threads
    std::unique_ptr<Reader> reader_;  // its threads use the members above: destroyed first
};

}  // namespace k3::store
