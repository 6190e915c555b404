// A layer's streamed MXFP4 weights as e4m3 tiles: at load, or chunk by chunk into a scratch layer where the card
// has no room for resident FP8.

#include "hopper.cuh"
#include "widen.cuh"

namespace antiphon::widen {
namespace {

// One block per (column tile, 128-row tile, expert).
__global__ void __launch_bounds__(kThreads)
    widen_kernel(const uint8_t* streamed, int row_tiles, int interleaved, uint8_t* values, float* scales,
                 int* inexact_tiles) {
  __shared__ __align__(16) uint8_t tile[kTileBytes];
  __shared__ int top;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, upper = warp / 4;
  const int row_tile = blockIdx.y * 2 + upper;
  if (threadIdx.x == 0) top = 0;
  __syncthreads();
  Piece piece = {};
  if (row_tile < row_tiles)  // else rows beyond the matrix: zeros
    piece = load_piece(streamed + (static_cast<size_t>(blockIdx.z) * row_tiles + row_tile) * kRowTileBytes, blockIdx.x,
                       warp % 4, lane);
  int largest = 0;
#pragma unroll
  for (int i = 0; i < kTilePairs * 4; ++i) {
    const int pair = i / 4, block = i / 2 % 2, row = i % 2;
    if (used(piece, pair, block, row)) largest = max(largest, piece.scale(pair, block, row));
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (lane == 0) atomicMax(&top, largest);
  __syncthreads();
  const bool exact = store_piece(piece, top, upper, warp % 4, lane, interleaved != 0, tile);
  const int rounded = __syncthreads_or(!exact);
  const size_t index = (static_cast<size_t>(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  auto* out = reinterpret_cast<uint4*>(values + index * kTileBytes);
  for (int i = threadIdx.x; i < kTileBytes / 16; i += kThreads) out[i] = reinterpret_cast<const uint4*>(tile)[i];
  if (threadIdx.x == 0) {
    scales[index] = ldexpf(1.0f, top - 127 - kTopExponent);
    if (rounded && inexact_tiles != nullptr) atomicAdd(inexact_tiles, 1);
  }
}

}  // namespace
}  // namespace antiphon::widen

// streamed [experts, row_tiles, 15, 6528] -> values [experts, ceil(row_tiles / 2), 23, 16384] and a scale a tile;
// adds the number of tiles that were rounded to *inexact_tiles unless that is null.
extern "C" int antiphon_moe_widen(const void* streamed, int experts, int row_tiles, int interleaved, void* values,
                                  float* scales, int* inexact_tiles, void* stream) {
  const dim3 grid(23, (row_tiles + 1) / 2, experts);
  return antiphon::launch(antiphon::widen::widen_kernel, grid, dim3(antiphon::widen::kThreads), 0,
                          static_cast<cudaStream_t>(stream), false, static_cast<const uint8_t*>(streamed), row_tiles,
                          interleaved, static_cast<uint8_t*>(values), scales, inexact_tiles);
}
