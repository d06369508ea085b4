// Setting a server up, its clients coming and going, and what the control side may ask. Any thread.
#include <fcntl.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "server.h"

namespace k3::store {

namespace {

std::string text(uint64_t n) { return std::to_string(n); }

ServerOptions checked(ServerOptions o) {
    const auto need = [](bool holds, const std::string& what) {
        if (!holds) throw std::invalid_argument(what);
    };
    need(o.slot_bytes > 0 && o.slot_bytes % kPage == 0,
         "slot_bytes must be whole pages, not " + text(o.slot_bytes));
    need(o.slots >= 1 && o.slots <= kSlotsMax, "slots must be from 1 to 2^20, not " + text(o.slots));
    need(o.slot_bytes <= (uint64_t{1} << 62) / o.slots, "the arena would be too large");
    need(o.max_clients >= 1 && o.max_clients <= kClientsMax,
         "max_clients must be from 1 to 64, not " + text(o.max_clients));
    need(o.entries >= 2 && o.entries <= kEntriesMax && (o.entries & (o.entries - 1)) == 0,
         "entries must be a power of two from 2 to 65536, not " + text(o.entries));
    need(o.quota >= 1 && o.quota <= o.entries / 2,
         "quota must be from 1 to half the ring's entries (" + text(o.entries / 2) + "), not " + text(o.quota));
    need(uint64_t{o.max_clients} * o.quota <= o.slots, text(o.max_clients) + " clients with " + text(o.quota) +
                                                           " leases each need more than the " + text(o.slots) +
                                                           " slots there are");
    need(o.reader.depth >= 1 && o.reader.depth <= 1024,
         "io_depth must be from 1 to 1024, not " + text(o.reader.depth));
    need(o.reader.checkers <= 64, "checkers must be at most 64");
    need(o.open_files >= 1, "open_files must be at least 1");
    return o;
}

uint64_t unpromised(const ServerOptions& o) { return o.slots - uint64_t{o.max_clients} * o.quota; }

// What clients may pin: the policy's own pins are of the same share.
uint64_t slots_to_pin(const ServerOptions& o) {
    const uint64_t share = unpromised(o) - unpromised(o) / 4;
    if (o.pins.size() > share) {
        throw std::invalid_argument(text(o.pins.size()) + " pins, but only " + text(share) +
                                    " slots are neither promised to clients nor kept for prefetches");
    }
    return share - o.pins.size();
}

}  // namespace

Server::Server(const ServerOptions& options, const ReserveProgress& on_reserved)
    : options_(checked(options)),
      process_(::getpid()),
      prefetch_slots_(unpromised(options) / 4),
      pin_slots_(slots_to_pin(options)),
      arena_(make_shared("k3-arena", options.slot_bytes * options.slots, true, on_reserved)),
      events_(make_event()),
      wake_(make_event()),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      files_(options.open_files) {
    if (!epoll_.valid()) refuse(errno, "cannot make an epoll descriptor");
    make_policy(options.policy, options.slots, {}, options.pins);  // refuse an unknown name now
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = 0;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0)
        refuse(errno, "cannot watch an eventfd");
    auto control = std::make_unique<Client>();
    control->name = "control";
    clients_[0] = std::move(control);
}

uint32_t Server::add_file(uint32_t root, const std::string& path, bool direct) {
    if (started_) throw std::logic_error("files are added before start()");
    if (root > roots_direct_.size() || root >= 64)
        throw std::invalid_argument("roots are numbered from 0 without gaps, up to 64");
    const uint32_t file = files_.add(root, path, direct);
    if (root == roots_direct_.size()) roots_direct_.push_back(true);
    if (!direct) roots_direct_[root] = false;
    return file;
}

void Server::set_layer(uint32_t layer, uint64_t payload_bytes, const std::vector<uint32_t>& pieces,
                       std::vector<Record> records) {
    if (started_) throw std::logic_error("layers are set before start()");
    catalog_.set_layer(layer, payload_bytes, pieces, std::move(records), files_.sizes(), options_.slot_bytes);
}

void Server::start() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (started_ || closed_) throw std::logic_error("a server is started once");
    slots_ = std::make_unique<Slots>(
        options_.slots, make_policy(options_.policy, options_.slots, catalog_.counts(), options_.pins));
    const auto note = [this](Job& job, PieceRead& piece) {
        {
            std::lock_guard<std::mutex> done_lock(done_mutex_);
            done_.emplace_back(&job, &piece);
        }
        if (asleep_.load(std::memory_order_seq_cst) == 1) ring_event(wake_.get());
    };
    reader_ = std::make_unique<Reader>(options_.reader, static_cast<uint32_t>(roots_direct_.size()), files_,
                                       faults_, note);
    for (size_t i = 0; i < roots_direct_.size(); ++i) reader_->drives()[i]->counters.direct = roots_direct_[i];
    service_ = std::thread(&Server::serve, this);
    started_ = true;
}

NewClient Server::add_client(const std::string& name) {
    auto client = std::make_unique<Client>();
    client->name = name;
    client->has_ring = true;
    client->memory = make_shared("k3-ring", ring_bytes(options_.entries), false);
    client->guard = BusGuard(client->memory.map.data(), client->memory.map.bytes());
    RingHeader* header = new (client->memory.map.data()) RingHeader();
    std::memcpy(header->magic, kMagic, sizeof kMagic);
    header->entries = options_.entries;
    header->daemon_asleep.store(1, std::memory_order_relaxed);  // until the service thread has seen it
    header->state.store(static_cast<uint32_t>(RingState::open), std::memory_order_release);
    client->ring = DaemonRing(RingView::at(client->memory.map.data(), options_.entries));
    client->request_doorbell = make_event();
    // The completion doorbell is a pipe, not an eventfd: whether an eventfd blocks is a property that both sides
    // share, so a client could fill it, make it block, and stop the daemon in the middle of a write.
    int pipe[2];
    if (::pipe2(pipe, O_CLOEXEC | O_NONBLOCK) != 0) refuse(errno, "cannot make a pipe");
    NewClient made;
    made.completion_doorbell = Fd(pipe[0]);
    client->completion_doorbell = Fd(pipe[1]);
    made.request_doorbell = duplicate(client->request_doorbell.get());
    made.ring = std::move(client->memory.fd);

    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_ || closing_) throw std::logic_error("the server is not running");
    if (clients_.size() - 1 >= options_.max_clients) {
        throw std::invalid_argument("there are " + text(options_.max_clients) + " clients already");
    }
    made.id = client->id = next_client_++;
    // Edge-triggered, and never read: a client cannot make that block either, and each ring is an edge.
    epoll_event event{};
    event.events = EPOLLIN | EPOLLET;
    event.data.u64 = made.id;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, client->request_doorbell.get(), &event) != 0) {
        refuse(errno, "cannot watch a doorbell");
    }
    clients_[made.id] = std::move(client);
    return made;
}

void Server::remove_client(ClientId id) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = clients_.find(id);
    if (id == 0 || found == clients_.end()) return;
    Client& client = *found->second;
    let_go_of_everything(client);
    client.ring.close();
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, client.request_doorbell.get(), nullptr);
    violations_.erase(std::remove(violations_.begin(), violations_.end(), id), violations_.end());
    clients_.erase(found);
    if (!pending_.empty()) ring_event(wake_.get());  // there may be a slot for somebody now
}

void Server::let_go_of_everything(Client& client) {
    for (const auto& [slot, count] : client.leases) {
        for (uint32_t i = 0; i < count; ++i) slots_->let_go(slot);
    }
    client.leases.clear();
    client.leased = 0;
    for (const auto& [key, slot] : client.pins) {
        slots_->let_go(slot);
        --pinned_;
    }
    client.pins.clear();
    forget_waiters(client);
    client.prefetches.clear();
    client.waiting = client.prefetching = client.owed = 0;
}

void Server::forget_waiters(Client& client) {
    struct Forgotten {
        bool any = false, pins = false;
    };
    const auto forget = [&](std::vector<Waiter>& waiters) {
        const auto mine = std::stable_partition(waiters.begin(), waiters.end(),
                                                [&](const Waiter& waiter) { return waiter.client != client.id; });
        const auto pins =
            std::count_if(mine, waiters.end(), [](const Waiter& waiter) { return waiter.op == Op::pin; });
        const Forgotten forgotten{mine != waiters.end(), pins > 0};
        pinned_ -= static_cast<uint64_t>(pins);
        waiters.erase(mine, waiters.end());
        return forgotten;
    };
    std::vector<std::pair<Key, bool>> unwanted;
    for (const auto& [key, flight] : flights_) {
        const Forgotten forgotten = forget(flight->waiters);
        if (forgotten.any && flight->waiters.empty()) unwanted.emplace_back(key, forgotten.pins);
    }
    for (const auto& [key, was_for_pin] : unwanted) nobody_waits_for(key, was_for_pin);
    for (auto item = pending_.begin(); item != pending_.end();) {
        const Key key = (item++)->key;
        Pending& pending = *pending_at_.at(key);
        forget(pending.waiters);
        if (pending.waiters.empty()) forget_pending(key);
    }
}

std::vector<ClientId> Server::violations() {
    std::lock_guard<std::mutex> lock(mutex_);
    clear_event(events_.get());
    return std::exchange(violations_, {});
}

Server::Client* Server::find(ClientId id) {
    const auto found = clients_.find(id);
    return found == clients_.end() || found->second->dropped ? nullptr : found->second.get();
}

ServerStats Server::stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    ServerStats s{};
    if (!started_) return s;
    s.hits = hits_, s.misses = misses_, s.joined = joined_;
    s.prefetch_hits = prefetch_hits_, s.prefetch_wasted = slots_->wasted(), s.prefetched = prefetched_;
    s.evictions = slots_->evictions(), s.stale_releases = stale_releases_, s.refused = refused_,
    s.failed = failed_;
    s.faults = faults_.fired();
    s.warming = clients_.at(0)->prefetching;
    s.pinned = pinned_, s.pin_slots = pin_slots_, s.prefetch_slots = prefetch_slots_;
    s.unused_prefetches = slots_->unused();
    s.flights = flights_.size(), s.waiting_for_slot = pending_.size();
    for (const auto& [key, flight] : flights_) s.unwanted_flights += flight->waiters.empty();
    s.slots = slots_->counts();
    s.open_files = files_.open_count();
    if (reader_) {
        s.checked_bytes = reader_->checked_bytes(), s.check_ns = reader_->check_ns();
        s.call_off_steps = reader_->call_off_steps();
        for (const auto& drive : reader_->drives()) {
            const DriveCounters& c = drive->counters;
            s.drives.push_back({c.reads,
                                c.read_bytes,
                                c.read_ns,
                                drive->busy_ns(),
                                drive->queued(),
                                drive->in_flight(),
                                drive->oldest_read_ns(),
                                c.errors,
                                c.damaged,
                                c.re_reads,
                                c.direct,
                                {std::begin(c.read_classes), std::end(c.read_classes)}});
        }
    }
    for (const auto& [id, client] : clients_) {
        if (id == 0) continue;
        uint64_t leased_bytes = 0;
        for (const auto& [slot, count] : client->leases) {
            leased_bytes += catalog_.payload_bytes((*slots_)[slot].key.layer) * count;
        }
        s.clients.push_back({id, client->name, client->leased, client->waiting, leased_bytes, client->prefetching,
                             client->pins.size(), client->granted, client->errors, client->refused,
                             client->stale_releases, client->requests, client->dropped});
    }
    return s;
}

uint64_t Server::warm(uint32_t layer, const std::vector<uint32_t>& experts) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_ || closing_) throw std::logic_error("the server is not running");
    if (prefetch_slots_ == 0)
        throw std::invalid_argument("every slot is promised to clients: there are none to warm with");
    Client& control = *clients_.at(0);
    for (const uint32_t expert : experts) {
        if (!catalog_.contains({layer, expert})) throw std::invalid_argument("no such expert");
    }
    uint64_t queued = 0;
    for (const uint32_t expert : experts) {
        if (slots_->find({layer, expert}) != kNoSlot) continue;
        ++control.owed, ++control.prefetching, ++queued;
        control.prefetches.push_back({0, {layer, expert}});
    }
    ring_event(wake_.get());
    return queued;
}

uint64_t Server::pin(uint32_t layer, const std::vector<uint32_t>& experts) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_ || closing_) throw std::logic_error("the server is not running");
    for (const uint32_t expert : experts) {
        if (!catalog_.contains({layer, expert})) throw std::invalid_argument("no such expert");
    }
    Client& control = *clients_.at(0);
    const uint64_t refused_before = control.refused;
    for (const uint32_t expert : experts) {
        Request request{};
        request.layer = layer, request.expert = expert;
        lease(control, request, Op::pin);
    }
    ring_event(wake_.get());
    return experts.size() - (control.refused - refused_before);
}

uint64_t Server::unpin(uint32_t layer, const std::vector<uint32_t>& experts) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!started_ || closed_) return 0;
    Client& control = *clients_.at(0);
    const uint64_t before = control.pins.size();
    for (const uint32_t expert : experts) unpin(control, {layer, expert});
    ring_event(wake_.get());
    return before - control.pins.size();
}

void Server::throttle(uint32_t root, uint64_t bytes_per_s) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!reader_ || root >= reader_->drives().size()) throw std::invalid_argument("no such root");
    reader_->drives()[root]->throttle(bytes_per_s);
}

bool Server::is_idle() const {
    if (!flights_.empty() || !pending_.empty()) return false;
    return std::all_of(clients_.begin(), clients_.end(),
                       [](const auto& entry) { return entry.second->prefetches.empty(); });
}

bool Server::drain(uint64_t timeout_ns) {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    if (!started_ || closed_) return true;
    ring_event(wake_.get());
    return idle_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [this] { return is_idle(); });
}

void Server::close() {
    if (::getpid() != process_) {
        // A forked child has none of the threads: let go of what would wait for them.
        (void)new std::thread(std::move(service_));
        (void)reader_.release();
        return;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (closed_) return;
        closed_ = closing_ = stop_ = true;
    }
    ring_event(wake_.get());
    faults_.clear();  // reads that a fault keeps waiting end now
    if (service_.joinable()) service_.join();
    if (reader_) reader_->stop();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, client] : clients_) {
        if (!client->has_ring) continue;
        client->ring.close();
        const char ring = 1;
        (void)!::write(client->completion_doorbell.get(), &ring, 1);
    }
    flights_.clear();
    pending_at_.clear();
    pending_.clear();
    clients_.erase(clients_.upper_bound(0), clients_.end());
    arena_.map.reset();
    arena_.fd.reset();
    files_.close();
}

}  // namespace k3::store
