#include "memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <utility>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace k3::store {

void refuse(int error, const std::string& what) { throw std::system_error(error, std::generic_category(), what); }

Fd& Fd::operator=(Fd&& other) noexcept {
    if (this != &other) {
        reset();
        fd_ = other.release();
    }
    return *this;
}

void Fd::reset() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

Fd duplicate(int fd) {
    Fd copy(::fcntl(fd, F_DUPFD_CLOEXEC, 3));
    if (!copy.valid()) refuse(errno, "cannot duplicate a descriptor");
    return copy;
}

Fd make_event() {
    Fd event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!event.valid()) refuse(errno, "cannot make an eventfd");
    return event;
}

void ring_event(int fd) {
    const uint64_t one = 1;
    while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
}

void clear_event(int fd) {
    uint64_t count;
    while (::read(fd, &count, sizeof count) < 0 && errno == EINTR) {
    }
}

Mapping::Mapping(int fd, uint64_t bytes, bool writable, const std::string& what) {
    void* memory = ::mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) refuse(errno, "cannot map " + std::to_string(bytes) + " bytes of " + what);
    data_ = static_cast<uint8_t*>(memory);
    bytes_ = bytes;
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    if (this != &other) {
        reset();
        data_ = std::exchange(other.data_, nullptr);
        bytes_ = std::exchange(other.bytes_, 0);
    }
    return *this;
}

void Mapping::reset() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
}

namespace {

// MemAvailable; everything when it cannot be read.
uint64_t available_bytes() {
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);) {
        uint64_t kilobytes;
        if (std::sscanf(line.c_str(), "MemAvailable: %" SCNu64 " kB", &kilobytes) == 1) return kilobytes * 1024;
    }
    return UINT64_MAX;
}

}  // namespace

SharedMemory make_shared(const char* name, uint64_t bytes, bool sealed_readers) {
    SharedMemory shared;
    shared.fd = Fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!shared.fd.valid()) refuse(errno, std::string("cannot make the memfd ") + name);
    if (::ftruncate(shared.fd.get(), static_cast<off_t>(bytes)) != 0) {
        refuse(errno, "cannot size " + std::string(name) + " to " + std::to_string(bytes) + " bytes");
    }
    // A memfd's pages are not accounted before they are touched: asking for more than there is would end in the
    // out-of-memory killer and not in an error.
    const uint64_t available = available_bytes();
    if (bytes > available) {
        refuse(ENOMEM, std::to_string(bytes) + " bytes for " + name + ", " + std::to_string(available) + " are available");
    }
    // Reserve all of it now: memory that is missing must be an error here and not a SIGBUS under a read. In steps, since
    // a signal makes the kernel undo a whole call.
    constexpr uint64_t kStep = uint64_t{1} << 30;
    for (uint64_t at = 0; at < bytes;) {
        const uint64_t step = std::min(kStep, bytes - at);
        if (::fallocate(shared.fd.get(), 0, static_cast<off_t>(at), static_cast<off_t>(step)) == 0) {
            at += step;
        } else if (errno != EINTR) {
            refuse(errno, "cannot reserve " + std::to_string(bytes) + " bytes of memory for " + name + ": refused at byte " +
                              std::to_string(at));
        }
    }
    shared.map = Mapping(shared.fd.get(), bytes, true, name);
    if (sealed_readers) ::madvise(shared.map.data(), bytes, MADV_HUGEPAGE);  // fewer TLB misses where it can be had
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (sealed_readers ? F_SEAL_FUTURE_WRITE : 0);
    if (::fcntl(shared.fd.get(), F_ADD_SEALS, seals) != 0) refuse(errno, std::string("cannot seal ") + name);
    return shared;
}

void block_signals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace k3::store
