// What this machine could do at most, for benchmarks: integer products on nothing but registers, and reading.
#include "functions.h"
#include "tile.h"

namespace k3 {
namespace K3_VARIANT {

int64_t probe_dots(int64_t rounds, int32_t* result) {
    constexpr int kChains = kBiasedBytes ? 12 : 3;  // the product's latency in one, registers in the other case
    constexpr int kTurns = 32;
    RowInts sums[kChains], w[kChains];
    int8_t x[kTurns * 4];
    for (int i = 0; i < kChains; ++i) sums[i] = w[i] = all_rows(0x01020300 + i);
    for (int i = 0; i < kTurns * 4; ++i) x[i] = (int8_t)i;
    for (int64_t n = 0; n < rounds; ++n) {
        asm volatile("" : "+m"(x));  // the same products again, which the compiler need not know
        for (int64_t turn = 0; turn < kTurns; ++turn) {
            const RowInts own = word_at(x + turn * 4);
#pragma GCC unroll 12
            for (int i = 0; i < kChains; ++i) sums[i] = dot_small(sums[i], w[i], own);
        }
    }
    for (int i = 1; i < kChains; ++i) sums[0] = sums[0] + sums[i];
    memcpy(result, &sums[0], sizeof *result);
    return rounds * kTurns * kChains * kRowBlock * 4;
}

int32_t probe_read(const uint8_t* p, int64_t bytes) {
    constexpr int kVectors = 4;
    I32x16 all[kVectors];
    for (int i = 0; i < kVectors; ++i) all[i] = splat_int(0);
    for (int64_t at = 0; at + (int64_t)sizeof all <= bytes; at += sizeof all) {
        I32x16 part[kVectors];
        memcpy(part, p + at, sizeof part);
        for (int i = 0; i < kVectors; ++i) all[i] = all[i] | part[i];
    }
    return reduce_max((all[0] | all[1]) | (all[2] | all[3]));
}

}  // namespace K3_VARIANT
}  // namespace k3
