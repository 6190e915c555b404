// Grouped GEMM of a chunk of tokens: MXFP4 weights as the streaming kernel stores them, widened to e4m3 in registers,
// times e4m3 activations with one scale a token; float32 sums.
//
// Weight rows are the M of the products, tokens the N: the weights need no shared memory beyond their packed bytes.
// Persistent blocks; two producer threads (activations, weights) and consumer warpgroups of 64 weight rows each, which
// prepare the next 64 columns while the tensor core works on the last. The first projection's epilogue adds the bias,
// applies the clamped SwiGLU and writes the second projection's e4m3 operand in place; the second's adds the bias
// inside the routing weight.
//
// Two forms. Many tokens an expert: a weight row has one exponent, so the sums over all 2880 columns stay in the tensor
// core and both factors meet them once, in the epilogue. Few tokens: products are cheap and widening is not, so the
// block scales meet the sums of every 32 columns instead.

#include "mixed_epilogue.cuh"

namespace antiphon::mixed {
namespace {

using Wide = Shape<3, 192, 4, 6, 160>;
using Wider = Shape<2, 256, 4, 6, 232>;
template <int N>
using Narrow = Shape<3, N, 6, 8, 160>;

// Two products of 32 columns each; `tokens` describes their operand.
template <int N>
__device__ __forceinline__ void multiply(float* acc, const uint32_t (&weights)[8], uint64_t tokens, int accumulate) {
  wgmma_fence();
  wgmma_e4m3_registers<N>(acc, weights, tokens, accumulate);
  wgmma_e4m3_registers<N>(acc, weights + 4, tokens + 2, 1);
  wgmma_commit();
}

// The sums of a tile of many tokens: 64 rows x N, all 2880 columns.
template <typename S>
struct WideSums {
  float acc[S::kTileRows / 2];  // one array for every width: registers are not moved between branches

  template <int N>
  __device__ __forceinline__ void accumulate(Consumer<S>& c, uint32_t offsets) {
    uint32_t even[8], odd[8];
    int held = 0;  // token slot whose products may still be running
    c.widen(offsets, even);
#pragma unroll 1
    for (int k = 0; k < kTilesK - 1; ++k) {
      const uint64_t tokens = c.wait_tokens();
      multiply<N>(acc, even, tokens, k > 0);
      wgmma_wait<1>();  // the products before these
      if (k > 0) c.release(held);
      c.widen(offsets, odd);
      multiply<N>(acc, odd, tokens + 4, 1);
      wgmma_wait<1>();
      held = c.tokens.slot;
      c.tokens.advance();
      c.widen(offsets, even);
    }
    multiply<N>(acc, even, c.wait_tokens(), 1);  // the last tile is half full
    wgmma_wait<0>();
    c.release(held);
    c.release(c.tokens.slot);
    c.tokens.advance();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pin(acc[i]);
  }
};

// The same of few tokens: the widest tile's products for every tile.
template <int N>
struct NarrowSums {
  float acc[N / 2], parts[2][N / 2];

  __device__ __forceinline__ void start(const uint32_t (&weights)[8], uint64_t tokens) {
    wgmma_fence();
    wgmma_e4m3_registers<N>(parts[0], weights, tokens, 0);
    wgmma_e4m3_registers<N>(parts[1], weights + 4, tokens + 2, 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void finish(uint32_t scales) {
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const float upper = __uint_as_float((block == 0 ? scales << 23 : scales << 7) & 0x7F800000u);
      const float lower = __uint_as_float((block == 0 ? scales << 15 : scales >> 1) & 0x7F800000u);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        pin(parts[block][i]);
        acc[i] = fmaf(parts[block][i], i % 4 < 2 ? upper : lower, acc[i]);
      }
    }
  }

  __device__ __forceinline__ void accumulate(Consumer<Narrow<N>>& c) {
    uint32_t even[8], odd[8];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[i] = 0.0f;
    uint32_t scales = c.expand(even);
#pragma unroll 1
    for (int k = 0; k < kTilesK - 1; ++k) {
      const uint64_t tokens = c.wait_tokens();
      start(even, tokens);
      const uint32_t odd_scales = c.expand(odd);
      finish(scales);
      start(odd, tokens + 4);
      scales = c.expand(even);
      finish(odd_scales);
      c.release(c.tokens.slot);
      c.tokens.advance();
    }
    start(even, c.wait_tokens());
    finish(scales);
    c.release(c.tokens.slot);
    c.tokens.advance();
  }
};

template <int N, bool GATED, typename S>
__device__ __forceinline__ void run_wide(const Arguments& a, const Work& work, Consumer<S>& c, WideSums<S>& sums) {
  const Rows<S, GATED> rows(a, work, c.group);
  sums.template accumulate<N>(c, level_offsets(rows.tops[0], rows.tops[1]));
  rows.template store<N>(a, work, sums.acc, {row_factor(rows.tops[0]), row_factor(rows.tops[1])});
}

template <bool GATED, typename S>
__device__ __forceinline__ void consume_wide(const Arguments& a, int total, Consumer<S>& c) {
  WideSums<S> sums;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<S>(a, index);
    const int tokens = __shfl_sync(0xFFFFFFFFu, work.tile.rows, 0);
    if (tokens <= 64) {
      run_wide<64, GATED>(a, work, c, sums);
    } else if (tokens <= 128) {
      run_wide<128, GATED>(a, work, c, sums);
    } else if (S::kTileRows == 192 || tokens <= 192) {
      run_wide<192, GATED>(a, work, c, sums);
    } else {
      run_wide<S::kTileRows, GATED>(a, work, c, sums);
    }
  }
}

template <bool GATED>
__device__ __forceinline__ void consume(const Arguments& a, int total, Consumer<Wide>& c) {
  consume_wide<GATED>(a, total, c);
}

template <bool GATED>
__device__ __forceinline__ void consume(const Arguments& a, int total, Consumer<Wider>& c) {
  consume_wide<GATED>(a, total, c);
}

template <bool GATED, int N>
__device__ __forceinline__ void consume(const Arguments& a, int total, Consumer<Narrow<N>>& c) {
  constexpr float kFactor = 1 << kExpandedExponent;
  NarrowSums<N> sums;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<Narrow<N>>(a, index);
    const Rows<Narrow<N>, GATED> rows(a, work, c.group);
    sums.accumulate(c);
    rows.template store<N>(a, work, sums.acc, {kFactor, kFactor});
  }
}

template <typename S, bool GATED>
__global__ void __launch_bounds__(S::kThreads, 1) mixed_gemm(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(8) uint64_t token_full[S::kTokenSlots], token_empty[S::kTokenSlots];
  __shared__ __align__(8) uint64_t weight_full[S::kWeightSlots], weight_empty[S::kWeightSlots];
  __shared__ __align__(8) Magnitudes magnitudes[kLevels];
  for (int i = threadIdx.x; i < 8 * kLevels; i += S::kThreads)
    reinterpret_cast<uint8_t*>(magnitudes)[i] = magnitude(i / 8, i % 8);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kTokenSlots; ++i) {
      mbarrier_init(shared_address(&token_full[i]), 1);
      mbarrier_init(shared_address(&token_empty[i]), S::kGroups * 4);
    }
    for (int i = 0; i < S::kWeightSlots; ++i) {
      mbarrier_init(shared_address(&weight_full[i]), 1);
      mbarrier_init(shared_address(&weight_empty[i]), S::kGroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int total = __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0) * a.tiles_n<S>();
  const uint8_t* weights = shared + S::kTokenSlots * S::kTileBytes;
  const Shared s = {shared_address(shared),      shared_address(weights),     shared_address(token_full),
                    shared_address(token_empty), shared_address(weight_full), shared_address(weight_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == S::kGroups) {
    give_registers<S::kProducerRegisters>();
    if (threadIdx.x == S::kGroups * 128) stream_tokens<S>(a, total, s);
    if (threadIdx.x == S::kGroups * 128 + 32) stream_weights<S>(a, total, s);
  } else {
    take_registers<S::kRegisters>();
    Consumer<S> c = {s, weights, magnitudes, group};
    consume<GATED>(a, total, c);
  }
}

template <typename S, bool GATED>
cudaError_t start(const Arguments& a, int grid, void* stream) {
  const cudaError_t prepared = prepare(mixed_gemm<S, GATED>, S::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(mixed_gemm<S, GATED>, dim3(grid), dim3(S::kThreads), S::kSharedBytes,
                static_cast<cudaStream_t>(stream), false, a);
}

template <bool GATED>
cudaError_t start(const Arguments& a, int tile_rows, int grid, void* stream) {
  switch (tile_rows) {
    case 32: return start<Narrow<32>, GATED>(a, grid, stream);
    case 48: return start<Narrow<48>, GATED>(a, grid, stream);
    case 64: return start<Narrow<64>, GATED>(a, grid, stream);
    case 192: return start<Wide, GATED>(a, grid, stream);
    case 256: return start<Wider, GATED>(a, grid, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon::mixed

extern "C" int antiphon_moe_mixed_gate_up(const void* activations, const void* weights, const void* tops,
                                          const void* bias, const void* tiles, const int* tile_count,
                                          const float* token_scale, void* hidden, int tile_rows, int grid,
                                          void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = mixed::arguments(activations, weights, tops, bias, tiles, tile_count, token_scale, hidden,
                                              2 * mixed::kDim / 64);
  return mixed::start<true>(a, tile_rows, grid, stream);
}

extern "C" int antiphon_moe_mixed_down(const void* hidden, const void* weights, const void* tops, const void* bias,
                                       const void* tiles, const int* tile_count, const float* row_weight, void* out,
                                       int tile_rows, int grid, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = mixed::arguments(hidden, weights, tops, bias, tiles, tile_count, row_weight, out,
                                              mixed::kDim / 64);
  return mixed::start<false>(a, tile_rows, grid, stream);
}
