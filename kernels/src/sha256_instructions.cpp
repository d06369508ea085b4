// SHA-256 with the SHA instructions of x86. One message is bound by their latency; two side by side by how many
// the CPU begins.
#include "sha256.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace k3 {
namespace {

#define K3_SHA __attribute__((target("sha,sse4.1,ssse3")))

alignas(16) constexpr uint32_t kRound[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

template <int N>
K3_SHA void hash_blocks(uint32_t* const* states, const uint8_t* const* data, int64_t blocks) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef[N], cdgh[N];
    for (int n = 0; n < N; ++n) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[n]));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(states[n] + 4));
        const __m128i cdab = _mm_shuffle_epi32(low, 0xb1), efgh = _mm_shuffle_epi32(high, 0x1b);
        abef[n] = _mm_alignr_epi8(cdab, efgh, 8);
        cdgh[n] = _mm_blend_epi16(efgh, cdab, 0xf0);
    }
    for (int64_t block = 0; block < blocks; ++block) {
        __m128i before0[N], before1[N], w[4][N];
        for (int n = 0; n < N; ++n) {
            before0[n] = abef[n];
            before1[n] = cdgh[n];
            const auto* const words = reinterpret_cast<const __m128i*>(data[n] + 64 * block);
            for (int i = 0; i < 4; ++i) w[i][n] = _mm_shuffle_epi8(_mm_loadu_si128(words + i), swap);
        }
#pragma GCC unroll 16
        for (int four = 0; four < 16; ++four) {  // rounds
            const __m128i k = _mm_load_si128(reinterpret_cast<const __m128i*>(kRound + int64_t{4} * four));
            __m128i* const own = w[four & 3];
            for (int n = 0; n < N; ++n) {
                if (four >= 4) {
                    const __m128i next = w[(four + 1) & 3][n], last = w[(four + 3) & 3][n];
                    const __m128i middle = _mm_alignr_epi8(last, w[(four + 2) & 3][n], 4);
                    own[n] = _mm_sha256msg2_epu32(_mm_add_epi32(_mm_sha256msg1_epu32(own[n], next), middle), last);
                }
                const __m128i sum = _mm_add_epi32(own[n], k);
                cdgh[n] = _mm_sha256rnds2_epu32(cdgh[n], abef[n], sum);
                abef[n] = _mm_sha256rnds2_epu32(abef[n], cdgh[n], _mm_shuffle_epi32(sum, 0x0e));
            }
        }
        for (int n = 0; n < N; ++n) {
            abef[n] = _mm_add_epi32(abef[n], before0[n]);
            cdgh[n] = _mm_add_epi32(cdgh[n], before1[n]);
        }
    }
    for (int n = 0; n < N; ++n) {
        const __m128i feba = _mm_shuffle_epi32(abef[n], 0x1b), dchg = _mm_shuffle_epi32(cdgh[n], 0xb1);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(states[n]), _mm_blend_epi16(feba, dchg, 0xf0));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(states[n] + 4), _mm_alignr_epi8(dchg, feba, 8));
    }
}

}  // namespace

void sha256_instructions_one(uint32_t* const* states, const uint8_t* const* data, int64_t blocks) {
    hash_blocks<1>(states, data, blocks);
}

void sha256_instructions_two(uint32_t* const* states, const uint8_t* const* data, int64_t blocks) {
    hash_blocks<2>(states, data, blocks);
}

}  // namespace k3
#endif
