// How activations and weights reach the consumers of the widening grouped GEMM.
//
// The work items of both projections are one list, the first one's before the second's, of which a block takes every
// grid-th: so no block waits for the end of the first. What the second multiplies was stored by many blocks; who copies
// it waits until all of a token tile is there. So all blocks must run at the same time, and no other kernel that waits
// in this way may run on the device then.
#pragma once

#include "fp8_layout.cuh"
#include "register_widen.cuh"
#include "wgmma_registers.cuh"

namespace antiphon::mixed {

using fp8::kDim;
using fp8::kTilesK;
using fp8::TokenTile;

constexpr int kPairs = kDim / 64;   // pairs of MXFP4 blocks in a row
constexpr int kStagePairs = 3;      // of the streamed format: stages of 192 columns
constexpr int kStages = kPairs / kStagePairs;
constexpr int kStageWeightBytes = kStagePairs * 2048;
constexpr int kStageBytes = kStageWeightBytes + kStagePairs * 128;
constexpr int kSpanColumns = 384;   // the second projection of split experts has whole spans of columns,
constexpr int kSpanTiles = kSpanColumns / fp8::kTileK, kSpanStages = kSpanColumns / (64 * kStagePairs);  // of each

// A block: GROUPS consumer warpgroups of 64 weight rows each, and TILE_ROWS tokens at most.
template <int GROUPS, int TILE_ROWS, int TOKEN_SLOTS, int WEIGHT_SLOTS, int REGISTERS>
struct Shape {
  static constexpr int kGroups = GROUPS;
  static constexpr int kTileRows = TILE_ROWS;
  static constexpr int kTileBytes = TILE_ROWS * fp8::kTileK;
  static constexpr int kTokenSlots = TOKEN_SLOTS;
  static constexpr int kWeightSlots = WEIGHT_SLOTS;
  static constexpr int kSlotBytes = GROUPS * kStageBytes;
  static constexpr int kTermSlots = 2;
  static constexpr int kRows = GROUPS * 64;  // weight rows of a block
  static constexpr int kBiasAt = 16 + kRows, kFactorAt = kBiasAt + 2 * kRows;  // in a slot of terms
  static constexpr int kTermBytes = kFactorAt + 4 * TILE_ROWS;
  static constexpr int kTermsAt = TOKEN_SLOTS * kTileBytes + WEIGHT_SLOTS * kSlotBytes;
  static constexpr int kSharedBytes = kTermsAt + kTermSlots * kTermBytes;
  static constexpr int kThreads = (GROUPS + 1) * 128;
  static constexpr int kRegisters = REGISTERS;  // of a consumer thread
  static constexpr int kProducerRegisters = GROUPS == 2 ? 40 : 32;
  static constexpr int kOperands = GROUPS == 2 ? 2 : 1;  // that there are registers for: one is widened beside products
  static_assert(kTermBytes % 16 == 0 && kFactorAt % 16 == 0);
  static_assert(kSharedBytes <= 230000);
  static_assert(128 * (GROUPS * REGISTERS + kProducerRegisters) <= 65536);
};

// One projection of all experts, with operands and factors of the tokens.
struct Projection {
  const uint8_t* tokens;       // [tiles, K tiles, tile bytes]
  const uint8_t* weights;      // [experts, row_tiles, stages, kStageBytes]
  const uint8_t* tops;         // [experts, row_tiles * 64] the largest scale of each row
  const __nv_bfloat16* bias;   // [experts, row_tiles * 64]
  const float* factor;         // [tiles * tile rows] by slot: the token's scale, or its routing weight
  int row_tiles;

  template <typename S>
  __device__ __forceinline__ int tiles_n() const {
    return (row_tiles + S::kGroups - 1) / S::kGroups;
  }
};

struct Arguments {
  Projection gate_up, down;
  const TokenTile* tiles;
  const int* tile_count;
  int* ready;                  // [1 + tiles], zero, and left so: blocks that are done, warps that stored of each tile
  uint8_t* hidden;             // e4m3 [tiles, K tiles, tile bytes], the second projection's tokens
  __nv_bfloat16* rows;         // [tiles * tile rows, 2880]
  int hidden_spans;            // of the second projection of split experts
};

inline Projection projection(const void* tokens, const void* weights, const void* tops, const void* bias,
                             const float* factor, int row_tiles) {
  return {static_cast<const uint8_t*>(tokens), static_cast<const uint8_t*>(weights),
          static_cast<const uint8_t*>(tops),   static_cast<const __nv_bfloat16*>(bias),
          factor,                              row_tiles};
}

// From what launchers are given; `hidden_spans`: 0 for whole experts.
inline Arguments arguments(const Projection& gate_up, const Projection& down, const void* tiles, const int* tile_count,
                           int* ready, void* hidden, void* rows, int hidden_spans) {
  return {gate_up,
          down,
          static_cast<const TokenTile*>(tiles),
          tile_count,
          ready,
          static_cast<uint8_t*>(hidden),
          static_cast<__nv_bfloat16*>(rows),
          hidden_spans};
}

// How many work items each projection has.
struct Items {
  int gate_up, all;

  template <typename S>
  static __device__ __forceinline__ Items of(const Arguments& a, int tile_count) {
    const int gate_up = tile_count * a.gate_up.tiles_n<S>();
    return {gate_up, gate_up + tile_count * a.down.tiles_n<S>()};
  }
};

// gated: of the first projection.
struct Work {
  int expert, rows, tile_m, tile_n;
  bool gated;
};

// Work items in the order projection, expert, weight tile, token tile, so that neighbours in time share a weight tile.
template <typename S>
__device__ __forceinline__ Work work_at(const Arguments& a, const Items& items, int index) {
  const bool gated = index < items.gate_up;
  if (!gated) index -= items.gate_up;
  const int tiles_n = (gated ? a.gate_up : a.down).tiles_n<S>();
  const TokenTile some = a.tiles[index / tiles_n];
  const int local = index - some.first * tiles_n;
  const int tile_n = local / some.count, tile_m = some.first + local % some.count;
  return {some.expert, a.tiles[tile_m].rows, tile_m, tile_n, gated};
}

// A slot of a ring and how often it was passed; a fresh barrier lets the producer's first turn through.
template <int SLOTS>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct Shared {
  uint32_t tokens, weights, terms;                                                   // data
  uint32_t token_full, token_empty, weight_full, weight_empty, term_full, term_empty;  // barriers
};

// What the consumers need of a tile besides its products: the work itself, then by bulk copies the largest scales and
// the biases of the weight rows and the factors of the tokens.
template <typename S>
__device__ __forceinline__ void stream_terms(const Projection& a, const Work& work, const Shared& s, uint8_t* terms,
                                             Cursor<S::kTermSlots>& at) {
  const uint32_t ready = s.term_full + 8 * at.slot, target = s.terms + at.slot * S::kTermBytes;
  mbarrier_wait(s.term_empty + 8 * at.slot, at.parity ^ 1);
  *reinterpret_cast<int4*>(terms + at.slot * S::kTermBytes) = {work.gated, work.rows, work.tile_m, work.tile_n};
  mbarrier_expect(ready, S::kTermBytes - 16);
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group) {
    const int row_tile = min(work.tile_n * S::kGroups + group, a.row_tiles - 1);
    const size_t row = (static_cast<size_t>(work.expert) * a.row_tiles + row_tile) * 64;
    bulk_copy(target + 16 + group * 64, a.tops + row, 64, ready);
    bulk_copy(target + S::kBiasAt + group * 128, a.bias + row, 128, ready);
  }
  bulk_copy(target + S::kFactorAt, a.factor + static_cast<size_t>(work.tile_m) * S::kTileRows, 4 * S::kTileRows,
            ready);
  at.advance();
}

template <typename S, bool SPLIT>
__device__ __forceinline__ void stream_tokens(const Arguments& a, const Items& items, const Shared& s, uint8_t* terms) {
  Cursor<S::kTokenSlots> at;
  Cursor<S::kTermSlots> terms_at;
  for (int index = blockIdx.x; index < items.all; index += gridDim.x) {
    const Work work = work_at<S>(a, items, index);
    const Projection& from = work.gated ? a.gate_up : a.down;
    stream_terms<S>(from, work, s, terms, terms_at);
    const int tiles = SPLIT && !work.gated ? a.hidden_spans * kSpanTiles : kTilesK;
    const uint32_t bytes = (work.rows + 15) / 16 * 16 * fp8::kTileK;
    const uint8_t* source = from.tokens + static_cast<size_t>(work.tile_m) * tiles * S::kTileBytes;
    if (!work.gated) {
      wait_for_count(a.ready + 1 + work.tile_m, a.gate_up.row_tiles * 4);
      fence_async_global();
    }
    for (int k = 0; k < tiles; ++k) {
      const uint32_t ready = s.token_full + 8 * at.slot;
      mbarrier_wait(s.token_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, bytes);
      bulk_copy(s.tokens + at.slot * S::kTileBytes, source + static_cast<size_t>(k) * S::kTileBytes, bytes, ready);
      at.advance();
    }
  }
}

// The last block that will not wait for a count any more leaves all of them as they were; `tiles`: how many there are.
__device__ __forceinline__ void clear_counts(const Arguments& a, int tiles) {
  __threadfence();
  if (atomicAdd(a.ready, 1) != static_cast<int>(gridDim.x) - 1) return;
  __threadfence();
  for (int i = 0; i <= tiles; ++i) a.ready[i] = 0;
}

template <typename S, bool SPLIT>
__device__ __forceinline__ void stream_weights(const Arguments& a, const Items& items, const Shared& s) {
  Cursor<S::kWeightSlots> at;
  for (int index = blockIdx.x; index < items.all; index += gridDim.x) {
    const Work work = work_at<S>(a, items, index);
    const Projection& from = work.gated ? a.gate_up : a.down;
    const int stages = SPLIT && !work.gated ? a.hidden_spans * kSpanStages : kStages, row_tiles = from.row_tiles;
    const uint8_t* expert = from.weights + static_cast<size_t>(work.expert) * row_tiles * stages * kStageBytes;
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t ready = s.weight_full + 8 * at.slot, target = s.weights + at.slot * S::kSlotBytes;
      mbarrier_wait(s.weight_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, S::kSlotBytes);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {  // rows beyond the matrix: the last ones again
        const int row_tile = min(work.tile_n * S::kGroups + group, row_tiles - 1);
        bulk_copy(target + group * kStageBytes, expert + (row_tile * stages + stage) * kStageBytes, kStageBytes, ready);
      }
      at.advance();
    }
  }
}

// What a lane reads of 64 rows x 64 columns.
struct Packed {
  uint4 words;
  uint32_t scales;  // row g, row g + 8, then the second block
};

// What a consumer warpgroup keeps from tile to tile.
template <typename S>
struct Consumer {
  const Shared& shared;
  const uint8_t* weights;
  const uint8_t* terms;
  const Magnitudes* magnitudes;
  int group;
  Cursor<S::kTokenSlots> tokens;
  Cursor<S::kWeightSlots> stage;
  Cursor<S::kTermSlots> term;

  // The terms of the next tile.
  __device__ __forceinline__ const uint8_t* wait_terms() const {
    mbarrier_wait(shared.term_full + 8 * term.slot, term.parity);
    return terms + term.slot * S::kTermBytes;
  }

  // Ends a tile: gives its terms back, and says of one of the first projection that this warp has stored all of it.
  __device__ __forceinline__ void end_tile(const Arguments& a) {
    const int4 item = *reinterpret_cast<const int4*>(terms + term.slot * S::kTermBytes);
    const bool stored = item.x != 0 && item.w * S::kGroups + group < a.gate_up.row_tiles;
    fence_async_proxy();  // as in release_stage()
    if (warp_arrive(shared.term_empty + 8 * term.slot) && stored) count_up(a.ready + 1 + item.z, 1);
    term.advance();
  }

  // 64 columns of this warpgroup's rows, pair PAIR of the stage. Pairs are read in order, and release_stage() follows
  // before the first of the next stage but one.
  template <int PAIR>
  __device__ __forceinline__ Packed read() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if constexpr (PAIR == 0) mbarrier_wait(shared.weight_full + 8 * stage.slot, stage.parity);
    const uint8_t* source = weights + stage.slot * S::kSlotBytes + group * kStageBytes;
    Packed packed;
    packed.words = *reinterpret_cast<const uint4*>(source + (PAIR * 4 * 32 + warp * 32 + lane) * 16);
    packed.scales = *reinterpret_cast<const uint32_t*>(source + kStageWeightBytes + (warp * 8 + lane / 4) * 12 + PAIR * 4);
    if constexpr (PAIR == kStagePairs - 1) stage.advance();
    return packed;
  }

  // Gives the slot back whose last pair was read latest, once that is in use. A bulk copy does not go the way of the
  // loads before it: they may still be queued behind others when it fills the slot again, unless a fence has waited.
  __device__ __forceinline__ void release_stage() const {
    const int slot = (stage.slot == 0 ? S::kWeightSlots : stage.slot) - 1;
    fence_async_proxy();
    warp_arrive(shared.weight_empty + 8 * slot);
  }

  // The operand of the token tile's next 128 columns, once they are there.
  __device__ __forceinline__ uint64_t wait_tokens() const {
    mbarrier_wait(shared.token_full + 8 * tokens.slot, tokens.parity);
    return swizzled_operand(shared.tokens + tokens.slot * S::kTileBytes);
  }

  __device__ __forceinline__ void release(int slot) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.token_empty + 8 * slot);
  }
};

}  // namespace antiphon::mixed
