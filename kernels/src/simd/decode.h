// Sixteen weights of one row as float32, from every encoding: the one place that says what stored weights
// mean.
//
// A source is built for one row, whose sixteen weights take kStepBytes from bytes() on; at(k) gives columns
// k .. k+15 (k a multiple of 16), first(k, n) gives the n < 16 columns from k and zeros after them.
#pragma once

#include "../matrix.h"
#include "lanes.h"

namespace k3 {
namespace K3_VARIANT {

#if defined(__AVX512F__)
K3_INLINE F32x16 from_int8(__m128i b) { return (F32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b)); }
// Sixteen words, each to the upper half of a lane, in one step.
K3_INLINE F32x16 from_bf16(const uint16_t* p) {
    alignas(64) static const uint16_t place[32] = {0, 0, 0, 1, 0, 2,  0, 3,  0, 4,  0, 5,  0, 6,  0, 7,
                                                   0, 8, 0, 9, 0, 10, 0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
    const __m512i words = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)p));
    return (F32x16)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, _mm512_load_si512(place), words);
}
#elif defined(__AVX2__)
K3_INLINE F32x16 from_int8(__m128i b) {
    return {(f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b)),
            (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(b, 8)))};
}
K3_INLINE F32x16 from_bf16(const uint16_t* p) {
    const __m256i lo = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
    const __m256i hi = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(p + 8)));
    return {(f32x8)_mm256_slli_epi32(lo, 16), (f32x8)_mm256_slli_epi32(hi, 16)};
}
#else
K3_INLINE F32x16 from_int8(const int8_t* p) {
    float lane[kLanes];
    for (int i = 0; i < kLanes; ++i) lane[i] = (float)p[i];
    return load(lane);
}
K3_INLINE F32x16 from_bf16(const uint16_t* p) {
    uint32_t lane[kLanes];
    for (int i = 0; i < kLanes; ++i) lane[i] = (uint32_t)p[i] << 16;
    float value[kLanes];
    memcpy(value, lane, sizeof value);
    return load(value);
}
#endif

// binary16 as float32, exact. Below the exponent of infinity the pattern, moved to float32's place and taken
// as such, is too small by 2^112, subnormal numbers too.
#if defined(__AVX512F__)
K3_INLINE F32x16 from_f16(const uint16_t* p) {
    return (F32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
#else
K3_INLINE F32x16 from_f16(const uint16_t* p) {
    uint32_t moved[kLanes], sign[kLanes];
    float value[kLanes];
    for (int i = 0; i < kLanes; ++i) {
        const uint32_t rest = p[i] & 0x7fff;
        sign[i] = (uint32_t)(p[i] & 0x8000) << 16;
        moved[i] = rest << 13 | (rest >= 0x7c00 ? 0x7f800000u : 0u);
    }
    memcpy(value, moved, sizeof value);
    for (int i = 0; i < kLanes; ++i) value[i] = value[i] * 0x1p112f;  // infinity and NaN stay what they are
    memcpy(moved, value, sizeof moved);
    for (int i = 0; i < kLanes; ++i) moved[i] |= sign[i];
    memcpy(value, moved, sizeof value);
    return load(value);
}
#endif

// INT4 stores weight + 8. MXFP4 nibbles are E2M1: bit 3 the sign, {0, .5, 1, 1.5, 2, 3, 4, 6} by the others;
// doubled they are integers, but for the sign of zero, which only the float32 form keeps.
alignas(16) static const int8_t kInt4Table[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
alignas(16) static const int8_t kMxDoubledTable[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#if defined(__AVX2__)
K3_INLINE F32x16 from_int8(const int8_t* p) { return from_int8(_mm_loadu_si128((const __m128i*)p)); }

// Sixteen nibbles (8 bytes, low nibble first), one per byte.
K3_INLINE __m128i nibbles16(const uint8_t* p) {
    const __m128i b = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)p));
    return _mm_and_si128(_mm_or_si128(b, _mm_slli_epi16(b, 4)), _mm_set1_epi8(15));
}
K3_INLINE F32x16 from_int4(const uint8_t* p) {
    return from_int8(_mm_shuffle_epi8(_mm_load_si128((const __m128i*)kInt4Table), nibbles16(p)));
}
#else
K3_INLINE F32x16 from_int4(const uint8_t* p) {
    int8_t value[kLanes];
    for (int64_t i = 0; i < 8; ++i) {
        value[2 * i] = kInt4Table[p[i] & 15];
        value[2 * i + 1] = kInt4Table[p[i] >> 4];
    }
    return from_int8(value);
}
#endif

// Doubled E2M1 values as float32, with the sign of zero.
#if defined(__AVX512F__)
K3_INLINE F32x16 from_e2m1(const uint8_t* p) {
    const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12);
    return (F32x16)_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(nibbles16(p)), table);
}
#elif defined(__AVX2__)
// The upper two bytes of each float32 by two table look-ups; the lower two are zero.
K3_INLINE F32x16 from_e2m1(const uint8_t* p) {
    const __m128i n = nibbles16(p);
    const __m128i high = _mm_setr_epi8(0, 0x3f, 0x40, 0x40, 0x40, 0x40, 0x41, 0x41, -0x80, -0x41, -0x40, -0x40,
                                       -0x40, -0x40, -0x3f, -0x3f);
    const __m128i low =
        _mm_setr_epi8(0, -0x80, 0, 0x40, -0x80, -0x40, 0, 0x40, 0, -0x80, 0, 0x40, -0x80, -0x40, 0, 0x40);
    const __m128i h = _mm_shuffle_epi8(high, n), l = _mm_shuffle_epi8(low, n);
    const __m256i a = _mm256_cvtepu16_epi32(_mm_unpacklo_epi8(l, h));
    const __m256i b = _mm256_cvtepu16_epi32(_mm_unpackhi_epi8(l, h));
    return {(f32x8)_mm256_slli_epi32(a, 16), (f32x8)_mm256_slli_epi32(b, 16)};
}
#else
K3_INLINE F32x16 from_e2m1(const uint8_t* p) {
    static const float table[16] = {0, 1, 2, 3, 4, 6, 8, 12, -0.0f, -1, -2, -3, -4, -6, -8, -12};
    float value[kLanes];
    for (int64_t i = 0; i < 8; ++i) {
        value[2 * i] = table[p[i] & 15];
        value[2 * i + 1] = table[p[i] >> 4];
    }
    return load(value);
}
#endif

// 2^(s - 128): half of the factor that scale byte s stands for, so that it multiplies doubled E2M1 values.
// s = 0 and 1 give subnormal numbers. Not for s = 255, which stands for no number and is refused before.
K3_INLINE float half_factor(uint8_t s) {
    const uint32_t subnormal = 0x00200000u << (s & 1), normal = ((uint32_t)s - 1) << 23;
    const uint32_t pattern = s < 2 ? subnormal : normal;
    float value;
    memcpy(&value, &pattern, sizeof value);
    return value;
}

struct SourceF32 {
    static constexpr int kStepBytes = 64;
    const float* row;
    K3_INLINE_MEMBER const char* bytes() const { return (const char*)row; }
    K3_INLINE_MEMBER F32x16 at(int64_t k) const { return load(row + k); }
    K3_INLINE_MEMBER F32x16 first(int64_t k, int64_t n) const { return load_first(row + k, n); }
};

struct SourceBf16 {
    static constexpr int kStepBytes = 32;
    const uint16_t* row;
    K3_INLINE_MEMBER const char* bytes() const { return (const char*)row; }
    K3_INLINE_MEMBER F32x16 at(int64_t k) const { return from_bf16(row + k); }
    K3_INLINE_MEMBER F32x16 first(int64_t k, int64_t n) const {
        uint16_t part[kLanes] = {};
        memcpy(part, row + k, n * sizeof *part);
        return from_bf16(part);
    }
};

struct SourceF16 {
    static constexpr int kStepBytes = 32;
    const uint16_t* row;
    K3_INLINE_MEMBER const char* bytes() const { return (const char*)row; }
    K3_INLINE_MEMBER F32x16 at(int64_t k) const { return from_f16(row + k); }
    K3_INLINE_MEMBER F32x16 first(int64_t k, int64_t n) const {
        uint16_t part[kLanes] = {};
        memcpy(part, row + k, n * sizeof *part);
        return from_f16(part);
    }
};

struct SourceInt8 {
    static constexpr int kStepBytes = 16;
    const int8_t* row;
    K3_INLINE_MEMBER const char* bytes() const { return (const char*)row; }
    float scale;
    K3_INLINE_MEMBER F32x16 at(int64_t k) const { return from_int8(row + k) * splat(scale); }
    K3_INLINE_MEMBER F32x16 first(int64_t k, int64_t n) const {
        int8_t part[kLanes] = {};
        memcpy(part, row + k, n);
        return from_int8(part) * splat(scale);
    }
};

struct SourceInt4 {
    static constexpr int kStepBytes = 8;
    const uint8_t* row;
    K3_INLINE_MEMBER const char* bytes() const { return (const char*)row; }
    const float* scales;
    K3_INLINE_MEMBER F32x16 at(int64_t k) const { return from_int4(row + k / 2) * splat(scales[k / kInt4Group]); }
    K3_INLINE_MEMBER F32x16 first(int64_t k, int64_t n) const {
        uint8_t part[8];
        memset(part, 0x88, sizeof part);
        memcpy(part, row + k / 2, (n + 1) / 2);
        if (n % 2) part[n / 2] = (uint8_t)((part[n / 2] & 15) | 0x80);
        return from_int4(part) * splat(scales[k / kInt4Group]);
    }
};

struct SourceMx {
    static constexpr int kStepBytes = 8;
    const uint8_t* row;
    K3_INLINE_MEMBER const char* bytes() const { return (const char*)row; }
    const uint8_t* exponents;
    K3_INLINE_MEMBER F32x16 at(int64_t k) const {
        return from_e2m1(row + k / 2) * splat(half_factor(exponents[k / kMxGroup]));
    }
    K3_INLINE_MEMBER F32x16 first(int64_t, int64_t) const { return splat(0.0f); }  // columns are a multiple of 32
};

K3_INLINE void source_of(SourceF32& s, const Matrix& w, int64_t r) {
    s.row = (const float*)w.data + r * w.columns;
}
K3_INLINE void source_of(SourceBf16& s, const Matrix& w, int64_t r) {
    s.row = (const uint16_t*)w.data + r * w.columns;
}
K3_INLINE void source_of(SourceF16& s, const Matrix& w, int64_t r) {
    s.row = (const uint16_t*)w.data + r * w.columns;
}
K3_INLINE void source_of(SourceInt8& s, const Matrix& w, int64_t r) {
    s.row = (const int8_t*)w.data + r * w.columns;
    s.scale = w.scales[r];
}
K3_INLINE void source_of(SourceInt4& s, const Matrix& w, int64_t r) {
    s.row = (const uint8_t*)w.data + r * ceil_div(w.columns, 2);
    s.scales = w.scales + r * ceil_div(w.columns, kInt4Group);
}
K3_INLINE void source_of(SourceMx& s, const Matrix& w, int64_t r) {
    s.row = (const uint8_t*)w.data + r * (w.columns / 2);
    s.exponents = w.exponents + r * (w.columns / kMxGroup);
}

}  // namespace K3_VARIANT
}  // namespace k3
