// A token's activations as e4m3 with one scale for every 128 columns.
#pragma once

#include "fp8_layout.cuh"
#include "hopper.cuh"

namespace antiphon::fp8 {

// By one warp; `store(i, word, scale)` takes, for the i-th 128 columns, the lane's four bytes and their scale.
// COLUMNS is a multiple of 4; what is beyond it in the last 128 is zero.
template <int COLUMNS, typename Store>
__device__ __forceinline__ void quantise_row(const __nv_bfloat16* x, Store store) {
  constexpr int kTiles = (COLUMNS + kTileK - 1) / kTileK;
  const int lane = threadIdx.x % 32;
  uint2 raw[kTiles];
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const int column = i * kTileK + lane * 4;
    raw[i] = make_uint2(0, 0);
    if (column < COLUMNS) raw[i] = *reinterpret_cast<const uint2*>(x + column);
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
    const float v[4] = {low_half(raw[i].x), high_half(raw[i].x), low_half(raw[i].y), high_half(raw[i].y)};
    const float largest = fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3])));
    const float peak = fmaxf(__uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(largest))), 1e-20f);
    const float factor = 448.0f / peak;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0] * factor, v[1] * factor), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2] * factor, v[3] * factor), __NV_SATFINITE, __NV_E4M3);
    store(i, low | (high << 16), peak / 448.0f);
  }
}

}  // namespace antiphon::fp8
