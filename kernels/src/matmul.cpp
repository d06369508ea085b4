#include "matmul.h"

#include <algorithm>
#include <atomic>

#include "threads.h"
#include "variant.h"

namespace k3 {

namespace {

// Weight rows per piece: about 32k multiplications, whole blocks.
int64_t grain_of(int64_t rows, int64_t columns) {
    const int64_t wanted = 32768 / std::max<int64_t>(1, rows * columns);
    return std::max<int64_t>(1, wanted / kRowBlock) * kRowBlock;
}

}  // namespace

void matmul_exact(const float* x, int64_t rows, const Matrix& w, float* y) {
    parallel_for(w.rows, grain_of(rows, w.columns), [&](int64_t begin, int64_t end) {
        std::vector<float> scratch(static_cast<size_t>(kRowBlock * w.columns));
        kernels().matmul(x, rows, w, begin, end, y, scratch.data());
    });
}

NonFinite QuantizedRows::fill(const float* x, int64_t rows, int64_t columns, int64_t group) {
    rows_ = rows;
    groups_ = ceil_div(columns, group);
    group_ = group;
    q_.resize(static_cast<size_t>(rows * groups_ * group));
    scales_.resize(static_cast<size_t>(rows * groups_));
    std::atomic<bool> finite{true};
    parallel_for(
        rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, columns)), [&](int64_t begin, int64_t end) {
            for (int64_t s = begin; s < end; ++s) {
                if (!kernels().quantize_row(x + s * columns, columns, group, q_.data() + s * groups_ * group,
                                            scales_.data() + s * groups_)) {
                    finite.store(false);
                }
            }
        });
    return finite.load() ? NonFinite{false, 0, 0, 0.0f} : find_nonfinite(Rows{false, columns, x}, rows);
}

Activations QuantizedRows::view() const { return {rows_, groups_, group_, q_.data(), scales_.data()}; }

void matmul_int8(const Activations& x, const Matrix& w, float* y) {
    parallel_for(w.rows, grain_of(x.rows, w.columns),
                 [&](int64_t begin, int64_t end) { kernels().matmul_int8(x, w, begin, end, y); });
}

}  // namespace k3
