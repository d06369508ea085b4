#include "rowops.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "threads.h"
#include "variant.h"

namespace k3 {

namespace {

constexpr int64_t kGrainFloats = 16384;

int64_t grain_of(int64_t columns) { return std::max<int64_t>(1, kGrainFloats / std::max<int64_t>(1, columns)); }

}  // namespace

void rms_norm(const float* x, int64_t rows, int64_t columns, const float* w, float eps, float* y) {
    parallel_for(rows, grain_of(columns),
                 [&](int64_t begin, int64_t end) { kernels().rms_norm(x, begin, end, columns, w, eps, y); });
}

void softmax(const float* x, int64_t rows, int64_t columns, float* y) {
    parallel_for(rows, grain_of(columns),
                 [&](int64_t begin, int64_t end) { kernels().softmax(x, begin, end, columns, y); });
}

void gated(const float* x, const float* gate, int64_t count, float* y) {
    parallel_for(count, kGrainFloats, [&](int64_t begin, int64_t end) {
        kernels().gated(x + begin, gate + begin, end - begin, y + begin);
    });
}

void elementwise(Function function, const float* x, int64_t count, float* y) {
    parallel_for(count, kGrainFloats, [&](int64_t begin, int64_t end) {
        kernels().elementwise(function, x + begin, end - begin, y + begin);
    });
}

void situ(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y) {
    parallel_for(count, kGrainFloats, [&](int64_t begin, int64_t end) {
        kernels().situ(gate + begin, up + begin, end - begin, beta, linear_beta, y + begin);
    });
}

int64_t top_k(const float* choice, int64_t rows, int64_t columns, int64_t k, int64_t* ids) {
    std::vector<std::pair<float, int64_t>> best(static_cast<size_t>(k));
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = choice + r * columns;
        // A heap whose front is the weakest of the best so far. What comes later has the higher id, so that
        // it must be greater to take a place.
        const auto stronger = [](const std::pair<float, int64_t>& a, const std::pair<float, int64_t>& b) {
            return a.first > b.first || (a.first == b.first && a.second < b.second);
        };
        for (int64_t c = 0; c < columns; ++c) {
            if (!std::isfinite(row[c])) return r * columns + c;
            if (c < k) {
                best[static_cast<size_t>(c)] = {row[c], c};
                if (c == k - 1) std::make_heap(best.begin(), best.end(), stronger);
            } else if (row[c] > best.front().first) {
                std::pop_heap(best.begin(), best.end(), stronger);
                best.back() = {row[c], c};
                std::push_heap(best.begin(), best.end(), stronger);
            }
        }
        for (int64_t i = 0; i < k; ++i) ids[r * k + i] = best[static_cast<size_t>(i)].second;
        std::sort(ids + r * k, ids + (r + 1) * k);
    }
    return -1;
}

void residual_mix(const float* const* entries, int count, int64_t rows, int64_t columns, const float* weight,
                  float eps, float* y) {
    parallel_for(rows, grain_of(columns * count), [&](int64_t begin, int64_t end) {
        kernels().residual_mix(entries, count, begin, end, columns, weight, eps, y);
    });
}

}  // namespace k3
