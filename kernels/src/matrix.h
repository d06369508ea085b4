// Plain views of matrices in memory, as the kernels are given them. They own nothing.
#pragma once

#include <cstdint>

namespace k3 {

enum class Encoding : int { bf16, f16, f32, int8, int4, mxfp4 };

constexpr int64_t kInt4Group = 64;        // columns that share a scale in INT4
constexpr int64_t kMxGroup = 32;          // columns that share a scale byte in MXFP4
constexpr int64_t kActivationGroup = 64;  // columns that share an activation scale (INT8 and INT4 weights)
constexpr int64_t kRowTile = 4;           // weight rows that are multiplied together in float32
constexpr int64_t kRowBlock = 16;         // weight rows that are multiplied as integers or decoded together

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A weight matrix [rows, columns], row-major.
//   bf16   data uint16 [rows, columns]
//   f16    data uint16 [rows, columns], patterns of binary16
//   f32    data float [rows, columns]
//   int8   data int8 [rows, columns], scales float [rows]
//   int4   data uint8 [rows, ceil(columns / 2)], biased by 8, low nibble first;
//          scales float [rows, ceil(columns / 64)]
//   mxfp4  data uint8 [rows, columns / 2], low nibble first; exponents uint8 [rows, columns / 32]
struct Matrix {
    Encoding encoding;
    int64_t rows;
    int64_t columns;
    const void* data;
    const float* scales = nullptr;
    const uint8_t* exponents = nullptr;
};

// Rows to be quantized: bf16, f16 or f32.
struct Rows {
    Encoding encoding;
    int64_t columns;
    const void* data;
};

// Activations quantized to int8 for weights of one encoding (INT8, INT4 or MXFP4): `groups` groups of `group`
// columns, the last one padded with zeros, all rows of a group together.
//   q int8 [groups, rows, group]: columns in order for INT8; otherwise first the even ones of the group, then
//   the odd ones, as low and high nibbles
//   scales float [groups, rows]; starts int32 [groups, rows]: what the integer sum of the group begins with
// Bias and therefore starts are the variant's own: the same variant quantizes and multiplies.
struct Activations {
    Encoding encoding;
    int64_t rows;
    int64_t groups;
    int64_t group;
    int8_t* q;
    float* scales;
    int32_t* starts;
};

}  // namespace k3
