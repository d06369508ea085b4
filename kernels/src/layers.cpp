#include "layers.h"

#include <algorithm>
#include <cstring>

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
        case Encoding::bf16:
        case Encoding::f16: part.data = static_cast<const uint16_t*>(w.data) + begin * w.columns; break;
        case Encoding::f32: part.data = static_cast<const float*>(w.data) + begin * w.columns; break;
        case Encoding::int8:
            part.data = static_cast<const uint8_t*>(w.data) + begin * w.columns;
            part.scales = w.scales + begin;
            break;
        case Encoding::int4:
            part.data = static_cast<const uint8_t*>(w.data) + begin * ceil_div(w.columns, 2);
            part.scales = w.scales + begin * ceil_div(w.columns, kInt4Group);
            break;
        case Encoding::mxfp4:
            part.data = static_cast<const uint8_t*>(w.data) + begin * (w.columns / 2);
            part.exponents = w.exponents + begin * (w.columns / kMxGroup);
            break;
    }
    return part;
}

constexpr int64_t kScoreRows = 64;  // positions and heads whose scores are one piece of work
constexpr int64_t kScoreHeads = 32;
constexpr int64_t kSumColumns = 64;  // columns of the latent whose weighted sums are one piece of work
constexpr int64_t kSumHeads = 4;     // heads that sweep over a block of them together
constexpr int64_t kScoresHeld = int64_t{4} << 20;  // scores held at once, unless one token has more

// Tokens of one call whose scores are held together.
struct Attention {
    const float *q_latent, *q_rope;  // of the first of these tokens
    int64_t tokens, heads;
    LatentCache cache;
    int64_t first;  // positions that the first token sees
    float scale;
    float *scores, *totals;  // [tokens, heads, stride] and [tokens, heads]
    int64_t stride;
    float* out;

    int64_t seen(int64_t token) const { return first + token; }
};

struct OfCall {};    // scratch of the thread that calls,
struct OfLatent {};  // and of those that work
struct OfRope {};
struct OfRows {};
struct OfResults {};
struct OfDecoded {};

// `count` rows of `columns` numbers each as float32, from row `row` and column `column` of [.., width]. What
// is float32 stays where it is, its rows `width` apart; what is not goes to `scratch`, row by row.
const float* floats_of(const LatentCache& cache, const void* data, int64_t width, int64_t row, int64_t count,
                       int64_t column, int64_t columns, float* scratch) {
    if (cache.type == CacheType::f32) return static_cast<const float*>(data) + row * width + column;
    const uint16_t* from = static_cast<const uint16_t*>(data) + row * width + column;
    if (columns == width) {
        kernels().widen(cache.type, from, count * width, scratch);
        return scratch;
    }
    for (int64_t t = 0; t < count; ++t) {
        kernels().widen(cache.type, from + t * width, columns, scratch + t * columns);
    }
    return scratch;
}

// Scores of one token and some heads against positions [begin, end).
void score(const Attention& a, int64_t token, int64_t head, int64_t heads, int64_t begin, int64_t end) {
    const int64_t latent = a.cache.latent_width, rope = a.cache.rope_width, row = token * a.heads + head;
    float* own_latent = thread_floats<OfLatent>(static_cast<size_t>(kScoreRows * latent));
    float* own_rope = thread_floats<OfRope>(static_cast<size_t>(kScoreRows * rope));
    const int64_t count = end - begin;
    kernels().scores({
        .q_latent = a.q_latent + row * latent,
        .q_rope = a.q_rope + row * rope,
        .latent = floats_of(a.cache, a.cache.latent, latent, begin, count, 0, latent, own_latent),
        .rope = floats_of(a.cache, a.cache.rope, rope, begin, count, 0, rope, own_rope),
        .heads = heads,
        .rows = count,
        .latent_width = latent,
        .rope_width = rope,
        .scale = a.scale,
        .out = a.scores + row * a.stride + begin,
        .out_stride = a.stride,
    });
}

// The scores of one (token, head) become exponentials, and these are added up.
void weigh(const Attention& a, int64_t row) {
    float* scores = a.scores + row * a.stride;
    const int64_t count = a.seen(row / a.heads);
    const float top = kernels().reduce_max(scores, count);
    float total = 0.0f;
    for (int64_t begin = 0; begin < count; begin += kAttentionBlock) {
        total = total + kernels().exp_shifted(scores + begin, std::min(kAttentionBlock, count - begin), top);
    }
    a.totals[row] = total;
}

// Columns [column, column + columns) of the results of one token and some heads: block after block, and
// within a block, which stays in the L2 cache, all heads.
void mix(const Attention& a, int64_t token, int64_t head, int64_t heads, int64_t column, int64_t columns) {
    const int64_t width = a.cache.latent_width, row = token * a.heads + head, count = a.seen(token);
    float* scratch = thread_floats<OfLatent>(static_cast<size_t>(kAttentionBlock * kSumColumns));
    float* out = a.out + row * width + column;
    for (int64_t h = 0; h < heads; ++h) std::fill_n(out + h * width, columns, 0.0f);
    for (int64_t begin = 0; begin < count; begin += kAttentionBlock) {
        const int64_t some = std::min(kAttentionBlock, count - begin);
        const float* block = floats_of(a.cache, a.cache.latent, width, begin, some, column, columns, scratch);
        const int64_t apart = a.cache.type == CacheType::f32 ? width : columns;
        for (int64_t h = 0; h < heads; h += kSumHeads) {
            kernels().add_weighted(a.scores + (row + h) * a.stride + begin, std::min(kSumHeads, heads - h),
                                   a.stride, block, apart, some, columns, out + h * width, width);
        }
    }
    for (int64_t h = 0; h < heads; ++h) {
        for (int64_t k = 0; k < columns; ++k) out[h * width + k] = out[h * width + k] / a.totals[row + h];
    }
}

void attend(const Attention& a) {
    const int64_t rows = ceil_div(a.seen(a.tokens - 1), kScoreRows), groups = ceil_div(a.heads, kScoreHeads);
    parallel_for(rows * a.tokens * groups, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {  // rows change last: they are in the caches for all queries
            const int64_t head = i % groups * kScoreHeads, token = i / groups % a.tokens;
            const int64_t row = i / groups / a.tokens * kScoreRows;
            const int64_t row_end = std::min(row + kScoreRows, a.seen(token));
            if (row < row_end) score(a, token, head, std::min(kScoreHeads, a.heads - head), row, row_end);
        }
    });
    const int64_t grain = std::max<int64_t>(1, 4096 / a.seen(0));
    parallel_for(a.tokens * a.heads, grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) weigh(a, i);
    });
    // All heads in one piece read the cache once; more pieces than that only where threads would have none.
    const int64_t width = a.cache.latent_width, parts = ceil_div(width, kSumColumns);
    const int64_t cuts =
        std::min(ceil_div(a.heads, kSumHeads), ceil_div(int64_t{2} * get_threads(), a.tokens * parts));
    const int64_t heads = ceil_div(ceil_div(a.heads, cuts), kSumHeads) * kSumHeads;
    const int64_t pieces = ceil_div(a.heads, heads);
    parallel_for(a.tokens * parts * pieces, 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
            const int64_t head = i % pieces * heads, column = i / pieces % parts * kSumColumns;
            mix(a, i / pieces / parts, head, std::min(heads, a.heads - head), column,
                std::min(kSumColumns, width - column));
        }
    });
}

}  // namespace

void kda_heads(const KdaHeads& a) {
    parallel_for(a.heads, 1, [&](int64_t begin, int64_t end) {
        float* scratch = thread_floats<KdaHeads>(static_cast<size_t>(kda_scratch(a.dim)));
        kernels().kda_heads(a, begin, end, scratch);
    });
}

void latent_attention(const float* q_latent, const float* q_rope, int64_t tokens, int64_t heads,
                      const LatentCache& cache, float scale, float* out) {
    if (tokens == 0 || heads == 0) return;
    const int64_t stride = ceil_div(cache.rows, 16) * 16;
    const int64_t together = std::min(tokens, std::max<int64_t>(1, kScoresHeld / (heads * stride)));
    float* held = thread_floats<OfCall>(static_cast<size_t>(together * heads * (stride + 1)));
    for (int64_t token = 0; token < tokens; token += together) {
        const int64_t row = token * heads;
        attend({
            .q_latent = q_latent + row * cache.latent_width,
            .q_rope = q_rope + row * cache.rope_width,
            .tokens = std::min(together, tokens - token),
            .heads = heads,
            .cache = cache,
            .first = cache.rows - tokens + 1 + token,
            .scale = scale,
            .scores = held,
            .totals = held + together * heads * stride,
            .stride = stride,
            .out = out + row * cache.latent_width,
        });
    }
}

void absorb_query(const float* q, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim,
                  const Matrix& w, float* out) {
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
        for (int64_t h = begin; h < end; ++h) {
            const int64_t both = key_dim + value_dim, row = h * both;
            kernels().weighted_sum(q + h * key_dim, tokens, heads * key_dim, w, row, row + key_dim,
                                   h + 1 < heads ? both : 0, out + h * w.columns, heads * w.columns);
        }
    });
}

void expand_value(const float* x, int64_t tokens, int64_t heads, int64_t key_dim, int64_t value_dim,
                  const Matrix& w, float* out) {
    parallel_for(heads, 1, [&](int64_t begin, int64_t end) {
        float* own = thread_floats<OfRows>(static_cast<size_t>(tokens * w.columns));
        float* y = thread_floats<OfResults>(static_cast<size_t>(tokens * value_dim));
        float* tile = thread_floats<OfDecoded>(static_cast<size_t>(kRowBlock * w.columns));
        for (int64_t h = begin; h < end; ++h) {
            for (int64_t t = 0; t < tokens; ++t) {
                std::copy_n(x + (t * heads + h) * w.columns, w.columns, own + t * w.columns);
            }
            const Matrix values = row_range(w, h * (key_dim + value_dim) + key_dim, value_dim);
            kernels().matmul(own, tokens, values, 0, value_dim, y, tile);
            for (int64_t t = 0; t < tokens; ++t) {
                std::copy_n(y + t * value_dim, value_dim, out + (t * heads + h) * value_dim);
            }
        }
    });
}

}  // namespace k3
