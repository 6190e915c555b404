// One matrix times the tokens of a chunk in FP8: the attention's projections. Weights, activations and sums as in the
// grouped products of experts, with one group and an epilogue that only adds the bias.

#include "fp8_pipeline.cuh"
#include "fp8_quantise.cuh"

namespace antiphon::fp8 {
namespace {

constexpr int kQuantiseWarps = 8;

// One warp per token.
template <int COLUMNS, int TILE_ROWS>
__global__ void __launch_bounds__(kQuantiseWarps * 32)
    quantise_kernel(const __nv_bfloat16* x, uint8_t* activations, int tokens) {
  using P = Products<COLUMNS, true, true>;
  using Tile = TokenTileBytes<TILE_ROWS>;
  const int token = blockIdx.x * kQuantiseWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= tokens) return;
  const int row = token % TILE_ROWS;
  uint8_t* tiles = activations + static_cast<size_t>(token / TILE_ROWS) * P::kTiles * Tile::kScaled;
  quantise_row<COLUMNS>(x + static_cast<size_t>(token) * COLUMNS, [&](int i, uint32_t word, float scale) {
    uint8_t* tile = tiles + i * Tile::kScaled;
    *reinterpret_cast<uint32_t*>(tile + swizzled(row, lane * 4)) = word;
    if (lane == 0) *reinterpret_cast<float*>(tile + Tile::kValues + row * 4) = scale;
  });
}

// The sums and the bias as rows of bf16; 4 bytes a thread, 16 contiguous a quad.
struct StoreProjected {
  template <typename S>
  __device__ __forceinline__ static void apply(const Arguments& a, const Work& work, const float (&acc)[64],
                                               int block) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = block + warp * 16 + g + 8 * half;
      if (row >= work.tile.rows) continue;
      const size_t token = static_cast<size_t>(work.tile_m) * S::kTileRows + row;
      __nv_bfloat16* out = static_cast<__nv_bfloat16*>(a.out) + token * a.rows + work.tile_n * kTileN;
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const int column = 8 * j + 2 * t;
        if (work.tile_n * kTileN + column >= a.rows) break;
        const float2 bias = bias_pair(a, work, column);
        *reinterpret_cast<__nv_bfloat162*>(out + column) =
            __floats2bfloat162_rn(acc[4 * j + 2 * half] + bias.x, acc[4 * j + 2 * half + 1] + bias.y);
      }
    }
  }
};

template <int COLUMNS, int TILE_ROWS>
__global__ void __launch_bounds__(kThreads, 1) projection_kernel(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(shared);
  using S = Shape<TILE_ROWS>;
  __shared__ __align__(8) uint64_t full[S::kStages], empty[S::kStages];
  run<Products<COLUMNS, true, true>, S, StoreProjected>(a, shared, full, empty);
}

template <int COLUMNS, int TILE_ROWS>
cudaError_t start(const __nv_bfloat16* x, uint8_t* activations, const Arguments& a, int grid, cudaStream_t stream) {
  using S = Shape<TILE_ROWS>;
  const cudaError_t prepared = prepare(projection_kernel<COLUMNS, TILE_ROWS>, S::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  const dim3 blocks((a.tokens + kQuantiseWarps - 1) / kQuantiseWarps);
  const cudaError_t quantised = launch(quantise_kernel<COLUMNS, TILE_ROWS>, blocks, dim3(kQuantiseWarps * 32), 0, stream,
                                       false, x, activations, a.tokens);
  if (quantised != cudaSuccess) return quantised;
  return launch(projection_kernel<COLUMNS, TILE_ROWS>, dim3(grid), dim3(kThreads), S::kSharedBytes, stream, false, a);
}

template <int COLUMNS>
cudaError_t start(const __nv_bfloat16* x, uint8_t* activations, const Arguments& a, int tile_rows, int grid,
                  cudaStream_t stream) {
  switch (tile_rows) {
    case 128: return start<COLUMNS, 128>(x, activations, a, grid, stream);
    case 256: return start<COLUMNS, 256>(x, activations, a, grid, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon::fp8

// out [tokens, rows] = x [tokens, columns] times the weights, plus the bias; two launches. `activations` holds the
// quantised tiles.
extern "C" int antiphon_moe_fp8_project(const void* x, void* activations, const void* weights,
                                        const float* weight_scales, const void* bias, void* out, int tokens,
                                        int columns, int rows, int tile_rows, int grid, void* stream) {
  namespace fp8 = antiphon::fp8;
  const fp8::Arguments a = {static_cast<const uint8_t*>(activations),
                            static_cast<const uint8_t*>(weights),
                            weight_scales,
                            static_cast<const __nv_bfloat16*>(bias),
                            nullptr,
                            nullptr,
                            nullptr,
                            out,
                            (rows + fp8::kTileN - 1) / fp8::kTileN,
                            rows,
                            tokens};
  const auto* from = static_cast<const __nv_bfloat16*>(x);
  auto* quantised = static_cast<uint8_t*>(activations);
  switch (columns) {
    case 2880: return fp8::start<2880>(from, quantised, a, tile_rows, grid, static_cast<cudaStream_t>(stream));
    case 4096: return fp8::start<4096>(from, quantised, a, tile_rows, grid, static_cast<cudaStream_t>(stream));
    default: return cudaErrorInvalidValue;
  }
}
