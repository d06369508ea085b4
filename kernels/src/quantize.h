// Weights to int8 and int4, and back; bytes compared. Definitions: docs/numerics.md; all bit-identical to the
// NumPy reference. Callable from any thread; rows are split over the pool.
#pragma once

#include <cstdint>

#include "matrix.h"

namespace k3 {

struct NonFinite {
    bool found;
    int64_t row, column;
    float value;
};

// The first value (in row-major order) that is infinite or NaN.
NonFinite find_nonfinite(const Rows& w, int64_t rows);

// False, with outputs undefined, when a value is not finite.
bool quantize_int8(const Rows& w, int64_t rows, uint8_t* q, float* scales);
bool quantize_int4(const Rows& w, int64_t rows, uint8_t* q, float* scales);

// out float [w.rows, w.columns]. MXFP4: no exponent may be 255, see find_reserved.
void decode(const Matrix& w, float* out);

// Index of the first byte that is 255 (stands for no number in MXFP4), -1 when there is none.
int64_t find_reserved(const uint8_t* exponents, int64_t count);

// Index of the first byte that differs, -1 when all are equal.
int64_t first_difference(const uint8_t* a, const uint8_t* b, int64_t count);

}  // namespace k3
