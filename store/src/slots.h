// The slots of the arena: what lies in which, who keeps it there, and which is given to the next read.
//
//   free     nobody may read it                      -> filling
//   filling  a read writes it; the read holds it     -> ready when every piece is read and checked, free otherwise
//   ready    complete, never written; leased or pinned while `holds` > 0, else only kept (cached)   -> free
//
// A slot that is not free is in the policy, and held there exactly while `holds` > 0: so only a slot that nobody
// reads or writes is ever given to another expert. Its generation is raised whenever it begins to be filled. Not
// thread-safe (the server's lock).
#pragma once

#include <list>
#include <map>
#include <memory>
#include <vector>

#include "layout.h"
#include "policy.h"

namespace k3::store {

enum class SlotState : uint8_t { free, filling, ready };

struct Slot {
    SlotState state = SlotState::free;
    Key key{};
    uint32_t generation = 0;
    uint32_t holds = 0;
    uint64_t payload_at = 0;  // in the slot
    // A prefetched expert that nobody has leased yet, and who asked for it.
    bool unused = false;
    ClientId prefetch_client = 0;
    uint64_t prefetch_tag = 0;
    std::list<uint32_t>::iterator unused_at;  // among those of its client
};

constexpr uint32_t kNoSlot = UINT32_MAX;

struct SlotCounts {
    uint64_t free = 0, filling = 0, held = 0, cached = 0;
};

class Slots {
public:
    Slots(uint32_t count, std::unique_ptr<Policy> policy) : slots_(count), policy_(std::move(policy)) {
        for (uint32_t i = count; i-- > 0;) free_.push_back(i);
    }

    const Slot& operator[](uint32_t slot) const { return slots_[slot]; }
    uint32_t size() const { return static_cast<uint32_t>(slots_.size()); }

    // The slot of an expert that is in or being read; kNoSlot when it is neither.
    uint32_t find(Key key) const {
        const auto found = where_.find(key);
        return found == where_.end() ? kNoSlot : found->second;
    }

    // Tells the policy that an expert was asked for.
    void access(Key key) { policy_->access(key); }

    // A slot for reading `key` into, held by the read; kNoSlot when all are held. Other experts may leave for it.
    uint32_t begin(Key key) {
        evicted_.clear();
        if (!policy_->insert(key, evicted_)) return kNoSlot;
        for (const Key& gone : evicted_) {
            give_up(where_.at(gone));
            ++evictions_;
        }
        const uint32_t index = free_.back();
        free_.pop_back();
        Slot& slot = slots_[index];
        const uint32_t generation = slot.generation + 1;
        slot = Slot{};
        slot.state = SlotState::filling;
        slot.key = key;
        slot.generation = generation;
        where_[key] = index;
        hold(index);
        return index;
    }

    void filled(uint32_t index, uint64_t payload_at) {
        slots_[index].state = SlotState::ready;
        slots_[index].payload_at = payload_at;
    }

    // The read failed or was called off: what is in the slot is never handed out.
    void failed(uint32_t index) {
        policy_->remove(slots_[index].key);
        slots_[index].holds = 0;
        give_up(index);
    }

    void hold(uint32_t index) {
        if (++slots_[index].holds == 1) policy_->hold(slots_[index].key);
    }

    void let_go(uint32_t index) {
        if (--slots_[index].holds == 0) policy_->unhold(slots_[index].key);
    }

    // Marks a prefetched expert as not used yet, or as used.
    void set_unused(uint32_t index, ClientId client, uint64_t tag) {
        Slot& slot = slots_[index];
        slot.unused = true;
        slot.prefetch_client = client;
        slot.prefetch_tag = tag;
        ++unused_;
        std::list<uint32_t>& of_client = unused_by_[client];
        slot.unused_at = of_client.insert(of_client.end(), index);
    }
    void set_used(uint32_t index) {
        Slot& slot = slots_[index];
        slot.unused = false;
        --unused_;
        const auto owner = unused_by_.find(slot.prefetch_client);
        owner->second.erase(slot.unused_at);
        if (owner->second.empty()) unused_by_.erase(owner);
    }

    // Throws out an expert that nobody holds.
    void drop(uint32_t index) {
        policy_->remove(slots_[index].key);
        give_up(index);
    }

    SlotCounts counts() const {
        SlotCounts counts;
        for (const Slot& slot : slots_) {
            ++(slot.state == SlotState::free      ? counts.free
               : slot.state == SlotState::filling ? counts.filling
               : slot.holds > 0                   ? counts.held
                                                  : counts.cached);
        }
        return counts;
    }

    uint64_t evictions() const { return evictions_; }
    uint64_t unused() const { return unused_; }
    // The slots of these by the client that asked for them, oldest first; only clients that have some.
    const std::map<ClientId, std::list<uint32_t>>& unused_by() const { return unused_by_; }
    uint64_t wasted() const { return wasted_; }  // prefetched and gone without ever being used

private:
    void give_up(uint32_t index) {
        Slot& slot = slots_[index];
        if (slot.unused) {
            set_used(index);
            ++wasted_;
        }
        where_.erase(slot.key);
        slot.state = SlotState::free;
        free_.push_back(index);
    }

    std::vector<Slot> slots_;
    std::unique_ptr<Policy> policy_;
    std::vector<uint32_t> free_;
    std::unordered_map<Key, uint32_t, KeyHash> where_;
    std::vector<Key> evicted_;
    uint64_t evictions_ = 0, unused_ = 0, wasted_ = 0;
    std::map<ClientId, std::list<uint32_t>> unused_by_;
};

}  // namespace k3::store
