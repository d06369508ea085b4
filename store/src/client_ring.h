// A client's end of the data plane: its ring mapped writable, the arena mapped read-only.
//
// submit() and release() may be called from any thread, poll() from any thread; wait() by one thread at a time,
// which is the one that then polls (the ring has a single "asleep" word).
//
// A ring belongs to the process that made it: a forked child shares the descriptors and could give back its
// parent's leases. It does not have the mapping, and every call is std::invalid_argument there; the arena stays
// readable.
#pragma once

#include <mutex>
#include <vector>

#include "memory.h"
#include "ring.h"

namespace k3::store {

class ClientRing {
public:
    // Descriptors stay the caller's. std::invalid_argument when the ring is not one, std::system_error when
    // something cannot be mapped.
    ClientRing(int ring_fd, int arena_fd, uint64_t arena_bytes, int request_doorbell, int completion_doorbell);
    ~ClientRing();

    // Writes requests for the experts (or, when releasing, slots with generations) as far as there is room and
    // returns how many were written.
    uint32_t submit(uint64_t tag, Op op, uint32_t layer, const uint32_t* experts, uint32_t count);
    uint32_t release(const uint32_t* slots, const uint32_t* generations, uint32_t count);

    uint32_t poll(Completion* into, uint32_t most);

    enum class Woken : uint8_t { completions, closed, other, timeout, interrupted };
    // Waits until there are completions, the daemon has closed the ring, `other_fd` (-1: none) is readable or has
    // ended, the time is over (negative: never) or a signal came.
    Woken wait(int64_t timeout_ns, int other_fd);

    bool closed() const;
    uint32_t entries() const { return entries_; }
    const uint8_t* arena() const { return arena_.data(); }
    uint64_t arena_bytes() const { return arena_.bytes(); }

private:
    uint32_t submit_all(const Request& like, const uint32_t* experts, const uint32_t* generations, uint32_t count);

    void check_process() const;
    bool spin(uint64_t began_ns, int64_t timeout_ns);
    Woken sleep(uint64_t began_ns, int64_t timeout_ns, int other_fd);

    const int process_;
    bool answers_are_quick_ = true;  // whether the last wait was short: then the next one spins before it sleeps
    Mapping ring_, arena_;
    Fd request_doorbell_, completion_doorbell_;
    uint32_t entries_ = 0;
    ClientSide side_;
    std::mutex submit_mutex_, take_mutex_;
};

}  // namespace k3::store
