// exp, tanh and what is made of them, sixteen lanes at a time.
//
// Own polynomials with a fixed order of operations: the C library's functions differ between versions and
// CPUs in the last bit. Each lane is computed alone. Bounds (tests/kernels/test_functions.py measures them,
// in units in the last place of the exact result, where that is a normal number): exp 1.5, tanh 2, sigmoid 3,
// silu 3. NaN gives NaN; exp underflows through the subnormal numbers to 0 and overflows to infinity.
#pragma once

#include "lanes.h"

namespace k3 {
namespace K3_VARIANT {

K3_INLINE I32x16 integer_bits(const F32x16& rounded) { return bits(rounded) - splat_int(0x4b400000); }
K3_INLINE F32x16 two_to(const I32x16& n) { return floats(shift_left(n + splat_int(127), 23)); }

// exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln(2) / 2; exp(r) = 1 + r + r^2 * polynomial of degree 4
// (minimax fit of the relative error). ln 2 is split in two so that n * kLn2High is exact.
K3_INLINE F32x16 exp16(const F32x16& x) {
    constexpr float kLog2E = 1.44269502f, kLn2High = 0.693359375f, kLn2Low = -0.000212194442f;
    constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const F32x16 inside = min(max(x, splat(-105.0f)), splat(90.0f));
    const F32x16 rounded = inside * splat(kLog2E) + splat(kRounder);
    const F32x16 n = rounded - splat(kRounder);
    const F32x16 r = (inside - n * splat(kLn2High)) - n * splat(kLn2Low);
    F32x16 p = splat(0.00138144672f);
    p = p * r + splat(0.00836878084f);
    p = p * r + splat(0.0416683927f);
    p = p * r + splat(0.166665196f);
    p = p * r + splat(0.49999994f);
    const F32x16 y = (p * (r * r) + r) + splat(1.0f);
    const I32x16 whole = integer_bits(rounded),
                 half = shift_right(whole, 1);  // in two steps: 2^n may be out of range
    const F32x16 scaled = (y * two_to(half)) * two_to(whole - half);
    return select(unordered(x), x, scaled);
}

// |x| < 0.625: x + x * (x^2 * polynomial of degree 4 in x^2); beyond: 1 - 2 / (exp(2 |x|) + 1); sign put
// back.
K3_INLINE F32x16 tanh16(const F32x16& x) {
    const F32x16 a = abs(x), z = a * a;
    F32x16 p = splat(-0.00571704237f);
    p = p * z + splat(0.0206505843f);
    p = p * z + splat(-0.0537434965f);
    p = p * z + splat(0.133314908f);
    p = p * z + splat(-0.333332837f);
    const F32x16 small = a + a * (z * p);
    const F32x16 large = splat(1.0f) - splat(2.0f) / (exp16(a + a) + splat(1.0f));
    const I32x16 sign = bits(x) & splat_int(INT32_MIN);
    return floats(bits(select(less(a, splat(0.625f)), small, large)) | sign);
}

K3_INLINE F32x16 negative(const F32x16& x) { return splat(-0.0f) - x; }
K3_INLINE F32x16 sigmoid16(const F32x16& x) { return splat(1.0f) / (splat(1.0f) + exp16(negative(x))); }
K3_INLINE F32x16 silu16(const F32x16& x) { return x / (splat(1.0f) + exp16(negative(x))); }

K3_INLINE F32x16 situ16(const F32x16& gate, const F32x16& up, const F32x16& beta, const F32x16& linear_beta) {
    const F32x16 bounded = (beta * tanh16(gate / beta)) * sigmoid16(gate);
    return bounded * (linear_beta * tanh16(up / linear_beta));
}

K3_INLINE float first_lane(const F32x16& x) {
    float lane[kLanes];
    store(lane, x);
    return lane[0];
}
K3_INLINE float exp1(float x) { return first_lane(exp16(splat(x))); }
K3_INLINE float sigmoid1(float x) { return first_lane(sigmoid16(splat(x))); }

}  // namespace K3_VARIANT
}  // namespace k3
