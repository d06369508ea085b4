#include "matmul.h"

#include <algorithm>
#include <atomic>

#include "threads.h"

namespace k3 {

int64_t row_grain(int64_t rows, int64_t columns) {
    const int64_t wanted = 131072 / std::max<int64_t>(1, rows * columns);
    return std::max<int64_t>(1, wanted / kRowBlock) * kRowBlock;
}

void matmul_exact(const float* x, int64_t rows, const Matrix& w, float* y) {
    const Kernels& variant = kernels();
    parallel_for(w.rows, row_grain(rows, w.columns), [&](int64_t begin, int64_t end) {
        std::vector<float> scratch(static_cast<size_t>(kRowBlock * w.columns));
        variant.matmul(x, rows, w, begin, end, y, scratch.data());
    });
}

void QuantizedRows::shape(Encoding encoding, int64_t rows, int64_t columns) {
    const int64_t group = encoding == Encoding::mxfp4 ? kMxGroup : kActivationGroup;
    const int64_t groups = ceil_div(columns, group);
    q_.resize(std::max(q_.size(), static_cast<size_t>(rows * groups * group)));
    scales_.resize(std::max(scales_.size(), static_cast<size_t>(rows * groups)));
    starts_.resize(scales_.size());
    view_ = {
        .encoding = encoding,
        .rows = rows,
        .groups = groups,
        .group = group,
        .q = q_.data(),
        .scales = scales_.data(),
        .starts = starts_.data(),
    };
}

NonFinite QuantizedRows::fill(const Kernels& variant, Encoding encoding, const float* x, int64_t rows,
                              int64_t columns) {
    shape(encoding, rows, columns);
    std::atomic<bool> finite{true};
    parallel_for(rows, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, columns)),
                 [&](int64_t begin, int64_t end) {
                     for (int64_t s = begin; s < end; ++s) {
                         if (!variant.quantize_groups(x + s * columns, columns, s, 0, view_))
                             finite.store(false, std::memory_order_relaxed);
                     }
                 });
    return finite.load() ? NonFinite{false, 0, 0, 0.0f} : find_nonfinite(Rows{Encoding::f32, columns, x}, rows);
}

NonFinite matmul_int8(const float* x, int64_t rows, const Matrix& w, float* y) {
    static thread_local QuantizedRows activations;
    const Kernels& variant = kernels();
    const NonFinite place = activations.fill(variant, w.encoding, x, rows, w.columns);
    if (place.found) return place;
    const Activations view = activations.view();
    parallel_for(w.rows, row_grain(rows, w.columns),
                 [&](int64_t begin, int64_t end) { variant.matmul_int8(view, w, begin, end, y + begin, w.rows); });
    return place;
}

}  // namespace k3
