// SHA-256 of several messages side by side, one in each lane (FIPS 180-4). A message alone is a chain of dependent
// steps that leaves most of a core idle; lanes of a vector do not depend on each other.
#include "functions.h"
#include "lanes.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

constexpr int kMessages = kSha256Messages;
typedef uint32_t Words __attribute__((vector_size(4 * kMessages)));

constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

// W is Words, or uint32_t for one message.
template <class W>
K3_INLINE void turn_right(W& x, int n) {
    x = (x >> n) | (x << (32 - n));
}

template <class W>
K3_INLINE void turns(W& out, const W& x, int first, int second, int third) {
    W a = x, b = x, c = x;
    turn_right(a, first);
    turn_right(b, second);
    turn_right(c, third);
    out = a ^ b ^ c;
}

template <class W>
K3_INLINE void turns_and_shift(W& out, const W& x, int first, int second, int shift) {
    W a = x, b = x;
    turn_right(a, first);
    turn_right(b, second);
    out = a ^ b ^ (x >> shift);
}

// The 64 rounds of one block of each message; `w` holds its words and is used up.
template <class W>
K3_INLINE void rounds(W* state, W* w) {
    W v[8];
    for (int i = 0; i < 8; ++i) v[i] = state[i];
#pragma GCC unroll 64
    for (int t = 0; t < 64; ++t) {
        if (t >= 16) {
            W s0, s1;
            turns_and_shift(s0, w[(t + 1) & 15], 7, 18, 3);
            turns_and_shift(s1, w[(t + 14) & 15], 17, 19, 10);
            w[t & 15] += s0 + s1 + w[(t + 9) & 15];
        }
        // The eight variables keep their places; their names move on by one each round.
        W& a = v[(64 - t) & 7];
        W& b = v[(65 - t) & 7];
        W& c = v[(66 - t) & 7];
        W& d = v[(67 - t) & 7];
        W& e = v[(68 - t) & 7];
        W& f = v[(69 - t) & 7];
        W& g = v[(70 - t) & 7];
        W& h = v[(71 - t) & 7];
        W sum0, sum1;
        turns(sum1, e, 6, 11, 25);
        turns(sum0, a, 2, 13, 22);
        const W first = h + sum1 + (g ^ (e & (f ^ g))) + (w[t & 15] + kRound[t]);
        d += first;
        h = first + sum0 + ((a & b) | (c & (a | b)));
    }
    for (int i = 0; i < 8; ++i) state[i] += v[i];
}

K3_INLINE uint32_t big_endian(const uint8_t* p) {
    uint32_t word;
    memcpy(&word, p, 4);
    return __builtin_bswap32(word);
}

}  // namespace

void sha256_blocks(uint32_t* const* states, const uint8_t* const* data, int64_t blocks) {
    Words state[8];
    for (int i = 0; i < 8; ++i) {
        for (int m = 0; m < kMessages; ++m) state[i][m] = states[m][i];
    }
    for (int64_t block = 0; block < blocks; ++block) {
        uint32_t words[16][kMessages];
        for (int m = 0; m < kMessages; ++m) {
            for (int64_t i = 0; i < 16; ++i) words[i][m] = big_endian(data[m] + 64 * block + 4 * i);
        }
        Words w[16];
        memcpy(w, words, sizeof w);
        rounds(state, w);
    }
    for (int i = 0; i < 8; ++i) {
        for (int m = 0; m < kMessages; ++m) states[m][i] = state[i][m];
    }
}

void sha256_blocks_of_one(uint32_t* state, const uint8_t* data, int64_t blocks) {
    for (int64_t block = 0; block < blocks; ++block) {
        uint32_t w[16];
        for (int64_t i = 0; i < 16; ++i) w[i] = big_endian(data + 64 * block + 4 * i);
        rounds(state, w);
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
