// The server's reads: from "wanted" through a flight to "landed" or failed. All under the server's lock.
#include <algorithm>
#include <utility>

#include "server.h"

namespace k3::store {

// Begins to read an expert for `waiters` (which it takes); false when every slot is held.
bool Server::take_off(Key key, Kind kind, std::vector<Waiter>& waiters) {
    const uint32_t slot = slots_->begin(key);
    if (slot == kNoSlot) return false;
    const ExpertPlan plan = catalog_.plan(key, arena_.map.data() + slot * options_.slot_bytes);
    auto made = std::make_unique<Flight>();
    Flight& flight = *made;
    flight.key = key;
    flight.slot = slot;
    flight.kind = kind;
    flight.waiters = std::move(waiters);
    flight.payload_at = plan.payload_at;
    flight.demand.store(kind == Kind::demand, std::memory_order_relaxed);
    reader_->prepare(flight, plan, files_);
    for (const PieceRead& piece : flight.pieces) flight.versions += piece.version;
    flight.check = must_check(flight);
    flight.pieces_left = flight.pieces.size();
    if (kind == Kind::prefetch || kind == Kind::warm) {
        flight.prefetcher = flight.waiters.front().client;
        ++filling_prefetches_;
        clients_.at(flight.prefetcher)->filling.insert(key);
    }
    flights_[key] = std::move(made);
    reader_->start(flight);
    return true;
}

// Whether digests are compared. Always of a file that is not the one, or not as, it was at the start or when its
// bytes were last compared: nobody has said anything about those bytes. (That it changed may be seen only when it
// is read; then the reader compares.)
bool Server::must_check(const Flight& flight) const {
    if (options_.verify == Verify::always) return true;
    if (options_.verify == Verify::never) return flight.versions != flight.pieces.size();
    const auto found = verified_.find(flight.key);
    return found == verified_.end() || found->second != flight.versions;
}

void Server::join(Flight& flight, const Waiter& waiter) {
    flight.waiters.push_back(waiter);
    // A pin is in no hurry. It leaves a prefetch what it is: were the pin called off, nobody's share would have
    // it.
    if (flight.kind == Kind::demand || waiter.op == Op::pin) return;
    if (flight.kind == Kind::prefetch) ++prefetch_hits_;
    is_prefetch_no_more(flight);
    flight.kind = Kind::demand;
    reader_->promote(flight);
}

// To be called while its kind still says so.
void Server::is_prefetch_no_more(const Flight& flight) {
    if (flight.kind != Kind::prefetch && flight.kind != Kind::warm) return;
    --filling_prefetches_;
    const auto owner = clients_.find(flight.prefetcher);
    if (owner != clients_.end()) owner->second->filling.erase(flight.key);
}

void Server::land_done() {
    std::vector<std::pair<Job*, PieceRead*>> done;
    {
        std::lock_guard<std::mutex> lock(done_mutex_);
        done.swap(done_);
    }
    for (const auto& [job, piece] : done) {
        Flight& flight = static_cast<Flight&>(*job);
        if (piece->outcome != Status::ok && flight.failure == nullptr) flight.failure = piece;
        if (--flight.pieces_left > 0) continue;
        is_prefetch_no_more(flight);
        if (flight.counts_as_pin) --pinned_;
        if (flight.failure == nullptr) {
            land(flight);
        } else if (flight.called_off.load(std::memory_order_relaxed)) {
            slots_->failed(flight.slot);
            // Who has asked for it since then gets it from a new read.
            if (!flight.waiters.empty()) await_slot(flight.key, std::move(flight.waiters));
        } else {
            fail(flight);
        }
        flights_.erase(flight.key);
    }
}

void Server::land(Flight& flight) {
    if (flight.check && options_.verify == Verify::first) verified_[flight.key] = flight.versions;
    slots_->filled(flight.slot, flight.payload_at);
    if (flight.kind == Kind::prefetch) {
        ++prefetched_;
        const bool known = !flight.waiters.empty();
        slots_->set_unused(flight.slot, flight.prefetcher, known ? flight.waiters[0].tag : 0);
    }
    for (const Waiter& waiter : flight.waiters) {
        Client* client = find(waiter.client);
        if (client != nullptr) grant(*client, flight.slot, waiter);
    }
    slots_->let_go(flight.slot);
}

void Server::fail(Flight& flight) {
    ++failed_;
    const PieceRead& piece = *flight.failure;
    slots_->failed(flight.slot);
    for (const Waiter& waiter : flight.waiters) {
        Client* client = find(waiter.client);
        if (client == nullptr) continue;
        settle(*client, waiter);
        ++client->errors;
        Completion completion{};
        completion.tag = waiter.tag;
        completion.op = static_cast<uint8_t>(waiter.op);
        completion.status = static_cast<uint8_t>(piece.outcome);
        completion.source = static_cast<uint8_t>(waiter.source);
        completion.layer = flight.key.layer;
        completion.expert = flight.key.expert;
        completion.file = piece.plan.record.file;
        completion.file_offset = piece.error_offset;
        completion.error = static_cast<uint32_t>(piece.outcome == Status::io_error ? piece.error : 0);
        answer(*client, completion);
    }
}

// The last one who waited for a flight has gone: no more of it is read than what is in progress, and if that is
// all of the rest, it is kept. A pin's flight counts as pinned until it ends: pinning and unpinning in a loop
// gains no slot.
void Server::nobody_waits_for(Key key, bool was_for_pin) {
    Flight& flight = *flights_.at(key);
    if (reader_->call_off(flight)) {
        free_called_off(key);
    } else if (was_for_pin && !flight.counts_as_pin) {
        flight.counts_as_pin = true;
        ++pinned_;
    }
}

// A flight of which nothing is in progress and nothing will be: its slot is free again.
void Server::free_called_off(Key key) {
    Flight& flight = *flights_.at(key);
    is_prefetch_no_more(flight);
    slots_->failed(flight.slot);
    flights_.erase(key);
}

void Server::await_slot(Key key, std::vector<Waiter> waiters) {
    pending_at_[key] = pending_.insert(pending_.end(), {key, std::move(waiters)});
}

void Server::retry_pending() {
    while (!pending_.empty()) {
        Pending& first = pending_.front();
        const bool is_leased = std::any_of(first.waiters.begin(), first.waiters.end(),
                                           [](const Waiter& waiter) { return waiter.op == Op::lease; });
        if (!take_off(first.key, is_leased ? Kind::demand : Kind::pin, first.waiters)) break;
        forget_pending(first.key);
    }
    if (pending_.empty() || !flights_.empty()) return;
    // Nothing is under way that could free a slot: whoever holds them all must answer for it.
    for (const Pending& item : pending_) {
        refused_ += item.waiters.size();
        answer_all(item.waiters, item.key, Status::busy);
    }
    pending_at_.clear();
    pending_.clear();
}

// Starts prefetches as far as their share of the slots goes, one of each client in turn.
void Server::pump_prefetches() {
    const auto wants = [](const auto& entry) { return !entry.second->prefetches.empty(); };
    if (std::none_of(clients_.begin(), clients_.end(), wants)) return;
    uint32_t idle = 0;
    while (filling_prefetches_ < prefetch_slots_ && pending_.empty() && idle <= clients_.size()) {
        auto next = clients_.upper_bound(prefetch_turn_);
        if (next == clients_.end()) next = clients_.begin();
        prefetch_turn_ = next->first;
        idle = start_prefetch(*next->second) ? 0 : idle + 1;
    }
}

// Deals with the first prefetch that a client wants; false when there is none, or none can be started now.
bool Server::start_prefetch(Client& client) {
    if (client.prefetches.empty()) return false;
    const Prefetch item = client.prefetches.front();
    const Waiter waiter{client.id, item.tag, Op::prefetch, Source::none};
    const bool warm = !client.has_ring;
    bool own = false;
    if (closing_) {
        client.prefetches.pop_front();
        answer_status(waiter, item.key, Status::cancelled);
        return true;
    }
    if (slots_->find(item.key) != kNoSlot || pending_for(item.key) != nullptr) {
        client.prefetches.pop_front();
        settle(client, waiter);
        return true;
    }
    if (!warm && !make_prefetch_room(client, item, own)) {
        if (!own) return false;
        // The share is full of what this same prefetch has brought: more of it would only push that out.
        client.prefetches.pop_front();
        ++client.refused;
        ++refused_;
        answer_status(waiter, item.key, Status::busy);
        return true;
    }
    std::vector<Waiter> waiters = {waiter};
    if (!take_off(item.key, warm ? Kind::warm : Kind::prefetch, waiters)) return false;
    client.prefetches.pop_front();
    return true;
}

// Prefetched experts that were never used give way to new ones, except those of the same prefetch (`own`).
bool Server::make_prefetch_room(const Client& client, const Prefetch& wanted, bool& own) {
    while (filling_prefetches_ + slots_->unused() >= prefetch_slots_) {
        const ClientId* const prefetcher = prefetcher_to_displace(client);
        if (prefetcher == nullptr) return false;
        const bool is_own = *prefetcher == client.id;
        if (!displace(*prefetcher, is_own ? &wanted.tag : nullptr)) {
            own = is_own;
            return false;
        }
    }
    return true;
}

// Whose unused prefetch makes room for one of `client`; nullptr when there is nobody's to take now. First those
// that nobody can use any more; then those of the client that has most, as long as it then still has no less than
// `client`, so that shares even out and stay even; else its own. Whoever has none at all may take one from
// anybody.
const ClientId* Server::prefetcher_to_displace(const Client& client) const {
    const ClientId* richest = nullptr;
    uint64_t most = 0;
    for (const auto& [id, unused] : slots_->unused_by()) {
        const auto found = clients_.find(id);
        if (id == 0 || found == clients_.end()) return &id;
        const uint64_t has = unused.size() + found->second->filling.size();
        if (id != client.id && has > most) richest = &id, most = has;
    }
    const auto own = slots_->unused_by().find(client.id);
    const uint64_t has = client.filling.size() + (own == slots_->unused_by().end() ? 0 : own->second.size());
    if (richest != nullptr && (has + 1 < most || has == 0)) return richest;
    return own == slots_->unused_by().end() ? nullptr : &own->first;
}

// Throws out the oldest unused prefetch of a client that is not of `except_tag`. False when it has none.
bool Server::displace(ClientId prefetcher, const uint64_t* except_tag) {
    for (const uint32_t index : slots_->unused_by().at(prefetcher)) {
        const Slot& slot = (*slots_)[index];
        if (except_tag != nullptr && slot.prefetch_tag == *except_tag) continue;
        if (slot.holds > 0) {
            slots_->set_used(index);  // pinned: it counts with the pins now
        } else {
            slots_->drop(index);
        }
        return true;
    }
    return false;
}

Server::Pending* Server::pending_for(Key key) {
    const auto found = pending_at_.find(key);
    return found == pending_at_.end() ? nullptr : &*found->second;
}

void Server::forget_pending(Key key) {
    const auto found = pending_at_.find(key);
    pending_.erase(found->second);
    pending_at_.erase(found);
}

}  // namespace k3::store
