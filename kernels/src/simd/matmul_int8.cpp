// Product with int8 activations: integers inside a group, float32 between groups.
//
//     d_g = sum over the columns of group g of q_x * q_w                     (int32, exact)
//     y   = 0; for g in order: y = y + float(d_g) * factor_g                 (each operation rounded to
//     float32) INT8:  factor_g = a_g; y = y * scale[r] at the end      INT4:  factor_g = a_g * scale[r, g]
//     MXFP4: factor_g = a_g * 2^(s[r, g] - 128), q_w being the doubled E2M1 value
//
// float(d_g) is exact: at most 128 * 127 * 64 < 2^24. Integers may be summed in any order, so each
// instruction set has its own dot product here and the result is still the same.
#include "decode.h"
#include "functions.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

#if defined(__AVX512F__)
constexpr int kXTile = 4;  // rows of x that share the loads of a weight; 32 registers hold more than 16 do
#else
constexpr int kXTile = 2;
#endif

#if defined(__AVX2__)
typedef __m256i Dot;  // 32 weights, or eight partial sums

K3_INLINE Dot nothing() { return _mm256_setzero_si256(); }
K3_INLINE Dot bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// Sixteen bytes of nibbles through a table, in column order.
K3_INLINE Dot nibbles(const uint8_t* p, const int8_t* table) {
    const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p));
    const __m256i n = _mm256_and_si256(_mm256_or_si256(b, _mm256_slli_epi16(b, 4)), _mm256_set1_epi8(15));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)), n);
}

// sums + w . x in groups of four bytes; |w| <= 128, |x| <= 127, so pairs of products stay below 2^15.
K3_INLINE Dot accumulate(Dot sums, Dot w, Dot x) {
    const __m256i size = _mm256_abs_epi8(w), turned = _mm256_sign_epi8(x, w);
#if defined(__AVX512VNNI__)
    return _mm256_dpbusd_epi32(sums, size, turned);
#else
    return _mm256_add_epi32(sums,
                            _mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), _mm256_set1_epi16(1)));
#endif
}

K3_INLINE void totals(const Dot* d, f32x4& out) {
    const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(d[0], d[1]), _mm256_hadd_epi32(d[2], d[3]));
    out = (f32x4)_mm_cvtepi32_ps(
        _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
#else
struct Dot {
    int32_t part[32];
};

K3_INLINE Dot nothing() { return Dot{}; }
K3_INLINE Dot bytes(const void* p) {
    Dot d;
    for (int i = 0; i < 32; ++i) d.part[i] = ((const int8_t*)p)[i];
    return d;
}
K3_INLINE Dot nibbles(const uint8_t* p, const int8_t* table) {
    Dot d;
    for (int i = 0; i < 16; ++i) {
        d.part[2 * i] = table[p[i] & 15];
        d.part[2 * i + 1] = table[p[i] >> 4];
    }
    return d;
}
K3_INLINE Dot accumulate(Dot sums, const Dot& w, const Dot& x) {
    for (int i = 0; i < 32; ++i) sums.part[i] += w.part[i] * x.part[i];
    return sums;
}
K3_INLINE void totals(const Dot* d, f32x4& out) {
    for (int r = 0; r < 4; ++r) {
        int32_t total = 0;
        for (int i = 0; i < 32; ++i) total += d[r].part[i];
        out[r] = (float)total;
    }
}
#endif

// One row's weights of group g as one or two blocks of 32 columns, and its factor.
struct RowsInt8 {
    static constexpr int kBlocks = 2;
    const int8_t* row;
    float scale;
    void open(const Matrix& w, int64_t r) {
        row = (const int8_t*)w.data + r * w.columns;
        scale = w.scales[r];
    }
    K3_INLINE_MEMBER void whole(int64_t g, Dot* out) const {
        out[0] = bytes(row + g * 64);
        out[1] = bytes(row + g * 64 + 32);
    }
    void rest(int64_t g, int64_t columns, Dot* out) const {
        int8_t part[64] = {};
        memcpy(part, row + g * 64, columns - g * 64);
        out[0] = bytes(part);
        out[1] = bytes(part + 32);
    }
    K3_INLINE_MEMBER float factor(int64_t) const { return 1.0f; }  // a_g * 1 is a_g
    K3_INLINE_MEMBER float finish(float y) const { return y * scale; }
};

struct RowsInt4 {
    static constexpr int kBlocks = 2;
    const uint8_t* row;
    const float* scales;
    void open(const Matrix& w, int64_t r) {
        row = (const uint8_t*)w.data + r * ceil_div(w.columns, 2);
        scales = w.scales + r * ceil_div(w.columns, kInt4Group);
    }
    K3_INLINE_MEMBER void whole(int64_t g, Dot* out) const {
        out[0] = nibbles(row + g * 32, kInt4Table);
        out[1] = nibbles(row + g * 32 + 16, kInt4Table);
    }
    void rest(int64_t g, int64_t columns, Dot* out) const {
        uint8_t part[32] = {};  // columns past the end meet activations that are zero
        memcpy(part, row + g * 32, (columns - g * 64 + 1) / 2);
        out[0] = nibbles(part, kInt4Table);
        out[1] = nibbles(part + 16, kInt4Table);
    }
    K3_INLINE_MEMBER float factor(int64_t g) const { return scales[g]; }
    K3_INLINE_MEMBER float finish(float y) const { return y; }
};

struct RowsMx {
    static constexpr int kBlocks = 1;
    const uint8_t* row;
    const uint8_t* exponents;
    void open(const Matrix& w, int64_t r) {
        row = (const uint8_t*)w.data + r * (w.columns / 2);
        exponents = w.exponents + r * (w.columns / kMxGroup);
    }
    K3_INLINE_MEMBER void whole(int64_t g, Dot* out) const {
        out[0] = nibbles(row + g * 16, kMxDoubledTable);
    }
    void rest(int64_t, int64_t, Dot* out) const { out[0] = nothing(); }  // columns are a multiple of 32
    K3_INLINE_MEMBER float factor(int64_t g) const { return half_factor(exponents[g]); }
    K3_INLINE_MEMBER float finish(float y) const { return y; }
};

// Four rows of W and ST rows of x; `count` of the four rows are written.
template <int ST, class W>
K3_INLINE void tile(const W* w, const Activations& x, int64_t s0, int64_t columns, float* y, int64_t stride,
                    int count) {
    constexpr int kBlocks = W::kBlocks;
    constexpr int64_t kWidth = 32 * kBlocks;
    f32x4 total[ST] = {};
    for (int64_t g = 0; g < x.groups; ++g) {
        Dot weight[kRowTile][kBlocks];
        if ((g + 1) * kWidth <= columns) {
            for (int r = 0; r < kRowTile; ++r) w[r].whole(g, weight[r]);
        } else {
            for (int r = 0; r < kRowTile; ++r) w[r].rest(g, columns, weight[r]);
        }
        const f32x4 own = {w[0].factor(g), w[1].factor(g), w[2].factor(g), w[3].factor(g)};
#pragma GCC unroll 4
        for (int s = 0; s < ST; ++s) {
            const int8_t* q = x.q + (s0 + s) * x.groups * kWidth + g * kWidth;
            f32x4 a, dots;
            splat(a, x.scales[(s0 + s) * x.groups + g]);
            Dot sums[kRowTile];
            for (int r = 0; r < kRowTile; ++r) {
                sums[r] = nothing();
                for (int b = 0; b < kBlocks; ++b)
                    sums[r] = accumulate(sums[r], weight[r][b], bytes(q + 32 * b));
            }
            totals(sums, dots);
            total[s] = total[s] + dots * (a * own);
        }
    }
    for (int s = 0; s < ST; ++s)
        for (int r = 0; r < count; ++r) y[s * stride + r] = w[r].finish(total[s][r]);
}

template <class W>
void product(const Activations& x, const Matrix& w, int64_t begin, int64_t end, float* y) {
    for (int64_t r = begin; r < end; r += kRowTile) {
        const int count = end - r < kRowTile ? (int)(end - r) : (int)kRowTile;
        W row[kRowTile];
        for (int i = 0; i < kRowTile; ++i) row[i].open(w, r + (i < count ? i : 0));
        int64_t s = 0;
        for (; s + kXTile <= x.rows; s += kXTile)
            tile<kXTile>(row, x, s, w.columns, y + s * w.rows + r, w.rows, count);
        for (; s < x.rows; ++s) tile<1>(row, x, s, w.columns, y + s * w.rows + r, w.rows, count);
    }
}

}  // namespace

void matmul_int8(const Activations& x, const Matrix& w, int64_t begin, int64_t end, float* y) {
    switch (w.encoding) {
        case Encoding::INT8: return product<RowsInt8>(x, w, begin, end, y);
        case Encoding::INT4: return product<RowsInt4>(x, w, begin, end, y);
        case Encoding::MXFP4: return product<RowsMx>(x, w, begin, end, y);
        case Encoding::BF16:
        case Encoding::F32: return;  // never asked for: these are multiplied exactly
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
