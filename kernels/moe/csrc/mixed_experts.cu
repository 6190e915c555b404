// Both projections of a chunk's whole experts; see mixed_experts.cuh. `ready` must be zero, and is so afterwards.
// `grid`: blocks, at most as many as run at the same time.

#include "mixed_experts.cuh"

extern "C" int antiphon_moe_mixed_experts(const void* activations, const void* gate_up, const void* gate_up_tops,
                                          const void* gate_up_bias, const void* down, const void* down_tops,
                                          const void* down_bias, const void* tiles, const int* tile_count, int* ready,
                                          const float* token_scale, const float* row_weight, void* hidden, void* rows,
                                          int tile_rows, int grid, int overlap, void* stream) {
  using namespace antiphon::mixed;
  const Projection first = projection(activations, gate_up, gate_up_tops, gate_up_bias, token_scale, 2 * kDim / 64);
  const Projection second = projection(hidden, down, down_tops, down_bias, row_weight, kDim / 64);
  const Arguments a = arguments(first, second, tiles, tile_count, ready, hidden, rows, 0);
  return start<false>(a, tile_rows, grid, overlap != 0, stream);
}
