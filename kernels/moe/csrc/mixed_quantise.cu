// Activations of a chunk as e4m3 with one scale a token, laid out for the tensor core at the rows of their experts.
//
// One scale for 2880 columns costs nothing against one for every 128: e4m3 keeps its relative error of 2^-4 down to
// 1 / 28,672 of the token's largest value, and what is below adds at most 1.2e-4 of the token's norm.

#include "fp8_layout.cuh"
#include "hopper.cuh"

namespace antiphon::mixed {
namespace {

using fp8::kDim;
using fp8::kTileK;
using fp8::kTilesK;

constexpr int kTopK = 4;
constexpr int kWarps = 8;
constexpr float kLargest = 448.0f;

struct Quantisation {
  const __nv_bfloat16* x;              // [tokens, kDim]
  const long long* ids;                // [tokens, 4]
  const __nv_bfloat16* expert_weight;  // [tokens, 4]
  const int* rank;                     // [tokens * 4]
  const int* first_tile;               // [experts]
  uint8_t* activations;                // [tiles, 23, tile_rows * 128]
  float* token_scale;                  // [tiles * tile_rows] by slot
  float* row_weight;                   // [tiles * tile_rows] by slot
  int* slots;                          // [tokens * 4] row of each pair among all tiles, -1 when not ours
  int tokens, first_expert, experts, tile_rows;
};

// The largest of two words' four magnitudes, as bf16 bits; NaN is the largest of all.
__device__ __forceinline__ uint32_t largest_bits(uint2 words, uint32_t so_far) {
  const uint32_t masked[2] = {words.x & 0x7FFF7FFFu, words.y & 0x7FFF7FFFu};
#pragma unroll
  for (int i = 0; i < 2; ++i) so_far = max(so_far, max(masked[i] & 0xFFFFu, masked[i] >> 16));
  return so_far;
}

// One warp per token: quantised once, written to the row of each of its experts.
__global__ void __launch_bounds__(kWarps * 32) quantise_kernel(const __grid_constant__ Quantisation a) {
  const int token = blockIdx.x * kWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  grid_dependency_trigger();  // what follows needs whole SMs and so waits for this block anyway
  grid_dependency_wait();
  if (token >= a.tokens) return;
  uint2 raw[kTilesK];
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kTilesK; ++i) {
    const int column = i * kTileK + lane * 4;
    raw[i] = make_uint2(0, 0);
    if (column < kDim) raw[i] = *reinterpret_cast<const uint2*>(a.x + static_cast<size_t>(token) * kDim + column);
    largest = largest_bits(raw[i], largest);
  }
  const float peak = fmaxf(__uint_as_float(__reduce_max_sync(0xFFFFFFFFu, largest) << 16), 1e-20f);
  const float factor = kLargest / peak;
  const size_t tile_bytes = static_cast<size_t>(a.tile_rows) * kTileK;
  uint8_t* target[kTopK];
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const int pair = token * kTopK + k;
    const long long local = a.ids[pair] - a.first_expert;
    int slot = -1;
    if (local >= 0 && local < a.experts) slot = a.first_tile[local] * a.tile_rows + a.rank[pair];
    target[k] = nullptr;
    if (slot >= 0)
      target[k] = a.activations + static_cast<size_t>(slot / a.tile_rows) * kTilesK * tile_bytes +
                  fp8::swizzled(slot % a.tile_rows, lane * 4);
    if (lane == 0) {
      a.slots[pair] = slot;
      if (slot >= 0) {
        a.row_weight[slot] = __bfloat162float(a.expert_weight[pair]);
        a.token_scale[slot] = peak / kLargest;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kTilesK; ++i) {
    const float2 first = make_float2(low_half(raw[i].x) * factor, high_half(raw[i].x) * factor);
    const float2 second = make_float2(low_half(raw[i].y) * factor, high_half(raw[i].y) * factor);
    const uint32_t word = __nv_cvt_float2_to_fp8x2(first, __NV_SATFINITE, __NV_E4M3) |
                          static_cast<uint32_t>(__nv_cvt_float2_to_fp8x2(second, __NV_SATFINITE, __NV_E4M3)) << 16;
#pragma unroll
    for (int k = 0; k < kTopK; ++k)
      if (target[k] != nullptr) *reinterpret_cast<uint32_t*>(target[k] + i * tile_bytes) = word;
  }
}

}  // namespace
}  // namespace antiphon::mixed

extern "C" int antiphon_moe_mixed_quantise(const void* x, const void* ids, const void* expert_weight, const int* rank,
                                           const int* first_tile, void* activations, float* token_scale,
                                           float* row_weight, int* slots, int tokens, int first_expert, int experts,
                                           int tile_rows, int overlap, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Quantisation a = {static_cast<const __nv_bfloat16*>(x),
                                 static_cast<const long long*>(ids),
                                 static_cast<const __nv_bfloat16*>(expert_weight),
                                 rank,
                                 first_tile,
                                 static_cast<uint8_t*>(activations),
                                 token_scale,
                                 row_weight,
                                 slots,
                                 tokens,
                                 first_expert,
                                 experts,
                                 tile_rows};
  return antiphon::launch(mixed::quantise_kernel, dim3((tokens + mixed::kWarps - 1) / mixed::kWarps),
                          dim3(mixed::kWarps * 32), 0, static_cast<cudaStream_t>(stream), overlap != 0, a);
}
