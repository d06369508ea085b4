// One routed expert in one call: y = W2 situ(W1 z, W3 z), from the expert's bytes as they lie on disk.
// Definition: docs/numerics.md; bit-identical to the NumPy reference. A result row depends on its row of z
// and on the expert alone. Callable from any thread; rows are split over the pool.
#pragma once

#include <cstdint>

#include "matrix.h"
#include "quantize.h"

namespace k3 {

struct Expert {
    Matrix w1, w2, w3;  // MXFP4; w1 and w3 [hidden, in], w2 [out, hidden]; no exponent is 255
    float beta, linear_beta;
};

enum class Stage : int { INPUT, HIDDEN };

// What could not be quantized: a place in z, or in the activations between the matrices.
struct ExpertRefusal {
    Stage stage;
    NonFinite place;
};

// y float [rows, w2.rows] from z float [rows, w1.columns]. Not exact: activations of z and of the hidden
// layer are rounded to int8 per group of 32; the refusal says where one is not finite (y is then undefined).
ExpertRefusal expert_forward(const float* z, int64_t rows, const Expert& expert, bool exact, float* y);

}  // namespace k3
