// The service thread: requests in, leases out. Setting up and control calls are in server_control.cpp, reads in
// server_reads.cpp.
#include "server.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace k3::store {

namespace {

constexpr int kRequestsPerTurn = 64;  // of one client before the others have their turn

bool is_blank(const Request& request, bool with_generation) {
    return request.zero[0] == 0 && request.zero[1] == 0 && request.zero[2] == 0 && request.zero_too == 0 &&
           (with_generation || request.generation == 0);
}

}  // namespace

void Server::serve() {
    block_signals();
    while (true) {
        bool worked;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            if (stop_) return;
            worked = turn();
        }
        // No spinning before sleep: on a shared machine it took the CPU from the client that was to be heard.
        if (!worked && !sleep_or_not()) return;
    }
}

// Blocks until there is something to do; false when the thread is to end.
bool Server::sleep_or_not() {
    int timeout_ms = -1;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stop_) return false;
        asleep_.store(1, std::memory_order_seq_cst);
        bool work;
        {
            std::lock_guard<std::mutex> done_lock(done_mutex_);
            work = !done_.empty();
        }
        for (const auto& [id, client] : clients_) {
            if (!client->has_ring || client->dropped) continue;
            client->ring.sleep();
            if (client->stalled) {
                timeout_ms = 1;  // nobody rings when completions are read, so look again soon
            } else if (client->ring.pending(true) != 0) {
                work = true;
            }
        }
        if (work) timeout_ms = 0;
    }
    epoll_event events[8];
    const int count = ::epoll_wait(epoll_.get(), events, 8, timeout_ms);
    for (int i = 0; i < count; ++i) {
        if (events[i].data.u64 == 0) clear_event(wake_.get());
    }
    asleep_.store(0, std::memory_order_relaxed);
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, client] : clients_) {
        if (client->has_ring && !client->dropped) client->ring.wake();
    }
    return !stop_;
}

// One round over everything there may be to do. True when a client had asked for something.
bool Server::turn() {
    land_done();
    bool worked = false;
    for (const auto& [id, client] : clients_) {
        if (client->has_ring && !client->dropped) worked |= take_requests(*client);
    }
    retry_pending();
    pump_prefetches();
    publish_all();
    drop_broken();
    if (closing_ && is_idle()) idle_.notify_all();
    return worked;
}

bool Server::take_requests(Client& client) {
    client.stalled = false;
    int taken = 0;
    while (taken < kRequestsPerTurn && !client.broken) {
        const int64_t pending = client.ring.pending();
        if (pending == 0 && !client.guard.tripped()) break;
        const int64_t unread = client.ring.unread();
        if (pending < 0 || unread < 0 || client.guard.tripped()) {
            client.broken = true;
            break;
        }
        // Every request taken may be answered, so there must be room for one answer more than is owed.
        if (static_cast<uint64_t>(unread) + client.owed + 1 > options_.entries) {
            client.stalled = true;
            break;
        }
        ++taken;
        ++client.requests;
        handle(client, client.ring.take());
    }
    if (taken > 0) client.ring.return_requests();
    return taken > 0;
}

void Server::handle(Client& client, const Request& request) {
    const Op op = static_cast<Op>(request.op);
    bool sound = is_blank(request, op == Op::release);
    switch (op) {
        case Op::lease:
        case Op::pin:
            if (sound) lease(client, request, op);
            break;
        case Op::release:
            sound = sound && request.expert < slots_->size();
            if (sound) release(client, request);
            break;
        case Op::prefetch:
            if (sound) prefetch(client, request);
            break;
        case Op::cancel:
            if (sound) cancel(client, request.tag);
            break;
        case Op::unpin:
            if (sound) unpin(client, {request.layer, request.expert});
            break;
        default: sound = false;
    }
    if (sound) return;
    Completion completion{};
    completion.tag = request.tag;
    completion.op = request.op;
    completion.status = static_cast<uint8_t>(Status::bad_request);
    answer(client, completion);
    client.broken = true;
}

void Server::lease(Client& client, const Request& request, Op op) {
    const Key key{request.layer, request.expert};
    Waiter waiter{client.id, request.tag, op, Source::read};
    // From here on `settle` undoes this, whatever the answer is.
    ++client.owed;
    if (op == Op::lease) ++client.waiting;
    if (op == Op::pin) ++pinned_;
    Status refusal = Status::ok;
    if (closing_) {
        refusal = Status::closing;
    } else if (!catalog_.contains(key)) {
        refusal = Status::no_such_expert;
    } else if (op == Op::lease && client.leased + client.waiting > options_.quota) {
        refusal = Status::quota;
    } else if (op == Op::pin && pinned_ > pin_slots_ && client.pins.count(key) == 0) {
        refusal = Status::busy;
    }
    if (refusal != Status::ok) {
        ++client.refused;
        ++refused_;
        answer_status(waiter, key, refusal);
        return;
    }
    if (op == Op::lease) slots_->access(key);
    const uint32_t slot = slots_->find(key);
    if (slot != kNoSlot && (*slots_)[slot].state == SlotState::ready) {
        if (op == Op::lease) ++hits_;
        waiter.source = Source::arena;
        grant(client, slot, waiter);
        return;
    }
    const auto flight = flights_.find(key);
    Pending* pending = flight == flights_.end() ? pending_for(key) : nullptr;
    if (flight != flights_.end() || pending != nullptr) {
        if (op == Op::lease) ++joined_;
        waiter.source = Source::joined;
        if (pending != nullptr) {
            pending->waiters.push_back(waiter);
        } else {
            join(*flight->second, waiter);
        }
        return;
    }
    if (op == Op::lease) ++misses_;
    // Not begun before the rest of the batch is seen: a miss must not evict an expert of its own set that is here.
    await_slot(key, {waiter});
}

void Server::release(Client& client, const Request& request) {
    const uint32_t slot = request.expert;
    const auto held = client.leases.find(slot);
    if (held == client.leases.end() || (*slots_)[slot].generation != request.generation) {
        ++client.stale_releases;
        ++stale_releases_;
        return;
    }
    if (--held->second == 0) client.leases.erase(held);
    --client.leased;
    slots_->let_go(slot);
}

void Server::prefetch(Client& client, const Request& request) {
    const Key key{request.layer, request.expert};
    const Waiter waiter{client.id, request.tag, Op::prefetch, Source::none};
    ++client.owed;
    ++client.prefetching;
    Status refusal = Status::ok;
    if (closing_) {
        refusal = Status::closing;
    } else if (!catalog_.contains(key)) {
        refusal = Status::no_such_expert;
    } else if (prefetch_slots_ == 0 || client.prefetching > options_.entries / 2) {
        refusal = Status::busy;
    }
    if (refusal != Status::ok) {
        ++client.refused;
        ++refused_;
        answer_status(waiter, key, refusal);
    } else if (slots_->find(key) != kNoSlot || pending_for(key) != nullptr) {
        settle(client, waiter);
    } else {
        client.prefetches.push_back({request.tag, key});
    }
}

void Server::cancel(Client& client, uint64_t tag) {
    std::deque<Prefetch> kept;
    for (const Prefetch& item : client.prefetches) {
        if (item.tag == tag) {
            answer_status({client.id, tag, Op::prefetch, Source::none}, item.key, Status::cancelled);
        } else {
            kept.push_back(item);
        }
    }
    client.prefetches = std::move(kept);
    std::vector<Key> begun;
    for (const Key& key : client.filling) {
        const std::vector<Waiter>& waiters = flights_.at(key)->waiters;
        const bool only_this = std::all_of(waiters.begin(), waiters.end(), [&](const Waiter& waiter) {
            return waiter.client == client.id && waiter.tag == tag && waiter.op == Op::prefetch;
        });
        if (!waiters.empty() && only_this) begun.push_back(key);
    }
    for (const Key& key : begun) {
        Flight& flight = *flights_.at(key);
        if (!reader_->call_off_if_not_begun(flight)) continue;
        const std::vector<Waiter> waiters = std::move(flight.waiters);
        free_called_off(key);
        answer_all(waiters, key, Status::cancelled);
    }
}

void Server::unpin(Client& client, Key key) {
    const auto pin = client.pins.find(key);
    if (pin == client.pins.end()) {
        if (!call_off_pins(client, key)) {
            ++client.stale_releases;
            ++stale_releases_;
        }
        return;
    }
    slots_->let_go(pin->second);
    client.pins.erase(pin);
    --pinned_;
}

// Answers a client's pins of an expert that is still being read. False when there are none.
bool Server::call_off_pins(Client& client, Key key) {
    const auto flight = flights_.find(key);
    Pending* const pending = flight == flights_.end() ? pending_for(key) : nullptr;
    if (flight == flights_.end() && pending == nullptr) return false;
    std::vector<Waiter>& waiters = pending != nullptr ? pending->waiters : flight->second->waiters;
    const auto called_off = std::stable_partition(waiters.begin(), waiters.end(), [&](const Waiter& waiter) {
        return waiter.client != client.id || waiter.op != Op::pin;
    });
    const std::vector<Waiter> answered(called_off, waiters.end());
    waiters.erase(called_off, waiters.end());
    answer_all(answered, key, Status::cancelled);
    if (!answered.empty() && waiters.empty()) {
        if (pending != nullptr) {
            forget_pending(key);
        } else {
            nobody_waits_for(key, true);
        }
    }
    return !answered.empty();
}

// Gives a ready slot to one who asked for it.
void Server::grant(Client& client, uint32_t index, const Waiter& waiter) {
    const Slot& slot = (*slots_)[index];
    settle(client, waiter);
    if (waiter.op == Op::prefetch) return;
    if (waiter.op == Op::lease) {
        if (slot.unused) {
            ++prefetch_hits_;
            slots_->set_used(index);
        }
        slots_->hold(index);
        ++client.leases[index];
        ++client.leased;
        ++client.granted;
    } else if (client.pins.emplace(slot.key, index).second) {
        slots_->hold(index);
        ++pinned_;  // settle() took it back
    }
    Completion completion{};
    completion.tag = waiter.tag;
    completion.op = static_cast<uint8_t>(waiter.op);
    completion.source = static_cast<uint8_t>(waiter.source);
    completion.layer = slot.key.layer;
    completion.expert = slot.key.expert;
    completion.slot = index;
    completion.generation = slot.generation;
    completion.offset = index * options_.slot_bytes + slot.payload_at;
    completion.payload_bytes = catalog_.payload_bytes(slot.key.layer);
    answer(client, completion);
}

// A request has its answer: it is no longer counted as under way.
void Server::settle(Client& client, const Waiter& waiter) {
    --client.owed;
    if (waiter.op == Op::lease) --client.waiting;
    if (waiter.op == Op::prefetch) --client.prefetching;
    if (waiter.op == Op::pin) --pinned_;
}

void Server::answer_status(const Waiter& waiter, Key key, Status status) {
    Client* client = find(waiter.client);
    if (client == nullptr) return;
    settle(*client, waiter);
    Completion completion{};
    completion.tag = waiter.tag;
    completion.op = static_cast<uint8_t>(waiter.op);
    completion.status = static_cast<uint8_t>(status);
    completion.layer = key.layer;
    completion.expert = key.expert;
    answer(*client, completion);
}

void Server::answer_all(const std::vector<Waiter>& waiters, Key key, Status status) {
    for (const Waiter& waiter : waiters) answer_status(waiter, key, status);
}

void Server::answer(Client& client, const Completion& completion) {
    if (!client.has_ring || client.dropped || client.broken) return;
    const int64_t unread = client.ring.unread();
    if (unread < 0 || unread >= options_.entries) {
        client.broken = true;  // it has turned its head back: room for every answer was seen to before
        return;
    }
    client.ring.put(completion);
    client.dirty = true;
}

void Server::publish_all() {
    for (const auto& [id, client] : clients_) {
        if (!client->dirty) continue;
        client->dirty = false;
        if (client->ring.publish()) {
            // A pipe whose writing end is ours alone: the client can not make this block. Full is as good as rung.
            const char ring = 1;
            (void)!::write(client->completion_doorbell.get(), &ring, 1);
        }
    }
}

void Server::drop_broken() {
    for (const auto& [id, client] : clients_) {
        if (!client->broken || client->dropped) continue;
        client->dropped = true;
        let_go_of_everything(*client);
        client->ring.close();
        const char ring = 1;
        (void)!::write(client->completion_doorbell.get(), &ring, 1);
        violations_.push_back(id);
        ring_event(events_.get());
    }
}

}  // namespace k3::store
