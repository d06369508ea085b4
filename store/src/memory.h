// Descriptors, mappings and the arena. What the operating system refuses is a std::system_error with its errno.
//
// Objects here belong to one thread at a time; the memory they map may be used from any.
#pragma once

#include <cstdint>
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
Fd make_event();  // an eventfd, not blocking
void ring_event(int fd);   // adds 1; never blocks on an eventfd that nobody else can reconfigure
void clear_event(int fd);  // back to 0

// A shared mapping of a descriptor that unmaps itself.
class Mapping {
public:
    Mapping() = default;
    Mapping(int fd, uint64_t bytes, bool writable, const std::string& what);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping() { reset(); }
    uint8_t* data() const { return data_; }
    uint64_t bytes() const { return bytes_; }
    void reset();

private:
    uint8_t* data_ = nullptr;
    uint64_t bytes_ = 0;
};

// A memfd of a fixed size with its memory reserved, mapped writable here; `sealed_readers` makes ours the last
// writable mapping there can ever be. The size is sealed in any case.
struct SharedMemory {
    Fd fd;
    Mapping map;
};
SharedMemory make_shared(const char* name, uint64_t bytes, bool sealed_readers);

// Blocks every signal in the calling thread: signals are the interpreter's business.
void block_signals();

uint64_t now_ns();

}  // namespace k3::store
