// Descriptors, mappings and the arena. What the operating system refuses is a std::system_error with its errno.
//
// Objects here belong to one thread at a time; the memory they map may be used from any.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <system_error>

namespace k3::store {

[[noreturn]] void refuse(int error, const std::string& what);

// A descriptor that closes itself.
class Fd {
public:
    Fd() = default;
    explicit Fd(int fd) : fd_(fd) {}
    Fd(Fd&& other) noexcept : fd_(other.release()) {}
    Fd& operator=(Fd&& other) noexcept;
    ~Fd() { reset(); }
    int get() const { return fd_; }
    bool valid() const { return fd_ >= 0; }
    int release() {
        const int fd = fd_;
        fd_ = -1;
        return fd;
    }
    void reset();

private:
    int fd_ = -1;
};

Fd duplicate(int fd);
Fd make_event();           // an eventfd, not blocking
void ring_event(int fd);   // adds 1; never blocks on an eventfd that nobody else can reconfigure
void clear_event(int fd);  // back to 0

// A shared mapping of a descriptor that unmaps itself. A large one begins on a huge page's boundary, so that huge
// pages below it are mapped as such.
class Mapping {
public:
    Mapping() = default;
    Mapping(int fd, uint64_t bytes, bool writable, const std::string& what);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping() { reset(); }
    uint8_t* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    // A forked child has nothing there; it must `forget`, or it would unmap what it has mapped there since.
    void keep_from_children();
    void forget() { data_ = nullptr, bytes_ = 0; }
    void reset();

private:
    uint8_t* data_ = nullptr;
    uint64_t bytes_ = 0;
};

// Told how many bytes are reserved so far; what it throws ends the reservation.
using ReserveProgress = std::function<void(uint64_t done_bytes)>;

// Makes every page of a memfd of this size present, and returns how many bytes of it are in huge pages: all whole
// ones where the kernel gives them (MADV_COLLAPSE, Linux 6.1; also where shared memory gets none by itself). A
// direct read into huge pages is pinned and described to the drive in a few parts instead of one for each 4 KiB;
// here it is twice as fast. std::system_error with the byte at which memory was refused.
uint64_t reserve(int fd, uint64_t bytes, const std::string& name, const ReserveProgress& on_progress);

// An empty memfd that can be sealed, and that nobody can execute or make executable where the kernel knows that
// (Linux 6.3; with vm.memfd_noexec=2 it makes no others).
Fd make_memfd(const std::string& name);

// A memfd of a fixed size with its memory reserved, mapped writable here; `sealed_readers` makes ours the last
// writable mapping there can ever be. The size is sealed in any case.
struct SharedMemory {
    Fd fd;
    Mapping map;
    uint64_t huge_bytes = 0;
};
SharedMemory make_shared(const char* name, uint64_t bytes, bool sealed_readers,
                         const ReserveProgress& on_progress = {});

// Blocks every signal in the calling thread: signals are the interpreter's business.
void block_signals();

uint64_t now_ns();

}  // namespace k3::store
