// The sums of a tile: 64 weight rows by its tokens, over all columns, in one warpgroup's registers.
//
// Integer operations are what the products wait for: accumulators go through the registers' ports while they run, and
// a warpgroup whose operand is in registers is held until it is read. So loops go on by six pairs of blocks, where all
// offsets are constants.
//
// Two forms. Many tokens an expert: a weight row has one exponent, so the sums over all 2880 columns stay in the tensor
// core and both factors meet them once, in the epilogue. Few tokens: products are cheap and widening is not, so the
// block scales meet the sums of every 32 columns instead.
//
// A tile is multiplied by the narrowest of several products that holds its tokens. Tiles of different widths take turns
// in the instruction cache: so each pair of a loop is there once for every width, and what follows the products is
// shared where the sums lie in the same registers.
#pragma once

#include "mixed_pipeline.cuh"

namespace antiphon::mixed {
namespace {

using Middle = Shape<3, 160, 5, 5, 160>;
using Wide = Shape<2, 256, 4, 6, 232>;
using Widest = Shape<2, 288, 4, 5, 232>;
template <int N>
using Narrow = Shape<3, N, 6, 8, 160>;

constexpr int kBody = 6;  // pairs that a loop goes on by: three tiles of tokens, two stages of weights
static_assert(kPairs % kBody == 3 && kBody % kStagePairs == 0 && kBody * 64 == kSpanColumns);

// Of the weight rows: 2880, which end in the middle of a body, or whole spans, of which each is a body.
struct Columns {
  int last;    // body
  bool spans;

  template <bool SPLIT>
  static __device__ __forceinline__ Columns of(const Arguments& a, bool gated) {
    if (!SPLIT || gated) return {kPairs / kBody, false};
    return {a.hidden_spans - 1, true};
  }
  __device__ __forceinline__ bool whole(int body) const { return spans || body < last; }
  __device__ __forceinline__ bool again(int body) const { return !spans || body < last; }
};

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

  // Pair P of a body: its products begin, the next is widened, and the second next is read, as far as there are any.
  template <int N, int P>
  __device__ __forceinline__ void step(Consumer<S>& c, uint32_t offsets, bool first, bool next, bool second) {
    if constexpr (P % 2 == 0) tokens = c.wait_tokens();
    multiply<N, kParts>(acc, operand[P % kOperands], tokens + 4 * (P % 2), !first);
    if constexpr (kOperands == 2) {
      if (second) read<P + 2>(c);
      wgmma_wait<1>();  // the products before these
      if constexpr (P % 2 == 0) {
        if (!first) c.release(held);
        held = c.tokens.slot;
      } else {
        c.tokens.advance();
      }
      if (next) widen<P + 1>(c);
    } else {  // the other warpgroups' products are what widening overlaps with
      wgmma_wait<0>();
      if (P % 2 == 1 || !next) {
        c.release(c.tokens.slot);
        c.tokens.advance();
      }
      if (next) widen<P + 1>(c);
      if (second) read<P + 2>(c);
    }
    if (second) look_up<P + 2>(c, offsets);
  }

  template <int N>
  __device__ __forceinline__ void accumulate(Consumer<S>& c, uint32_t offsets, Columns columns) {
    read<0>(c);
    look_up<0>(c, offsets);
    widen<0>(c);
    read<1>(c);
    look_up<1>(c, offsets);
#pragma unroll 1
    for (int body = 0;; ++body) {
      const bool whole = columns.whole(body), again = columns.again(body);
      step<N, 0>(c, offsets, body == 0, true, true);
      step<N, 1>(c, offsets, false, true, whole);
      step<N, 2>(c, offsets, false, whole, whole);
      if (!whole) break;
      step<N, 3>(c, offsets, false, true, true);
      step<N, 4>(c, offsets, false, true, again);
      step<N, 5>(c, offsets, false, again, again);
      if (!again) break;
    }
    if constexpr (kOperands == 2) {
      wgmma_wait<0>();
      c.release(held);
      if (!columns.spans) c.tokens.advance();  // the last tile is half full
    }
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
#pragma unroll
      for (int i = 0; i < N / kParts / 2; ++i) pin(acc[part][i]);
    }
  }
};

// The same of few tokens: W columns of a tile of N. A column without a token costs as much as one with, so widths go on
// by 8.
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

  // Pair P of a body, and the next one's operand if there is one.
  template <int P>
  __device__ __forceinline__ void step(Consumer<Narrow<N>>& c, bool more) {
    if constexpr (P % 2 == 0) tokens = c.wait_tokens();
    start(operand[P % 2], tokens + 4 * (P % 2));
    uint32_t next = 0;
    if (more) next = expand<(P + 1) % kStagePairs>(c, operand[(P + 1) % 2]);
    finish(scales);
    scales = next;
    if (P % 2 == 1 || !more) {
      c.release(c.tokens.slot);
      c.tokens.advance();
    }
  }

  __device__ __forceinline__ void accumulate(Consumer<Narrow<N>>& c, Columns columns) {
#pragma unroll
    for (int i = 0; i < kStored / 2; ++i) acc[i] = 0.0f;
    scales = expand<0>(c, operand[0]);
#pragma unroll 1
    for (int body = 0;; ++body) {
      const bool whole = columns.whole(body), again = columns.again(body);
      step<0>(c, true);
      step<1>(c, true);
      step<2>(c, whole);
      if (!whole) break;
      step<3>(c, true);
      step<4>(c, true);
      step<5>(c, again);
      if (!again) break;
    }
  }
};

}  // namespace
}  // namespace antiphon::mixed
