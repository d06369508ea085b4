// Attention over a cache, and the weighted sums of matrix rows that it shares with the absorbed projections.
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
constexpr int kWide = 4;        // registers of columns taken together for four rows of p
constexpr int kWideOne = 16;    // and for one
constexpr int kScoreHeads = 4;  // queries whose scores are summed together
#else
constexpr int kWide = 2;
constexpr int kWideOne = 4;
constexpr int kScoreHeads = 1;
#endif
constexpr int kScoreRows = 4;  // positions that they meet

// HT rows of p and N registers of columns from k; only the last register may be partial (`left` columns, when
// N is 1). Add: the sums are added to what `out` holds. The same columns of the rows `ahead` further on are
// fetched.
template <int HT, int N, bool Add, class Source>
K3_INLINE void tile(const float* p, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end, int64_t k,
                    int64_t left, int64_t ahead, float* out, int64_t out_stride) {
    F32x16 total[HT][N];
    for (int h = 0; h < HT; ++h)
        for (int n = 0; n < N; ++n) total[h][n] = splat(0.0f);
    Source source;
    for (int64_t t = begin; t < end; ++t) {
        if (ahead != 0) {
            source_of(source, w, t + ahead);
            const char* const from = source.bytes() + k / kLanes * Source::kStepBytes;
            for (int at = 0; at < N * Source::kStepBytes; at += 64) __builtin_prefetch(from + at, 0, 2);
        }
        source_of(source, w, t);
        F32x16 row[N];
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n)
            row[n] = N > 1 || left >= kLanes ? source.at(k + n * kLanes) : source.first(k, left);
#pragma GCC unroll 4
        for (int h = 0; h < HT; ++h) {
            const F32x16 share = splat(p[h * p_stride + t - begin]);
#pragma GCC unroll 16
            for (int n = 0; n < N; ++n) total[h][n] = total[h][n] + share * row[n];
        }
    }
    for (int h = 0; h < HT; ++h) {
        for (int n = 0; n < N; ++n) {
            float* at = out + h * out_stride + k + n * kLanes;
            const int64_t some = left - n * kLanes;
            store_some(at, Add ? load_some(at, some) + total[h][n] : total[h][n], some);
        }
    }
}

template <int HT, int N, bool Add, class Source>
void all_columns(const float* p, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end, int64_t k,
                 int64_t k_end, int64_t ahead, float* out, int64_t out_stride) {
    for (; k + N * kLanes <= k_end; k += N * kLanes) {
        tile<HT, N, Add, Source>(p, p_stride, w, begin, end, k, N * kLanes, ahead, out, out_stride);
    }
    for (; k < k_end; k += kLanes) {
        tile<HT, 1, Add, Source>(p, p_stride, w, begin, end, k, k_end - k, ahead, out, out_stride);
    }
}

template <bool Add, class Source>
void all(const float* p, int64_t rows, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end, int64_t k,
         int64_t k_end, int64_t ahead, float* out, int64_t out_stride) {
    int64_t h = 0;
    for (; h + 4 <= rows; h += 4, ahead = 0) {
        all_columns<4, kWide, Add, Source>(p + h * p_stride, p_stride, w, begin, end, k, k_end, ahead,
                                           out + h * out_stride, out_stride);
    }
    for (; h < rows; ++h, ahead = 0) {
        all_columns<1, kWideOne, Add, Source>(p + h * p_stride, p_stride, w, begin, end, k, k_end, ahead,
                                              out + h * out_stride, out_stride);
    }
}

// The sums of sixteen registers, each by the tree of lanes.h.
#if defined(__AVX512F__)
K3_INLINE __m512 halves_added(const F32x16& a, const F32x16& b) {  // eight lanes of a, eight of b
    return _mm512_add_ps(_mm512_shuffle_f32x4((__m512)a, (__m512)b, 0x44),
                         _mm512_shuffle_f32x4((__m512)a, (__m512)b, 0xee));
}
K3_INLINE __m512 quarters_added(__m512 a, __m512 b) {  // four lanes of each of four
    return _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}
// total[i] is the sum of part[i / 4][i % 4]
K3_INLINE F32x16 sums(const F32x16 part[4][4]) {
    __m512 four[4];
    // Quarter c of four[i] holds what is left of part[c][i].
    for (int i = 0; i < 4; ++i) {
        four[i] = quarters_added(halves_added(part[0][i], part[1][i]), halves_added(part[2][i], part[3][i]));
    }
    const auto pairs = [](__m512 a, __m512 b) {
        const __m512d x = _mm512_castps_pd(a), y = _mm512_castps_pd(b);
        return _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
    };
    const __m512 a = pairs(four[0], four[1]), b = pairs(four[2], four[3]);
    return (F32x16)_mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}
#else
template <int HT, int RT>
K3_INLINE F32x16 sums(const F32x16 (&part)[HT][RT]) {
    float total[kLanes] = {};
    for (int h = 0; h < HT; ++h)
        for (int r = 0; r < RT; ++r) total[h * 4 + r] = sum(part[h][r]);
    return load(total);
}
#endif

// part[h][r] = the lanes of the product of HT rows of q and RT rows of c, all of `width` numbers.
template <int HT, int RT>
K3_INLINE void products(const float* q, const float* c, int64_t width, F32x16 part[HT][RT]) {
    for (int h = 0; h < HT; ++h)
        for (int r = 0; r < RT; ++r) part[h][r] = splat(0.0f);
    const int64_t whole = width / kLanes * kLanes;
    for (int64_t k = 0; k < whole; k += kLanes) {
        F32x16 row[RT];
#pragma GCC unroll 4
        for (int r = 0; r < RT; ++r) row[r] = load(c + r * width + k);
#pragma GCC unroll 4
        for (int h = 0; h < HT; ++h) {
            const F32x16 query = load(q + h * width + k);
#pragma GCC unroll 4
            for (int r = 0; r < RT; ++r) part[h][r] = part[h][r] + query * row[r];
        }
    }
    if (whole < width) {
        for (int h = 0; h < HT; ++h) {
            const F32x16 query = load_first(q + h * width + whole, width - whole);
            for (int r = 0; r < RT; ++r) {
                part[h][r] = part[h][r] + query * load_first(c + r * width + whole, width - whole);
            }
        }
    }
}

K3_INLINE void score_whole_tile(const Scores& s, int64_t head, int64_t row) {
    F32x16 latent[kScoreHeads][kScoreRows], rope[kScoreHeads][kScoreRows];
    products<kScoreHeads, kScoreRows>(s.q_latent + head * s.latent_width, s.latent + row * s.latent_width,
                                      s.latent_width, latent);
    const F32x16 first = sums(latent);
    products<kScoreHeads, kScoreRows>(s.q_rope + head * s.rope_width, s.rope + row * s.rope_width, s.rope_width,
                                      rope);
    float score[kLanes];
    store(score, (first + sums(rope)) * splat(s.scale));
    for (int64_t h = 0; h < kScoreHeads; ++h) {
        memcpy(s.out + (head + h) * s.out_stride + row, score + h * kScoreRows, kScoreRows * sizeof(float));
    }
}

K3_INLINE void score_one(const Scores& s, int64_t head, int64_t row) {
    F32x16 latent[1][1], rope[1][1];
    products<1, 1>(s.q_latent + head * s.latent_width, s.latent + row * s.latent_width, s.latent_width, latent);
    products<1, 1>(s.q_rope + head * s.rope_width, s.rope + row * s.rope_width, s.rope_width, rope);
    s.out[head * s.out_stride + row] = (sum(latent[0][0]) + sum(rope[0][0])) * s.scale;
}

}  // namespace

void weighted_sum(const float* p, int64_t rows, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end,
                  int64_t ahead, float* out, int64_t out_stride) {
    const auto of = [&](auto source) {
        all<false, decltype(source)>(p, rows, p_stride, w, begin, end, 0, w.columns, ahead, out, out_stride);
    };
    switch (w.encoding) {
        case Encoding::bf16: return of(SourceBf16{});
        case Encoding::f16: return of(SourceF16{});
        case Encoding::f32: return of(SourceF32{});
        case Encoding::int8: return of(SourceInt8{});
        case Encoding::int4: return of(SourceInt4{});
        case Encoding::mxfp4: return of(SourceMx{});
    }
}

void add_weighted(const float* p, int64_t rows, int64_t p_stride, const float* w, int64_t w_stride, int64_t count,
                  int64_t columns, float* out, int64_t out_stride) {
    const Matrix m = {.encoding = Encoding::f32, .rows = count, .columns = w_stride, .data = w};
    all<true, SourceF32>(p, rows, p_stride, m, 0, count, 0, columns, 0, out, out_stride);
}

void scores(const Scores& s) {
    // A few positions meet all queries: they stay in the L1 cache, the queries in the L2 cache.
    int64_t row = 0;
    for (; row + kScoreRows <= s.rows; row += kScoreRows) {
        int64_t head = 0;
        for (; head + kScoreHeads <= s.heads; head += kScoreHeads) score_whole_tile(s, head, row);
        for (; head < s.heads; ++head)
            for (int r = 0; r < kScoreRows; ++r) score_one(s, head, row + r);
    }
    for (; row < s.rows; ++row)
        for (int64_t head = 0; head < s.heads; ++head) score_one(s, head, row);
}

float reduce_max(const float* x, int64_t count) {
    float top = x[0];
    int64_t t = 0;
    if (count >= kLanes) {
        F32x16 lanes = load(x);
        for (t = kLanes; t + kLanes <= count; t += kLanes) lanes = max(lanes, load(x + t));
        float lane[kLanes];
        store(lane, lanes);
        for (int i = 0; i < kLanes; ++i) top = lane[i] > top ? lane[i] : top;
    }
    for (; t < count; ++t) top = x[t] > top ? x[t] : top;
    return top;
}

void widen(CacheType type, const void* from, int64_t count, float* to) {
    const uint16_t* p = (const uint16_t*)from;
    for (int64_t k = 0; k < count; k += kLanes) {
        const int64_t left = count - k < kLanes ? count - k : kLanes;
        uint16_t part[kLanes] = {};
        memcpy(part, p + k, left * sizeof *part);
        store_some(to + k, type == CacheType::bf16 ? from_bf16(part) : from_f16(part), left);
    }
}

float exp_shifted(float* scores, int64_t count, float top) {
    F32x16 lanes = splat(0.0f);
    for (int64_t t = 0; t < count; t += kLanes) {
        const int64_t left = count - t;
        store_some(scores + t, exp16(load_some(scores + t, left) - splat(top)), left);
        lanes = lanes + load_some(scores + t, left);
    }
    return sum(lanes);
}

}  // namespace K3_VARIANT
}  // namespace k3
