// The two rings of one client and everything about memory order. No other file touches an index.
//
// A ring is written by one side and read by the other, so two rules are enough:
//
//   publish   The writer fills entries with plain stores, then stores the tail. The reader loads the tail with
//             acquire, so whoever sees the tail sees the entries. The reader copies entries out, then stores the
//             head with release; the writer loads the head with acquire, so it overwrites an entry only after the
//             copy is complete.
//   sleep     A side that has nothing to do stores 1 in its asleep word and then looks at the other's tail once
//             more; a side that has stored a tail then looks at the other's asleep word. All four of these are
//             sequentially consistent, so at least one of the two sees the other: no wake-up is lost. (A client
//             in another language may use a full fence between its store and its load; that is the same.)
//
// The daemon trusts nothing in here: it keeps the indices that it writes in its own memory, bounds the two that it
// reads, and copies each request out once, word by word, before it looks at it.
//
// Not thread-safe: each side belongs to one thread at a time (its owner's lock).
#pragma once

#include <cstring>

#include "layout.h"

namespace k3::store {

// Where the parts of a mapped ring are.
struct RingView {
    RingHeader* header = nullptr;
    Request* requests = nullptr;
    Completion* completions = nullptr;
    uint32_t entries = 0;

    static RingView at(void* memory, uint32_t entries) {
        uint8_t* base = static_cast<uint8_t*>(memory);
        return {reinterpret_cast<RingHeader*>(base), reinterpret_cast<Request*>(base + kRequestsAt),
                reinterpret_cast<Completion*>(base + completions_at(entries)), entries};
    }
};

inline void fall_asleep(std::atomic<uint32_t>& word) { word.store(1, std::memory_order_seq_cst); }
inline void wake_up(std::atomic<uint32_t>& word) { word.store(0, std::memory_order_relaxed); }

// The daemon's side.
class DaemonRing {
public:
    explicit DaemonRing(RingView view = {}) : view_(view) {}

    // Requests that can be taken, or -1 when the client's tail is impossible. `last_look` is the one after
    // fall_asleep().
    int64_t pending(bool last_look = false) const {
        const auto order = last_look ? std::memory_order_seq_cst : std::memory_order_acquire;
        const uint32_t count = view_.header->request_tail.load(order) - request_head_;
        return count <= view_.entries ? static_cast<int64_t>(count) : -1;
    }

    // The next request, copied. Only when pending() > 0.
    Request take() {
        Request copy;
        const uint64_t* from = reinterpret_cast<const uint64_t*>(&view_.requests[request_head_ % view_.entries]);
        uint64_t words[sizeof(Request) / 8];
        for (size_t i = 0; i < sizeof(Request) / 8; ++i) words[i] = __atomic_load_n(from + i, __ATOMIC_RELAXED);
        std::memcpy(&copy, words, sizeof copy);
        ++request_head_;
        return copy;
    }

    // Gives the entries that were taken back to the client.
    void return_requests() { view_.header->request_head.store(request_head_, std::memory_order_release); }

    // Completions that the client has not read yet, or -1 when its head is impossible.
    int64_t unread() const {
        const uint32_t count = completion_tail_ - view_.header->completion_head.load(std::memory_order_acquire);
        return count <= view_.entries ? static_cast<int64_t>(count) : -1;
    }

    // Only while unread() < entries. Not visible before publish().
    void put(const Completion& completion) { view_.completions[completion_tail_++ % view_.entries] = completion; }

    // Makes what was put visible; true when the client must be woken.
    bool publish() {
        view_.header->completion_tail.store(completion_tail_, std::memory_order_seq_cst);
        return view_.header->client_asleep.load(std::memory_order_seq_cst) == 1;
    }

    void sleep() { fall_asleep(view_.header->daemon_asleep); }
    void wake() { wake_up(view_.header->daemon_asleep); }
    void close() {
        view_.header->state.store(static_cast<uint32_t>(RingState::closed), std::memory_order_release);
    }

private:
    RingView view_;
    uint32_t request_head_ = 0;
    uint32_t completion_tail_ = 0;
};

// A client's side. It trusts the daemon to write sound completions, but not to be alive.
class ClientSide {
public:
    explicit ClientSide(RingView view = {}) : view_(view) {
        if (view_.header == nullptr) return;
        request_tail_ = view_.header->request_tail.load(std::memory_order_relaxed);
        completion_head_ = view_.header->completion_head.load(std::memory_order_relaxed);
    }

    // Entries that can be written now.
    uint32_t room() const {
        const uint32_t used = request_tail_ - view_.header->request_head.load(std::memory_order_acquire);
        return used <= view_.entries ? view_.entries - used : 0;
    }

    void put(const Request& request) { view_.requests[request_tail_++ % view_.entries] = request; }

    // Makes what was put visible; true when the daemon must be woken.
    bool publish() {
        view_.header->request_tail.store(request_tail_, std::memory_order_seq_cst);
        return view_.header->daemon_asleep.load(std::memory_order_seq_cst) == 1;
    }

    // Completions that can be taken. `last_look` is the one after sleep().
    uint32_t pending(bool last_look = false) const {
        const auto order = last_look ? std::memory_order_seq_cst : std::memory_order_acquire;
        const uint32_t count = view_.header->completion_tail.load(order) - completion_head_;
        return count <= view_.entries ? count : 0;
    }

    Completion take() { return view_.completions[completion_head_++ % view_.entries]; }

    void return_completions() { view_.header->completion_head.store(completion_head_, std::memory_order_release); }

    void sleep() { fall_asleep(view_.header->client_asleep); }
    void wake() { wake_up(view_.header->client_asleep); }
    bool closed() const {
        return view_.header->state.load(std::memory_order_acquire) != static_cast<uint32_t>(RingState::open);
    }

private:
    RingView view_;
    uint32_t request_tail_ = 0;
    uint32_t completion_head_ = 0;
};

}  // namespace k3::store
