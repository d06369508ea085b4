// Which experts stay in RAM: pure policies behind one interface. No I/O, no clock, no randomness, so the daemon,
// the simulator and the property tests drive the same code and get the same answers.
//
// A policy holds keys, at most `capacity` of them, each of them either free to go or *held* (leased, pinned, or
// being read). A held key is never evicted. What every policy promises:
//
//   access(k)   true when k is in. Tells the policy that k was wanted just now, in or not.
//   insert(k)   k was not in and is afterwards; `evicted` are the keys that left for it, none of them held, never
//   k.
//               False, and nothing changed, when all `capacity` keys are held or pinned.
//   evict_one() takes out the key that would leave next; false when none may leave.
//   hold(k), unhold(k)  count; k must be in. remove(k) takes k out whatever its state (its read failed).
//
// Not thread-safe: the daemon calls it under the server's lock.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace k3::store {

struct Key {
    uint32_t layer;
    uint32_t expert;
    bool operator==(const Key& other) const { return layer == other.layer && expert == other.expert; }
    uint64_t number() const { return uint64_t{layer} << 32 | expert; }
};

struct KeyHash {
    size_t operator()(const Key& key) const { return std::hash<uint64_t>()(key.number() * 0x9E3779B97F4A7C15u); }
};

using LayerCounts = std::map<uint32_t, uint32_t>;  // layer -> experts it has

// Counts holds and keeps the books that all policies share; what to evict is left to `choose`.
class Policy {
public:
    virtual ~Policy() = default;
    Policy(const Policy&) = delete;
    Policy& operator=(const Policy&) = delete;

    bool access(Key key);
    bool insert(Key key, std::vector<Key>& evicted);
    bool evict_one(Key& evicted);
    void hold(Key key);
    void unhold(Key key);
    void remove(Key key);

    bool contains(Key key) const { return holds_.count(key) != 0; }
    bool held(Key key) const;
    uint64_t size() const { return holds_.size(); }
    uint64_t capacity() const { return capacity_; }

protected:
    explicit Policy(uint64_t capacity) : capacity_(capacity) {}

    virtual void touched(Key key, bool present) = 0;
    // The key to evict before `incoming` comes in (nullptr: for no particular key). False when all are held.
    // `must` says that there is no room; otherwise the policy may also decline.
    virtual bool choose(const Key* incoming, bool must, Key& victim) = 0;
    virtual void added(Key key) = 0;
    // `evicted` false: the key was removed, and nothing is to be remembered of it.
    virtual void gone(Key key, bool evicted) = 0;
    virtual void now_held(Key) {}
    virtual void now_free(Key) {}

private:
    uint64_t capacity_;
    std::unordered_map<Key, uint32_t, KeyHash> holds_;
};

// "layer-lru"    room divided among the layers, least recently used first within each. A layer may exceed its
// share
//                while its keys are held or room is free; what exceeds is the first to go when others need room.
// "lru"          one list over all layers.
// "s3-fifo"      small and main queue (1 : 9) and a ghost list as long as main; frequency counts up to 3.
// "least-stale"  a layer is visited when one of its experts is accessed after another layer's. First what was left
//                unused for most visits of its own layer; of equals, what belongs to the layer that comes round
//                last.
// "pin-lru"      `pins` never leave once they are in; the rest is one LRU list.
// In the lists that order by use, a key is newest at its last access and again at its last unhold.
// std::invalid_argument for an unknown name or a capacity of 0.
std::unique_ptr<Policy> make_policy(const std::string& name, uint64_t capacity, const LayerCounts& counts,
                                    const std::vector<Key>& pins);

std::vector<std::string> policy_names();

// Divides `slots` among layers as evenly as whole numbers allow, no layer getting more than it has experts;
// earlier layers get the odd ones.
std::map<uint32_t, uint64_t> divide(uint64_t slots, const LayerCounts& counts);

}  // namespace k3::store
