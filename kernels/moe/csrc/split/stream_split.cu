// Both projections of a rank's columns of every expert for small token counts; see stream_experts.cuh.

#include "../stream_experts.cuh"

// As antiphon_moe_experts, of experts with `hidden_columns` of the intermediate size: gate_up [experts, 2 x hidden_columns
// rows], down [experts, kDim rows, hidden_columns].
extern "C" int antiphon_moe_split_experts(const void* gate_up, const void* gate_up_bias, const void* down,
                                          const void* down_bias, const void* tokens, const float* scale,
                                          const int* order, const void* tiles, const int* tile_count, int* ready,
                                          void* hidden, const void* pair_weight, float* partial, int max_tiles,
                                          int hidden_columns, int token_tile, int grid, int overlap, void* stream) {
  using namespace antiphon::stream;
  if (hidden_columns < kSplitColumns || hidden_columns > kDim || hidden_columns % kSplitColumns != 0)
    return cudaErrorInvalidValue;
  const Arguments a = arguments(gate_up, gate_up_bias, down, down_bias, tokens, scale, order, tiles, tile_count, ready,
                                hidden, pair_weight, partial, max_tiles, hidden_columns);
  return start<true>(a, token_tile, grid, static_cast<cudaStream_t>(stream), overlap != 0);
}
