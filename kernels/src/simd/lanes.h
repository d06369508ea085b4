// Sixteen float32 lanes, on every machine: the unit in which all kernels count.
//
// F16 is one register with AVX-512, two with AVX2, four elsewhere (SSE2, NEON through the compiler's vector
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
K3_INLINE int32_t largest(const i32x4& v) {
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
K3_INLINE int32_t largest(const i32x8& v) {
    return largest(
        (i32x4)_mm_max_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1)));
}
#endif

#if defined(__AVX512F__)
typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
K3_REGISTER(F16, I16)
K3_INLINE float sum(const F16& v) {
    return sum((f32x8)_mm512_castps512_ps256((__m512)v) + (f32x8)_mm512_extractf32x8_ps((__m512)v, 1));
}
K3_INLINE int32_t largest(const I16& v) {
    return largest((i32x8)_mm256_max_epi32(_mm512_castsi512_si256((__m512i)v),
                                           _mm512_extracti64x4_epi64((__m512i)v, 1)));
}
#elif defined(__AVX2__)
typedef Pair<f32x8> F16;
typedef Pair<i32x8> I16;
#else
typedef Pair<Pair<f32x4>> F16;
typedef Pair<Pair<i32x4>> I16;
#endif
#undef K3_REGISTER

// The same functions on pairs.
template <class V>
K3_INLINE void load(Pair<V>& v, const float* p) {
    load(v.lo, p);
    load(v.hi, p + sizeof(V) / 4);
}
template <class V>
K3_INLINE void store(float* p, const Pair<V>& v) {
    store(p, v.lo);
    store(p + sizeof(V) / 4, v.hi);
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
K3_INLINE V choose(const V& mask, const V& a, const V& b) {
    return (mask & a) | (complement(mask) & b);
}
template <class V>
K3_INLINE int32_t largest(const Pair<V>& v) {
    return largest(choose(greater(v.lo, v.hi), v.lo, v.hi));
}

K3_INLINE F16 load(const float* p) {
    F16 v;
    load(v, p);
    return v;
}
K3_INLINE F16 splat(float x) {
    F16 v;
    splat(v, x);
    return v;
}
K3_INLINE I16 splat_int(int32_t x) {
    I16 v;
    splat(v, x);
    return v;
}
K3_INLINE F16 choose(const I16& mask, const F16& a, const F16& b) {
    return floats(choose(mask, bits(a), bits(b)));
}
K3_INLINE I16 larger(const I16& a, const I16& b) { return choose(greater(a, b), a, b); }
// b where a < b, else a (a NaN in either gives a)
K3_INLINE F16 at_least(const F16& a, const F16& b) { return choose(less(a, b), b, a); }
K3_INLINE F16 at_most(const F16& a, const F16& b) { return choose(less(b, a), b, a); }
K3_INLINE F16 magnitude(const F16& a) { return floats(bits(a) & splat_int(0x7fffffff)); }

// The first `count` (< 16) floats of p, zeros after them.
K3_INLINE F16 load_first(const float* p, int64_t count) {
    float lane[kLanes] = {};
    memcpy(lane, p, count * sizeof(float));
    return load(lane);
}
K3_INLINE F16 load_some(const float* p, int64_t count) {
    return count >= kLanes ? load(p) : load_first(p, count);
}
K3_INLINE void store_some(float* p, const F16& v, int64_t count) {
    if (count >= kLanes) return store(p, v);
    float lane[kLanes];
    store(lane, v);
    memcpy(p, lane, count * sizeof(float));
}

}  // namespace K3_VARIANT
}  // namespace k3
