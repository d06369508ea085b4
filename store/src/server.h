// The daemon's data plane: arena, slots, drives and the rings of all clients. No sockets and no meaning of files:
// whoever makes a Server tells it what there is, then calls start().
//
// One lock (`mutex_`) guards all state. One service thread takes requests from the rings and hands out what the
// drives have read; reads and digests run in the reader's threads, which only leave a note (`done_`) and never
// take the lock. Control calls may come from any thread at any time and take the lock for a moment.
//
// No deadlock: `max_clients` * `quota` slots are promised, a quarter of the rest may be filled by prefetches
// (clients that prefetch share it evenly), the remainder may be pinned, by clients and by the policy together.
// These sum to the number of slots, and a client never holds or awaits more leases than its quota, so a demand
// read that finds no slot only ever waits for reads that nobody wants any more, and those end by themselves.
//
// A read that nobody waits for any more is called off at once: what is queued of it never begins. What is in
// progress owns its slot until it ends, so there are at most as many such slots as reads in progress (`depth` per
// drive) and pieces being digested; those that were for a pin count as pins until then.
//
// What a client can write (its ring, its doorbells) is bounded in ring.h, server.cpp and at add_client(); a client
// that breaks the rules is cut off and told of by violations().
//
// Sanitizers: `scripts/sanitize store address` and `scripts/sanitize store thread`.
#pragma once

#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "bus_guard.h"
#include "catalog.h"
#include "faults.h"
#include "files.h"
#include "memory.h"
#include "reader.h"
#include "ring.h"
#include "slots.h"

namespace k3::store {

struct ServerOptions {
    uint64_t slot_bytes = 0;  // whole pages
    uint32_t slots = 0;
    std::string policy;
    std::vector<Key> pins;  // of the policy pin-lru
    ReaderOptions reader;
    Verify verify = Verify::always;
    uint32_t max_clients = 0;
    uint32_t quota = 0;  // leases held or awaited per client
    uint32_t entries = kDefaultEntries;
    uint32_t open_files = 256;
};

struct ClientStats {
    ClientId id;
    std::string name;
    uint64_t leases, waiting, leased_bytes, prefetching, pinned;
    uint64_t granted, errors, refused, stale_releases, requests;
    bool dropped;
};

struct DriveStats {
    uint64_t reads, read_bytes, read_ns, busy_ns, queued, in_flight, oldest_read_ns, errors, damaged, re_reads;
    bool direct;
    std::vector<uint64_t> read_classes;
};

struct ServerStats {
    uint64_t hits, misses, joined, prefetch_hits, prefetch_wasted, prefetched, evictions, stale_releases, refused,
        failed;
    uint64_t checked_bytes, check_ns, faults;
    uint64_t warming, pinned, pin_slots, prefetch_slots, unused_prefetches, flights, unwanted_flights,
        waiting_for_slot;
    uint64_t call_off_steps;
    SlotCounts slots;
    uint64_t open_files;
    std::vector<DriveStats> drives;
    std::vector<ClientStats> clients;
};

// What a new client is given; the descriptors are the caller's to pass on and close.
struct NewClient {
    ClientId id;
    Fd ring, request_doorbell, completion_doorbell;
};

class Server {
public:
    // std::invalid_argument when the numbers do not fit together, std::system_error when there is no memory.
    explicit Server(const ServerOptions& options, const ReserveProgress& on_reserved = {});
    ~Server() { close(); }
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    // Setting up; std::logic_error after start().
    uint32_t add_file(uint32_t root, const std::string& path, bool direct);
    void set_layer(uint32_t layer, uint64_t payload_bytes, const std::vector<uint32_t>& pieces,
                   std::vector<Record> records);
    void start();

    int arena_fd() const { return arena_.fd.get(); }
    int events_fd() const { return events_.get(); }  // readable while violations() has something to say
    uint64_t arena_bytes() const { return arena_.map.bytes(); }
    uint64_t arena_huge_bytes() const { return arena_.huge_bytes; }
    const ServerOptions& options() const { return options_; }

    NewClient add_client(const std::string& name);
    // Frees everything the client had. Does nothing for a client that is not there.
    void remove_client(ClientId id);
    // Clients that broke the protocol since the last call; they have been cut off and are to be removed.
    std::vector<ClientId> violations();
    ServerStats stats();

    // Reads experts at low priority into the cache / and keeps them there. Returns how many were queued, or pinned
    // and queued; the rest is in already (or, when pinning, there is no room to pin more).
    uint64_t warm(uint32_t layer, const std::vector<uint32_t>& experts);
    uint64_t pin(uint32_t layer, const std::vector<uint32_t>& experts);
    uint64_t unpin(uint32_t layer, const std::vector<uint32_t>& experts);

    void inject(const FaultRule& rule, uint64_t seed) { faults_.add(rule, seed); }
    void clear_faults() { faults_.clear(); }
    void resume_stalls() { faults_.resume(); }
    void throttle(uint32_t root, uint64_t bytes_per_s);

    // Grants nothing new from here on; true when everything under way has ended within the time.
    bool drain(uint64_t timeout_ns);
    void close();

private:
    enum class Kind : uint8_t { demand, pin, prefetch, warm };

    struct Waiter {
        ClientId client;
        uint64_t tag;
        Op op;
        Source source;
    };

    // An expert being read into a slot, and who waits for it.
    struct Flight : Job {
        Key key;
        uint32_t slot;
        Kind kind;
        ClientId prefetcher = 0;  // the client whose share of the prefetches it counts in, while it is one
        std::vector<Waiter> waiters;
        bool counts_as_pin = false;  // it was for a pin that was called off
        uint64_t pieces_left;
        uint64_t payload_at;
        uint64_t versions = 0;  // sum of its files'; it grows with each of them
        const PieceRead* failure = nullptr;
    };

    // What was asked for or pinned and has no slot yet.
    struct Pending {
        Key key;
        std::vector<Waiter> waiters;
    };

    struct Prefetch {
        uint64_t tag;
        Key key;
    };

    struct Client {
        ClientId id = 0;
        std::string name;
        SharedMemory memory;
        BusGuard guard;  // of `memory`
        DaemonRing ring;
        Fd request_doorbell, completion_doorbell;
        std::unordered_map<uint32_t, uint32_t> leases;    // slot -> how many
        std::unordered_map<Key, uint32_t, KeyHash> pins;  // -> slot
        std::deque<Prefetch> prefetches;                  // that have no slot yet
        uint64_t leased = 0;                              // sum of leases
        uint64_t waiting = 0;                             // lease requests that were not answered yet
        uint64_t prefetching = 0;                         // in `prefetches`, or being read
        std::unordered_set<Key, KeyHash> filling;         // prefetches of it that are being read
        uint64_t owed = 0;      // completions that may still come: waiting, prefetching and pins under way
        bool has_ring = false;  // not the control side's
        bool dirty = false;     // has completions that were not published
        bool stalled = false;   // does not read its completions
        bool dropped = false;
        bool broken = false;  // to be dropped at the end of this turn
        uint64_t requests = 0, granted = 0, errors = 0, refused = 0, stale_releases = 0;
    };

    // The service thread
    void serve();
    bool turn();
    bool sleep_or_not();
    bool take_requests(Client& client);
    void handle(Client& client, const Request& request);
    void lease(Client& client, const Request& request, Op op);
    void release(Client& client, const Request& request);
    void prefetch(Client& client, const Request& request);
    void cancel(Client& client, uint64_t tag);
    void unpin(Client& client, Key key);
    bool call_off_pins(Client& client, Key key);
    void grant(Client& client, uint32_t slot, const Waiter& waiter);
    void answer(Client& client, const Completion& completion);
    void answer_status(const Waiter& waiter, Key key, Status status);
    void answer_all(const std::vector<Waiter>& waiters, Key key, Status status);

    // Reads
    bool take_off(Key key, Kind kind, std::vector<Waiter>& waiters);
    bool must_check(const Flight& flight) const;
    void land_done();
    void land(Flight& flight);
    void fail(Flight& flight);
    void nobody_waits_for(Key key, bool was_for_pin);
    void free_called_off(Key key);
    void await_slot(Key key, std::vector<Waiter> waiters);
    void join(Flight& flight, const Waiter& waiter);
    void retry_pending();
    void pump_prefetches();
    bool start_prefetch(Client& client);
    bool make_prefetch_room(const Client& client, const Prefetch& wanted, bool& own);
    const ClientId* prefetcher_to_displace(const Client& client) const;
    bool displace(ClientId prefetcher, const uint64_t* except_tag);
    void is_prefetch_no_more(const Flight& flight);
    Pending* pending_for(Key key);
    void forget_pending(Key key);

    // Clients
    void let_go_of_everything(Client& client);
    void forget_waiters(Client& client);
    void drop_broken();
    void publish_all();
    Client* find(ClientId id);
    void settle(Client& client, const Waiter& waiter);
    bool is_idle() const;

    const ServerOptions options_;
    const int process_;  // threads do not follow into a forked child
    const uint64_t prefetch_slots_, pin_slots_;
    SharedMemory arena_;
    Fd events_, wake_, epoll_;
    Files files_;
    Faults faults_;
    Catalog catalog_;
    std::vector<bool> roots_direct_;

    mutable std::mutex mutex_;
    std::condition_variable idle_;
    bool started_ = false, closing_ = false, stop_ = false, closed_ = false;
    std::unique_ptr<Slots> slots_;
    std::map<ClientId, std::unique_ptr<Client>> clients_;  // 0 is the control side
    ClientId next_client_ = 1;
    ClientId prefetch_turn_ = 0;
    std::unordered_map<Key, std::unique_ptr<Flight>, KeyHash> flights_;
    std::list<Pending> pending_;
    std::unordered_map<Key, std::list<Pending>::iterator, KeyHash> pending_at_;
    std::unordered_map<Key, uint64_t, KeyHash> verified_;  // -> Flight::versions
    std::vector<ClientId> violations_;
    uint64_t filling_prefetches_ = 0, pinned_ = 0;
    uint64_t hits_ = 0, misses_ = 0, joined_ = 0, prefetch_hits_ = 0, prefetched_ = 0, stale_releases_ = 0,
             refused_ = 0, failed_ = 0;

    std::mutex done_mutex_;
    std::vector<std::pair<Job*, PieceRead*>> done_;
    std::atomic<uint32_t> asleep_{0};

    std::unique_ptr<Reader> reader_;  // its threads use the members above: destroyed first
    std::thread service_;
};

}  // namespace k3::store
