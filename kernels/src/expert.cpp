#include "expert.h"

#include <memory>

#include "matmul.h"
#include "rowops.h"

namespace k3 {

namespace {

// One matrix after the other: each is large enough for every thread. Activations are quantized once for w1
// and w3.
class Multiplier {
public:
    Multiplier(bool exact, const float* x, int64_t rows, int64_t columns)
        : exact_(exact), x_(x), rows_(rows) {
        if (!exact) place_ = quantized_.fill(x, rows, columns, kMxGroup);
    }
    const NonFinite& place() const { return place_; }
    void times(const Matrix& w, float* y) const {
        if (exact_) {
            matmul_exact(x_, rows_, w, y);
        } else {
            matmul_int8(quantized_.view(), w, y);
        }
    }

private:
    bool exact_;
    const float* x_;
    int64_t rows_;
    QuantizedRows quantized_;
    NonFinite place_{false, 0, 0, 0.0f};
};

}  // namespace

ExpertRefusal expert_forward(const float* z, int64_t rows, const Expert& expert, bool exact, float* y) {
    const int64_t count = rows * expert.w1.rows;
    const std::unique_ptr<float[]> gate(new float[static_cast<size_t>(count)]);
    const std::unique_ptr<float[]> up(new float[static_cast<size_t>(count)]);
    const Multiplier input(exact, z, rows, expert.w1.columns);
    if (input.place().found) return {Stage::INPUT, input.place()};
    input.times(expert.w1, gate.get());
    input.times(expert.w3, up.get());
    situ(gate.get(), up.get(), count, expert.beta, expert.linear_beta, gate.get());
    const Multiplier hidden(exact, gate.get(), rows, expert.w1.rows);
    if (hidden.place().found) return {Stage::HIDDEN, hidden.place()};
    hidden.times(expert.w2, y);
    return {Stage::INPUT, {false, 0, 0, 0.0f}};
}

}  // namespace k3
