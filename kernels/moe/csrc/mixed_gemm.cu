// Both projections of a chunk's whole experts; see mixed_experts.cuh.

#include "mixed_experts.cuh"

extern "C" int antiphon_moe_mixed_gate_up(const void* activations, const void* weights, const void* tops,
                                          const void* bias, const void* tiles, const int* tile_count,
                                          const float* token_scale, void* hidden, int tile_rows, int grid,
                                          int overlap, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = mixed::arguments(activations, weights, tops, bias, tiles, tile_count, token_scale, hidden,
                                              2 * mixed::kDim / 64, 0);
  return mixed::start<true, false>(a, tile_rows, grid, overlap != 0, stream);
}

extern "C" int antiphon_moe_mixed_down(const void* hidden, const void* weights, const void* tops, const void* bias,
                                       const void* tiles, const int* tile_count, const float* row_weight, void* out,
                                       int tile_rows, int grid, int overlap, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = mixed::arguments(hidden, weights, tops, bias, tiles, tile_count, row_weight, out,
                                              mixed::kDim / 64, 0);
  return mixed::start<false, false>(a, tile_rows, grid, overlap != 0, stream);
}
