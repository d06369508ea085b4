#include "quantize.h"

#include <algorithm>
#include <atomic>
#include <cstring>

#include "threads.h"
#include "variant.h"

namespace k3 {

namespace {

// Rows that make up about 64 kB: less is not worth waking a thread for.
int64_t grain_of(int64_t columns) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, columns)); }

float value_at(const Rows& w, int64_t index) {
    if (w.encoding == Encoding::f32) return static_cast<const float*>(w.data)[index];
    const uint32_t stored = static_cast<const uint16_t*>(w.data)[index], rest = stored & 0x7fff;
    const bool half = w.encoding == Encoding::f16;
    const uint32_t pattern = half ? rest << 13 | (rest >= 0x7c00 ? 0x7f800000u : 0u) : stored << 16;
    float value;
    std::memcpy(&value, &pattern, sizeof value);
    if (!half) return value;
    return (stored & 0x8000 ? -value : value) * 0x1p112f;  // as from_f16 of simd/decode.h
}

template <class Quantizer>
bool split(const Rows& w, int64_t rows, const Quantizer& quantizer) {
    std::atomic<bool> finite{true};
    parallel_for(rows, grain_of(w.columns), [&](int64_t begin, int64_t end) {
        if (finite.load(std::memory_order_relaxed) && !quantizer(begin, end)) finite.store(false);
    });
    return finite.load();
}

}  // namespace

NonFinite find_nonfinite(const Rows& w, int64_t rows) {
    for (int64_t i = 0; i < rows * w.columns; ++i) {
        const float value = value_at(w, i);
        if (!(value - value == 0.0f)) return {true, i / w.columns, i % w.columns, value};
    }
    return {false, 0, 0, 0.0f};
}

bool quantize_int8(const Rows& w, int64_t rows, uint8_t* q, float* scales) {
    return split(w, rows,
                 [&](int64_t begin, int64_t end) { return kernels().quantize_int8(w, begin, end, q, scales); });
}

bool quantize_int4(const Rows& w, int64_t rows, uint8_t* q, float* scales) {
    return split(w, rows,
                 [&](int64_t begin, int64_t end) { return kernels().quantize_int4(w, begin, end, q, scales); });
}

void decode(const Matrix& w, float* out) {
    parallel_for(w.rows, grain_of(w.columns),
                 [&](int64_t begin, int64_t end) { kernels().decode(w, begin, end, out + begin * w.columns); });
}

int64_t find_reserved(const uint8_t* exponents, int64_t count) {
    const void* at = count > 0 ? std::memchr(exponents, 255, static_cast<size_t>(count)) : nullptr;
    return at == nullptr ? -1 : static_cast<const uint8_t*>(at) - exponents;
}

int64_t first_difference(const uint8_t* a, const uint8_t* b, int64_t count) {
    constexpr int64_t kBlock = 65536;  // memcmp says that bytes differ, not where: look again in one block
    for (int64_t start = 0; start < count; start += kBlock) {
        const int64_t length = std::min(kBlock, count - start);
        if (std::memcmp(a + start, b + start, static_cast<size_t>(length)) == 0) continue;
        for (int64_t i = start; i < start + length; ++i) {
            if (a[i] != b[i]) return i;
        }
    }
    return -1;
}

}  // namespace k3
