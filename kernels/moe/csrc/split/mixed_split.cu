// Both projections of a rank's columns of a chunk's experts; see mixed_experts.cuh.

#include "../mixed_experts.cuh"

// As antiphon_moe_mixed_experts, of experts with `hidden_columns` of the intermediate size, a multiple of 384.
extern "C" int antiphon_moe_split_mixed_experts(const void* activations, const void* gate_up, const void* gate_up_tops,
                                                const void* gate_up_bias, const void* down, const void* down_tops,
                                                const void* down_bias, const void* tiles, const int* tile_count,
                                                int* ready, const float* token_scale, const float* row_weight,
                                                void* hidden, void* rows, int hidden_columns, int tile_rows, int grid,
                                                void* stream) {
  using namespace antiphon::mixed;
  if (hidden_columns <= 0 || hidden_columns >= kDim || hidden_columns % kSpanColumns != 0) return cudaErrorInvalidValue;
  const int gate_up_tiles = 2 * hidden_columns / 64, spans = hidden_columns / kSpanColumns;
  const Projection first = projection(activations, gate_up, gate_up_tops, gate_up_bias, token_scale, gate_up_tiles);
  const Projection second = projection(hidden, down, down_tops, down_bias, row_weight, kDim / 64);
  const Arguments a = arguments(first, second, tiles, tile_count, ready, hidden, rows, spans);
  return start<true>(a, tile_rows, grid, false, stream);
}
