// One routed expert in one call: y = W2 situ(W1 z, W3 z), from the expert's bytes as they lie on disk.
// Definition: docs/numerics.md; bit-identical to the NumPy reference. A result row depends on its row of z
// and on the expert alone. Callable from any thread; rows are split over the pool. Scratch memory stays with
// the calling thread and is used again.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "quantize.h"

namespace k3 {

struct Expert {
    Matrix w1, w2, w3;  // MXFP4; w1 and w3 [hidden, in], w2 [out, hidden]
    float beta, linear_beta;
};

// What stops a product: an activation (of z, or between the matrices) that cannot be quantized, or a scale
// byte of a matrix that stands for no number. The latter comes first where there are several, w1 before w2
// before w3.
enum class Refused : int { nothing, input, hidden, w1, w2, w3 };

// `place` is that of the activation, or row and group (as column) of the scale byte.
struct ExpertRefusal {
    Refused what;
    NonFinite place;
};

// y float [rows, w2.rows] from z float [rows, w1.columns]. Not exact: activations of z and of the hidden
// layer are rounded to int8 per group of 32. After a refusal y is undefined.
ExpertRefusal expert_forward(const float* z, int64_t rows, const Expert& expert, bool exact, float* y);

}  // namespace k3
