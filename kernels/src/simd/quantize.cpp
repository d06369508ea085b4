// Quantizers: weights to int8 per row and int4 per group of 64, activations to int8 per group.
//
//     scale = max(absmax / limit, 1e-20);  q = round_half_to_even(w / scale), clipped
//
// Everything is one IEEE float32 operation after the other (a true division, no reciprocal), so the bytes are
// the same on every machine. The largest magnitude is found on bit patterns, whose integer order is that of
// the magnitudes, with infinities and NaNs above all finite numbers.
#include "decode.h"
#include "functions.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

constexpr int32_t kInfinityBits = 0x7f800000;
constexpr float kScaleFloor = 1e-20f;

K3_INLINE float as_float(int32_t pattern) {
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

K3_INLINE float scale_of(int32_t absmax_bits, float limit) {
    const float scale = as_float(absmax_bits) / limit;
    return scale < kScaleFloor ? kScaleFloor : scale;
}

// Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low bits (for |x| < 2^22).
constexpr float kRounder = 12582912.0f;
constexpr int32_t kRounderBits = 0x4b400000;

K3_INLINE I32x16 quantized(const F32x16& w, const F32x16& scale, float low, float high) {
    const F32x16 t = min(max(w / scale, splat(low)), splat(high));
    return bits(t + splat(kRounder)) - splat_int(kRounderBits);
}

K3_INLINE I32x16 abs_bits(const F32x16& w) { return bits(w) & splat_int(0x7fffffff); }

// The low byte of each of sixteen lanes.
#if defined(__AVX512F__)
K3_INLINE void store_bytes(uint8_t* p, const I32x16& v) {
    _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v));
}
#elif defined(__AVX2__)
K3_INLINE void store_bytes(uint8_t* p, const I32x16& v) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32((__m256i)v.lo, (__m256i)v.hi), 0xd8);
    const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
#else
K3_INLINE void store_bytes(uint8_t* p, const I32x16& v) {
    int32_t lane[kLanes];
    memcpy(lane, &v, sizeof lane);
    for (int i = 0; i < kLanes; ++i) p[i] = (uint8_t)lane[i];
}
#endif

// Sixteen nibbles (one per lane) as eight bytes, even lanes low.
K3_INLINE void store_nibbles(uint8_t* p, const I32x16& v) {
    uint8_t lane[kLanes];
    store_bytes(lane, v);
#if defined(__AVX2__)
    const __m128i weights = _mm_set1_epi16(0x1001);  // low byte times 1, high byte times 16
    const __m128i pairs = _mm_maddubs_epi16(_mm_loadu_si128((const __m128i*)lane), weights);
    _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(pairs, pairs));
#else
    for (int64_t i = 0; i < 8; ++i) p[i] = (uint8_t)(lane[2 * i] | lane[2 * i + 1] << 4);
#endif
}

template <class Source>
bool int8_row(const Source& w, int64_t columns, uint8_t* q, float* scale_out) {
    const int64_t whole = columns / kLanes * kLanes, rest = columns - whole;
    I32x16 top = splat_int(0);
    for (int64_t k = 0; k < whole; k += kLanes) top = max(top, abs_bits(w.at(k)));
    if (rest) top = max(top, abs_bits(w.first(whole, rest)));
    const int32_t absmax = reduce_max(top);
    if (absmax >= kInfinityBits) return false;
    *scale_out = scale_of(absmax, 127.0f);
    const F32x16 scale = splat(*scale_out);
    for (int64_t k = 0; k < whole; k += kLanes) store_bytes(q + k, quantized(w.at(k), scale, -127.0f, 127.0f));
    if (rest) {
        uint8_t part[kLanes];
        store_bytes(part, quantized(w.first(whole, rest), scale, -127.0f, 127.0f));
        memcpy(q + whole, part, rest);
    }
    return true;
}

template <class Source>
bool int4_row(const Source& w, int64_t columns, uint8_t* q, float* scales) {
    const I32x16 bias = splat_int(8);
    int64_t start = 0;
    for (; start + kInt4Group <= columns; start += kInt4Group) {
        const F32x16 a = w.at(start), b = w.at(start + 16), c = w.at(start + 32), d = w.at(start + 48);
        const int32_t absmax = reduce_max(max(max(abs_bits(a), abs_bits(b)), max(abs_bits(c), abs_bits(d))));
        if (absmax >= kInfinityBits) return false;
        const F32x16 scale = splat(*scales++ = scale_of(absmax, 7.0f));
        store_nibbles(q + start / 2, quantized(a, scale, -8.0f, 7.0f) + bias);
        store_nibbles(q + start / 2 + 8, quantized(b, scale, -8.0f, 7.0f) + bias);
        store_nibbles(q + start / 2 + 16, quantized(c, scale, -8.0f, 7.0f) + bias);
        store_nibbles(q + start / 2 + 24, quantized(d, scale, -8.0f, 7.0f) + bias);
    }
    if (start == columns) return true;
    I32x16 top = splat_int(0);
    for (int64_t k = start; k < columns; k += kLanes) {
        top = max(top, abs_bits(columns - k < kLanes ? w.first(k, columns - k) : w.at(k)));
    }
    const int32_t absmax = reduce_max(top);
    if (absmax >= kInfinityBits) return false;
    const F32x16 scale = splat(*scales = scale_of(absmax, 7.0f));
    for (int64_t k = start; k < columns; k += kLanes) {
        const int64_t count = columns - k < kLanes ? columns - k : kLanes;
        uint8_t part[kLanes / 2];
        store_nibbles(part, quantized(count < kLanes ? w.first(k, count) : w.at(k), scale, -8.0f, 7.0f) + bias);
        memcpy(q + k / 2, part, (count + 1) / 2);
    }
    return true;
}

template <class Source, class Row>
bool rows_from(const Rows& w, int64_t begin, int64_t end, const Row& row) {
    const Matrix view = {.encoding = w.encoding, .rows = 0, .columns = w.columns, .data = w.data};
    Source source;
    for (int64_t r = begin; r < end; ++r) {
        source_of(source, view, r);
        if (!row(source, r)) return false;
    }
    return true;
}

template <class Row>
bool rows(const Rows& w, int64_t begin, int64_t end, const Row& row) {
    if (w.encoding == Encoding::bf16) return rows_from<SourceBf16>(w, begin, end, row);
    if (w.encoding == Encoding::f16) return rows_from<SourceF16>(w, begin, end, row);
    return rows_from<SourceF32>(w, begin, end, row);
}

}  // namespace

bool quantize_int8(const Rows& w, int64_t begin, int64_t end, uint8_t* q, float* scales) {
    const auto row = [&](const auto& source, int64_t r) {
        return int8_row(source, w.columns, q + r * w.columns, scales + r);
    };
    return rows(w, begin, end, row);
}

bool quantize_int4(const Rows& w, int64_t begin, int64_t end, uint8_t* q, float* scales) {
    const int64_t bytes = ceil_div(w.columns, 2), groups = ceil_div(w.columns, kInt4Group);
    const auto row = [&](const auto& source, int64_t r) {
        return int4_row(source, w.columns, q + r * bytes, scales + r * groups);
    };
    return rows(w, begin, end, row);
}

bool quantize_groups(const float* x, int64_t columns, int64_t row, int64_t first_group, const Activations& out) {
    for (int64_t start = 0, g = first_group; start < columns; start += out.group, ++g) {
        const int64_t count = columns - start < out.group ? columns - start : out.group;
        int8_t* q = out.q + (g * out.rows + row) * out.group;
        I32x16 top = splat_int(0);
        for (int64_t k = 0; k < count; k += kLanes) {
            top = max(top, abs_bits(load_some(x + start + k, count - k)));
        }
        const int32_t absmax = reduce_max(top);
        if (absmax >= kInfinityBits) return false;
        const F32x16 scale = splat(out.scales[g * out.rows + row] = scale_of(absmax, 127.0f));
        for (int64_t k = 0; k < out.group; k += kLanes) {
            const F32x16 part = k < count ? load_some(x + start + k, count - k) : splat(0.0f);
            store_bytes((uint8_t*)q + k, quantized(part, scale, -127.0f, 127.0f));
        }
    }
    finish_groups(row, first_group, ceil_div(columns, out.group), out);
    return true;
}

}  // namespace K3_VARIANT
}  // namespace k3
