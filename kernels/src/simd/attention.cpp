// Weighted sums of matrix rows (values of a latent cache, absorbed projections) and the exponentials that
// weigh them.
//
//     out[h, k] = 0 + p[h, 0] * w[begin, k] + p[h, 1] * w[begin + 1, k] + ...       in that order, rounded
//     each time
#include "decode.h"
#include "functions.h"
#include "mathfn.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

#if defined(__AVX512F__)
constexpr int kWide = 4;  // registers of columns taken together
#else
constexpr int kWide = 2;
#endif

// HT rows of p and N registers of columns from k; only the last register may be partial (`left` columns, when
// N is 1).
template <int HT, int N, class Source>
K3_INLINE void tile(const float* p, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end, int64_t k,
                    int64_t left, float* out, int64_t out_stride) {
    F16 total[HT][N];
    for (int h = 0; h < HT; ++h)
        for (int n = 0; n < N; ++n) total[h][n] = splat(0.0f);
    Source source;
    for (int64_t t = begin; t < end; ++t) {
        source_of(source, w, t);
        F16 row[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n)
            row[n] = N > 1 || left >= kLanes ? source.at(k + n * kLanes) : source.first(k, left);
#pragma GCC unroll 4
        for (int h = 0; h < HT; ++h) {
            const F16 share = splat(p[h * p_stride + t - begin]);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) total[h][n] = total[h][n] + share * row[n];
        }
    }
    for (int h = 0; h < HT; ++h)
        for (int n = 0; n < N; ++n)
            store_some(out + h * out_stride + k + n * kLanes, total[h][n], left - n * kLanes);
}

template <int HT, class Source>
void all_columns(const float* p, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end, float* out,
                 int64_t out_stride) {
    int64_t k = 0;
    for (; k + kWide * kLanes <= w.columns; k += kWide * kLanes) {
        tile<HT, kWide, Source>(p, p_stride, w, begin, end, k, kWide * kLanes, out, out_stride);
    }
    for (; k < w.columns; k += kLanes) {
        tile<HT, 1, Source>(p, p_stride, w, begin, end, k, w.columns - k, out, out_stride);
    }
}

template <class Source>
void all(const float* p, int64_t rows, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end,
         float* out, int64_t out_stride) {
    int64_t h = 0;
    for (; h + 4 <= rows; h += 4) {
        all_columns<4, Source>(p + h * p_stride, p_stride, w, begin, end, out + h * out_stride, out_stride);
    }
    for (; h < rows; ++h) {
        all_columns<1, Source>(p + h * p_stride, p_stride, w, begin, end, out + h * out_stride, out_stride);
    }
}

}  // namespace

void weighted_sum(const float* p, int64_t rows, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end,
                  float* out, int64_t out_stride) {
    switch (w.encoding) {
        case Encoding::BF16: return all<SourceBf16>(p, rows, p_stride, w, begin, end, out, out_stride);
        case Encoding::F32: return all<SourceF32>(p, rows, p_stride, w, begin, end, out, out_stride);
        case Encoding::INT8: return all<SourceInt8>(p, rows, p_stride, w, begin, end, out, out_stride);
        case Encoding::INT4: return all<SourceInt4>(p, rows, p_stride, w, begin, end, out, out_stride);
        case Encoding::MXFP4: return all<SourceMx>(p, rows, p_stride, w, begin, end, out, out_stride);
    }
}

float scores_top(const float* latent, const float* rope, int64_t count, float scale, float* scores) {
    float top = 0.0f;
    for (int64_t t = 0; t < count; ++t) {
        scores[t] = (latent[t] + rope[t]) * scale;
        top = t == 0 || scores[t] > top ? scores[t] : top;
    }
    return top;
}

float exp_shifted(float* scores, int64_t count, float top) {
    F16 lanes = splat(0.0f);
    for (int64_t t = 0; t < count; t += kLanes) {
        const int64_t left = count - t;
        store_some(scores + t, exp16(load_some(scores + t, left) - splat(top)), left);
        lanes = lanes + load_some(scores + t, left);
    }
    return sum(lanes);
}

}  // namespace K3_VARIANT
}  // namespace k3
