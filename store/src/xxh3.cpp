#include "xxh3.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace k3::store {

namespace {

constexpr uint64_t kP32_1 = 0x9E3779B1u, kP32_2 = 0x85EBCA77u, kP32_3 = 0xC2B2AE3Du;
constexpr uint64_t kP64_1 = 0x9E3779B185EBCA87u, kP64_2 = 0xC2B2AE3D27D4EB4Fu, kP64_3 = 0x165667B19E3779F9u,
                   kP64_4 = 0x85EBCA77C2B2AE63u, kP64_5 = 0x27D4EB2F165667C5u;
constexpr uint64_t kMix1 = 0x165667919E3779F9u, kMix2 = 0x9FB21C651E98DF25u;

constexpr size_t kStripe = 64;
constexpr size_t kStripesPerBlock = 16;
constexpr size_t kBlock = kStripe * kStripesPerBlock;

// The algorithm's default secret.
alignas(64) constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4,
    0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e,
    0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21, 0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43,
    0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19,
    0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8, 0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7,
    0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78,
    0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16,
    0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f,
    0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

struct Hash {
    uint64_t low, high;
};

uint32_t load32(const uint8_t* p) {
    uint32_t v;
    std::memcpy(&v, p, 4);
    return v;
}

uint64_t load64(const uint8_t* p) {
    uint64_t v;
    std::memcpy(&v, p, 8);
    return v;
}

Hash multiply(uint64_t a, uint64_t b) {
    const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
    return {static_cast<uint64_t>(product), static_cast<uint64_t>(product >> 64)};
}

uint64_t multiply_fold(uint64_t a, uint64_t b) {
    const Hash product = multiply(a, b);
    return product.low ^ product.high;
}

uint64_t avalanche(uint64_t h) {
    h ^= h >> 37;
    h *= kMix1;
    return h ^ (h >> 32);
}

uint64_t avalanche_long(uint64_t h) {
    h ^= h >> 33;
    h *= kP64_2;
    h ^= h >> 29;
    h *= kP64_3;
    return h ^ (h >> 32);
}

Hash up_to_16(const uint8_t* in, size_t n) {
    const uint8_t* s = kSecret;
    if (n > 8) {
        Hash m = multiply(load64(in) ^ load64(in + n - 8) ^ load64(s + 32) ^ load64(s + 40), kP64_1);
        m.low += static_cast<uint64_t>(n - 1) << 54;
        const uint64_t last = load64(in + n - 8) ^ load64(s + 48) ^ load64(s + 56);
        m.high += last + (last & 0xFFFFFFFFu) * (kP32_2 - 1);
        m.low ^= __builtin_bswap64(m.high);
        Hash h = multiply(m.low, kP64_2);
        h.high += m.high * kP64_2;
        return {avalanche(h.low), avalanche(h.high)};
    }
    if (n >= 4) {
        const uint64_t both = load32(in) | static_cast<uint64_t>(load32(in + n - 4)) << 32;
        Hash m = multiply(both ^ load64(s + 16) ^ load64(s + 24), kP64_1 + (n << 2));
        m.high += m.low << 1;
        m.low ^= m.high >> 3;
        m.low = (m.low ^ (m.low >> 35)) * kMix2;
        m.low ^= m.low >> 28;
        return {m.low, avalanche(m.high)};
    }
    if (n > 0) {
        const uint32_t low = static_cast<uint32_t>(in[0]) << 16 | static_cast<uint32_t>(in[n >> 1]) << 24 |
                             in[n - 1] | static_cast<uint32_t>(n) << 8;
        const uint32_t swapped = __builtin_bswap32(low);
        const uint32_t high = swapped << 13 | swapped >> 19;
        return {avalanche_long(low ^ uint64_t{load32(s) ^ load32(s + 4)}),
                avalanche_long(high ^ uint64_t{load32(s + 8) ^ load32(s + 12)})};
    }
    return {avalanche_long(load64(s + 64) ^ load64(s + 72)), avalanche_long(load64(s + 80) ^ load64(s + 88))};
}

uint64_t mix16(const uint8_t* in, const uint8_t* s) {
    return multiply_fold(load64(in) ^ load64(s), load64(in + 8) ^ load64(s + 8));
}

void mix32(Hash& acc, const uint8_t* first, const uint8_t* second, const uint8_t* s) {
    acc.low += mix16(first, s);
    acc.low ^= load64(second) + load64(second + 8);
    acc.high += mix16(second, s + 16);
    acc.high ^= load64(first) + load64(first + 8);
}

Hash up_to_240(const uint8_t* in, size_t n) {
    Hash acc = {n * kP64_1, 0};
    if (n <= 128) {
        for (size_t i = (n - 1) / 32 + 1; i-- > 0;)
            mix32(acc, in + 16 * i, in + n - 16 * (i + 1), kSecret + 32 * i);
    } else {
        for (size_t i = 32; i < 160; i += 32) mix32(acc, in + i - 32, in + i - 16, kSecret + i - 32);
        acc = {avalanche(acc.low), avalanche(acc.high)};
        for (size_t i = 160; i <= n; i += 32) mix32(acc, in + i - 32, in + i - 16, kSecret + 3 + i - 160);
        mix32(acc, in + n - 16, in + n - 32, kSecret + 103);
    }
    const uint64_t low = acc.low + acc.high;
    const uint64_t high = acc.low * kP64_1 + acc.high * kP64_4 + n * kP64_2;
    return {avalanche(low), uint64_t{0} - avalanche(high)};
}

// Adds `stripes` stripes; the secret moves on by 8 bytes with each. `scramble` follows a full block.
using Accumulate = void (*)(uint64_t* acc, const uint8_t* in, const uint8_t* secret, size_t stripes,
                            bool scramble);

void accumulate_portable(uint64_t* acc, const uint8_t* in, const uint8_t* secret, size_t stripes, bool scramble) {
    for (size_t n = 0; n < stripes; ++n) {
        for (size_t i = 0; i < 8; ++i) {
            const uint64_t value = load64(in + n * kStripe + 8 * i);
            const uint64_t keyed = value ^ load64(secret + 8 * n + 8 * i);
            acc[i ^ 1] += value;
            acc[i] += (keyed & 0xFFFFFFFFu) * (keyed >> 32);
        }
    }
    if (!scramble) return;
    for (size_t i = 0; i < 8; ++i) acc[i] = ((acc[i] ^ (acc[i] >> 47)) ^ load64(kSecret + 128 + 8 * i)) * kP32_1;
}

#if defined(__x86_64__)
constexpr size_t kAhead = 1024;  // bytes prefetched ahead: the data has just come from a drive and is in no cache

__attribute__((target("avx2"))) void accumulate_avx2(uint64_t* acc, const uint8_t* in, const uint8_t* secret,
                                                     size_t stripes, bool scramble) {
    __m256i sum[2];
    for (int i = 0; i < 2; ++i) sum[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(acc) + i);
    for (size_t n = 0; n < stripes; ++n) {
        const uint8_t* at = in + n * kStripe;
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
        for (int i = 0; i < 2; ++i) {
            const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + i);
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret + 8 * n) + i);
            const __m256i keyed = _mm256_xor_si256(value, key);
            const __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            sum[i] = _mm256_add_epi64(sum[i], _mm256_add_epi64(product, _mm256_shuffle_epi32(value, 0x4E)));
        }
    }
    const __m256i prime = _mm256_set1_epi64x(static_cast<long long>(kP32_1));
    for (int i = 0; i < 2; ++i) {
        if (scramble) {
            const __m256i key = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kSecret + 128) + i);
            const __m256i x = _mm256_xor_si256(_mm256_xor_si256(sum[i], _mm256_srli_epi64(sum[i], 47)), key);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), prime);
            sum[i] = _mm256_add_epi64(_mm256_mul_epu32(x, prime), _mm256_slli_epi64(high, 32));
        }
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(acc) + i, sum[i]);
    }
}

__attribute__((target("avx512f"))) void accumulate_avx512(uint64_t* acc, const uint8_t* in, const uint8_t* secret,
                                                          size_t stripes, bool scramble) {
    __m512i sum = _mm512_loadu_si512(acc);
    for (size_t n = 0; n < stripes; ++n) {
        const uint8_t* at = in + n * kStripe;
        _mm_prefetch(reinterpret_cast<const char*>(at + kAhead), _MM_HINT_T0);
        const __m512i value = _mm512_loadu_si512(at);
        const __m512i keyed = _mm512_xor_si512(value, _mm512_loadu_si512(secret + 8 * n));
        const __m512i product = _mm512_mul_epu32(keyed, _mm512_srli_epi64(keyed, 32));
        const __m512i swapped = _mm512_shuffle_epi32(value, static_cast<_MM_PERM_ENUM>(0x4E));
        sum = _mm512_add_epi64(sum, _mm512_add_epi64(product, swapped));
    }
    if (scramble) {
        const __m512i prime = _mm512_set1_epi64(static_cast<long long>(kP32_1));
        const __m512i key = _mm512_loadu_si512(kSecret + 128);
        const __m512i x = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), key);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), prime);
        sum = _mm512_add_epi64(_mm512_mul_epu32(x, prime), _mm512_slli_epi64(high, 32));
    }
    _mm512_storeu_si512(acc, sum);
}
#endif

struct Variant {
    const char* name;
    Accumulate run;
};

constexpr Variant kPortable = {"portable", accumulate_portable};
#if defined(__x86_64__)
constexpr Variant kAvx2 = {"avx2", accumulate_avx2};
constexpr Variant kAvx512 = {"avx512", accumulate_avx512};
#endif

const Variant* find(const std::string& wanted) {  // empty: the fastest
#if defined(__x86_64__)
    __builtin_cpu_init();
    if ((wanted.empty() || wanted == kAvx512.name) && __builtin_cpu_supports("avx512f")) return &kAvx512;
    if ((wanted.empty() || wanted == kAvx2.name) && __builtin_cpu_supports("avx2")) return &kAvx2;
#endif
    return wanted.empty() || wanted == kPortable.name ? &kPortable : nullptr;
}

std::atomic<const Variant*>& chosen() {
    static std::atomic<const Variant*> variant{find("")};
    return variant;
}

uint64_t merge(const uint64_t* acc, const uint8_t* secret, uint64_t start) {
    uint64_t result = start;
    for (size_t i = 0; i < 4; ++i) {
        result +=
            multiply_fold(acc[2 * i] ^ load64(secret + 16 * i), acc[2 * i + 1] ^ load64(secret + 16 * i + 8));
    }
    return avalanche(result);
}

constexpr size_t kShortMax = 240;
constexpr uint64_t kFirstSums[8] = {kP32_3, kP64_1, kP64_2, kP64_3, kP64_4, kP32_2, kP64_5, kP32_1};

void write_digest(Hash hash, uint8_t digest[16]) {
    const uint64_t high = __builtin_bswap64(hash.high), low = __builtin_bswap64(hash.low);
    std::memcpy(digest, &high, 8);
    std::memcpy(digest + 8, &low, 8);
}

}  // namespace

void Xxh3Stream::advance(size_t arrived) {
    if (bytes_ <= kShortMax) return;
    const Accumulate accumulate = chosen().load(std::memory_order_relaxed)->run;
    // The last block, whole or not, is finish()'s.
    const size_t ready = std::min(arrived / kBlock, (bytes_ - 1) / kBlock);
    if (blocks_ == 0) std::memcpy(sums_, kFirstSums, sizeof sums_);
    for (; blocks_ < ready; ++blocks_)
        accumulate(sums_, data_ + blocks_ * kBlock, kSecret, kStripesPerBlock, true);
}

void Xxh3Stream::finish(uint8_t digest[16]) {
    if (bytes_ <= kShortMax) {
        write_digest(bytes_ <= 16 ? up_to_16(data_, bytes_) : up_to_240(data_, bytes_), digest);
        return;
    }
    advance(bytes_);
    const Accumulate accumulate = chosen().load(std::memory_order_relaxed)->run;
    accumulate(sums_, data_ + blocks_ * kBlock, kSecret, (bytes_ - 1 - blocks_ * kBlock) / kStripe, false);
    accumulate(sums_, data_ + bytes_ - kStripe, kSecret + 121, 1, false);
    write_digest({merge(sums_, kSecret + 11, bytes_ * kP64_1), merge(sums_, kSecret + 117, ~(bytes_ * kP64_2))},
                 digest);
}

void xxh3_128(const uint8_t* data, size_t bytes, uint8_t digest[16]) { Xxh3Stream(data, bytes).finish(digest); }

std::string xxh3_variant() { return chosen().load()->name; }

bool set_xxh3_variant(const std::string& name) {
    const Variant* found = find(name);
    if (found == nullptr) return false;
    chosen().store(found);
    return true;
}

}  // namespace k3::store
