// Sixteen rows of W side by side: lane r of every vector belongs to row r of a tile, so that the integer sum
// of a group of columns is complete in its lane and nothing is ever added across lanes.
//
// A vector of a tile holds four columns (one 32-bit word) of each of the sixteen rows. dot() multiplies it
// with four columns of one row of x and adds the four products to each lane. Integers, so exact however it is
// done.
//
// kBiasedBytes, kBiasedNibbles: whether dot() for INT8, and for INT4 and MXFP4, takes weights with a bias
// that makes them unsigned; what the bias adds to a sum is then taken off beforehand (Activations::starts).
#pragma once

#include "decode.h"

#if defined(__SSE2__) && !defined(__AVX2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace k3 {
namespace K3_VARIANT {

#if defined(__AVX512VNNI__)
typedef I32x16 RowInts;
typedef F32x16 RowFloats;
#elif defined(__AVX2__)
typedef Pair<i32x8> RowInts;  // AVX-512 without VNNI too: it has no byte multiplication better than AVX2's
typedef Pair<f32x8> RowFloats;
#else
typedef Pair<Pair<i32x4>> RowInts;
typedef Pair<Pair<f32x4>> RowFloats;
#endif

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__)
constexpr bool kBiasedBytes = true, kBiasedNibbles = true;
#elif defined(__AVX2__)
constexpr bool kBiasedBytes = false, kBiasedNibbles = true;  // 255 * 127 * 2 does not fit 16 bits
#else
constexpr bool kBiasedBytes = false, kBiasedNibbles = false;
#endif

// Per register: take4 gives the four 32-bit words of 16 bytes of each row, a word to a vector.
#if defined(__AVX512VNNI__)
K3_INLINE __m512i rows4(const uint8_t* p, int64_t stride) {  // rows 0, 4, 8 and 12 from p
    const __m128i* const a = (const __m128i*)p;
    __m512i v = _mm512_castsi128_si512(_mm_loadu_si128(a));
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i*)(p + 4 * stride)), 1);
    v = _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i*)(p + 8 * stride)), 2);
    return _mm512_inserti32x4(v, _mm_loadu_si128((const __m128i*)(p + 12 * stride)), 3);
}
K3_INLINE void take4(const uint8_t* p, int64_t stride, I32x16* out) {
    const __m512i a = rows4(p, stride), b = rows4(p + stride, stride), c = rows4(p + 2 * stride, stride),
                  d = rows4(p + 3 * stride, stride);
    const __m512i ab0 = _mm512_unpacklo_epi32(a, b), ab1 = _mm512_unpackhi_epi32(a, b);
    const __m512i cd0 = _mm512_unpacklo_epi32(c, d), cd1 = _mm512_unpackhi_epi32(c, d);
    out[0] = (I32x16)_mm512_unpacklo_epi64(ab0, cd0);
    out[1] = (I32x16)_mm512_unpackhi_epi64(ab0, cd0);
    out[2] = (I32x16)_mm512_unpacklo_epi64(ab1, cd1);
    out[3] = (I32x16)_mm512_unpackhi_epi64(ab1, cd1);
}
K3_INLINE I32x16 dot(const I32x16& sums, const I32x16& w, const I32x16& x) {
    return (I32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
K3_INLINE I32x16 dot_small(const I32x16& sums, const I32x16& w, const I32x16& x) { return dot(sums, w, x); }
K3_INLINE I32x16 looked_up(const int8_t* table, const I32x16& n) {
    return (I32x16)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), (__m512i)n);
}
K3_INLINE F32x16 to_floats(const I32x16& v) { return (F32x16)_mm512_cvtepi32_ps((__m512i)v); }

// Lane r: the sum of all lanes of v[r].
K3_INLINE __m512i halves(__m512i a, __m512i b) {  // a's 128-bit quarters 0+2, 1+3, then b's
    return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xee));
}
K3_INLINE __m512i quarters(const __m512i* v) {  // four words each of rows 0, 4, 8 and 12 from v
    const __m512i a = halves(v[0], v[4]), b = halves(v[8], v[12]);
    return _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xdd));
}
K3_INLINE __m512i pairs(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
}
K3_INLINE I32x16 totals(const __m512i* v) {
    const __m512i a = pairs(quarters(v), quarters(v + 1)), b = pairs(quarters(v + 2), quarters(v + 3));
    return (I32x16)_mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
}

// Quarter i of v[j] becomes quarter j of out[i].
K3_INLINE void transpose_quarters(const __m512i* v, __m512i* out) {
    const __m512i ab01 = _mm512_shuffle_i64x2(v[0], v[1], 0x44), ab23 = _mm512_shuffle_i64x2(v[0], v[1], 0xee);
    const __m512i cd01 = _mm512_shuffle_i64x2(v[2], v[3], 0x44), cd23 = _mm512_shuffle_i64x2(v[2], v[3], 0xee);
    out[0] = _mm512_shuffle_i64x2(ab01, cd01, 0x88);
    out[1] = _mm512_shuffle_i64x2(ab01, cd01, 0xdd);
    out[2] = _mm512_shuffle_i64x2(ab23, cd23, 0x88);
    out[3] = _mm512_shuffle_i64x2(ab23, cd23, 0xdd);
}
// Of each quarter the sums of the words of v[0], v[1], v[2], v[3]. The words, and sums of two of them, fit 16
// bits.
K3_INLINE __m512i quarter_totals(const __m512i* v) {
    const __m512i one = _mm512_set1_epi16(1);
    const __m512i ab = _mm512_madd_epi16(_mm512_packs_epi32(v[0], v[1]), one);
    const __m512i cd = _mm512_madd_epi16(_mm512_packs_epi32(v[2], v[3]), one);
    return _mm512_madd_epi16(_mm512_packs_epi32(ab, cd), one);
}
#elif defined(__AVX2__)
K3_INLINE __m256i rows2(const uint8_t* p, int64_t stride) {  // rows 0 and 4 from p
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_loadu_si128((const __m128i*)p)),
                                   _mm_loadu_si128((const __m128i*)(p + 4 * stride)), 1);
}
K3_INLINE void take4(const uint8_t* p, int64_t stride, i32x8* out) {
    const __m256i a = rows2(p, stride), b = rows2(p + stride, stride), c = rows2(p + 2 * stride, stride),
                  d = rows2(p + 3 * stride, stride);
    const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab1 = _mm256_unpackhi_epi32(a, b);
    const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd1 = _mm256_unpackhi_epi32(c, d);
    out[0] = (i32x8)_mm256_unpacklo_epi64(ab0, cd0);
    out[1] = (i32x8)_mm256_unpackhi_epi64(ab0, cd0);
    out[2] = (i32x8)_mm256_unpacklo_epi64(ab1, cd1);
    out[3] = (i32x8)_mm256_unpackhi_epi64(ab1, cd1);
}
#if defined(__AVXVNNI__)
K3_INLINE i32x8 dot(const i32x8& sums, const i32x8& w, const i32x8& x) {
    return (i32x8)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
}
K3_INLINE i32x8 dot_small(const i32x8& sums, const i32x8& w, const i32x8& x) { return dot(sums, w, x); }
#else
K3_INLINE i32x8 add_pairs(const i32x8& sums, __m256i products) {
    return (i32x8)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(products, _mm256_set1_epi16(1)));
}
// |w| <= 128, |x| <= 127, so pairs of products stay below 2^15.
K3_INLINE i32x8 dot(const i32x8& sums, const i32x8& w, const i32x8& x) {
    return add_pairs(sums,
                     _mm256_maddubs_epi16(_mm256_abs_epi8((__m256i)w), _mm256_sign_epi8((__m256i)x, (__m256i)w)));
}
K3_INLINE i32x8 dot_small(const i32x8& sums, const i32x8& w, const i32x8& x) {
    return add_pairs(sums, _mm256_maddubs_epi16((__m256i)w, (__m256i)x));
}
#endif
K3_INLINE i32x8 looked_up(const int8_t* table, const i32x8& n) {
    return (i32x8)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)),
                                      (__m256i)n);
}
K3_INLINE f32x8 to_floats(const i32x8& v) { return (f32x8)_mm256_cvtepi32_ps((__m256i)v); }
#else
K3_INLINE void take4(const uint8_t* p, int64_t stride, i32x4* out) {
    i32x4 a, b, c, d;
    memcpy(&a, p, 16);
    memcpy(&b, p + stride, 16);
    memcpy(&c, p + 2 * stride, 16);
    memcpy(&d, p + 3 * stride, 16);
#if defined(__SSE2__)
    const __m128i ab0 = _mm_unpacklo_epi32((__m128i)a, (__m128i)b);
    const __m128i ab1 = _mm_unpackhi_epi32((__m128i)a, (__m128i)b);
    const __m128i cd0 = _mm_unpacklo_epi32((__m128i)c, (__m128i)d);
    const __m128i cd1 = _mm_unpackhi_epi32((__m128i)c, (__m128i)d);
    out[0] = (i32x4)_mm_unpacklo_epi64(ab0, cd0);
    out[1] = (i32x4)_mm_unpackhi_epi64(ab0, cd0);
    out[2] = (i32x4)_mm_unpacklo_epi64(ab1, cd1);
    out[3] = (i32x4)_mm_unpackhi_epi64(ab1, cd1);
#else
    out[0] = i32x4{a[0], b[0], c[0], d[0]};
    out[1] = i32x4{a[1], b[1], c[1], d[1]};
    out[2] = i32x4{a[2], b[2], c[2], d[2]};
    out[3] = i32x4{a[3], b[3], c[3], d[3]};
#endif
}
#if defined(__SSE2__)
K3_INLINE __m128i even(const i32x4& v) { return _mm_srai_epi16(_mm_slli_epi16((__m128i)v, 8), 8); }
K3_INLINE __m128i odd(const i32x4& v) { return _mm_srai_epi16((__m128i)v, 8); }
K3_INLINE i32x4 dot(const i32x4& sums, const i32x4& w, const i32x4& x) {
    return sums + (i32x4)_mm_madd_epi16(even(w), even(x)) + (i32x4)_mm_madd_epi16(odd(w), odd(x));
}
#elif defined(__ARM_FEATURE_DOTPROD)
K3_INLINE i32x4 dot(const i32x4& sums, const i32x4& w, const i32x4& x) {
    return (i32x4)vdotq_s32((int32x4_t)sums, (int8x16_t)w, (int8x16_t)x);
}
#else
K3_INLINE i32x4 dot(const i32x4& sums, const i32x4& w, const i32x4& x) {
    i32x4 out = sums;
    for (int shift = 24; shift >= 0; shift -= 8) out += (w << shift >> 24) * (x << shift >> 24);
    return out;
}
#endif
K3_INLINE i32x4 dot_small(const i32x4& sums, const i32x4& w, const i32x4& x) { return dot(sums, w, x); }
#if defined(__ARM_NEON)
K3_INLINE i32x4 looked_up(const int8_t* table, const i32x4& n) {
    return (i32x4)vqtbl1q_s8(vld1q_s8(table), (uint8x16_t)n);
}
#else
// Without an instruction that looks up bytes: computed, 16 bytes at a time. `table` is known to the compiler.
typedef int8_t i8x16 __attribute__((vector_size(16)));
K3_INLINE i32x4 looked_up(const int8_t* table, const i32x4& nibbles) {
    const i8x16 n = (i8x16)nibbles;
    if (table == kInt4Table) return (i32x4)(n - 8);
    // Doubled E2M1: 0 1 2 3 4 6 8 12, then the same negative.
    const i8x16 m = n & 7, over4 = (i8x16)(m > 4) & (m - 4), over6 = (i8x16)(m > 6) & 2;
    const i8x16 minus = (i8x16)(n > 7);
    return (i32x4)(((m + over4 + over6) ^ minus) - minus);
}
#endif
K3_INLINE f32x4 to_floats(const i32x4& v) { return __builtin_convertvector(v, f32x4); }
#endif

// The same on pairs.
template <class V>
K3_INLINE void take4(const uint8_t* p, int64_t stride, Pair<V>* out) {
    V lo[4], hi[4];
    take4(p, stride, lo);
    take4(p + stride * (int64_t)(sizeof(V) / 4), stride, hi);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) out[j] = {lo[j], hi[j]};
}
template <class V>
K3_INLINE Pair<V> dot(const Pair<V>& sums, const Pair<V>& w, const Pair<V>& x) {
    return {dot(sums.lo, w.lo, x.lo), dot(sums.hi, w.hi, x.hi)};
}
template <class V>
K3_INLINE Pair<V> dot_small(const Pair<V>& sums, const Pair<V>& w, const Pair<V>& x) {
    return {dot_small(sums.lo, w.lo, x.lo), dot_small(sums.hi, w.hi, x.hi)};
}
template <class V>
K3_INLINE Pair<V> looked_up(const int8_t* table, const Pair<V>& n) {
    return {looked_up(table, n.lo), looked_up(table, n.hi)};
}
template <class V>
K3_INLINE auto to_floats(const Pair<V>& v) -> Pair<decltype(to_floats(v.lo))> {
    return {to_floats(v.lo), to_floats(v.hi)};
}

K3_INLINE RowInts all_rows(int32_t word) {
    RowInts v;
    splat(v, word);
    return v;
}
K3_INLINE RowFloats all_rows(float x) {
    RowFloats v;
    splat(v, x);
    return v;
}
K3_INLINE RowInts word_at(const int8_t* q) {
    int32_t word;
    memcpy(&word, q, sizeof word);
    return all_rows(word);
}
K3_INLINE RowFloats load_rows(const float* p) {
    RowFloats v;
    load(v, p);
    return v;
}

// Bytes [at, at + 16) of the rows of a tile, `stride` bytes apart, as four vectors. kWhole: there are sixteen
// rows and the bytes exist; otherwise only the first `count` rows and bytes before `length` do, and the rest
// is 0.
template <bool kWhole>
K3_INLINE void take(const uint8_t* p, int64_t stride, int64_t at, int64_t count, int64_t length, RowInts* out) {
    if (kWhole) return take4(p + at, stride, out);
    uint8_t part[kRowBlock * 16] = {};
    const int64_t bytes = length - at < 16 ? length - at : 16;
    if (bytes > 0)
        for (int64_t r = 0; r < count; ++r) memcpy(part + r * 16, p + r * stride + at, bytes);
    take4(part, 16, out);
}

}  // namespace K3_VARIANT
}  // namespace k3
