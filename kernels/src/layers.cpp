#include "layers.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "rowops.h"
#include "scratch.h"
#include "threads.h"
#include "variant.h"

namespace k3 {

namespace {

Matrix row_range(const Matrix& w, int64_t begin, int64_t count) {
    Matrix part = w;
    part.rows = count;
    switch (w.encoding) {
        case Encoding::BF16: part.data = static_cast<const uint16_t*>(w.data) + begin * w.columns; break;
        case Encoding::F32: part.data = static_cast<const float*>(w.data) + begin * w.columns; break;
        case Encoding::INT8:
            part.data = static_cast<const uint8_t*>(w.data) + begin * w.columns;
            part.scales = w.scales + begin;
            break;
        case Encoding::INT4:
            part.data = static_cast<const uint8_t*>(w.data) + begin * ceil_div(w.columns, 2);
            part.scales = w.scales + begin * ceil_div(w.columns, kInt4Group);
            break;
        case Encoding::MXFP4:
            part.data = static_cast<const uint8_t*>(w.data) + begin * (w.columns / 2);
            part.exponents = w.exponents + begin * (w.columns / kMxGroup);
            break;
    }
    return part;
}

// Heads that read the cache in one sweep: enough sweeps for every thread, but no more heads than keep a
// thread's scores small. Heads do not meet in any sum, so this changes no bit.
int64_t heads_together(int64_t pairs) {
    return std::min<int64_t>(16, std::max<int64_t>(4, pairs / get_threads()));
}

// Reused between pieces of one thread; only ever touched by it.
struct Scratch {
    std::vector<float> scores, rope_scores, tile, block;
};

// Heads [h0, h1) of one token over the first `count` positions.
void attend(const float* q_latent, const float* q_rope, int64_t heads, const Matrix& latent,
            const Matrix& rope, int64_t count, float scale, float* out, Scratch& scratch) {
    const Matrix seen = row_range(latent, 0, count), seen_rope = row_range(rope, 0, count);
    const int64_t width = latent.columns;
    scratch.scores.resize(static_cast<size_t>(heads * count));
    scratch.rope_scores.resize(static_cast<size_t>(heads * count));
    scratch.tile.resize(static_cast<size_t>(kRowBlock * std::max(width, rope.columns)));
    scratch.block.resize(static_cast<size_t>(heads * width));
    const Kernels& k = kernels();
    k.matmul(q_latent, heads, seen, 0, count, scratch.scores.data(), scratch.tile.data());
    k.matmul(q_rope, heads, seen_rope, 0, count, scratch.rope_scores.data(), scratch.tile.data());
    std::vector<float> top(static_cast<size_t>(heads)), total(static_cast<size_t>(heads), 0.0f);
    for (int64_t h = 0; h < heads; ++h) {
        float* row = scratch.scores.data() + h * count;
        top[h] = k.scores_top(row, scratch.rope_scores.data() + h * count, count, scale, row);
    }
    std::fill(out, out + heads * width, 0.0f);
    for (int64_t begin = 0; begin < count; begin += kAttentionBlock) {
        const int64_t end = std::min(count, begin + kAttentionBlock);
        for (int64_t h = 0; h < heads; ++h) {
            total[h] =
                total[h] + k.exp_shifted(scratch.scores.data() + h * count + begin, end - begin, top[h]);
        }
        k.weighted_sum(scratch.scores.data() + begin, heads, count, latent, begin, end, scratch.block.data(),
                       width);
        for (int64_t i = 0; i < heads * width; ++i) out[i] = out[i] + scratch.block[i];
    }
    for (int64_t h = 0; h < heads; ++h) {
        for (int64_t i = 0; i < width; ++i) out[h * width + i] = out[h * width + i] / total[h];
    }
}

}  // namespace

void kda_heads(const KdaHeads& a) {
    parallel_for(a.heads, 1, [&](int64_t begin, int64_t end) {
        float* scratch = thread_floats<KdaHeads>(static_cast<size_t>(kda_scratch(a.dim)));
        kernels().kda_heads(a, begin, end, scratch);
    });
}

void latent_attention(const float* q_latent, const float* q_rope, int64_t tokens, int64_t heads,
                      const Matrix& latent, const Matrix& rope, float scale, float* out) {
    const int64_t together = heads_together(tokens * heads), sweeps = ceil_div(heads, together);
    parallel_for(tokens * sweeps, 1, [&](int64_t begin, int64_t end) {
        Scratch scratch;
        for (int64_t i = begin; i < end; ++i) {
            const int64_t token = i / sweeps, first = i % sweeps * together;
            const int64_t row = token * heads + first, count = std::min(together, heads - first);
            attend(q_latent + row * latent.columns, q_rope + row * rope.columns, count, latent, rope,
                   latent.rows - tokens + 1 + token, scale, out + row * latent.columns, scratch);
        }
    });
}

void absorb_query(const float* q, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim,
                  const Matrix& w, float* out) {
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; ++h) {
            const int64_t row = h * (key_dim + value_dim);
            kernels().weighted_sum(q + h * key_dim, tokens, heads * key_dim, w, row, row + key_dim,
                                   out + h * w.columns, heads * w.columns);
        }
    });
}

void expand_value(const float* x, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim,
                  const Matrix& w, float* out) {
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
        std::vector<float> own(static_cast<size_t>(tokens * w.columns)),
            y(static_cast<size_t>(tokens * value_dim));
        std::vector<float> tile(static_cast<size_t>(kRowBlock * w.columns));
        for (int64_t h = begin; h < end; ++h) {
            for (int64_t t = 0; t < tokens; ++t) {
                std::copy_n(x + (t * heads + h) * w.columns, w.columns, own.data() + t * w.columns);
            }
            const Matrix values = row_range(w, h * (key_dim + value_dim) + key_dim, value_dim);
            kernels().matmul(own.data(), tokens, values, 0, value_dim, y.data(), tile.data());
            for (int64_t t = 0; t < tokens; ++t) {
                std::copy_n(y.data() + t * value_dim, value_dim, out + (t * heads + h) * value_dim);
            }
        }
    });
}

}  // namespace k3
