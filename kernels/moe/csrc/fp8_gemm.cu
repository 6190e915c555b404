// Grouped FP8 GEMM for long prefill: e4m3 activations with a scale per row and 128 columns, e4m3 weights with a
// scale per 128 x 128, float32 sums promoted every 128 columns.
//
// The first projection's epilogue adds the bias, applies the clamped SwiGLU and writes the second projection's
// e4m3 operand in place; the second's adds the bias inside the routing weight. Persistent blocks of 256 tokens x
// 128 weight rows: one producer thread, two consumer warpgroups that alternate between products and promotion.

#include "fp8_layout.cuh"
#include "hopper.cuh"

namespace antiphon::fp8 {
namespace {

constexpr int kStages = 4;
constexpr int kStageBytes = kTileBytes + kWeightTileBytes + kScaleBytes;
constexpr int kConsumerGroups = 2;
constexpr int kThreads = (kConsumerGroups + 1) * 128;
constexpr int kSharedBytes = kStages * kStageBytes;
constexpr int kBlocks = kTileRows / 64 / kConsumerGroups;  // 64-token blocks a warpgroup

struct Arguments {
  const uint8_t* activations;   // [tiles, 23, kScaledTileBytes or kTileBytes]
  const uint8_t* weights;       // [experts, tiles_n, 23, kWeightTileBytes]
  const float* weight_scales;   // [experts, tiles_n, 23]
  const __nv_bfloat16* bias;    // [experts, rows]
  const TokenTile* tiles;
  const int* tile_count;
  const float* row_weight;      // [tiles * 256], second projection
  void* out;                    // e4m3 [tiles, 23, kTileBytes], or bf16 [tiles * 256, 2880]
  int tiles_n;
  int rows;                     // weight rows that exist: 5760 or 2880
};

struct Work {
  TokenTile tile;
  int tile_m, tile_n;
};

// Work items in the order expert, weight tile, token tile, so that neighbours in time share a weight tile.
__device__ __forceinline__ Work work_at(const Arguments& a, int index) {
  const TokenTile some = a.tiles[index / a.tiles_n];
  const int local = index - some.first * a.tiles_n;
  const int tile_n = local / some.count, tile_m = some.first + local % some.count;
  return {a.tiles[tile_m], tile_m, tile_n};
}

// 4 x 4 bytes: lane t of a quad gives bytes for columns 0..3 and receives column t of all four lanes.
__device__ __forceinline__ uint32_t transpose_quad(uint32_t word) {
  const int t = threadIdx.x % 4;
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, word, 1);
  word = __byte_perm(word, other, t % 2 == 0 ? 0x6240 : 0x3715);
  other = __shfl_xor_sync(0xFFFFFFFFu, word, 2);
  return __byte_perm(word, other, t < 2 ? 0x5410 : 0x3276);
}

__device__ __forceinline__ float2 bias_pair(const Arguments& a, const Work& work, int column) {
  const size_t at = static_cast<size_t>(work.tile.expert) * a.rows + work.tile_n * kTileN + column;
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a.bias + at));
}

// Columns alternate gate, up; the thread holds both. `block` is the first of 64 tokens within the tile.
__device__ __forceinline__ void store_hidden(const Arguments& a, const Work& work, const float (&acc)[64],
                                             int block) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint8_t* tile = static_cast<uint8_t*>(a.out) +
                  (static_cast<size_t>(work.tile_m) * kTilesK + work.tile_n / 2) * kTileBytes;
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

__device__ __forceinline__ void store_weighted(const Arguments& a, const Work& work, const float (&acc)[64],
                                               int block) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = block + warp * 16 + g + 8 * half;
    if (row >= work.tile.rows) continue;
    const size_t slot = static_cast<size_t>(work.tile_m) * kTileRows + row;
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

template <bool GATED>
__device__ __forceinline__ void produce(const Arguments& a, int total, uint32_t stages, uint32_t full, uint32_t empty) {
  constexpr int kSourceBytes = GATED ? kScaledTileBytes : kTileBytes;
  int stage = 0;
  uint32_t parity = 1;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at(a, index);
    const uint32_t row_bytes = (work.tile.rows + 63) / 64 * 64 * kTileK;
    const uint8_t* source = a.activations + static_cast<size_t>(work.tile_m) * kTilesK * kSourceBytes;
    const uint8_t* weights =
        a.weights + (static_cast<size_t>(work.tile.expert) * a.tiles_n + work.tile_n) * kTilesK * kWeightTileBytes;
    for (int k = 0; k < kTilesK; ++k) {
      const uint32_t base = stages + stage * kStageBytes, ready = full + 8 * stage;
      const uint8_t* tokens = source + k * kSourceBytes;
      mbarrier_wait(empty + 8 * stage, parity);
      mbarrier_expect(ready, row_bytes + kWeightTileBytes + (GATED ? kScaleBytes : 0));
      bulk_copy(base + kTileBytes, weights + k * kWeightTileBytes, kWeightTileBytes, ready);
      bulk_copy(base, tokens, row_bytes, ready);
      if (GATED) bulk_copy(base + kTileBytes + kWeightTileBytes, tokens + kTileBytes, kScaleBytes, ready);
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// One stage of one warpgroup: its 64-token blocks x 128 weight rows over STEPS * 32 columns, promoted into acc.
template <bool GATED, int STEPS>
__device__ __forceinline__ void multiply(float (&acc)[kBlocks][64], const uint8_t* stage, float weight_scale, int group,
                                         int rows) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
  const float* row_scales = reinterpret_cast<const float*>(stage + kTileBytes + kWeightTileBytes);
  const uint64_t a_operand = swizzled_operand(shared_address(stage));
  const uint64_t b_operand = swizzled_operand(shared_address(stage + kTileBytes));
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int block = (group + kConsumerGroups * i) * 64;
    if (block >= rows) break;
    float part[64];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k)  // 32 bytes on within the swizzled row
      wgmma_e4m3_n128(part, a_operand + block * (kTileK / 16) + 2 * k, b_operand + 2 * k, k > 0);
    wgmma_commit();
    float upper = weight_scale / kHiddenFactor, lower = upper;
    if (GATED) {
      upper = weight_scale * row_scales[block + warp * 16 + g];
      lower = weight_scale * row_scales[block + warp * 16 + g + 8];
    }
    wgmma_wait_all();
#pragma unroll
    for (int c = 0; c < 64; ++c) {
      pin(part[c]);
      acc[i][c] = fmaf(part[c], c % 4 < 2 ? upper : lower, acc[i][c]);
    }
  }
}

template <bool GATED>
__device__ __forceinline__ void consume(const Arguments& a, int total, const uint8_t* stages, uint32_t full,
                                        uint32_t empty, int group) {
  int stage = 0;
  uint32_t parity = 0;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at(a, index);
    const int rows = __shfl_sync(0xFFFFFFFFu, work.tile.rows, 0);
    const float* scales =
        a.weight_scales + (static_cast<size_t>(work.tile.expert) * a.tiles_n + work.tile_n) * kTilesK;
    float weight_scale = scales[0];
    float acc[kBlocks][64] = {};
#pragma unroll 1
    for (int k = 0; k < kTilesK; ++k) {
      const float next_scale = scales[min(k + 1, kTilesK - 1)];
      mbarrier_wait(full + 8 * stage, parity);
      if (k < kTilesK - 1) {
        multiply<GATED, kTileK / 32>(acc, stages + stage * kStageBytes, weight_scale, group, rows);
      } else {
        multiply<GATED, kDim % kTileK / 32>(acc, stages + stage * kStageBytes, weight_scale, group, rows);
      }
      __syncwarp();  // the row scales are read
      if (threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * stage);
      weight_scale = next_scale;
      if (++stage == kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      const int block = (group + kConsumerGroups * i) * 64;
      if (block >= rows) break;
      if constexpr (GATED) {
        store_hidden(a, work, acc[i], block);
      } else {
        store_weighted(a, work, acc[i], block);
      }
    }
  }
}

template <bool GATED>
__global__ void __launch_bounds__(kThreads, 1) grouped_gemm(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), kConsumerGroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int total = __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0) * a.tiles_n;
  const uint32_t ready = shared_address(full), released = shared_address(empty);
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == kConsumerGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kConsumerGroups * 128) produce<GATED>(a, total, shared_address(shared), ready, released);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    consume<GATED>(a, total, shared, ready, released, group);
  }
}

template <bool GATED>
cudaError_t start(const Arguments& a, int grid, cudaStream_t stream) {
  const cudaError_t prepared =
      cudaFuncSetAttribute(grouped_gemm<GATED>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(grouped_gemm<GATED>, dim3(grid), dim3(kThreads), kSharedBytes, stream, false, a);
}

}  // namespace
}  // namespace antiphon::fp8

extern "C" int antiphon_moe_fp8_gate_up(const void* activations, const void* weights, const float* weight_scales,
                                        const void* bias, const void* tiles, const int* tile_count, void* hidden,
                                        int grid, void* stream) {
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
                            2 * fp8::kDim};
  return fp8::start<true>(a, grid, static_cast<cudaStream_t>(stream));
}

extern "C" int antiphon_moe_fp8_down(const void* hidden, const void* weights, const float* weight_scales,
                                     const void* bias, const void* tiles, const int* tile_count,
                                     const float* row_weight, void* out, int grid, void* stream) {
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
                            fp8::kDim};
  return fp8::start<false>(a, grid, static_cast<cudaStream_t>(stream));
}
