// Sixteen float32 lanes, on every machine: the unit in which all kernels count.
//
// F32x16 is one register with AVX-512, two with AVX2, four elsewhere (SSE2, NEON through the compiler's vector
// types). Every operation is the IEEE one per lane, and sum() adds lanes in one fixed tree, so the width of
// the registers never shows in a result.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define K3_INLINE static inline __attribute__((always_inline))
#define K3_INLINE_MEMBER inline __attribute__((always_inline))

namespace k3 {
namespace K3_VARIANT {

constexpr int64_t kLanes = 16;

// Two vectors that act as one of twice the width.
template <class V>
struct Pair {
    V lo, hi;
};

// Lanes of a vector, each of four bytes.
template <class V>
constexpr int64_t kLanesOf = sizeof(V) / sizeof(float);

#define K3_PAIR_OPERATOR(op)                                            \
    template <class V>                                                  \
    K3_INLINE Pair<V> operator op(const Pair<V>& a, const Pair<V>& b) { \
        return {a.lo op b.lo, a.hi op b.hi};                            \
    }
K3_PAIR_OPERATOR(+)
K3_PAIR_OPERATOR(-)
K3_PAIR_OPERATOR(*)
K3_PAIR_OPERATOR(/)
K3_PAIR_OPERATOR(&)
K3_PAIR_OPERATOR(|)
K3_PAIR_OPERATOR(^)
#undef K3_PAIR_OPERATOR

typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x4 __attribute__((vector_size(16)));

// Functions on one register of floats F or of as many integers I.
#define K3_REGISTER(F, I)                                                   \
    K3_INLINE void load(F& v, const float* p) { memcpy(&v, p, sizeof v); }  \
    K3_INLINE void store(float* p, const F& v) { memcpy(p, &v, sizeof v); } \
    K3_INLINE void splat(F& v, float x) {                                   \
        int32_t b;                                                          \
        memcpy(&b, &x, 4);                                                  \
        v = (F)(I{} + b);                                                   \
    }                                                                       \
    K3_INLINE void splat(I& v, int32_t x) { v = I{} + x; }                  \
    K3_INLINE I bits(const F& v) { return (I)v; }                           \
    K3_INLINE F floats(const I& v) { return (F)v; }                         \
    K3_INLINE I less(const F& a, const F& b) { return (I)(a < b); }         \
    K3_INLINE I greater(const I& a, const I& b) { return (I)(a > b); }      \
    K3_INLINE I unordered(const F& a) { return (I)(a != a); }               \
    K3_INLINE I complement(const I& a) { return ~a; }                       \
    K3_INLINE I shift_left(const I& a, int n) { return a << n; }            \
    K3_INLINE I shift_right(const I& a, int n) { return a >> n; }

K3_REGISTER(f32x4, i32x4)

K3_INLINE float sum(const f32x4& v) { return (v[0] + v[2]) + (v[1] + v[3]); }
K3_INLINE i32x4 max(const i32x4& a, const i32x4& b) {
    const i32x4 is_a = greater(a, b);
    return (is_a & a) | (~is_a & b);
}
K3_INLINE int32_t reduce_max(const i32x4& v) {
    int32_t a = v[0] > v[2] ? v[0] : v[2], b = v[1] > v[3] ? v[1] : v[3];
    return a > b ? a : b;
}

#if defined(__AVX2__)
typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
K3_REGISTER(f32x8, i32x8)
K3_INLINE float sum(const f32x8& v) {
    return sum((f32x4)_mm256_castps256_ps128((__m256)v) + (f32x4)_mm256_extractf128_ps((__m256)v, 1));
}
K3_INLINE i32x8 max(const i32x8& a, const i32x8& b) { return (i32x8)_mm256_max_epi32((__m256i)a, (__m256i)b); }
K3_INLINE int32_t reduce_max(const i32x8& v) {
    return reduce_max(
        max((i32x4)_mm256_castsi256_si128((__m256i)v), (i32x4)_mm256_extracti128_si256((__m256i)v, 1)));
}
#endif

#if defined(__AVX512F__)
typedef float F32x16 __attribute__((vector_size(64)));
typedef int32_t I32x16 __attribute__((vector_size(64)));
K3_REGISTER(F32x16, I32x16)
K3_INLINE float sum(const F32x16& v) {
    return sum((f32x8)_mm512_castps512_ps256((__m512)v) + (f32x8)_mm512_extractf32x8_ps((__m512)v, 1));
}
K3_INLINE I32x16 max(const I32x16& a, const I32x16& b) { return (I32x16)_mm512_max_epi32((__m512i)a, (__m512i)b); }
K3_INLINE int32_t reduce_max(const I32x16& v) {
    return reduce_max(
        max((i32x8)_mm512_castsi512_si256((__m512i)v), (i32x8)_mm512_extracti64x4_epi64((__m512i)v, 1)));
}
#elif defined(__AVX2__)
typedef Pair<f32x8> F32x16;
typedef Pair<i32x8> I32x16;
#else
typedef Pair<Pair<f32x4>> F32x16;
typedef Pair<Pair<i32x4>> I32x16;
#endif
#undef K3_REGISTER

// The same functions on pairs.
template <class V>
K3_INLINE void load(Pair<V>& v, const float* p) {
    load(v.lo, p);
    load(v.hi, p + kLanesOf<V>);
}
template <class V>
K3_INLINE void store(float* p, const Pair<V>& v) {
    store(p, v.lo);
    store(p + kLanesOf<V>, v.hi);
}
template <class V, class T>
K3_INLINE void splat(Pair<V>& v, T x) {
    splat(v.lo, x);
    v.hi = v.lo;
}
template <class V>
K3_INLINE auto bits(const Pair<V>& v) -> Pair<decltype(bits(v.lo))> {
    return {bits(v.lo), bits(v.hi)};
}
template <class V>
K3_INLINE auto floats(const Pair<V>& v) -> Pair<decltype(floats(v.lo))> {
    return {floats(v.lo), floats(v.hi)};
}
template <class V>
K3_INLINE auto less(const Pair<V>& a, const Pair<V>& b) -> Pair<decltype(less(a.lo, b.lo))> {
    return {less(a.lo, b.lo), less(a.hi, b.hi)};
}
template <class V>
K3_INLINE Pair<V> greater(const Pair<V>& a, const Pair<V>& b) {
    return {greater(a.lo, b.lo), greater(a.hi, b.hi)};
}
template <class V>
K3_INLINE auto unordered(const Pair<V>& a) -> Pair<decltype(unordered(a.lo))> {
    return {unordered(a.lo), unordered(a.hi)};
}
template <class V>
K3_INLINE Pair<V> complement(const Pair<V>& a) {
    return {complement(a.lo), complement(a.hi)};
}
template <class V>
K3_INLINE Pair<V> shift_left(const Pair<V>& a, int n) {
    return {shift_left(a.lo, n), shift_left(a.hi, n)};
}
template <class V>
K3_INLINE Pair<V> shift_right(const Pair<V>& a, int n) {
    return {shift_right(a.lo, n), shift_right(a.hi, n)};
}
template <class V>
K3_INLINE float sum(const Pair<V>& v) {
    return sum(v.lo + v.hi);
}
template <class V>
K3_INLINE V select(const V& mask, const V& a, const V& b) {
    return (mask & a) | (complement(mask) & b);
}
template <class V>
K3_INLINE Pair<V> max(const Pair<V>& a, const Pair<V>& b) {
    return {max(a.lo, b.lo), max(a.hi, b.hi)};
}
template <class V>
K3_INLINE int32_t reduce_max(const Pair<V>& v) {
    return reduce_max(max(v.lo, v.hi));
}

K3_INLINE F32x16 load(const float* p) {
    F32x16 v;
    load(v, p);
    return v;
}
K3_INLINE F32x16 splat(float x) {
    F32x16 v;
    splat(v, x);
    return v;
}
K3_INLINE I32x16 splat_int(int32_t x) {
    I32x16 v;
    splat(v, x);
    return v;
}
K3_INLINE F32x16 select(const I32x16& mask, const F32x16& a, const F32x16& b) {
    return floats(select(mask, bits(a), bits(b)));
}
// b where a < b, else a (a NaN in either gives a)
K3_INLINE F32x16 max(const F32x16& a, const F32x16& b) { return select(less(a, b), b, a); }
K3_INLINE F32x16 min(const F32x16& a, const F32x16& b) { return select(less(b, a), b, a); }
K3_INLINE F32x16 abs(const F32x16& a) { return floats(bits(a) & splat_int(0x7fffffff)); }

// The first `count` (< 16) floats of p, zeros after them.
K3_INLINE F32x16 load_first(const float* p, int64_t count) {
    float lane[kLanes] = {};
    memcpy(lane, p, count * sizeof(float));
    return load(lane);
}
K3_INLINE F32x16 load_some(const float* p, int64_t count) {
    return count >= kLanes ? load(p) : load_first(p, count);
}
K3_INLINE void store_some(float* p, const F32x16& v, int64_t count) {
    if (count >= kLanes) return store(p, v);
    float lane[kLanes];
    store(lane, v);
    memcpy(p, lane, count * sizeof(float));
}

}  // namespace K3_VARIANT
}  // namespace k3
