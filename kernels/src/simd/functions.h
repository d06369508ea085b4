// The functions that one compilation of this folder provides; table.cpp collects them. Documented in
// variant.h.
#pragma once

#include "../variant.h"

namespace k3 {
namespace K3_VARIANT {

bool quantize_int8(const Rows& w, int64_t begin, int64_t end, uint8_t* q, float* scales);
bool quantize_int4(const Rows& w, int64_t begin, int64_t end, uint8_t* q, float* scales);
void decode(const Matrix& w, int64_t begin, int64_t end, float* out);
void matmul(const float* x, int64_t rows, const Matrix& w, int64_t begin, int64_t end, float* y, float* scratch);
bool quantize_groups(const float* x, int64_t columns, int64_t row, int64_t first_group, const Activations& out);
void finish_groups(int64_t row, int64_t first_group, int64_t count, const Activations& x);
bool matmul_int8(const Activations& x, const Matrix& w, int64_t begin, int64_t end, float* y, int64_t stride);
void rms_norm(const float* x, int64_t begin, int64_t end, int64_t columns, const float* w, float eps, float* y);
void softmax(const float* x, int64_t begin, int64_t end, int64_t columns, float* y);
void gated(const float* x, const float* gate, int64_t count, float* y);
void elementwise(Function function, const float* x, int64_t count, float* y);
void situ(const float* gate, const float* up, int64_t count, float beta, float linear_beta, float* y);
void residual_mix(const float* const* entries, int count, int64_t begin, int64_t end, int64_t columns,
                  const float* weight, float eps, float* y);
void kda_heads(const KdaHeads& a, int64_t begin, int64_t end, float* scratch);
void weighted_sum(const float* p, int64_t rows, int64_t p_stride, const Matrix& w, int64_t begin, int64_t end,
                  int64_t ahead, float* out, int64_t out_stride);
void add_weighted(const float* p, int64_t rows, int64_t p_stride, const float* w, int64_t w_stride, int64_t count,
                  int64_t columns, float* out, int64_t out_stride);
void scores(const Scores& s);
float reduce_max(const float* x, int64_t count);
void widen(CacheType type, const void* from, int64_t count, float* to);
float exp_shifted(float* scores, int64_t count, float top);
#if defined(__AVX512F__)
constexpr int kSha256Messages = 16;
#elif defined(__AVX2__)
constexpr int kSha256Messages = 8;
#else
constexpr int kSha256Messages = 4;
#endif
void sha256_blocks(uint32_t* const* states, const uint8_t* const* data, int64_t blocks);
void sha256_blocks_of_one(uint32_t* state, const uint8_t* data, int64_t blocks);
int64_t probe_dots(int64_t rounds, int32_t* result);
int32_t probe_read(const uint8_t* p, int64_t bytes);

}  // namespace K3_VARIANT
}  // namespace k3
