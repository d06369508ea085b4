// The bytes that the daemon and its clients share: docs/store_protocol.md section 2, as C++ types.
//
// store/protocol/ring_layout.py states the same numbers for Python; tests/store/test_native_layout.py compares the
// two. Little-endian machines only (checked below), so the types are the wire format.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace k3::store {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the ring is little-endian");
static_assert(std::atomic<uint32_t>::is_always_lock_free,
              "an index that takes a lock cannot lie in shared memory");

constexpr uint64_t kPage = 4096;
constexpr char kMagic[8] = {'K', '3', 'R', 'I', 'N', 'G', 0, 1};
constexpr uint32_t kDefaultEntries = 1024;
constexpr uint32_t kEntriesMax = 1 << 16;
constexpr uint32_t kClientsMax = 64;
constexpr uint32_t kSlotsMax = 1 << 20;

// Never used twice: 64 bits do not come round.
using ClientId = uint64_t;

enum class Op : uint8_t { lease = 1, release = 2, prefetch = 3, cancel = 4, pin = 5, unpin = 6 };

enum class Status : uint8_t {
    ok = 0,
    no_such_expert = 1,
    quota = 2,
    busy = 3,
    damaged = 4,
    io_error = 5,
    bad_request = 6,
    closing = 7,
    cancelled = 8,
};

enum class Source : uint8_t { none = 0, arena = 1, read = 2, joined = 3 };

enum class RingState : uint32_t { open = 1, closed = 2 };

// Every index has a cache line of its own. Who may write which is in the comment; nobody else ever does.
struct RingHeader {
    char magic[8];                                      // daemon, once
    uint32_t entries;                                   // daemon, once
    uint32_t zero;                                      // daemon, once
    alignas(64) std::atomic<uint32_t> request_tail;     // client
    alignas(64) std::atomic<uint32_t> request_head;     // daemon
    alignas(64) std::atomic<uint32_t> completion_tail;  // daemon
    alignas(64) std::atomic<uint32_t> completion_head;  // client
    alignas(64) std::atomic<uint32_t> daemon_asleep;    // daemon
    alignas(64) std::atomic<uint32_t> client_asleep;    // client
    alignas(64) std::atomic<uint32_t> state;            // daemon
};

struct Request {
    uint64_t tag;
    uint8_t op;
    uint8_t zero[3];
    uint32_t layer;
    uint32_t expert;      // of a release: the slot
    uint32_t generation;  // of a release, else zero
    uint64_t zero_too;
};

struct Completion {
    uint64_t tag;
    uint8_t op;
    uint8_t status;
    uint8_t source;
    uint8_t zero;
    uint32_t layer;
    uint32_t expert;
    uint32_t slot;
    uint32_t generation;
    uint32_t file;
    uint64_t offset;  // of the payload in the arena
    uint64_t payload_bytes;
    uint64_t file_offset;
    uint32_t error;  // errno
    uint32_t zero_too;
};

static_assert(offsetof(RingHeader, magic) == 0 && offsetof(RingHeader, entries) == 8);
static_assert(offsetof(RingHeader, zero) == 12 && offsetof(RingHeader, request_tail) == 64);
static_assert(offsetof(RingHeader, request_head) == 128 && offsetof(RingHeader, completion_tail) == 192);
static_assert(offsetof(RingHeader, completion_head) == 256 && offsetof(RingHeader, daemon_asleep) == 320);
static_assert(offsetof(RingHeader, client_asleep) == 384 && offsetof(RingHeader, state) == 448);
static_assert(sizeof(RingHeader) == 512 && sizeof(RingHeader) <= kPage);

static_assert(sizeof(Request) == 32 && alignof(Request) == 8);
static_assert(offsetof(Request, tag) == 0 && offsetof(Request, op) == 8 && offsetof(Request, zero) == 9);
static_assert(offsetof(Request, layer) == 12 && offsetof(Request, expert) == 16);
static_assert(offsetof(Request, generation) == 20 && offsetof(Request, zero_too) == 24);

static_assert(sizeof(Completion) == 64 && alignof(Completion) == 8);
static_assert(offsetof(Completion, tag) == 0 && offsetof(Completion, op) == 8 &&
              offsetof(Completion, status) == 9);
static_assert(offsetof(Completion, source) == 10 && offsetof(Completion, zero) == 11);
static_assert(offsetof(Completion, layer) == 12 && offsetof(Completion, expert) == 16);
static_assert(offsetof(Completion, slot) == 20 && offsetof(Completion, generation) == 24);
static_assert(offsetof(Completion, file) == 28 && offsetof(Completion, offset) == 32);
static_assert(offsetof(Completion, payload_bytes) == 40 && offsetof(Completion, file_offset) == 48);
static_assert(offsetof(Completion, error) == 56 && offsetof(Completion, zero_too) == 60);

constexpr uint64_t kRequestsAt = kPage;
constexpr uint64_t completions_at(uint32_t entries) { return kRequestsAt + sizeof(Request) * uint64_t{entries}; }
constexpr uint64_t ring_bytes(uint32_t entries) {
    const uint64_t end = completions_at(entries) + sizeof(Completion) * uint64_t{entries};
    return (end + kPage - 1) / kPage * kPage;
}

}  // namespace k3::store
