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
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "layout.h"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
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

namespace {

constexpr uint64_t kHugePageMax = uint64_t{32}
                                  << 20;  // what is larger (arm64 with pages of 64 KiB) would be wasted

// Size of a huge page of shared memory; 0 when there are none.
uint64_t huge_page_bytes() {
    static const uint64_t bytes = [] {
        std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
        uint64_t size = 0;
        return file >> size && size <= kHugePageMax && (size & (size - 1)) == 0 ? size : 0;
    }();
    return bytes;
}

}  // namespace

Mapping::Mapping(int fd, uint64_t bytes, bool writable, const std::string& what) {
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    const uint64_t huge = huge_page_bytes();
    // Room to shift the mapping to a huge page's boundary, given back below.
    const uint64_t slack = huge != 0 && bytes >= huge ? huge : 0;
    void* room = nullptr;
    if (slack != 0) {
        room = ::mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) refuse(errno, "cannot map " + std::to_string(bytes) + " bytes of " + what);
    }
    const uint64_t begin = reinterpret_cast<uint64_t>(room);
    const uint64_t at = slack == 0 ? 0 : (begin + huge - 1) / huge * huge;
    void* memory =
        ::mmap(reinterpret_cast<void*>(at), bytes, protection, MAP_SHARED | (slack != 0 ? MAP_FIXED : 0), fd, 0);
    const int error = errno;
    if (slack != 0) {
        const uint64_t end = (at + bytes + kPage - 1) / kPage * kPage,
                       room_end = (begin + bytes + slack + kPage - 1) / kPage * kPage;
        if (memory == MAP_FAILED) {
            ::munmap(room, bytes + slack);
        } else {
            if (at > begin) ::munmap(room, at - begin);
            if (room_end > end) ::munmap(reinterpret_cast<void*>(end), room_end - end);
        }
    }
    if (memory == MAP_FAILED) refuse(error, "cannot map " + std::to_string(bytes) + " bytes of " + what);
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

void Mapping::keep_from_children() {
    if (data_ != nullptr && ::madvise(data_, bytes_, MADV_DONTFORK) != 0)
        refuse(errno, "cannot keep a mapping from forked children");
}

void Mapping::reset() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
    data_ = nullptr;
    bytes_ = 0;
}

namespace {

struct Available {
    uint64_t bytes;
    const char* said_by;
};

// MemAvailable; without /proc what is free, which leaves out the page cache that could be reclaimed.
Available available_memory() {
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);) {
        std::istringstream fields(line);
        std::string name;
        uint64_t kilobytes;
        if (fields >> name >> kilobytes && name == "MemAvailable:") return {kilobytes * 1024, "MemAvailable"};
    }
    const auto pages = static_cast<uint64_t>(::sysconf(_SC_AVPHYS_PAGES));
    const auto page_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    return {pages * page_bytes, "free pages: /proc/meminfo cannot be read"};
}

}  // namespace

namespace {

// Reserves small pages in [at, at + bytes) that are not there yet. In one call; a signal makes the kernel undo it
// all.
void allocate(int fd, uint64_t at, uint64_t bytes, const std::string& name) {
    while (::fallocate(fd, 0, static_cast<off_t>(at), static_cast<off_t>(bytes)) != 0) {
        if (errno != EINTR) {
            refuse(errno, "cannot reserve memory for " + name + ": refused at byte " + std::to_string(at));
        }
    }
}

// Turns stretches of a memfd into huge pages, until the kernel has refused too often in a row.
class Collapser {
public:
    Collapser(int fd, uint64_t bytes, const std::string& name) : fd_(fd), name_(name), page_(huge_page_bytes()) {
        if (page_ != 0 && bytes >= page_) map_ = Mapping(fd, bytes, true, name);
        refusals_ = map_.data() == nullptr ? kRefusalsMax : 0;
    }

    // Bytes of the whole huge pages in [at, at + bytes) that are huge now. `at` is a multiple of their size.
    uint64_t collapse(uint64_t at, uint64_t bytes) {
        if (refusals_ >= kRefusalsMax) return 0;
        const uint64_t whole = bytes / page_ * page_;
        // The kernel fills the gaps of a stretch but does not begin with nothing.
        for (uint64_t i = 0; i < whole; i += page_) allocate(fd_, at + i, kPage, name_);
        if (whole == 0 || ask(at, whole)) return whole;
        uint64_t huge = 0;
        for (uint64_t i = 0; i < whole && refusals_ < kRefusalsMax; i += page_) {
            const bool given = ask(at + i, page_);
            huge += given ? page_ : 0;
            refusals_ = given ? 0 : refusals_ + 1;
        }
        return huge;
    }

private:
    static constexpr int kRefusalsMax = 16;  // fragmented memory: each try takes long and the next would fail too

    bool ask(uint64_t at, uint64_t bytes) const { return ::madvise(map_.data() + at, bytes, MADV_COLLAPSE) == 0; }

    const int fd_;
    const std::string& name_;
    const uint64_t page_;
    Mapping map_;
    int refusals_ = 0;
};

}  // namespace

uint64_t reserve(int fd, uint64_t bytes, const std::string& name, const ReserveProgress& on_progress) {
    // A memfd's pages are not accounted before they are touched: asking for more than there is would end in the
    // out-of-memory killer and not in an error.
    const Available available = available_memory();
    if (bytes > available.bytes) {
        refuse(ENOMEM, std::to_string(bytes) + " bytes for " + name + ", " + std::to_string(available.bytes) +
                           " are available (" + available.said_by + ")");
    }
    // All of it now: memory that is missing must be an error here and not a SIGBUS under a read.
    constexpr uint64_t kStep = uint64_t{64} << 20;  // whole huge pages
    Collapser collapser(fd, bytes, name);
    uint64_t huge = 0;
    for (uint64_t at = 0; at < bytes; at += kStep) {
        const uint64_t step = std::min(kStep, bytes - at);
        huge += collapser.collapse(at, step);
        allocate(fd, at, step, name);
        if (on_progress) on_progress(at + step);
    }
    return huge;
}

Fd make_memfd(const std::string& name) {
    const unsigned flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    Fd fd(::memfd_create(name.c_str(), flags | MFD_NOEXEC_SEAL));
    if (!fd.valid() && errno == EINVAL) fd = Fd(::memfd_create(name.c_str(), flags));  // before Linux 6.3
    if (!fd.valid()) refuse(errno, "cannot make the memfd " + name);
    return fd;
}

SharedMemory make_shared(const char* name, uint64_t bytes, bool sealed_readers,
                         const ReserveProgress& on_progress) {
    SharedMemory shared;
    shared.fd = make_memfd(name);
    if (::ftruncate(shared.fd.get(), static_cast<off_t>(bytes)) != 0) {
        refuse(errno, "cannot size " + std::string(name) + " to " + std::to_string(bytes) + " bytes");
    }
    shared.huge_bytes = reserve(shared.fd.get(), bytes, name, on_progress);
    shared.map = Mapping(shared.fd.get(), bytes, true, name);
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (sealed_readers ? F_SEAL_FUTURE_WRITE : 0);
    if (::fcntl(shared.fd.get(), F_ADD_SEALS, seals) != 0) refuse(errno, std::string("cannot seal ") + name);
    return shared;
}

void block_signals() {
    sigset_t all;
    sigfillset(&all);
    // Blocking these does not stop a fault: the kernel would end the process, past every handler (bus_guard.h).
    for (const int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, fault);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1000000000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace k3::store
