// Exact product: float32 activations times decoded weights.
//
//     lane[j] = sum over k = j, j + 16, j + 32, ... in that order of x[k] * w[k]     (each product rounded)
//     y = the sixteen lanes added in the tree of lanes.h
//
// That order belongs to one (row of x, row of W) pair alone: tiles below only share loads.
#include "decode.h"
#include "functions.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

#if defined(__AVX512F__)
constexpr int kXTile = 4;
#else
constexpr int kXTile = 2;
#endif
constexpr int64_t kFarBytes = 8192;  // what memory hands out to a core in about half a microsecond

// y[s * stride + r] for RT neighbouring rows of W and ST rows of x.
template <int RT, int ST, class Source>
K3_INLINE void tile(const Source* w, const float* x, int64_t columns, float* y, int64_t stride) {
    F32x16 lane[RT][ST];
    for (int r = 0; r < RT; ++r)
        for (int s = 0; s < ST; ++s) lane[r][s] = splat(0.0f);
    const int64_t whole = columns / kLanes * kLanes;
    // A single row of x is as fast as memory: ask for the next RT rows of W in the order in which they lie,
    // and where these are short for what comes later, or it would not be there in time.
    constexpr bool kFetch = RT > 1 && ST == 1;
    uintptr_t next = 0;
    if constexpr (kFetch) {
        const int64_t rows_bytes = RT * (w[1].bytes() - w[0].bytes());
        next = reinterpret_cast<uintptr_t>(w[0].bytes()) + (rows_bytes < kFarBytes ? kFarBytes : rows_bytes);
    }
    for (int64_t k = 0; k < whole; k += kLanes) {
        if (kFetch) {
            for (int at = 0; at < RT * Source::kStepBytes; at += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(next + at), 0, 2);
            next += RT * Source::kStepBytes;
        }
        F32x16 part[ST];
#pragma GCC unroll 8
        for (int s = 0; s < ST; ++s) part[s] = load(x + s * columns + k);
#pragma GCC unroll 8
        for (int r = 0; r < RT; ++r) {
            const F32x16 weight = w[r].at(k);
#pragma GCC unroll 8
            for (int s = 0; s < ST; ++s) lane[r][s] = lane[r][s] + part[s] * weight;
        }
    }
    if (whole < columns) {
        for (int r = 0; r < RT; ++r) {
            const F32x16 weight = w[r].first(whole, columns - whole);
            for (int s = 0; s < ST; ++s) {
                lane[r][s] = lane[r][s] + load_first(x + s * columns + whole, columns - whole) * weight;
            }
        }
    }
    for (int r = 0; r < RT; ++r)
        for (int s = 0; s < ST; ++s) y[s * stride + r] = sum(lane[r][s]);
}

template <int RT, class Source>
void all_x(const Source* w, const float* x, int64_t rows, int64_t columns, float* y, int64_t stride) {
    int64_t s = 0;
    for (; s + kXTile <= rows; s += kXTile) tile<RT, kXTile>(w, x + s * columns, columns, y + s * stride, stride);
    for (; s < rows; ++s) tile<RT, 1>(w, x + s * columns, columns, y + s * stride, stride);
}

template <class Source>
void decode_row(const Source& w, int64_t columns, float* out) {
    int64_t k = 0;
    for (; k + kLanes <= columns; k += kLanes) store(out + k, w.at(k));
    if (k < columns) store_some(out + k, w.first(k, columns - k), columns - k);
}

// Few rows of x: every weight is decoded where it is used.
template <class Source>
void product_direct(const float* x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, float* y) {
    Source source[kRowTile];
    int64_t r = begin;
    for (; r + kRowTile <= end; r += kRowTile) {
        for (int i = 0; i < kRowTile; ++i) source_of(source[i], w, r + i);
        all_x<kRowTile>(source, x, rows, w.columns, y + r, w.rows);
    }
    for (; r < end; ++r) {
        source_of(source[0], w, r);
        all_x<1>(source, x, rows, w.columns, y + r, w.rows);
    }
}

// `count` weight rows from r as float32; those that already are stay where they lie.
template <class Source>
const float* decoded(const Matrix& w, int64_t r, int64_t count, float* scratch) {
    if (w.encoding == Encoding::f32) return (const float*)w.data + r * w.columns;
    Source source;
    for (int64_t i = 0; i < count; ++i) {
        source_of(source, w, r + i);
        decode_row(source, w.columns, scratch + i * w.columns);
    }
    return scratch;
}

// Several rows of x: a block of weight rows is decoded once into scratch, then a few rows of x at a time meet
// it.
template <class Source>
void product_decoded(const float* x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, float* y,
                     float* scratch) {
    for (int64_t r = begin; r < end; r += kRowBlock) {
        const int64_t count = end - r < kRowBlock ? end - r : kRowBlock;
        const Matrix block = {
            .encoding = Encoding::f32,
            .rows = w.rows,
            .columns = w.columns,
            .data = decoded<Source>(w, r, count, scratch),
        };
        for (int64_t s = 0; s < rows; s += kXTile) {
            const int64_t some = rows - s < kXTile ? rows - s : kXTile;
            product_direct<SourceF32>(x + s * w.columns, some, block, 0, count, y + s * w.rows + r);
        }
    }
}

template <class Source>
void product(const float* x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, float* y, float* scratch) {
    if (rows < kXTile) return product_direct<Source>(x, rows, w, begin, end, y);
    product_decoded<Source>(x, rows, w, begin, end, y, scratch);
}

template <class Source>
void decode_rows(const Matrix& w, int64_t begin, int64_t end, float* out) {
    Source source;
    for (int64_t r = begin; r < end; ++r) {
        source_of(source, w, r);
        decode_row(source, w.columns, out + (r - begin) * w.columns);
    }
}

}  // namespace

void matmul(const float* x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, float* y, float* scratch) {
    switch (w.encoding) {
        case Encoding::bf16: return product<SourceBf16>(x, rows, w, begin, end, y, scratch);
        case Encoding::f16: return product<SourceF16>(x, rows, w, begin, end, y, scratch);
        case Encoding::f32: return product<SourceF32>(x, rows, w, begin, end, y, scratch);
        case Encoding::int8: return product<SourceInt8>(x, rows, w, begin, end, y, scratch);
        case Encoding::int4: return product<SourceInt4>(x, rows, w, begin, end, y, scratch);
        case Encoding::mxfp4: return product<SourceMx>(x, rows, w, begin, end, y, scratch);
    }
}

void decode(const Matrix& w, int64_t begin, int64_t end, float* out) {
    switch (w.encoding) {
        case Encoding::bf16: return decode_rows<SourceBf16>(w, begin, end, out);
        case Encoding::f16: return decode_rows<SourceF16>(w, begin, end, out);
        case Encoding::f32: return decode_rows<SourceF32>(w, begin, end, out);
        case Encoding::int8: return decode_rows<SourceInt8>(w, begin, end, out);
        case Encoding::int4: return decode_rows<SourceInt4>(w, begin, end, out);
        case Encoding::mxfp4: return decode_rows<SourceMx>(w, begin, end, out);
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
