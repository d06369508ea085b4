// The heads of a KDA layer from the outputs of the projections to the gated rows: convolution, norms, gates,
// delta rule, output norm and gate, one head after the other, so that a head's memory stays in the caches for
// all tokens of a call.
//
// Every column of a memory (every channel of a convolution) is computed alone, its sums in ascending order of
// the key index (of age); blocks only decide what stays in the L1 cache.
#include "functions.h"
#include "mathfn.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

constexpr int64_t padded(int64_t dim) { return ceil_div(dim, kLanes) * kLanes; }

// Rows of one head for the tokens of a tile, each padded with zeros to whole registers.
struct Tile {
    float *q, *k, *v, *decay, *read;
    float* block;  // a block of the head's memory, rows side by side
    int64_t stride;
};

K3_INLINE Tile tile_in(float* scratch, int64_t dim) {
    const int64_t stride = padded(dim), size = kKdaTokens * stride;
    return {
        .q = scratch,
        .k = scratch + size,
        .v = scratch + 2 * size,
        .decay = scratch + 3 * size,
        .read = scratch + 4 * size,
        .block = scratch + 5 * size,
        .stride = stride,
    };
}

// Convolution and SiLU of `count` tokens from `first` of one stream (0 q, 1 k, 2 v); its window moves on.
// Taps is the number of taps, or 0 for any.
template <int Taps>
void convolve(const KdaHeads& a, int stream, const float* u, int64_t head, int64_t first, int64_t count,
              float* out, int64_t stride) {
    const int64_t taps = Taps > 0 ? Taps : a.taps, old = taps - 1, width = a.heads * a.dim;
    for (int64_t c = 0; c < a.dim; c += kLanes) {
        const int64_t channel = head * a.dim + c, left = a.dim - c;
        const float* w = a.conv + stream * taps * width + channel;
        float* window = a.windows + stream * old * width + channel;
        F32x16 weight[Taps > 0 ? Taps : kTapsMax], past[Taps > 0 ? Taps : kTapsMax];
        for (int64_t tap = 0; tap < taps; ++tap) weight[tap] = load_some(w + tap * width, left);
        for (int64_t tap = 0; tap < old; ++tap) past[tap] = load_some(window + tap * width, left);
        for (int64_t t = 0; t < count; ++t) {
            past[old] = load_some(u + (first + t) * width + channel, left);
            F32x16 total = past[0] * weight[0];
            for (int64_t tap = 1; tap < taps; ++tap) total = total + past[tap] * weight[tap];
            store(out + t * stride + c, silu16(total));
            for (int64_t tap = 0; tap < old; ++tap) past[tap] = past[tap + 1];
        }
        for (int64_t tap = 0; tap < old; ++tap) store_some(window + tap * width, past[tap], left);
    }
}

K3_INLINE float square_sum(const float* row, int64_t stride) {
    F32x16 lanes = splat(0.0f);
    for (int64_t c = 0; c < stride; c += kLanes) lanes = lanes + load(row + c) * load(row + c);
    return sum(lanes);
}

K3_INLINE float inverse_length(const float* row, int64_t stride, float eps) {
    return 1.0f / __builtin_sqrtf(square_sum(row, stride) + eps);
}

// exp of the log decay of `count` tokens from `first`.
void decays(const KdaHeads& a, int64_t head, int64_t first, int64_t count, float* out, int64_t stride) {
    const F32x16 rate = splat(exp1(a.a_log[head])), bound = splat(a.lower_bound);
    for (int64_t t = 0; t < count; ++t) {
        const float* f = a.f + ((first + t) * a.heads + head) * a.dim;
        for (int64_t c = 0; c < a.dim; c += kLanes) {
            const int64_t left = a.dim - c;
            const F32x16 shifted = load_some(f + c, left) + load_some(a.dt_bias + head * a.dim + c, left);
            store(out + t * stride + c, exp16(bound * sigmoid16(rate * shifted)));
        }
    }
}

// One block of a head's memory: N registers of columns, of which `width` columns exist. In its place its rows
// lie `dim` apart; between the first sweep of the first token and the last sweep of the last one it lies side
// by side in `block`, where no two of its lines compete for a place in the L1 cache.
template <int N>
struct Block {
    float* memory;
    float* block;
    int64_t dim, width;
};

// seen = sum of the decayed rows times k; the decayed rows go to the block. Whole: all N registers exist.
template <int N, bool Whole, bool FromMemory>
K3_INLINE void fade(const Block<N>& b, const float* decay, const float* k, F32x16* seen) {
    for (int n = 0; n < N; ++n) seen[n] = splat(0.0f);
    const float* from = FromMemory ? b.memory : b.block;
    const int64_t step = FromMemory ? b.dim : N * kLanes;
    for (int64_t i = 0; i < b.dim; ++i) {
        const F32x16 share = splat(decay[i]), key = splat(k[i]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const float* at = from + i * step + n * kLanes;
            const F32x16 faded = (FromMemory && !Whole ? load_some(at, b.width) : load(at)) * share;
            store(b.block + (i * N + n) * kLanes, faded);
            seen[n] = seen[n] + faded * key;
        }
    }
}

// The block's rows take in k times error; read = sum of the new rows times q.
template <int N, bool Whole, bool ToMemory>
K3_INLINE void write(const Block<N>& b, const float* k, const float* q, const F32x16* error, F32x16* read) {
    for (int n = 0; n < N; ++n) read[n] = splat(0.0f);
    float* to = ToMemory ? b.memory : b.block;
    const int64_t step = ToMemory ? b.dim : N * kLanes;
    for (int64_t i = 0; i < b.dim; ++i) {
        const F32x16 key = splat(k[i]), query = splat(q[i]);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) {
            const F32x16 updated = load(b.block + (i * N + n) * kLanes) + key * error[n];
            float* at = to + i * step + n * kLanes;
            if (ToMemory && !Whole) {
                store_some(at, updated, b.width);
            } else {
                store(at, updated);
            }
            read[n] = read[n] + updated * query;
        }
    }
}

// The delta rule of `count` tokens for N registers of columns from j; beta [count].
template <int N, bool Whole>
void delta_block(const Tile& tile, float* memory, int64_t dim, int64_t j, const float* beta, int64_t count) {
    const Block<N> b = {.memory = memory + j, .block = tile.block, .dim = dim, .width = dim - j};
    for (int64_t t = 0; t < count; ++t) {
        const int64_t row = t * tile.stride;
        const float *q = tile.q + row, *k = tile.k + row, *decay = tile.decay + row;
        F32x16 seen[N], error[N], read[N];
        if (t == 0) {
            fade<N, Whole, true>(b, decay, k, seen);
        } else {
            fade<N, Whole, false>(b, decay, k, seen);
        }
        const F32x16 share = splat(beta[t]);
        for (int n = 0; n < N; ++n) error[n] = share * (load(tile.v + row + j + n * kLanes) - seen[n]);
        if (t == count - 1) {
            write<N, Whole, true>(b, k, q, error, read);
        } else {
            write<N, Whole, false>(b, k, q, error, read);
        }
        for (int n = 0; n < N; ++n) store(tile.read + row + j + n * kLanes, read[n]);
    }
}

void delta_rule(const Tile& tile, float* memory, int64_t dim, const float* beta, int64_t count) {
    int64_t j = 0;
    for (; j + kKdaBlock * kLanes <= dim; j += kKdaBlock * kLanes) {
        delta_block<kKdaBlock, true>(tile, memory, dim, j, beta, count);
    }
    for (; j < dim; j += kLanes) delta_block<1, false>(tile, memory, dim, j, beta, count);
}

}  // namespace

void kda_heads(const KdaHeads& a, int64_t begin, int64_t end, float* scratch) {
    const Tile tile = tile_in(scratch, a.dim);
    const int64_t stride = tile.stride, width = a.heads * a.dim;
    const float* streams[3] = {a.q, a.k, a.v};
    float* rows[3] = {tile.q, tile.k, tile.v};
    for (int64_t head = begin; head < end; ++head) {
        float* memory = a.memory + head * a.dim * a.dim;
        for (int64_t first = 0; first < a.tokens; first += kKdaTokens) {
            const int64_t count = a.tokens - first < kKdaTokens ? a.tokens - first : kKdaTokens;
            for (int stream = 0; stream < 3; ++stream) {
                const auto convolution = a.taps == 4 ? convolve<4> : convolve<0>;
                convolution(a, stream, streams[stream], head, first, count, rows[stream], stride);
            }
            decays(a, head, first, count, tile.decay, stride);
            float beta[kKdaTokens];
            for (int64_t t = 0; t < count; ++t) {
                float *q = tile.q + t * stride, *k = tile.k + t * stride;
                const F32x16 q_factor = splat(inverse_length(q, stride, a.l2_eps)), scale = splat(a.query_scale);
                const F32x16 k_factor = splat(inverse_length(k, stride, a.l2_eps));
                for (int64_t c = 0; c < stride; c += kLanes) {
                    store(q + c, (load(q + c) * q_factor) * scale);
                    store(k + c, load(k + c) * k_factor);
                }
                beta[t] = sigmoid1(a.b[(first + t) * a.heads + head]);
            }
            delta_rule(tile, memory, a.dim, beta, count);
            for (int64_t t = 0; t < count; ++t) {
                const float* read = tile.read + t * stride;
                const int64_t row = (first + t) * width + head * a.dim;
                const F32x16 factor =
                    splat(1.0f / __builtin_sqrtf(square_sum(read, stride) / (float)a.dim + a.norm_eps));
                for (int64_t c = 0; c < a.dim; c += kLanes) {
                    const int64_t left = a.dim - c;
                    const F32x16 normed = load_some(a.norm + c, left) * (load(read + c) * factor);
                    store_some(a.out + row + c, normed * sigmoid16(load_some(a.g + row + c, left)), left);
                }
            }
        }
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
