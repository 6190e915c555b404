// Both projections of whole experts for small token counts; see stream_experts.cuh.

#include "stream_experts.cuh"

// hidden tile = split(swiglu(gate_up[expert] x + bias)) of the split activations of the tokens, then
// partial[pair, 2880] = weight[pair] * (down[expert] hidden + bias) in float32. `ready` must be zero. `grid`: blocks, at
// most as many as the device holds at one time.
extern "C" int antiphon_moe_experts(const void* gate_up, const void* gate_up_bias, const void* down, const void* down_bias,
                                    const void* tokens, const float* scale, const int* order, const void* tiles,
                                    const int* tile_count, int* ready, void* hidden, const void* pair_weight,
                                    float* partial, int max_tiles, int token_tile, int grid, int overlap,
                                    void* stream) {
  using namespace antiphon::stream;
  const Arguments a = arguments(gate_up, gate_up_bias, down, down_bias, tokens, scale, order, tiles, tile_count, ready,
                                hidden, pair_weight, partial, max_tiles, kDim);
  return start<false>(a, token_tile, grid, static_cast<cudaStream_t>(stream), overlap != 0);
}
