// Which instruction set the kernels run with.
//
// kernels/src/simd is compiled once per variant; this header declares the table of functions that each
// compilation fills. Every variant gives the same bits, so choosing one is a matter of speed alone.
// The functions are serial, work on plain pointers, allocate nothing and throw nothing; threads, scratch and
// checks belong to the files in kernels/src. All of them may run on any thread.
//
// Sanitizers: `scripts/sanitize kernels` makes recorded calls again, without Python. To run all tests
// with them, install into an environment of its own,
//   pip install -C cmake.define.K3_SANITIZE=ON -C build-dir=build/sanitize -e '.[test]'
// and run the tests there with the run-time libraries in front of Python's own,
//   export LD_PRELOAD="$(gcc -print-file-name=libasan.so) $(gcc -print-file-name=libubsan.so)"
//   ASAN_OPTIONS=detect_leaks=0 pytest tests/kernels
#pragma once

#include <cstdint>

#include "matrix.h"
#include "state.h"

namespace k3 {

// Functions of one variant. [begin, end) are rows (or heads, or channels) of the output.
struct Kernels {
    const char* name;

    // Quantizers: false when a value of the rows is not finite (nothing is said about which).
    bool (*quantize_int8)(const Rows& w, int64_t begin, int64_t end, uint8_t* q, float* scales);
    bool (*quantize_int4)(const Rows& w, int64_t begin, int64_t end, uint8_t* q, float* scales);

    // out[begin..end) as float32 rows of w.columns.
    void (*decode)(const Matrix& w, int64_t begin, int64_t end, float* out);

    // y[s, begin..end) = x[s] . w[r]; y has w.rows columns. `scratch`: kRowBlock * w.columns floats.
    void (*matmul)(const float* x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, float* y,
                   float* scratch);

    // int8 activations, see matrix.h. quantize_groups: x, `columns` numbers of one row, become the groups of
    // `out` from first_group on; false when one is not finite. matmul_int8: y[s * stride + r - begin] = x[s]
    // . w[r]; false when a scale byte of these rows of W stands for no number.
    bool (*quantize_groups)(const float* x, int64_t columns, int64_t row, int64_t first_group,
                            const Activations& out);
    bool (*matmul_int8)(const Activations& x, const Matrix& w, int64_t begin, int64_t end, float* y,
                        int64_t stride);

    // Rows and single numbers. rms_norm: w * (x / sqrt(mean(x^2) + eps)); gated: x * sigmoid(gate).
    void (*rms_norm)(const float* x, int64_t begin, int64_t end, int64_t columns, const float* w, float eps,
                     float* y);
    void (*softmax)(const float* x, int64_t begin, int64_t end, int64_t columns, float* y);
    void (*gated)(const float* x, const float* gate, int64_t count, float* y);
    void (*elementwise)(Function function, const float* x, int64_t count, float* y);
    void (*situ)(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y);
    // Softmax over `count` (<= kMixMax) entries [rows, columns] of their normed products with `weight`.
    void (*residual_mix)(const float* const* entries, int count, int64_t begin, int64_t end, int64_t columns,
                         const float* weight, float eps, float* y);

    // States, see state.h. [begin, end) are heads; `scratch`: kda_scratch(dim) floats.
    void (*kda_heads)(const KdaHeads& a, int64_t begin, int64_t end, float* scratch);

    // Attention. out[h] = sum over rows t of [begin, end) of p[h, t - begin] * w[t], for `rows` rows of p.
    // The rows `ahead` further on, if ahead is not 0, are fetched meanwhile.
    void (*weighted_sum)(const float* p, int64_t rows, int64_t p_stride, const Matrix& w, int64_t begin,
                         int64_t end, int64_t ahead, float* out, int64_t out_stride);
    // The same with float32 rows `w_stride` apart, of which the first `columns` count; added to what `out`
    // holds.
    void (*add_weighted)(const float* p, int64_t rows, int64_t p_stride, const float* w, int64_t w_stride,
                         int64_t count, int64_t columns, float* out, int64_t out_stride);
    void (*scores)(const Scores& s);
    // The greatest of count > 0 numbers; any, if one is NaN.
    float (*reduce_max)(const float* x, int64_t count);
    void (*widen)(CacheType type, const void* from, int64_t count, float* to);  // bf16 or f16
    // scores = exp(scores - top); returns their sum.
    float (*exp_shifted)(float* scores, int64_t count, float top);

    // SHA-256, see sha256.h. A state is eight words, `data` whole blocks of 64 bytes: of sha256_messages messages
    // at once, or of one.
    int sha256_messages;
    void (*sha256_blocks)(uint32_t* const* states, const uint8_t* const* data, int64_t blocks);
    void (*sha256_blocks_of_one)(uint32_t* state, const uint8_t* data, int64_t blocks);

    // Ceilings for benchmarks. probe_dots: int8 multiplications done, on registers alone; `result` is of no
    // use but keeps the compiler honest. probe_read: the same for reading `bytes` bytes.
    int64_t (*probe_dots)(int64_t rounds, int32_t* result);
    int32_t (*probe_read)(const uint8_t* p, int64_t bytes);
};

// The table in use. Chosen on first use: the fastest variant that the CPU can run.
const Kernels& kernels();

// Number of variants that this CPU can run, and their names, slowest first.
int variant_count();
const char* variant_name(int index);

// Use the variant called `name` from now on; false when this build or this CPU has none. Calls that run at
// the same moment may use either.
bool set_variant(const char* name);

}  // namespace k3
