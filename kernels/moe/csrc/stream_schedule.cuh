// Which row tiles of which token tiles a block of the streaming kernel takes.
#pragma once

#include "stream_geometry.cuh"

namespace antiphon::stream {

// The items of this block: runs of neighbours, so that it changes its token tile rarely. With HALVES the first
// projection of half of the token tiles comes before that of the others, and so does the second: what a block then
// reads was made by all blocks well before, and nobody waits.
struct Work {
  int first, count;
};
template <bool HALVES>
struct Schedule {
  static constexpr int kParts = HALVES ? 2 : 1;
  Work gate_up[kParts], down[kParts];
  int items = 0;
};

__device__ __forceinline__ int share(long long items, int block, int blocks) {
  return static_cast<int>(items * block / blocks);
}

// This block's run of `items` items from `first` on, behind `before` others that were dealt out. Ends of runs are
// differences of rounded shares of sums, so that no block gets more than one item above the mean in all. A part with
// fewer items than blocks may deal an item out twice: the second projection's parts may, since its results are the same.
__device__ __forceinline__ Work deal(int first, int items, int before, int block, int blocks) {
  const int begin = share(before + items, block, blocks) - share(before, block, blocks);
  const int end = share(before + items, block + 1, blocks) - share(before, block + 1, blocks);
  return {first + begin, max(end - begin, 0)};
}

// Blocks are left idle where the others would not get more work for it: the last items of a few would otherwise be
// waited for by all.
template <bool HALVES>
__device__ __forceinline__ Schedule<HALVES> schedule(const Arguments& a, int tiles) {
  Schedule<HALVES> plan = {};
  const int rows[2] = {a.gate_up.row_tiles, a.down.row_tiles};
  const int all = tiles * (rows[0] + rows[1]), grid = gridDim.x, block = blockIdx.x;
  const int most = (all + grid - 1) / grid, blocks = most > 0 ? (all + most - 1) / most : 0;
  if (block >= blocks) return plan;
  // No item of the first projection may be dealt out twice: its tiles would be counted as finished too early.
  const int half = HALVES && (tiles - tiles / 2) * rows[0] >= blocks ? tiles / 2 : 0;
  int before = 0;
#pragma unroll
  for (int projection = 0; projection < 2; ++projection) {
#pragma unroll
    for (int part = 0; part < Schedule<HALVES>::kParts; ++part) {
      const int first = part == 0 && HALVES ? 0 : half, end = part == 0 && HALVES ? half : tiles;
      const int items = (end - first) * rows[projection];
      const Work work = deal(first * rows[projection], items, before, block, blocks);
      (projection == 0 ? plan.gate_up : plan.down)[part] = work;
      plan.items += work.count;
      before += items;
    }
  }
  return plan;
}

}  // namespace antiphon::stream
