// Keeps the daemon alive when it touches a page of a client's ring that the kernel cannot give any more.
//
// A client can punch holes into its ring: it must be able to write there, and no seal allows the one without the
// other. The next touch makes a new page, and where there is no memory for it (vm.overcommit_memory=2) that is a
// SIGBUS. Then the whole mapping is replaced by private memory of zeros, and `tripped` says so: the client is
// dropped.
#pragma once

#include <cstdint>

namespace k3::store {

class BusGuard {
public:
    BusGuard() = default;
    // std::system_error (ENFILE) when there are more guards than clients can be.
    BusGuard(uint8_t* memory, uint64_t bytes);
    BusGuard(BusGuard&& other) noexcept : place_(other.place_) { other.place_ = -1; }
    BusGuard& operator=(BusGuard&& other) noexcept;
    ~BusGuard() { reset(); }  // before its memory is unmapped
    bool tripped() const;
    void reset();

private:
    int place_ = -1;
};

}  // namespace k3::store
