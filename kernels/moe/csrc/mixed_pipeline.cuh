// How activations and weights reach the consumers of the widening grouped GEMM.
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

struct Arguments {
  const uint8_t* activations;  // [tiles, K tiles, tile bytes]
  const uint8_t* weights;      // [experts, row_tiles, stages, kStageBytes]
  const uint8_t* tops;         // [experts, row_tiles * 64] the largest scale of each row
  const __nv_bfloat16* bias;   // [experts, row_tiles * 64]
  const TokenTile* tiles;
  const int* tile_count;
  const float* row_factor;     // [tiles * tile rows] by slot: the token's scale, or its routing weight
  void* out;                   // e4m3 [tiles, K tiles, tile bytes], or bf16 [tiles * tile rows, 2880]
  int row_tiles;
  int hidden_spans;            // of the second projection of split experts

  template <typename S>
  __device__ __forceinline__ int tiles_n() const {
    return (row_tiles + S::kGroups - 1) / S::kGroups;
  }
};

// From the pointers that launchers are given.
inline Arguments arguments(const void* activations, const void* weights, const void* tops, const void* bias,
                           const void* tiles, const int* tile_count, const float* row_factor, void* out,
                           int row_tiles, int hidden_spans) {
  return {static_cast<const uint8_t*>(activations),
          static_cast<const uint8_t*>(weights),
          static_cast<const uint8_t*>(tops),
          static_cast<const __nv_bfloat16*>(bias),
          static_cast<const TokenTile*>(tiles),
          tile_count,
          row_factor,
          out,
          row_tiles,
          hidden_spans};
}

struct Work {
  int expert, rows, tile_m, tile_n;
};

// Work items in the order expert, weight tile, token tile, so that neighbours in time share a weight tile.
template <typename S>
__device__ __forceinline__ Work work_at(const Arguments& a, int index) {
  const int tiles_n = a.tiles_n<S>();
  const TokenTile some = a.tiles[index / tiles_n];
  const int local = index - some.first * tiles_n;
  const int tile_n = local / some.count, tile_m = some.first + local % some.count;
  return {some.expert, a.tiles[tile_m].rows, tile_m, tile_n};
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
__device__ __forceinline__ void stream_terms(const Arguments& a, const Work& work, const Shared& s, uint8_t* terms,
                                             Cursor<S::kTermSlots>& at) {
  const uint32_t ready = s.term_full + 8 * at.slot, target = s.terms + at.slot * S::kTermBytes;
  mbarrier_wait(s.term_empty + 8 * at.slot, at.parity ^ 1);
  *reinterpret_cast<int4*>(terms + at.slot * S::kTermBytes) = {work.expert, work.rows, work.tile_m, work.tile_n};
  mbarrier_expect(ready, S::kTermBytes - 16);
#pragma unroll
  for (int group = 0; group < S::kGroups; ++group) {
    const int row_tile = min(work.tile_n * S::kGroups + group, a.row_tiles - 1);
    const size_t row = (static_cast<size_t>(work.expert) * a.row_tiles + row_tile) * 64;
    bulk_copy(target + 16 + group * 64, a.tops + row, 64, ready);
    bulk_copy(target + S::kBiasAt + group * 128, a.bias + row, 128, ready);
  }
  bulk_copy(target + S::kFactorAt, a.row_factor + static_cast<size_t>(work.tile_m) * S::kTileRows, 4 * S::kTileRows,
            ready);
  at.advance();
}

template <typename S, bool GATED, bool SPLIT>
__device__ __forceinline__ void stream_tokens(const Arguments& a, int total, const Shared& s, uint8_t* terms) {
  Cursor<S::kTokenSlots> at;
  Cursor<S::kTermSlots> terms_at;
  const int tiles = SPLIT && !GATED ? a.hidden_spans * kSpanTiles : kTilesK;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<S>(a, index);
    stream_terms<S>(a, work, s, terms, terms_at);
    const uint32_t bytes = (work.rows + 15) / 16 * 16 * fp8::kTileK;
    const uint8_t* source = a.activations + static_cast<size_t>(work.tile_m) * tiles * S::kTileBytes;
    for (int k = 0; k < tiles; ++k) {
      const uint32_t ready = s.token_full + 8 * at.slot;
      mbarrier_wait(s.token_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, bytes);
      bulk_copy(s.tokens + at.slot * S::kTileBytes, source + static_cast<size_t>(k) * S::kTileBytes, bytes, ready);
      at.advance();
    }
  }
}

template <typename S, bool GATED, bool SPLIT>
__device__ __forceinline__ void stream_weights(const Arguments& a, int total, const Shared& s) {
  Cursor<S::kWeightSlots> at;
  const int stages = SPLIT && !GATED ? a.hidden_spans * kSpanStages : kStages;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<S>(a, index);
    const uint8_t* expert = a.weights + static_cast<size_t>(work.expert) * a.row_tiles * stages * kStageBytes;
    for (int stage = 0; stage < stages; ++stage) {
      const uint32_t ready = s.weight_full + 8 * at.slot, target = s.weights + at.slot * S::kSlotBytes;
      mbarrier_wait(s.weight_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, S::kSlotBytes);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {  // rows beyond the matrix: the last ones again
        const int row_tile = min(work.tile_n * S::kGroups + group, a.row_tiles - 1);
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

  __device__ __forceinline__ void release_terms() {
    fence_async_proxy();  // as in release_stage()
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.term_empty + 8 * term.slot);
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
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.weight_empty + 8 * slot);
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
