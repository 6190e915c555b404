// Both projections of a rank's columns of a chunk's experts; see mixed_experts.cuh.

#include "../mixed_experts.cuh"

namespace antiphon::mixed {
namespace {

bool takes(int hidden_columns) {
  return hidden_columns > 0 && hidden_columns < kDim && hidden_columns % kSpanColumns == 0;
}

}  // namespace
}  // namespace antiphon::mixed

// As antiphon_moe_mixed_gate_up, of experts with `hidden_columns` of the intermediate size, a multiple of 384.
extern "C" int antiphon_moe_split_gate_up(const void* activations, const void* weights, const void* tops,
                                          const void* bias, const void* tiles, const int* tile_count,
                                          const float* token_scale, void* hidden, int hidden_columns, int tile_rows,
                                          int grid, void* stream) {
  namespace mixed = antiphon::mixed;
  if (!mixed::takes(hidden_columns)) return cudaErrorInvalidValue;
  const mixed::Arguments a = mixed::arguments(activations, weights, tops, bias, tiles, tile_count, token_scale, hidden,
                                              2 * hidden_columns / 64, hidden_columns / mixed::kSpanColumns);
  return mixed::start<true, true>(a, tile_rows, grid, false, stream);
}

extern "C" int antiphon_moe_split_down(const void* hidden, const void* weights, const void* tops, const void* bias,
                                       const void* tiles, const int* tile_count, const float* row_weight, void* out,
                                       int hidden_columns, int tile_rows, int grid, void* stream) {
  namespace mixed = antiphon::mixed;
  if (!mixed::takes(hidden_columns)) return cudaErrorInvalidValue;
  const mixed::Arguments a = mixed::arguments(hidden, weights, tops, bias, tiles, tile_count, row_weight, out,
                                              mixed::kDim / 64, hidden_columns / mixed::kSpanColumns);
  return mixed::start<false, true>(a, tile_rows, grid, false, stream);
}
