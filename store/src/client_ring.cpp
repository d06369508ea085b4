#include "client_ring.h"

#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>

namespace k3::store {

namespace {

constexpr uint64_t kSpinNs = 50'000;    // what sleeping and waking up costs; no more is ever lost by it
constexpr uint64_t kQuickNs = 150'000;  // an answer after this was read from a drive, or the machine is crowded

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

ClientRing::ClientRing(int ring_fd, int arena_fd, uint64_t arena_bytes, int request_doorbell,
                       int completion_doorbell)
    : process_(::getpid()),
      request_doorbell_(duplicate(request_doorbell)),
      completion_doorbell_(duplicate(completion_doorbell)) {
    struct stat about;
    if (::fstat(ring_fd, &about) != 0) refuse(errno, "cannot look at the ring");
    const uint64_t bytes = static_cast<uint64_t>(about.st_size);
    if (bytes < kPage) throw std::invalid_argument("not a ring: too short");
    ring_ = Mapping(ring_fd, bytes, true, "the ring");
    const RingHeader* header = reinterpret_cast<const RingHeader*>(ring_.data());
    if (std::memcmp(header->magic, kMagic, sizeof kMagic) != 0)
        throw std::invalid_argument("not a ring: wrong magic");
    entries_ = header->entries;
    if (entries_ < 2 || entries_ > kEntriesMax || (entries_ & (entries_ - 1)) != 0 ||
        bytes < ring_bytes(entries_)) {
        throw std::invalid_argument("not a ring: " + std::to_string(entries_) + " entries in " +
                                    std::to_string(bytes) + " bytes");
    }
    if (::fstat(arena_fd, &about) != 0) refuse(errno, "cannot look at the arena");
    if (arena_bytes == 0 || static_cast<uint64_t>(about.st_size) < arena_bytes) {
        throw std::invalid_argument("the arena has " + std::to_string(about.st_size) + " bytes, not " +
                                    std::to_string(arena_bytes));
    }
    arena_ = Mapping(arena_fd, arena_bytes, false, "the arena");
    side_ = ClientSide(RingView::at(ring_.data(), entries_));
    ring_.keep_from_children();
}

ClientRing::~ClientRing() {
    if (::getpid() != process_) ring_.forget();
}

void ClientRing::check_process() const {
    if (::getpid() == process_) return;
    throw std::invalid_argument("the ring belongs to process " + std::to_string(process_) + ", which opened it");
}

bool ClientRing::closed() const {
    check_process();
    return side_.closed();
}

uint32_t ClientRing::submit(uint64_t tag, Op op, uint32_t layer, const uint32_t* experts, uint32_t count) {
    Request like{};
    like.tag = tag;
    like.op = static_cast<uint8_t>(op);
    like.layer = layer;
    return submit_all(like, experts, nullptr, count);
}

uint32_t ClientRing::release(const uint32_t* slots, const uint32_t* generations, uint32_t count) {
    Request like{};
    like.op = static_cast<uint8_t>(Op::release);
    return submit_all(like, slots, generations, count);
}

uint32_t ClientRing::submit_all(const Request& like, const uint32_t* experts, const uint32_t* generations,
                                uint32_t count) {
    check_process();
    std::lock_guard<std::mutex> lock(submit_mutex_);
    const uint32_t written = std::min(count, side_.room());
    Request request = like;
    for (uint32_t i = 0; i < written; ++i) {
        request.expert = experts[i];
        if (generations != nullptr) request.generation = generations[i];
        side_.put(request);
    }
    if (written > 0 && side_.publish()) ring_event(request_doorbell_.get());
    return written;
}

uint32_t ClientRing::poll(Completion* into, uint32_t most) {
    check_process();
    std::lock_guard<std::mutex> lock(take_mutex_);
    const uint32_t count = std::min(most, side_.pending());
    for (uint32_t i = 0; i < count; ++i) into[i] = side_.take();
    if (count > 0) side_.return_completions();
    return count;
}

ClientRing::Woken ClientRing::wait(int64_t timeout_ns, int other_fd) {
    check_process();
    const uint64_t began_ns = now_ns();
    const Woken woken = spin(began_ns, timeout_ns) ? Woken::completions : sleep(began_ns, timeout_ns, other_fd);
    answers_are_quick_ = woken == Woken::completions && now_ns() - began_ns < kQuickNs;
    return woken;
}

// What is in RAM is answered sooner than a process falls asleep and wakes up again. True when there are
// completions.
bool ClientRing::spin(uint64_t began_ns, int64_t timeout_ns) {
    if (!answers_are_quick_ || timeout_ns == 0) return false;
    do {
        {
            std::lock_guard<std::mutex> lock(take_mutex_);
            if (side_.pending() > 0) return true;
        }
        for (int i = 0; i < 32; ++i) relax();
    } while (now_ns() - began_ns < kSpinNs && !side_.closed());
    return false;
}

ClientRing::Woken ClientRing::sleep(uint64_t began_ns, int64_t timeout_ns, int other_fd) {
    const auto look = [this](bool last_look) {
        std::lock_guard<std::mutex> lock(take_mutex_);
        return side_.pending(last_look) > 0;
    };
    while (true) {
        if (look(false)) return Woken::completions;
        const uint64_t waited_ns = now_ns() - began_ns;
        if (side_.closed()) return Woken::closed;
        int timeout_ms = -1;
        if (timeout_ns >= 0) {
            if (static_cast<int64_t>(waited_ns) >= timeout_ns) return Woken::timeout;
            // Rounded up, and never past what an int holds: the loop comes back for the rest.
            const int64_t left_ms = (timeout_ns - static_cast<int64_t>(waited_ns) + 999999) / 1000000;
            timeout_ms = static_cast<int>(std::min<int64_t>(left_ms, 1 << 30));
        }
        side_.sleep();
        pollfd fds[2] = {{completion_doorbell_.get(), POLLIN, 0}, {other_fd, POLLIN, 0}};
        int ready = 0;
        if (!look(true)) ready = ::poll(fds, other_fd >= 0 ? 2 : 1, timeout_ms);
        const int error = errno;
        side_.wake();
        if (ready < 0) {
            if (error == EINTR) return Woken::interrupted;
            refuse(error, "cannot wait for completions");
        }
        if (fds[0].revents & POLLIN) {
            char rung[64];
            (void)!::read(completion_doorbell_.get(), rung, sizeof rung);
        }
        if (look(false)) return Woken::completions;
        if (side_.closed() || (fds[0].revents & (POLLHUP | POLLERR | POLLNVAL))) return Woken::closed;
        if (other_fd >= 0 && fds[1].revents != 0) return Woken::other;
    }
}

}  // namespace k3::store
