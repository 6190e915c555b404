// Where the tokens of each expert lie in a chunk's tiles.
#pragma once

#include "fp8_layout.cuh"

namespace antiphon::fp8 {

constexpr int kMaxExperts = 128;

// The tiles of an expert lie together, those of experts with the most tokens first: so blocks that run at the same time
// multiply by products of one width, and what is left for the end is small.
//
// By a whole block with a thread for each expert. counts, tile_counts: in shared memory, [experts]; the latter is written.
__device__ __forceinline__ void lay_out_tiles(const int* counts, int* tile_counts, int experts, int tile_rows,
                                              int* first_tile, TokenTile* tiles, int* tile_count) {
  const int expert = threadIdx.x;
  if (expert < experts) tile_counts[expert] = (counts[expert] + tile_rows - 1) / tile_rows;
  __syncthreads();
  if (expert >= experts) return;
  const int count = counts[expert], mine = tile_counts[expert];
  int first = 0, all = 0;
#pragma unroll 8
  for (int other = 0; other < experts; ++other) {
    const int more = counts[other] - count, theirs = tile_counts[other];
    if (more > 0 || (more == 0 && other < expert)) first += theirs;
    all += theirs;
  }
  first_tile[expert] = first;
  for (int i = 0; i < mine; ++i) tiles[first + i] = {expert, min(tile_rows, count - i * tile_rows), first, mine};
  if (expert == 0) *tile_count = all;
}

}  // namespace antiphon::fp8
