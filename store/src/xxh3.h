// xxh3-128 with seed 0: the digest of every extent of a container. Written from the published description of the
// algorithm; tests/store/test_xxh3.py holds it equal to the xxhash package at every length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace k3::store {

// The 16 bytes of the digest in canonical (big-endian) order. Thread-safe, allocates nothing.
void xxh3_128(const uint8_t* data, size_t bytes, uint8_t digest[16]);

// The same digest of bytes that lie in one place and arrive there from front to back: hashed as they come, nothing
// is copied. Not thread-safe.
class Xxh3Stream {
public:
    Xxh3Stream(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}

    // The first `arrived` bytes are there, no fewer than before. Takes all whole blocks of them in.
    void advance(size_t arrived);
    // All bytes are there.
    void finish(uint8_t digest[16]);

private:
    const uint8_t* data_;
    size_t bytes_;
    size_t blocks_ = 0;  // taken in
    alignas(64) uint64_t sums_[8];
};

// What long inputs are hashed with: "avx512", "avx2" or "portable". All give the same digest. set_xxh3_variant is
// for tests and returns false when this CPU cannot run it; digests that are being computed at that moment may use
// either.
std::string xxh3_variant();
bool set_xxh3_variant(const std::string& name);

}  // namespace k3::store
