#include "bus_guard.h"

#include <signal.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <mutex>

#include "layout.h"
#include "memory.h"

namespace k3::store {

namespace {

// Read by the signal handler, so without locks: a place is in use while `bytes` is not 0.
struct Place {
    std::atomic<uint8_t*> memory{nullptr};
    std::atomic<uint64_t> bytes{0};
    std::atomic<bool> tripped{false};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint8_t*>::is_always_lock_free);

Place places[2 * kClientsMax];
std::mutex places_mutex;  // of those who make and end guards
bool is_installed = false;
struct sigaction previous;

void on_bus_error(int number, siginfo_t* info, void* context) {
    const int error = errno;
    const uint8_t* const address = static_cast<uint8_t*>(info->si_addr);
    for (Place& place : places) {
        const uint64_t bytes = place.bytes.load(std::memory_order_acquire);
        uint8_t* const memory = place.memory.load(std::memory_order_relaxed);
        if (bytes == 0 || address < memory || address >= memory + bytes) continue;
        const int fresh = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
        if (::mmap(memory, bytes, PROT_READ | PROT_WRITE, fresh, -1, 0) == MAP_FAILED) break;
        place.tripped.store(true, std::memory_order_release);
        errno = error;
        return;
    }
    // Somebody else's.
    if ((previous.sa_flags & SA_SIGINFO) != 0) {
        previous.sa_sigaction(number, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(number);
    } else {
        ::signal(number, SIG_DFL);
        ::raise(number);  // delivered when this returns
    }
    errno = error;
}

void install() {
    if (is_installed) return;
    struct sigaction action{};
    action.sa_sigaction = on_bus_error;
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (::sigaction(SIGBUS, &action, &previous) != 0) refuse(errno, "cannot handle SIGBUS");
    is_installed = true;
}

}  // namespace

BusGuard::BusGuard(uint8_t* memory, uint64_t bytes) {
    std::lock_guard<std::mutex> lock(places_mutex);
    install();
    for (int i = 0; i < static_cast<int>(2 * kClientsMax); ++i) {
        if (places[i].bytes.load(std::memory_order_relaxed) != 0) continue;
        places[i].tripped.store(false, std::memory_order_relaxed);
        places[i].memory.store(memory, std::memory_order_relaxed);
        places[i].bytes.store(bytes, std::memory_order_release);
        place_ = i;
        return;
    }
    refuse(ENFILE, "there are as many guarded rings as there can be");
}

BusGuard& BusGuard::operator=(BusGuard&& other) noexcept {
    if (this != &other) {
        reset();
        place_ = other.place_;
        other.place_ = -1;
    }
    return *this;
}

bool BusGuard::tripped() const { return place_ >= 0 && places[place_].tripped.load(std::memory_order_acquire); }

void BusGuard::reset() {
    if (place_ >= 0) places[place_].bytes.store(0, std::memory_order_release);
    place_ = -1;
}

}  // namespace k3::store
