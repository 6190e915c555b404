// Grouped GEMM of a chunk of tokens: MXFP4 weights as the streaming kernel stores them, widened to e4m3 in registers,
// times e4m3 activations with one scale a token; float32 sums.
//
// Weight rows are the M of the products, tokens the N: the weights need no shared memory beyond their packed bytes.
// Persistent blocks; two producer threads (activations, weights) and consumer warpgroups of 64 weight rows each, which
// prepare operands while the tensor core works on their own last ones or on others' (mixed_sums.cuh). The first
// projection's epilogue adds the bias, applies the clamped SwiGLU and writes the second projection's e4m3 operand in
// place; the second's, which follows in the same launch, adds the bias inside the routing weight. What a tile needs
// beside its operands comes through shared memory ahead of time.
//
// SPLIT: experts that ranks hold columns of. The first projection has fewer rows, the second fewer columns, whose
// number is an argument.
#pragma once

#include "mixed_epilogue.cuh"
#include "mixed_sums.cuh"

namespace antiphon::mixed {
namespace {

// Multiplies with the narrowest of the widths that holds the tile's tokens, or the last one; returns how many of them a
// part of the sums has.
template <int N, int... WIDER, typename S>
__device__ __forceinline__ int accumulate_fitting(int tokens, uint32_t offsets, Columns columns, Consumer<S>& c,
                                                  WideSums<S>& sums) {
  if constexpr (sizeof...(WIDER) > 0) {
    if (tokens > N) return accumulate_fitting<WIDER...>(tokens, offsets, columns, c, sums);
  }
  sums.template accumulate<N>(c, offsets, columns);
  return N / WideSums<S>::kParts;
}

template <typename S>
__device__ __forceinline__ int accumulate(int tokens, uint32_t offsets, Columns columns, Consumer<S>& c,
                                          WideSums<S>& sums) {
  if constexpr (S::kTileRows == Middle::kTileRows) {
    return accumulate_fitting<64, 80, 96, 112, 128, 144, 160>(tokens, offsets, columns, c, sums);
  } else if constexpr (S::kTileRows == Wide::kTileRows) {
    return accumulate_fitting<64, 128, 192, 256>(tokens, offsets, columns, c, sums);
  } else {
    return accumulate_fitting<64, 192, 256, 272, 288>(tokens, offsets, columns, c, sums);
  }
}

template <bool SPLIT, typename S>
__device__ __forceinline__ void consume(const Arguments& a, const Items& items, Consumer<S>& c) {
  constexpr int kParts = WideSums<S>::kParts;
  WideSums<S> sums;
  for (int index = blockIdx.x; index < items.all; index += gridDim.x) {
    const uint8_t* terms = c.wait_terms();
    int part_tokens;
    {
      const Rows<S, SPLIT> rows(terms, c.group);
      const uint32_t offsets = level_offsets(rows.tops[0], rows.tops[1]);
      part_tokens = accumulate(rows.tokens, offsets, Columns::of<SPLIT>(a, rows.gated), c, sums);
    }
    const Rows<S, SPLIT> rows(terms, c.group);  // again, rather than held in registers
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int first = part * part_tokens;
      rows.template store<S::kTileRows / kParts>(a, first, min(rows.tokens - first, part_tokens), sums.acc[part],
                                                 {row_factor(rows.tops[0]), row_factor(rows.tops[1])});
    }
    c.end_tile(a);
  }
}

// With the narrowest width from W on that holds the tile's tokens.
template <int W, bool SPLIT, int N>
__device__ __forceinline__ void run_fitting(const Arguments& a, const Rows<Narrow<N>, SPLIT>& rows,
                                            Consumer<Narrow<N>>& c) {
  if constexpr (W < N) {
    if (rows.tokens > W) return run_fitting<W + 8>(a, rows, c);
  }
  constexpr float kFactor = 1 << kExpandedExponent;
  NarrowSums<N, W> sums;
  sums.accumulate(c, Columns::of<SPLIT>(a, rows.gated));
  rows.template store<sums.kStored>(a, 0, rows.tokens, sums.acc, {kFactor, kFactor});
}

template <bool SPLIT, int N>
__device__ __forceinline__ void consume(const Arguments& a, const Items& items, Consumer<Narrow<N>>& c) {
  for (int index = blockIdx.x; index < items.all; index += gridDim.x) {
    run_fitting<8>(a, Rows<Narrow<N>, SPLIT>(c.wait_terms(), c.group), c);
    c.end_tile(a);
  }
}

template <typename S, bool SPLIT>
__global__ void __launch_bounds__(S::kThreads, 1) mixed_experts(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(8) uint64_t token_full[S::kTokenSlots], token_empty[S::kTokenSlots];
  __shared__ __align__(8) uint64_t weight_full[S::kWeightSlots], weight_empty[S::kWeightSlots];
  __shared__ __align__(8) uint64_t term_full[S::kTermSlots], term_empty[S::kTermSlots];
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
      mbarrier_init(shared_address(&weight_empty[i]), S::kGroups * 4 * kWarpArrivals);
    }
    for (int i = 0; i < S::kTermSlots; ++i) {
      mbarrier_init(shared_address(&term_full[i]), 1);
      mbarrier_init(shared_address(&term_empty[i]), S::kGroups * 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_trigger();  // what follows finds room on an SM once this block is done there
  grid_dependency_wait();
  const int tiles = __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0);
  const Items items = Items::of<S>(a, tiles);
  const uint8_t* weights = shared + S::kTokenSlots * S::kTileBytes;
  uint8_t* terms = shared + S::kTermsAt;
  const Shared s = {shared_address(shared),      shared_address(weights),     shared_address(terms),
                    shared_address(token_full),  shared_address(token_empty), shared_address(weight_full),
                    shared_address(weight_empty), shared_address(term_full),  shared_address(term_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == S::kGroups) {
    give_registers<S::kProducerRegisters>();
    if (threadIdx.x == S::kGroups * 128) {
      stream_tokens<S, SPLIT>(a, items, s, terms);
      clear_counts(a, tiles);
    } else if (threadIdx.x == S::kGroups * 128 + 32) {
      stream_weights<S, SPLIT>(a, items, s);
    }
  } else {
    take_registers<S::kRegisters>();
    Consumer<S> c = {s, weights, terms, magnitudes, group};
    consume<SPLIT>(a, items, c);
  }
}

template <typename S, bool SPLIT>
cudaError_t start(const Arguments& a, int grid, bool overlap, void* stream) {
  const auto kernel = mixed_experts<S, SPLIT>;
  const cudaError_t prepared = prepare(kernel, S::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  // A block that is not there cannot be waited for. The devices of a process are alike, so one answer serves all.
  static const int resident = resident_blocks(kernel, S::kThreads, S::kSharedBytes);
  if (grid < 1 || grid > resident) return cudaErrorCooperativeLaunchTooLarge;
  return launch(kernel, dim3(grid), dim3(S::kThreads), S::kSharedBytes, static_cast<cudaStream_t>(stream), overlap,
                a);
}

template <bool SPLIT>
cudaError_t start(const Arguments& a, int tile_rows, int grid, bool overlap, void* stream) {
  switch (tile_rows) {
    case 32: return start<Narrow<32>, SPLIT>(a, grid, overlap, stream);
    case 48: return start<Narrow<48>, SPLIT>(a, grid, overlap, stream);
    case 64: return start<Narrow<64>, SPLIT>(a, grid, overlap, stream);
    case 160: return start<Middle, SPLIT>(a, grid, overlap, stream);
    case 256: return start<Wide, SPLIT>(a, grid, overlap, stream);
    case 288: return start<Widest, SPLIT>(a, grid, overlap, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon::mixed
