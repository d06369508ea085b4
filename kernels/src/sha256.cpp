#include "sha256.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "variant.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace k3 {

namespace {

constexpr int64_t kBlock = 64;

// From so many messages on, all lanes at once are faster than one message after the other, idle lanes included.
constexpr int kWorthLanes = 3;

bool find_sha_instructions() {
#if defined(__x86_64__)
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    return __builtin_cpu_supports("sse4.1") && __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) &&
           (ebx & 1u << 29) != 0;
#else
    return false;
#endif
}

std::atomic<bool> instructions_wanted{true};

bool use_instructions() { return has_sha_instructions() && instructions_wanted.load(std::memory_order_relaxed); }

// Whole blocks that are still to be hashed into one state.
struct Run {
    uint32_t* state;
    const uint8_t* data;
    int64_t blocks;
};

void hash_one(Run& run) {
#if defined(__x86_64__)
    if (use_instructions()) return sha256_instructions_one(&run.state, &run.data, run.blocks);
#endif
    kernels().sha256_blocks_of_one(run.state, run.data, run.blocks);
}

// Hashes `blocks` blocks of each of the first `count` runs.
void hash_together(Run* runs, int count, int64_t blocks) {
    uint32_t spare[8] = {};  // what idle lanes compute
    uint32_t* states[kSha256AtOnce];
    const uint8_t* data[kSha256AtOnce];
    for (int i = 0; i < count; ++i) {
        states[i] = runs[i].state;
        data[i] = runs[i].data;
        runs[i].data += blocks * kBlock;
        runs[i].blocks -= blocks;
    }
#if defined(__x86_64__)
    if (use_instructions()) return sha256_instructions_two(states, data, blocks);
#endif
    for (int i = count; i < kernels().sha256_messages; ++i) {
        states[i] = spare;
        data[i] = data[0];
    }
    kernels().sha256_blocks(states, data, blocks);
}

// Appends to the partial block of a message until it is full; returns what is left as whole blocks, with the bytes
// behind them put aside in the message.
Run begin(Sha256& message, const uint8_t* data, int64_t nbytes) {
    const int64_t filled = static_cast<int64_t>(message.bytes % kBlock);
    message.bytes += static_cast<uint64_t>(nbytes);
    if (filled > 0) {
        const int64_t taken = std::min(nbytes, kBlock - filled);
        if (taken > 0) std::memcpy(message.rest + filled, data, static_cast<size_t>(taken));
        if (filled + taken < kBlock) return {message.state, data, 0};
        data += taken;
        nbytes -= taken;
        Run full = {message.state, message.rest, 1};
        hash_one(full);
    }
    const int64_t behind = nbytes % kBlock;
    if (behind > 0) std::memcpy(message.rest, data + nbytes - behind, static_cast<size_t>(behind));
    return {message.state, data, nbytes / kBlock};
}

}  // namespace

Sha256::Sha256()
    : state{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

bool has_sha_instructions() {
    static const bool found = find_sha_instructions();
    return found;
}

void want_sha_instructions(bool wanted) { instructions_wanted.store(wanted, std::memory_order_relaxed); }

int sha256_side_by_side() {
    // Four lanes are slower than a good implementation for one message, and elsewhere than on x86 that one may
    // have instructions.
    const int lanes = kernels().sha256_messages;
    return use_instructions() ? 2 : lanes >= 8 ? lanes : 1;
}

void sha256_update(Sha256* const* messages, const uint8_t* const* data, const int64_t* nbytes, int count) {
    Run runs[kSha256AtOnce];
    int left = 0;
    for (int i = 0; i < count; ++i) {
        const Run run = begin(*messages[i], data[i], nbytes[i]);
        if (run.blocks > 0) runs[left++] = run;
    }
    const int together = use_instructions() ? 2 : kernels().sha256_messages;
    const int worth = std::min(together, kWorthLanes);
    while (left >= worth) {
        const int width = std::min(left, together);
        int64_t blocks = runs[0].blocks;
        for (int i = 1; i < width; ++i) blocks = std::min(blocks, runs[i].blocks);
        hash_together(runs, width, blocks);
        for (int i = width - 1; i >= 0; --i) {
            if (runs[i].blocks == 0) runs[i] = runs[--left];
        }
    }
    for (int i = 0; i < left; ++i) hash_one(runs[i]);
}

void sha256_digest(const Sha256& message, uint8_t digest[32]) {
    Sha256 end = message;
    const uint64_t bits = message.bytes * 8;
    uint8_t padding[2 * kBlock] = {0x80};
    const int64_t filled = static_cast<int64_t>(message.bytes % kBlock);
    const int64_t length = (filled < 56 ? 56 : 120) - filled;
    for (int i = 0; i < 8; ++i) padding[length + i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
    Run last = begin(end, padding, length + 8);
    if (last.blocks > 0) hash_one(last);
    for (int i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(end.state[i / 4] >> (24 - 8 * (i % 4)));
}

}  // namespace k3
