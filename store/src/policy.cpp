#include "policy.h"

#include <algorithm>
#include <list>
#include <stdexcept>
#include <unordered_set>

namespace k3::store {

bool Policy::access(Key key) {
    const bool present = contains(key);
    touched(key, present);
    return present;
}

bool Policy::insert(Key key, std::vector<Key>& evicted) {
    if (contains(key)) throw std::invalid_argument("insert: this expert is in already");
    Key victim;
    const bool must = size() >= capacity_;
    if (choose(&key, must, victim)) {
        holds_.erase(victim);
        gone(victim, true);
        evicted.push_back(victim);
    } else if (must) {
        return false;
    }
    holds_.emplace(key, 0);
    added(key);
    return true;
}

bool Policy::evict_one(Key& evicted) {
    if (!choose(nullptr, true, evicted)) return false;
    holds_.erase(evicted);
    gone(evicted, true);
    return true;
}

void Policy::hold(Key key) {
    const auto found = holds_.find(key);
    if (found == holds_.end()) throw std::invalid_argument("hold: this expert is not in");
    if (++found->second == 1) now_held(key);
}

void Policy::unhold(Key key) {
    const auto found = holds_.find(key);
    if (found == holds_.end() || found->second == 0)
        throw std::invalid_argument("unhold: this expert is not held");
    if (--found->second == 0) now_free(key);
}

void Policy::remove(Key key) {
    if (holds_.erase(key) == 0) throw std::invalid_argument("remove: this expert is not in");
    gone(key, false);
}

bool Policy::held(Key key) const {
    const auto found = holds_.find(key);
    return found != holds_.end() && found->second > 0;
}

std::map<uint32_t, uint64_t> divide(uint64_t slots, const LayerCounts& counts) {
    std::vector<std::pair<uint32_t, uint32_t>> smallest_first;  // experts, layer
    for (const auto& [layer, experts] : counts) smallest_first.emplace_back(experts, layer);
    std::sort(smallest_first.begin(), smallest_first.end());
    std::map<uint32_t, uint64_t> shares;
    uint64_t left = slots;
    size_t done = 0;
    while (done < smallest_first.size() && smallest_first[done].first <= left / (smallest_first.size() - done)) {
        shares[smallest_first[done].second] = smallest_first[done].first;
        left -= smallest_first[done++].first;  // takes less than its share: the others divide what it leaves
    }
    std::vector<uint32_t> rest;
    for (size_t i = done; i < smallest_first.size(); ++i) rest.push_back(smallest_first[i].second);
    std::sort(rest.begin(), rest.end());
    for (size_t i = 0; i < rest.size(); ++i) shares[rest[i]] = left / rest.size() + (i < left % rest.size());
    return shares;
}

namespace {

// Keys in order of use, oldest first, each stamped with when that was. Held keys are kept out of it, so the front
// may always go.
class UseOrder {
public:
    struct Entry {
        Key key;
        uint64_t stamp;
        uint64_t visit;
    };

    bool contains(Key key) const { return where_.count(key) != 0; }
    bool empty() const { return order_.empty(); }
    const Entry& oldest() const { return order_.front(); }

    void newest(Key key, uint64_t stamp, uint64_t visit = 0) {
        drop(key);
        where_[key] = order_.insert(order_.end(), Entry{key, stamp, visit});
    }

    void drop(Key key) {
        const auto found = where_.find(key);
        if (found == where_.end()) return;
        order_.erase(found->second);
        where_.erase(found);
    }

private:
    std::list<Entry> order_;
    std::unordered_map<Key, std::list<Entry>::iterator, KeyHash> where_;
};

class Lru : public Policy {
public:
    Lru(uint64_t capacity, const std::vector<Key>& pins) : Policy(capacity), pins_(pins.begin(), pins.end()) {}

protected:
    void touched(Key key, bool present) override {
        if (present) freshen(key);
    }
    bool choose(const Key*, bool must, Key& victim) override {
        if (!must || order_.empty()) return false;
        victim = order_.oldest().key;
        return true;
    }
    void added(Key key) override { freshen(key); }
    void gone(Key key, bool) override { order_.drop(key); }
    void now_held(Key key) override { order_.drop(key); }
    void now_free(Key key) override { freshen(key); }

private:
    void freshen(Key key) {
        if (!held(key) && pins_.count(key) == 0) order_.newest(key, ++clock_);
    }

    std::unordered_set<Key, KeyHash> pins_;
    UseOrder order_;
    uint64_t clock_ = 0;
};

class LayerLru : public Policy {
public:
    LayerLru(uint64_t capacity, const LayerCounts& counts) : Policy(capacity) {
        for (const auto& [layer, share] : divide(capacity, counts)) layers_[layer].share = share;
    }

protected:
    void touched(Key key, bool present) override {
        if (present) freshen(key);
    }

    bool choose(const Key* incoming, bool must, Key& victim) override {
        // Free room may be used beyond a layer's share; without any, a full layer pays with its own.
        if (!must) return false;
        if (incoming != nullptr) {
            const Layer& own = layers_[incoming->layer];
            if (own.present >= own.share && !own.order.empty()) {
                victim = own.order.oldest().key;
                return true;
            }
        }
        const Layer* from = nullptr;
        bool from_over = false;
        for (const auto& [number, layer] : layers_) {
            if (layer.order.empty()) continue;
            const bool over = layer.present > layer.share;
            const bool better = from == nullptr || (over && !from_over) ||
                                (over == from_over && layer.order.oldest().stamp < from->order.oldest().stamp);
            if (better) from = &layer, from_over = over;
        }
        if (from == nullptr) return false;
        victim = from->order.oldest().key;
        return true;
    }

    void added(Key key) override {
        ++layers_[key.layer].present;
        freshen(key);
    }
    void gone(Key key, bool) override {
        --layers_[key.layer].present;
        layers_[key.layer].order.drop(key);
    }
    void now_held(Key key) override { layers_[key.layer].order.drop(key); }
    void now_free(Key key) override { freshen(key); }

private:
    struct Layer {
        uint64_t share = 0;
        uint64_t present = 0;  // held ones included
        UseOrder order;
    };

    void freshen(Key key) {
        if (!held(key)) layers_[key.layer].order.newest(key, ++clock_);
    }

    std::map<uint32_t, Layer> layers_;
    uint64_t clock_ = 0;
};

class LeastStale : public Policy {
public:
    LeastStale(uint64_t capacity, const LayerCounts& counts) : Policy(capacity) {
        for (const auto& entry : counts) layers_[entry.first];
    }

protected:
    void touched(Key key, bool present) override {
        if (key.layer != current_) ++layers_[key.layer].visits;
        current_ = key.layer;
        if (present) freshen(key);
    }

    bool choose(const Key*, bool must, Key& victim) override {
        if (!must) return false;
        uint64_t stalest = 0;
        bool found = false;
        const auto look_at = [&](const Layer& layer) {
            if (layer.order.empty()) return;
            const uint64_t staleness = layer.visits - layer.order.oldest().visit;
            if (found && staleness <= stalest) return;
            stalest = staleness;
            victim = layer.order.oldest().key;
            found = true;
        };
        // The layer being visited now comes round last, the one before it earlier, and so on downwards and round.
        const auto after = layers_.upper_bound(current_);
        for (auto at = after; at != layers_.begin();) look_at((--at)->second);
        for (auto at = layers_.end(); at != after;) look_at((--at)->second);
        return found;
    }

    void added(Key key) override { freshen(key); }
    void gone(Key key, bool) override {
        layers_[key.layer].order.drop(key);
        visits_.erase(key);
    }
    void now_held(Key key) override { layers_[key.layer].order.drop(key); }
    // Giving back is no use of its own: the visit is that of the last access.
    void now_free(Key key) override { layers_[key.layer].order.newest(key, ++clock_, visits_[key]); }

private:
    struct Layer {
        uint64_t visits = 0;
        UseOrder order;
    };

    void freshen(Key key) {
        Layer& layer = layers_[key.layer];
        visits_[key] = layer.visits;
        if (!held(key)) layer.order.newest(key, ++clock_, layer.visits);
    }

    std::map<uint32_t, Layer> layers_;
    std::unordered_map<Key, uint64_t, KeyHash> visits_;  // in which visit of its layer a key was last used
    uint32_t current_ = UINT32_MAX;
    uint64_t clock_ = 0;
};

// S3-FIFO. Held keys keep their place in their queue and are passed over.
class S3Fifo : public Policy {
public:
    explicit S3Fifo(uint64_t capacity)
        : Policy(capacity),
          small_target_(std::max<uint64_t>(1, capacity / 10)),
          ghosts_max_(capacity - capacity / 10) {}

protected:
    void touched(Key key, bool present) override {
        if (present) entries_[key].frequency = std::min(3, entries_[key].frequency + 1);
    }

    bool choose(const Key*, bool must, Key& victim) override {
        if (!must) return false;
        // Moves between the queues end: each lowers a frequency or shortens the small queue.
        while (true) {
            const bool from_small = small_.size() >= small_target_ || main_.empty();
            Queue::iterator at;
            if (from_small ? oldest_free(small_, at) : oldest_free(main_, at)) {
                if (from_small ? leaves_small(at) : leaves_main(at)) {
                    victim = *at;
                    return true;
                }
            } else if (from_small ? oldest_free(main_, at) : oldest_free(small_, at)) {
                if (from_small ? leaves_main(at) : leaves_small(at)) {
                    victim = *at;
                    return true;
                }
            } else {
                return false;
            }
        }
    }

    void added(Key key) override {
        const auto ghost = ghosts_.find(key);
        const bool returns = ghost != ghosts_.end();
        if (returns) {
            ghost_order_.erase(ghost->second);
            ghosts_.erase(ghost);
        }
        Queue& queue = returns ? main_ : small_;
        entries_[key] = {0, !returns, queue.insert(queue.end(), key)};
    }

    void gone(Key key, bool evicted) override {
        const Entry entry = entries_[key];
        (entry.in_small ? small_ : main_).erase(entry.at);
        entries_.erase(key);
        if (!evicted || !entry.in_small) return;
        ghosts_[key] = ghost_order_.insert(ghost_order_.end(), key);
        if (ghosts_.size() > ghosts_max_) {
            ghosts_.erase(ghost_order_.front());
            ghost_order_.pop_front();
        }
    }

private:
    using Queue = std::list<Key>;  // oldest first
    struct Entry {
        int frequency;
        bool in_small;
        Queue::iterator at;
    };

    bool oldest_free(Queue& queue, Queue::iterator& found) {
        found = std::find_if(queue.begin(), queue.end(), [this](Key key) { return !held(key); });
        return found != queue.end();
    }

    // True when the key leaves the cache; otherwise it was used more than once and goes to main.
    bool leaves_small(Queue::iterator at) {
        Entry& entry = entries_[*at];
        if (entry.frequency <= 1) return true;
        entry.frequency = 0;
        entry.in_small = false;
        main_.splice(main_.end(), small_, at);
        return false;
    }

    // True when the key leaves the cache; otherwise it goes round once more, counting one use less.
    bool leaves_main(Queue::iterator at) {
        Entry& entry = entries_[*at];
        if (entry.frequency == 0) return true;
        --entry.frequency;
        main_.splice(main_.end(), main_, at);
        return false;
    }

    uint64_t small_target_;
    uint64_t ghosts_max_;
    Queue small_, main_, ghost_order_;
    std::unordered_map<Key, Entry, KeyHash> entries_;
    std::unordered_map<Key, Queue::iterator, KeyHash> ghosts_;
};

}  // namespace

std::unique_ptr<Policy> make_policy(const std::string& name, uint64_t capacity, const LayerCounts& counts,
                                    const std::vector<Key>& pins) {
    if (capacity == 0) throw std::invalid_argument("a policy needs room for at least one expert");
    if (!pins.empty() && name != "pin-lru") throw std::invalid_argument("only pin-lru takes pins");
    if (name == "layer-lru") return std::make_unique<LayerLru>(capacity, counts);
    if (name == "lru" || name == "pin-lru") return std::make_unique<Lru>(capacity, pins);
    if (name == "s3-fifo") return std::make_unique<S3Fifo>(capacity);
    if (name == "least-stale") return std::make_unique<LeastStale>(capacity, counts);
    throw std::invalid_argument("no policy is called " + name);
}

std::vector<std::string> policy_names() { return {"layer-lru", "lru", "s3-fifo", "least-stale", "pin-lru"}; }

}  // namespace k3::store
