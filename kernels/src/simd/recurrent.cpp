// What carries a state from token to token: the delta-rule update and the short convolution.
//
// Every column of the state (every channel of the convolution) is computed alone, its sums in ascending order
// of the key index (of age), so that blocks below only decide what stays in the L1 cache.
#include "functions.h"
#include "mathfn.h"

namespace k3 {
namespace K3_VARIANT {

namespace {

// N registers of columns from j of one head's state through all tokens. Unless Whole, N is 1 and `width`
// columns count.
template <int N, bool Whole>
void delta_columns(const DeltaRule& d, int64_t head, int64_t j, int64_t width) {
    const auto get = [width](const float* p) { return Whole ? load(p) : load_some(p, width); };
    const auto put = [width](float* p, const F16& v) {
        return Whole ? store(p, v) : store_some(p, v, width);
    };
    float* state = d.state + head * d.key_dim * d.value_dim + j;
    for (int64_t t = 0; t < d.tokens; ++t) {
        const int64_t row = t * d.heads + head;
        const float *q = d.q + row * d.key_dim, *k = d.k + row * d.key_dim,
                    *decay = d.decay + row * d.key_dim;
        F16 seen[N], error[N], out[N];
        for (int n = 0; n < N; ++n) seen[n] = out[n] = splat(0.0f);
        for (int64_t i = 0; i < d.key_dim; ++i) {
            const F16 fade = splat(decay[i]), key = splat(k[i]);
            for (int n = 0; n < N; ++n) {
                float* at = state + i * d.value_dim + n * kLanes;
                const F16 faded = get(at) * fade;
                put(at, faded);
                seen[n] = seen[n] + faded * key;
            }
        }
        const F16 beta = splat(d.beta[row]);
        for (int n = 0; n < N; ++n) {
            error[n] = beta * (get(d.v + row * d.value_dim + j + n * kLanes) - seen[n]);
        }
        for (int64_t i = 0; i < d.key_dim; ++i) {
            const F16 key = splat(k[i]), query = splat(q[i]);
            for (int n = 0; n < N; ++n) {
                float* at = state + i * d.value_dim + n * kLanes;
                const F16 updated = get(at) + key * error[n];
                put(at, updated);
                out[n] = out[n] + updated * query;
            }
        }
        for (int n = 0; n < N; ++n) put(d.out + row * d.value_dim + j + n * kLanes, out[n]);
    }
}

}  // namespace

void delta_rule(const DeltaRule& d, int64_t begin, int64_t end) {
    constexpr int64_t kBlock = 2 * kLanes;
    for (int64_t head = begin; head < end; ++head) {
        int64_t j = 0;
        for (; j + kBlock <= d.value_dim; j += kBlock) delta_columns<2, true>(d, head, j, kBlock);
        for (; j < d.value_dim; j += kLanes) delta_columns<1, false>(d, head, j, d.value_dim - j);
    }
}

void short_conv(const ShortConv& c, int64_t begin, int64_t end) {
    const int64_t old = c.taps - 1;
    for (int64_t channel = begin; channel < end; channel += kLanes) {
        const int64_t left = end - channel < kLanes ? end - channel : kLanes;
        F16 weight[kTapsMax], past[kTapsMax];
        for (int64_t tap = 0; tap < c.taps; ++tap) {
            float lane[kLanes] = {};
            for (int64_t i = 0; i < left; ++i) lane[i] = c.w[(channel + i) * c.taps + tap];
            weight[tap] = load(lane);
        }
        for (int64_t tap = 0; tap < old; ++tap)
            past[tap] = load_some(c.window + tap * c.channels + channel, left);
        for (int64_t t = 0; t < c.tokens; ++t) {
            past[old] = load_some(c.u + t * c.channels + channel, left);
            F16 total = past[0] * weight[0];
            for (int64_t tap = 1; tap < c.taps; ++tap) total = total + past[tap] * weight[tap];
            store_some(c.out + t * c.channels + channel, silu16(total), left);
            for (int64_t tap = 0; tap < old; ++tap) past[tap] = past[tap + 1];
        }
        for (int64_t tap = 0; tap < old; ++tap)
            store_some(c.window + tap * c.channels + channel, past[tap], left);
    }
}

}  // namespace K3_VARIANT
}  // namespace k3
