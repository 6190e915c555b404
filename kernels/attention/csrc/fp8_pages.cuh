// Pages whose keys and values are e4m3 numbers with a bf16 scale for each token and kv head; see kernels/fp8_pages.py.
// A head of a page: keys [page_size, 64], values [page_size, 64], then the scales of the keys [page_size] and of the
// values [page_size].
#pragma once

#include "../../moe/csrc/hopper.cuh"

namespace antiphon::fp8_pages {

constexpr int kDim = 64;

__host__ __device__ constexpr int head_bytes(int page_size) { return 2 * page_size * (kDim + 2); }

// With which the largest magnitude becomes 448; of zeros 2^-100. `peak` is that magnitude's bits, which grow with it,
// NaN beyond all: a scale of NaN hides no number that is none.
__device__ __forceinline__ __nv_bfloat16 scale_for(uint32_t peak) {
  const float scale = __uint_as_float(peak) * (1.0f / 448.0f);
  return __float2bfloat16_rn(scale < 7.888609052210118e-31f ? 7.888609052210118e-31f : scale);
}
__device__ __forceinline__ float inverse(__nv_bfloat16 scale) { return 1.0f / __bfloat162float(scale); }

// Four numbers as e4m3, the first in the lowest byte.
__device__ __forceinline__ uint32_t e4m3_word(float a, float b, float c, float d) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(c, d), __NV_SATFINITE, __NV_E4M3);
  return low | (high << 16);
}

__device__ __forceinline__ void unpack(uint4 raw, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half(words[i]);
    values[2 * i + 1] = high_half(words[i]);
  }
}

__device__ __forceinline__ uint32_t peak_of(const float (&values)[8]) {
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) peak = max(peak, __float_as_uint(values[i]) & 0x7FFFFFFFu);
  return peak;
}

__device__ __forceinline__ uint2 scaled(const float (&values)[8], float factor) {
  return make_uint2(e4m3_word(values[0] * factor, values[1] * factor, values[2] * factor, values[3] * factor),
                    e4m3_word(values[4] * factor, values[5] * factor, values[6] * factor, values[7] * factor));
}

// Where a token's numbers lie in a page, and their scale.
struct Place {
  uint8_t* numbers;
  __nv_bfloat16* scale;
};
__device__ __forceinline__ Place place_of(uint8_t* pages, long long page_stride, int page_size, long long slot,
                                          int kv_head, int values) {
  uint8_t* head = pages + slot / page_size * page_stride + static_cast<long long>(kv_head) * head_bytes(page_size);
  const int row = values * page_size + static_cast<int>(slot % page_size);
  return {head + row * kDim, reinterpret_cast<__nv_bfloat16*>(head + 2 * page_size * kDim) + row};
}

}  // namespace antiphon::fp8_pages
