// Product with int8 activations: integers inside a group, float32 between groups.
//
//     d_g = sum over the columns of group g of q_x * q_w                     (int32, exact)
//     y   = 0; for g in order: y = y + float(d_g) * factor_g                 (each operation rounded to
//     float32) INT8:  factor_g = a_g; y = y * scale[r] at the end      INT4:  factor_g = a_g * scale[r, g]
//     MXFP4: factor_g = a_g * 2^(s[r, g] - 128), q_w being the doubled E2M1 value
//
// float(d_g) is exact: at most 128 * 127 * 64 < 2^24. Integers may be summed in any order, so each
// instruction set has its own dot product (tile.h) and the result is still the same.
//
// Weights are met in tiles: sixteen rows by one group of columns, brought into registers once for all rows of
// x. While one tile row is computed the next is fetched in the order in which it lies in memory, so that the
// memory sees one long stream, however many rows are read side by side.
#include "functions.h"
#include "tile.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

constexpr int64_t kXBlock = 64;  // rows of x whose sums are kept at a time
constexpr int64_t kLine = 64;    // bytes that memory hands out at once

K3_INLINE void fetch(const void* base, int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kLine) __builtin_prefetch((const char*)base + at, 0, 2);
}

#if defined(__AVX512VNNI__)
constexpr bool kSingle = true;
#else
constexpr bool kSingle = false;
#endif

// Sixteen rows of W, the last of which may not exist. open() once, then group() and factor() for g = 0, 1,
// ...; fetch_next(g) asks for as many bytes of the sixteen rows after them as group g has. word(v) is the
// word of x, in the order of Activations, that meets vector v of a group.
//
// kTogether > 0: there is a shorter way for a single row of x. A register holds columns of one row of W, and
// adding up what sixteen of them give takes fewer steps than transposing the weights; a second row of x would
// need all of it again. single(g, x, next, total) adds the kTogether groups from g on to the totals of
// sixteen whole rows, and if `next` fetches them for the rows after.
struct TileInt8 {
    static constexpr int kWords = 16;  // vectors of a group
    static constexpr int kTogether = kSingle ? 1 : 0;
    static constexpr bool kBiased = kBiasedBytes;
    static constexpr int word(int v) { return v; }
    const uint8_t* data;
    const float* scales;
    int64_t columns, count;

    void open(const Matrix& w, int64_t r, int64_t rows) {
        columns = w.columns;
        count = rows;
        data = (const uint8_t*)w.data + r * columns;
        scales = w.scales + r;
    }
    K3_INLINE_MEMBER void fetch_next(int64_t g) const {
        fetch(data + kRowBlock * columns, g * 64 * kRowBlock, (g + 1) * 64 * kRowBlock);
    }
    template <bool kWhole>
    K3_INLINE_MEMBER void group(int64_t g, RowInts* out) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < 4; ++i) {
            take<kWhole>(data, columns, g * 64 + i * 16, count, columns, out + 4 * i);
#pragma GCC unroll 4
            for (int64_t j = 4 * i; kBiased && j < 4 * i + 4; ++j) out[j] = out[j] ^ all_rows((int32_t)0x80808080);
        }
    }
#if defined(__AVX512VNNI__)
    K3_INLINE_MEMBER void single(int64_t g, const Activations& x, bool next, RowFloats* total) const {
        if (next) fetch_next(g);
        const __m512i q = _mm512_loadu_si512(x.q + g * kActivationGroup), bias = _mm512_set1_epi8(-128);
        __m512i sums[kRowBlock];
#pragma GCC unroll 16
        for (int r = 0; r < kRowBlock; ++r) {
            const __m512i w = _mm512_loadu_si512(data + r * columns + g * 64);
            sums[r] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_xor_si512(w, bias), q);
        }
        *total = *total + to_floats(totals(sums) + all_rows(x.starts[g])) * all_rows(x.scales[g]);
    }
#endif
    K3_INLINE_MEMBER RowFloats factor(int64_t, const RowFloats& a) const { return a; }  // a_g * 1
    RowFloats finish(const RowFloats& y) const {
        float own[kRowBlock] = {};
        memcpy(own, scales, count * sizeof *own);
        return y * load_rows(own);
    }
    bool sound() const { return true; }
};

// Words of nibbles as words of weights: the low nibbles of a word are its even columns, the high ones its
// odd.
K3_INLINE RowInts weights_of(const RowInts& nibbles, const int8_t* table) {
    const RowInts n = nibbles & all_rows(0x0f0f0f0f);
    return table == nullptr ? n : looked_up(table, n);
}
template <int kCount>
K3_INLINE void split(const RowInts* packed, const int8_t* table, RowInts* out) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kCount; ++j) {
        out[2 * j] = weights_of(packed[j], table);
        out[2 * j + 1] = weights_of(shift_right(packed[j], 4), table);
    }
}

struct TileInt4 {
    static constexpr int kWords = 16;
    static constexpr int kTogether = 0;  // shorter in the caches, but slower as soon as weights come from memory
    static constexpr int word(int v) { return v / 2 + v % 2 * (kWords / 2); }
    static constexpr bool kBiased = kBiasedNibbles;
    const uint8_t* data;
    const uint8_t* scales;  // float [rows, groups], as bytes
    int64_t bytes, scale_bytes, count;
    RowInts four[4];  // scales of groups 4n .. 4n + 3

    void open(const Matrix& w, int64_t r, int64_t rows) {
        bytes = ceil_div(w.columns, 2);
        scale_bytes = ceil_div(w.columns, kInt4Group) * 4;
        count = rows;
        data = (const uint8_t*)w.data + r * bytes;
        scales = (const uint8_t*)w.scales + r * scale_bytes;
    }
    K3_INLINE_MEMBER void fetch_next(int64_t g) const {
        fetch(data + kRowBlock * bytes, g * 32 * kRowBlock, (g + 1) * 32 * kRowBlock);
        fetch(scales + kRowBlock * scale_bytes, g * 4 * kRowBlock, (g + 1) * 4 * kRowBlock);
    }
    template <bool kWhole>
    K3_INLINE_MEMBER void group(int64_t g, RowInts* out) {
        if (g % 4 == 0) {
            if (kWhole && g * 4 + 16 <= scale_bytes)
                take<true>(scales, scale_bytes, g * 4, count, scale_bytes, four);
            else
                take<false>(scales, scale_bytes, g * 4, count, scale_bytes, four);
        }
        RowInts packed[8];
        take<kWhole>(data, bytes, g * 32, count, bytes, packed);
        take<kWhole>(data, bytes, g * 32 + 16, count, bytes, packed + 4);
        split<8>(packed, kBiased ? nullptr : kInt4Table, out);
    }
    K3_INLINE_MEMBER RowFloats factor(int64_t g, const RowFloats& a) const { return a * floats(four[g % 4]); }
    RowFloats finish(const RowFloats& y) const { return y; }
    bool sound() const { return true; }
};

// Doubled E2M1 values plus 12.
alignas(16) static const int8_t kMxBiasedTable[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

struct TileMx {
    static constexpr int kWords = 8;
    static constexpr int kTogether = kSingle ? 4 : 0;
    static constexpr int word(int v) { return v / 2 + v % 2 * (kWords / 2); }
    static constexpr bool kBiased = kBiasedNibbles;
    const uint8_t* data;
    const uint8_t* exponents;
    int64_t bytes, groups, count;
    RowInts sixteen[4];  // exponents of groups 16n .. 16n + 15, four to a word
    RowFloats own;       // factor of the group at hand
    RowInts reserved = all_rows(0);

    void open(const Matrix& w, int64_t r, int64_t rows) {
        bytes = w.columns / 2;
        groups = w.columns / kMxGroup;
        count = rows;
        data = (const uint8_t*)w.data + r * bytes;
        exponents = w.exponents + r * groups;
    }
    K3_INLINE_MEMBER void fetch_next(int64_t g) const {
        fetch(data + kRowBlock * bytes, g * 16 * kRowBlock, (g + 1) * 16 * kRowBlock);
        if (g % 4 == 0) fetch(exponents + kRowBlock * groups, g * kRowBlock, (g + 4) * kRowBlock);
    }
    template <bool kWhole>
    K3_INLINE_MEMBER void take_exponents(int64_t g) {
        if (kWhole && g + 16 <= groups)
            take<true>(exponents, groups, g, count, groups, sixteen);
        else
            take<false>(exponents, groups, g, count, groups, sixteen);
    }
    // 2^(e - 128) for group g of those whose exponents were taken; e = 255 is remembered.
    K3_INLINE_MEMBER RowFloats power(int64_t g) {
        // It is (e - 1) << 23 from e = 2 on, and (e + 1) << 21, a subnormal number, before: each is the
        // larger where it holds.
        const RowInts e = shift_right(sixteen[g % 16 / 4], (int)(g % 4) * 8) & all_rows(255);
        const RowInts above = e + all_rows(1);
        reserved = reserved | above;  // 256 has a bit of its own
        return floats(max(shift_left(e - all_rows(1), 23), shift_left(above, 21)));
    }
#if defined(__AVX512VNNI__)
    // The same for the four groups from g on.
    K3_INLINE_MEMBER void powers(int64_t g, RowFloats* out) {
        const __m512i e = (__m512i)sixteen[g % 16 / 4];
        const __m512i usual = _mm512_sub_epi8(e, _mm512_set1_epi8(2));  // the others are 255, 0 and 1
        if (__builtin_expect(_mm512_cmpge_epu8_mask(usual, _mm512_set1_epi8((char)253)) != 0, false)) {
#pragma GCC unroll 4
            for (int i = 0; i < 4; ++i) out[i] = power(g + i);
            return;
        }
        const __m512i below = _mm512_sub_epi8(e, _mm512_set1_epi8(1)), field = _mm512_set1_epi32(0x7f800000);
        out[0] = (RowFloats)_mm512_and_si512(_mm512_slli_epi32(below, 23), field);
        out[1] = (RowFloats)_mm512_and_si512(_mm512_slli_epi32(below, 15), field);
        out[2] = (RowFloats)_mm512_and_si512(_mm512_slli_epi32(below, 7), field);
        out[3] = (RowFloats)_mm512_and_si512(_mm512_srli_epi32(below, 1), field);
    }
    // Words are sums of eight products, at most 12 * 127 each, and two of them: they fit 16 bits.
    K3_INLINE_MEMBER void single(int64_t g, const Activations& x, bool next, RowFloats* total) {
        if (g % 16 == 0) take_exponents<true>(g);
        const __m512i front = _mm512_loadu_si512(x.q + g * kMxGroup);
        const __m512i back = _mm512_loadu_si512(x.q + g * kMxGroup + 64);
        const __m512i q[2] = {_mm512_shuffle_i64x2(front, back, 0x88), _mm512_shuffle_i64x2(front, back, 0xdd)};
        const __m512i bias = _mm512_set1_epi8(12), none = _mm512_setzero_si512();
        // What the bias adds to each word, taken off.
        const __m512i begin =
            _mm512_sub_epi32(none, _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(none, bias, q[0]), bias, q[1]));
        const __m512i low = _mm512_set1_epi8(15);
        const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)kMxBiasedTable));
        __m512i own[4], sums[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            if (next) fetch_next(g + i);
            __m512i row[4];
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                const __m512i w = _mm512_loadu_si512(data + (4 * i + j) * bytes + g * 16);
                const __m512i even = _mm512_and_si512(w, low);
                const __m512i odd = _mm512_and_si512(_mm512_srli_epi16(w, 4), low);
                row[j] = _mm512_dpbusd_epi32(begin, _mm512_shuffle_epi8(table, even), q[0]);
                row[j] = _mm512_dpbusd_epi32(row[j], _mm512_shuffle_epi8(table, odd), q[1]);
            }
            own[i] = quarter_totals(row);
        }
        transpose_quarters(own, sums);
        RowFloats factors[4];
        powers(g, factors);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i)
            *total = *total + to_floats((RowInts)sums[i]) * (all_rows(x.scales[g + i]) * factors[i]);
    }
#endif
    template <bool kWhole>
    K3_INLINE_MEMBER void group(int64_t g, RowInts* out) {
        if (g % 16 == 0) take_exponents<kWhole>(g);
        own = power(g);
        RowInts packed[4];
        take<kWhole>(data, bytes, g * 16, count, bytes, packed);
        split<4>(packed, kBiased ? kMxBiasedTable : kMxDoubledTable, out);
    }
    K3_INLINE_MEMBER RowFloats factor(int64_t, const RowFloats& a) const { return a * own; }
    RowFloats finish(const RowFloats& y) const { return y; }
    bool sound() const {
        int32_t lane[kRowBlock], all = 0;
        memcpy(lane, &reserved, sizeof lane);
        for (int64_t r = 0; r < kRowBlock; ++r) all |= lane[r];
        return (all & 256) == 0;
    }
};

K3_INLINE RowInts times(const TileInt8&, const RowInts& sums, const RowInts& w, const RowInts& x) {
    return dot(sums, w, x);
}
template <class Tile>
K3_INLINE RowInts times(const Tile&, const RowInts& sums, const RowInts& w, const RowInts& x) {
    return dot_small(sums, w, x);
}

// total[s] += float(d_g) * factor_g for rows s0 .. s0 + some of x.
template <bool kWhole, class Tile>
K3_INLINE void step(Tile& tile, int64_t g, const Activations& x, int64_t s0, int64_t some, RowFloats* total) {
    const int64_t first = g * x.rows + s0;
    const int8_t* q = x.q + first * 4 * Tile::kWords;
    RowInts w[Tile::kWords];
    tile.template group<kWhole>(g, w);
    for (int64_t s = 0; s < some; ++s, q += 4 * Tile::kWords) {
        // Two chains of additions: one would wait for itself.
        RowInts even = all_rows(Tile::kBiased ? x.starts[first + s] : 0), odd = all_rows(0);
#pragma GCC unroll 8
        for (int v = 0; v < Tile::kWords; v += 2) {
            even = times(tile, even, w[v], word_at(q + 4 * Tile::word(v)));
            odd = times(tile, odd, w[v + 1], word_at(q + 4 * Tile::word(v + 1)));
        }
        total[s] = total[s] + to_floats(even + odd) * tile.factor(g, all_rows(x.scales[first + s]));
    }
}

template <class Tile>
K3_INLINE void groups(Tile& tile, const Activations& x, int64_t columns, bool next, int64_t s0, int64_t some,
                      RowFloats* total) {
    const int64_t whole = tile.count == kRowBlock ? columns / x.group : 0;
    int64_t g = 0;
    if constexpr (Tile::kTogether > 0) {
        for (; x.rows == 1 && g + Tile::kTogether <= whole; g += Tile::kTogether) tile.single(g, x, next, total);
    }
    for (; g < whole; ++g) {
        if (next) tile.fetch_next(g);
        step<true>(tile, g, x, s0, some, total);
    }
    for (; g < x.groups; ++g) step<false>(tile, g, x, s0, some, total);
}

template <class Tile>
bool product(const Activations& x, const Matrix& w, int64_t begin, int64_t end, float* y, int64_t stride) {
    Tile tile;
    for (int64_t r = begin; r < end; r += kRowBlock) {
        const int64_t count = end - r < kRowBlock ? end - r : kRowBlock;
        tile.open(w, r, count);
        const bool next = r + 2 * kRowBlock <= w.rows;
        for (int64_t s0 = 0; s0 < x.rows; s0 += kXBlock) {
            const int64_t some = x.rows - s0 < kXBlock ? x.rows - s0 : kXBlock;
            RowFloats total[kXBlock];
            for (int64_t s = 0; s < some; ++s) total[s] = all_rows(0.0f);
            if (some == 1)
                groups(tile, x, w.columns, next, s0, 1, total);
            else
                groups(tile, x, w.columns, next && s0 == 0, s0, some, total);
            for (int64_t s = 0; s < some; ++s) {
                float lane[kRowBlock];
                const RowFloats sums = tile.finish(total[s]);
                store(lane, sums);
                memcpy(y + (s0 + s) * stride + r - begin, lane, count * sizeof *lane);
            }
        }
    }
    return tile.sound();
}

constexpr int32_t bias_of(Encoding encoding) {
    return encoding == Encoding::int8   ? (kBiasedBytes ? 128 : 0)
           : encoding == Encoding::int4 ? (kBiasedNibbles ? 8 : 0)
                                        : (kBiasedNibbles ? 12 : 0);
}

}  // namespace

bool matmul_int8(const Activations& x, const Matrix& w, int64_t begin, int64_t end, float* y, int64_t stride) {
    switch (w.encoding) {
        case Encoding::int8: return product<TileInt8>(x, w, begin, end, y, stride);
        case Encoding::int4: return product<TileInt4>(x, w, begin, end, y, stride);
        case Encoding::mxfp4: return product<TileMx>(x, w, begin, end, y, stride);
        case Encoding::bf16:
        case Encoding::f16:
        case Encoding::f32: break;  // never asked for: these are multiplied exactly
    }
    return false;
}

void finish_groups(int64_t row, int64_t first_group, int64_t count, const Activations& x) {
    const int32_t bias = bias_of(x.encoding);
    for (int64_t g = first_group; g < first_group + count; ++g) {
        int8_t* q = x.q + (g * x.rows + row) * x.group;
        int32_t sum = 0;
        for (int64_t k = 0; k < x.group; ++k) sum += q[k];
        x.starts[g * x.rows + row] = -bias * sum;
        if (x.encoding == Encoding::int8) continue;
        int8_t odd[kActivationGroup / 2];
        for (int64_t k = 0; k < x.group / 2; ++k) {
            odd[k] = q[2 * k + 1];
            q[k] = q[2 * k];
        }
        memcpy(q + x.group / 2, odd, x.group / 2);
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
