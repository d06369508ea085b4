// SHA-256 (FIPS 180-4) of several messages at once: for the digests of files that are read side by side.
//
// Serial, allocates nothing and throws nothing. A message may be used by one thread at a time; different messages
// by different threads. The bytes hashed are the same with every variant and every number of messages.
#pragma once

#include <cstdint>

namespace k3 {

// A message of which some bytes have been taken in.
struct Sha256 {
    Sha256();

    uint32_t state[8];
    uint64_t bytes = 0;     // taken in so far
    uint8_t rest[64] = {};  // the last bytes % 64 of them, which are not in `state` yet
};

// Most messages that one call of sha256_update takes.
constexpr int kSha256AtOnce = 64;

// Appends nbytes[i] bytes from data[i] to messages[i], which are different ones; count <= kSha256AtOnce.
void sha256_update(Sha256* const* messages, const uint8_t* const* data, const int64_t* nbytes, int count);

// The digest of the bytes so far; the message can go on.
void sha256_digest(const Sha256& message, uint8_t digest[32]);

// Messages that this CPU hashes side by side faster than one after the other; 1 where a library for one message is
// the better choice. More in one call gain nothing.
int sha256_side_by_side();

// Whether this CPU has SHA instructions. They are used unless somebody does not want them, to test or to measure.
bool has_sha_instructions();
void want_sha_instructions(bool wanted);

// For sha256.cpp: whole blocks of one message and of two side by side, where the CPU has SHA instructions. A state
// is eight words.
void sha256_instructions_one(uint32_t* const* states, const uint8_t* const* data, int64_t blocks);
void sha256_instructions_two(uint32_t* const* states, const uint8_t* const* data, int64_t blocks);

}  // namespace k3
