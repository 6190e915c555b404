// Grouped FP8 GEMM for long prefill: e4m3 activations with a scale per row and 128 columns, e4m3 weights with a
// scale per 128 x 128, float32 sums promoted every 128 columns.
//
// The first projection's epilogue adds the bias, applies the clamped SwiGLU and writes the second projection's
// e4m3 operand in place; the second's adds the bias inside the routing weight. Persistent blocks of 256 or 128 tokens
// x 128 weight rows: one producer thread, two consumer warpgroups that alternate between products and promotion.

#include "fp8_pipeline.cuh"

namespace antiphon::fp8 {
namespace {

using GateUp = Products<kDim, true, false>;
using Down = Products<kDim, false, false>;

// 4 x 4 bytes: lane t of a quad gives bytes for columns 0..3 and receives column t of all four lanes.
__device__ __forceinline__ uint32_t transpose_quad(uint32_t word) {
  const int t = threadIdx.x % 4;
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  word = __byte_perm(word, other, t % 2 == 0 ? 0x6240 : 0x3715);
  other = __shfl_xor_sync(0xFFFFFFFFu, word, 2);
  return __byte_perm(word, other, t < 2 ? 0x5410 : 0x3276);
}

// Columns alternate gate, up; the thread holds both. `block` is the first of 64 tokens within the tile.
struct StoreHidden {
  template <typename S>
  __device__ __forceinline__ static void apply(const Arguments& a, const Work& work, const float (&acc)[64],
                                               int block) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    uint8_t* tile = static_cast<uint8_t*>(a.out) +
                    (static_cast<size_t>(work.tile_m) * kTilesK + work.tile_n / 2) * S::kValues;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 16 hidden columns each
      float2 bias[4];
#pragma unroll
      for (int b = 0; b < 4; ++b) bias[b] = bias_pair(a, work, (4 * i + b) * 8 + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float hidden[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int at = (4 * i + b) * 4 + 2 * half;
          hidden[b] = clamped_swiglu(acc[at] + bias[b].x, acc[at + 1] + bias[b].y) * kHiddenFactor;
        }
        const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(hidden[0], hidden[1]), __NV_SATFINITE, __NV_E4M3);
        const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(hidden[2], hidden[3]), __NV_SATFINITE, __NV_E4M3);
        const uint32_t word = transpose_quad(low | (high << 16));
        const int row = block + warp * 16 + g + 8 * half;
        if (row < work.tile.rows)
          *reinterpret_cast<uint32_t*>(tile + swizzled(row, work.tile_n % 2 * 64 + 16 * i + 4 * t)) = word;
      }
    }
  }
};

struct StoreWeighted {
  template <typename S>
  __device__ __forceinline__ static void apply(const Arguments& a, const Work& work, const float (&acc)[64],
                                               int block) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block + warp * 16 + g + 8 * half;
      if (row >= work.tile.rows) continue;
      const size_t slot = static_cast<size_t>(work.tile_m) * S::kTileRows + row;
      const float weight = a.row_weight[slot];
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(a.out) + slot * kDim + work.tile_n * kTileN;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int column = 8 * j + 2 * t;
        if (work.tile_n * kTileN + column >= a.rows) break;
        const float2 bias = bias_pair(a, work, column);
        *reinterpret_cast<__nv_bfloat162*>(out + column) =
            __floats2bfloat162_rn(weight * (acc[4 * j + 2 * half] + bias.x), weight * (acc[4 * j + 2 * half + 1] + bias.y));
      }
    }
  }
};

template <typename P, typename S, typename Store>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(8) uint64_t full[S::kStages], empty[S::kStages];
  run<P, S, Store>(a, shared, full, empty);
}

template <typename P, typename S, typename Store>
cudaError_t start(const Arguments& a, int grid, void* stream) {
  const cudaError_t prepared = prepare(grouped_gemm<P, S, Store>, S::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(grouped_gemm<P, S, Store>, dim3(grid), dim3(kThreads), S::kSharedBytes,
                static_cast<cudaStream_t>(stream), false, a);
}

template <typename P, typename Store>
cudaError_t start(const Arguments& a, int tile_rows, int grid, void* stream) {
  switch (tile_rows) {
    case 128: return start<P, Shape<128>, Store>(a, grid, stream);
    case 256: return start<P, Shape<256>, Store>(a, grid, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon::fp8

extern "C" int antiphon_moe_fp8_gate_up(const void* activations, const void* weights, const float* weight_scales,
                                        const void* bias, const void* tiles, const int* tile_count, void* hidden,
                                        int tile_rows, int grid,
                                        void* stream) {
  namespace fp8 = antiphon::fp8;
  const fp8::Arguments a = {static_cast<const uint8_t*>(activations),
                            static_cast<const uint8_t*>(weights),
                            weight_scales,
                            static_cast<const __nv_bfloat16*>(bias),
                            static_cast<const fp8::TokenTile*>(tiles),
                            tile_count,
                            nullptr,
                            hidden,
                            2 * fp8::kDim / fp8::kTileN,
                            2 * fp8::kDim,
                            0};
  return fp8::start<fp8::GateUp, fp8::StoreHidden>(a, tile_rows, grid, stream);
}

extern "C" int antiphon_moe_fp8_down(const void* hidden, const void* weights, const float* weight_scales,
                                     const void* bias, const void* tiles, const int* tile_count,
                                     const float* row_weight, void* out, int tile_rows, int grid, void* stream) {
  namespace fp8 = antiphon::fp8;
  const fp8::Arguments a = {static_cast<const uint8_t*>(hidden),
                            static_cast<const uint8_t*>(weights),
                            weight_scales,
                            static_cast<const __nv_bfloat16*>(bias),
                            static_cast<const fp8::TokenTile*>(tiles),
                            tile_count,
                            row_weight,
                            out,
                            (fp8::kDim + fp8::kTileN - 1) / fp8::kTileN,
                            fp8::kDim,
                            0};
  return fp8::start<fp8::Down, fp8::StoreWeighted>(a, tile_rows, grid, stream);
}
