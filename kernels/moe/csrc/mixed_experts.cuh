// Grouped GEMM of a chunk of tokens: MXFP4 weights as the streaming kernel stores them, widened to e4m3 in registers,
// times e4m3 activations with one scale a token; float32 sums.
//
// Weight rows are the M of the products, tokens the N: the weights need no shared memory beyond their packed bytes.
// Persistent blocks; two producer threads (activations, weights) and consumer warpgroups of 64 weight rows each, which
// prepare the next 64 columns while the tensor core works on the last. The first projection's epilogue adds the bias,
// applies the clamped SwiGLU and writes the second projection's e4m3 operand in place; the second's adds the bias
// inside the routing weight.
//
// Integer operations are what the products wait for: accumulators go through the registers' ports while they run, and
// a warpgroup whose operand is in registers is held until it is read. So loops go on by six pairs of blocks, where all
// offsets are constants, and what a tile needs beside its operands comes through shared memory ahead of time.
//
// Two forms. Many tokens an expert: a weight row has one exponent, so the sums over all 2880 columns stay in the tensor
// core and both factors meet them once, in the epilogue. Few tokens: products are cheap and widening is not, so the
// block scales meet the sums of every 32 columns instead.
//
// SPLIT: experts that ranks hold columns of. The first projection has fewer rows, the second fewer columns, whose number
// is an argument.
#pragma once

#include "mixed_epilogue.cuh"

namespace antiphon::mixed {
namespace {

using Middle = Shape<3, 160, 5, 5, 160>;
using Wide = Shape<2, 256, 4, 6, 232>;
using Widest = Shape<2, 288, 4, 5, 232>;
template <int N>
using Narrow = Shape<3, N, 6, 8, 160>;

constexpr int kBody = 6;  // pairs that a loop goes on by: three tiles of tokens, two stages of weights
static_assert(kPairs % kBody == 3 && kBody % kStagePairs == 0 && kBody * 64 == kSpanColumns);

// Two products of 32 columns each, with one or both halves of the tokens; `tokens` describes their operand.
template <int N, int PARTS, int LENGTH>
__device__ __forceinline__ void multiply(float (&acc)[PARTS][LENGTH], const uint32_t (&weights)[8], uint64_t tokens,
                                         int accumulate) {
  constexpr int kPart = N / PARTS;
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      wgmma_e4m3_registers<kPart>(acc[part], weights + 4 * k, tokens + 2 * k + part * (kPart * fp8::kTileK / 16),
                                  k == 0 ? accumulate : 1);
  }
  wgmma_commit();
}

// The sums of a tile of many tokens: 64 rows x N, all 2880 columns, in pairs of 32 columns. While the products of one
// pair run, the next one is widened, and what the one after that is widened from is on its way.
template <typename S>
struct WideSums {
  // Products take 256 tokens at most. The same arrays for every width: registers are not moved between branches.
  static constexpr int kParts = (S::kTileRows + 255) / 256;
  static constexpr int kOperands = S::kOperands;
  float acc[kParts][S::kTileRows / kParts / 2];
  uint32_t operand[kOperands][8];
  Packed packed[kOperands];
  PairMagnitudes by;
  uint64_t tokens;
  int held;  // token slot whose products may still be running

  template <int PAIR>
  __device__ __forceinline__ void read(Consumer<S>& c) {
    packed[PAIR % kOperands] = c.template read<PAIR % kStagePairs>();
  }

  template <int PAIR>
  __device__ __forceinline__ void look_up(Consumer<S>& c, uint32_t offsets) {
    by = pair_magnitudes(packed[PAIR % kOperands].scales, offsets, c.magnitudes);
  }

  template <int PAIR>
  __device__ __forceinline__ void widen(const Consumer<S>& c) {
    widen_pair(packed[PAIR % kOperands].words, by, operand[PAIR % kOperands]);
#pragma unroll
    for (int i = 0; i < 8; ++i) pin(operand[PAIR % kOperands][i]);
    if constexpr (PAIR % kStagePairs == kStagePairs - 1) c.release_stage();
  }

  // Pair P of a body, of which there are `LEFT` more behind it: its products begin, the next is widened, and the second
  // next is read.
  template <int N, int P, int LEFT>
  __device__ __forceinline__ void step(Consumer<S>& c, uint32_t offsets, bool first) {
    if constexpr (P % 2 == 0) tokens = c.wait_tokens();
    multiply<N, kParts>(acc, operand[P % kOperands], tokens + 4 * (P % 2), !first);
    if constexpr (kOperands == 2) {
      if constexpr (LEFT >= 2) read<P + 2>(c);
      wgmma_wait<1>();  // the products before these
      if constexpr (P % 2 == 0) {
        if (!first) c.release(held);
        held = c.tokens.slot;
      } else {
        c.tokens.advance();
      }
      if constexpr (LEFT >= 1) widen<P + 1>(c);
    } else {  // the other warpgroups' products are what widening overlaps with
      wgmma_wait<0>();
      if constexpr (P % 2 == 1 || LEFT == 0) {
        c.release(c.tokens.slot);
        c.tokens.advance();
      }
      if constexpr (LEFT >= 1) widen<P + 1>(c);
      if constexpr (LEFT >= 2) read<P + 2>(c);
    }
    if constexpr (LEFT >= 2) look_up<P + 2>(c, offsets);
  }

  // SPANS: of whole spans of columns, of which the last is multiplied behind the loop; otherwise of 2880.
  template <int N, bool SPANS>
  __device__ __forceinline__ void accumulate(Consumer<S>& c, uint32_t offsets, const Arguments& a) {
    const int bodies = SPANS ? a.hidden_spans - 1 : kPairs / kBody;
    read<0>(c);
    look_up<0>(c, offsets);
    widen<0>(c);
    read<1>(c);
    look_up<1>(c, offsets);
#pragma unroll 1
    for (int body = 0; body < bodies; ++body) {
      step<N, 0, 3>(c, offsets, body == 0);
      step<N, 1, 3>(c, offsets, false);
      step<N, 2, 3>(c, offsets, false);
      step<N, 3, 3>(c, offsets, false);
      step<N, 4, 3>(c, offsets, false);
      step<N, 5, 3>(c, offsets, false);
    }
    if constexpr (SPANS) {
      step<N, 0, 3>(c, offsets, bodies == 0);
      step<N, 1, 3>(c, offsets, false);
      step<N, 2, 3>(c, offsets, false);
      step<N, 3, 2>(c, offsets, false);
      step<N, 4, 1>(c, offsets, false);
      step<N, 5, 0>(c, offsets, false);
    } else {
      step<N, 0, 2>(c, offsets, false);
      step<N, 1, 1>(c, offsets, false);
      step<N, 2, 0>(c, offsets, false);
    }
    if constexpr (kOperands == 2) {
      wgmma_wait<0>();
      c.release(held);
      if constexpr (!SPANS) c.tokens.advance();  // the last tile is half full
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < N / kParts / 2; ++i) pin(acc[part][i]);
    }
  }
};

// The same of few tokens, N of a tile and W of them multiplied. Every column of sums costs as much as those of tokens, so
// widths go on by 8.
template <int N, int W>
struct NarrowSums {
  static constexpr int kStored = (W + 15) / 16 * 16;  // tokens beyond the tile's are not written
  float acc[kStored / 2], parts[2][W / 2];
  uint32_t operand[2][8], scales;
  uint64_t tokens;

  // The next pair without its scales, which are returned.
  template <int PAIR>
  __device__ __forceinline__ uint32_t expand(Consumer<Narrow<N>>& c, uint32_t (&operand)[8]) {
    const Packed packed = c.template read<PAIR>();
    expand_pair(packed.words, operand);
#pragma unroll
    for (int i = 0; i < 8; ++i) pin(operand[i]);
    if constexpr (PAIR == kStagePairs - 1) c.release_stage();
    return packed.scales;
  }

  __device__ __forceinline__ void start(const uint32_t (&weights)[8], uint64_t tokens) {
    wgmma_fence();
    wgmma_e4m3_registers<W>(parts[0], weights, tokens, 0);
    wgmma_e4m3_registers<W>(parts[1], weights + 4, tokens + 2, 0);
    wgmma_commit();
  }

  __device__ __forceinline__ void finish(uint32_t scales) {
    wgmma_wait<0>();
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const float upper = __uint_as_float((block == 0 ? scales << 23 : scales << 7) & 0x7F800000u);
      const float lower = __uint_as_float((block == 0 ? scales << 15 : scales >> 1) & 0x7F800000u);
#pragma unroll
      for (int i = 0; i < W / 2; ++i) {
        pin(parts[block][i]);
        acc[i] = fmaf(parts[block][i], i % 4 < 2 ? upper : lower, acc[i]);
      }
    }
  }

  // Pair P of a body, and the next one's operand.
  template <int P, bool MORE>
  __device__ __forceinline__ void step(Consumer<Narrow<N>>& c) {
    if constexpr (P % 2 == 0) tokens = c.wait_tokens();
    start(operand[P % 2], tokens + 4 * (P % 2));
    uint32_t next = 0;
    if constexpr (MORE) next = expand<(P + 1) % kStagePairs>(c, operand[(P + 1) % 2]);
    finish(scales);
    scales = next;
    if constexpr (P % 2 == 1 || !MORE) {
      c.release(c.tokens.slot);
      c.tokens.advance();
    }
  }

  template <bool SPANS>
  __device__ __forceinline__ void accumulate(Consumer<Narrow<N>>& c, const Arguments& a) {
    const int bodies = SPANS ? a.hidden_spans - 1 : kPairs / kBody;
#pragma unroll
    for (int i = 0; i < kStored / 2; ++i) acc[i] = 0.0f;
    scales = expand<0>(c, operand[0]);
#pragma unroll 1
    for (int body = 0; body < bodies; ++body) {
      step<0, true>(c);
      step<1, true>(c);
      step<2, true>(c);
      step<3, true>(c);
      step<4, true>(c);
      step<5, true>(c);
    }
    step<0, true>(c);
    step<1, true>(c);
    step<2, SPANS>(c);
    if constexpr (SPANS) {
      step<3, true>(c);
      step<4, true>(c);
      step<5, false>(c);
    }
  }
};

template <int N, bool GATED, bool SPLIT, typename S>
__device__ __forceinline__ void run_wide(const Arguments& a, const uint8_t* terms, uint32_t offsets, Consumer<S>& c,
                                         WideSums<S>& sums) {
  sums.template accumulate<N, SPLIT && !GATED>(c, offsets, a);
  const Rows<S, GATED, SPLIT> rows(terms, c.group);  // again, rather than held in registers
  constexpr int kParts = WideSums<S>::kParts;
#pragma unroll
  for (int part = 0; part < kParts; ++part)
    rows.template store<N / kParts>(a, part * (N / kParts), sums.acc[part],
                                    {row_factor(rows.tops[0]), row_factor(rows.tops[1])});
}

// With the narrowest of the widths that holds the tile's tokens, or the last one.
template <bool GATED, bool SPLIT, int N, int... WIDER, typename S>
__device__ __forceinline__ void run_fitting(const Arguments& a, int tokens, const uint8_t* terms, uint32_t offsets,
                                            Consumer<S>& c, WideSums<S>& sums) {
  if constexpr (sizeof...(WIDER) == 0) {
    run_wide<N, GATED, SPLIT>(a, terms, offsets, c, sums);
  } else if (tokens <= N) {
    run_wide<N, GATED, SPLIT>(a, terms, offsets, c, sums);
  } else {
    run_fitting<GATED, SPLIT, WIDER...>(a, tokens, terms, offsets, c, sums);
  }
}

template <bool GATED, bool SPLIT, typename S>
__device__ __forceinline__ void consume(const Arguments& a, int total, Consumer<S>& c) {
  WideSums<S> sums;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const uint8_t* terms = c.wait_terms();
    const Rows<S, GATED, SPLIT> rows(terms, c.group);
    const uint32_t offsets = level_offsets(rows.tops[0], rows.tops[1]);
    const int tokens = __shfl_sync(0xFFFFFFFFu, rows.work.rows, 0);
    if constexpr (S::kTileRows == Middle::kTileRows) {
      run_fitting<GATED, SPLIT, 64, 80, 96, 112, 128, 144, 160>(a, tokens, terms, offsets, c, sums);
    } else if constexpr (S::kTileRows == Wide::kTileRows) {
      run_fitting<GATED, SPLIT, 64, 96, 128, 160, 192, 224, 256>(a, tokens, terms, offsets, c, sums);
    } else {
      run_fitting<GATED, SPLIT, 128, 240, 256, 272, 288>(a, tokens, terms, offsets, c, sums);
    }
    c.release_terms();
  }
}

// With the narrowest width from W on that holds the tile's tokens.
template <bool GATED, bool SPLIT, int W, int N>
__device__ __forceinline__ void run_fitting(const Arguments& a, int tokens, const Rows<Narrow<N>, GATED, SPLIT>& rows,
                                            Consumer<Narrow<N>>& c) {
  if constexpr (W < N) {
    if (tokens > W) return run_fitting<GATED, SPLIT, W + 8>(a, tokens, rows, c);
  }
  constexpr float kFactor = 1 << kExpandedExponent;
  NarrowSums<N, W> sums;
  sums.template accumulate<SPLIT && !GATED>(c, a);
  rows.template store<sums.kStored>(a, 0, sums.acc, {kFactor, kFactor});
}

template <bool GATED, bool SPLIT, int N>
__device__ __forceinline__ void consume(const Arguments& a, int total, Consumer<Narrow<N>>& c) {
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Rows<Narrow<N>, GATED, SPLIT> rows(c.wait_terms(), c.group);
    const int tokens = __shfl_sync(0xFFFFFFFFu, rows.work.rows, 0);
    run_fitting<GATED, SPLIT, 8>(a, tokens, rows, c);
    c.release_terms();
  }
}

template <typename S, bool GATED, bool SPLIT>
__global__ void __launch_bounds__(S::kThreads, 1) mixed_gemm(const __grid_constant__ Arguments a) {
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
      mbarrier_init(shared_address(&weight_empty[i]), S::kGroups * 4);
    }
    for (int i = 0; i < S::kTermSlots; ++i) {
      mbarrier_init(shared_address(&term_full[i]), 1);
      mbarrier_init(shared_address(&term_empty[i]), S::kGroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_trigger();  // what follows finds room on an SM once this block is done there
  grid_dependency_wait();
  const int total = __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0) * a.tiles_n<S>();
  const uint8_t* weights = shared + S::kTokenSlots * S::kTileBytes;
  uint8_t* terms = shared + S::kTermsAt;
  const Shared s = {shared_address(shared),      shared_address(weights),     shared_address(terms),
                    shared_address(token_full),  shared_address(token_empty), shared_address(weight_full),
                    shared_address(weight_empty), shared_address(term_full),  shared_address(term_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == S::kGroups) {
    give_registers<S::kProducerRegisters>();
    if (threadIdx.x == S::kGroups * 128) stream_tokens<S, GATED, SPLIT>(a, total, s, terms);
    if (threadIdx.x == S::kGroups * 128 + 32) stream_weights<S, GATED, SPLIT>(a, total, s);
  } else {
    take_registers<S::kRegisters>();
    Consumer<S> c = {s, weights, terms, magnitudes, group};
    consume<GATED, SPLIT>(a, total, c);
  }
}

template <typename S, bool GATED, bool SPLIT>
cudaError_t start(const Arguments& a, int grid, bool overlap, void* stream) {
  const auto kernel = mixed_gemm<S, GATED, SPLIT>;
  const cudaError_t prepared = prepare(kernel, S::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(kernel, dim3(grid), dim3(S::kThreads), S::kSharedBytes, static_cast<cudaStream_t>(stream), overlap,
                a);
}

template <bool GATED, bool SPLIT>
cudaError_t start(const Arguments& a, int tile_rows, int grid, bool overlap, void* stream) {
  switch (tile_rows) {
    case 32: return start<Narrow<32>, GATED, SPLIT>(a, grid, overlap, stream);
    case 48: return start<Narrow<48>, GATED, SPLIT>(a, grid, overlap, stream);
    case 64: return start<Narrow<64>, GATED, SPLIT>(a, grid, overlap, stream);
    case 160: return start<Middle, GATED, SPLIT>(a, grid, overlap, stream);
    case 256: return start<Wide, GATED, SPLIT>(a, grid, overlap, stream);
    case 288: return start<Widest, GATED, SPLIT>(a, grid, overlap, stream);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon::mixed
