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

// A block: GROUPS consumer warpgroups of 64 weight rows each, and TILE_ROWS tokens at most.
template <int GROUPS, int TILE_ROWS, int TOKEN_SLOTS, int WEIGHT_SLOTS, int REGISTERS>
struct Shape {
  static constexpr int kGroups = GROUPS;
  static constexpr int kTileRows = TILE_ROWS;
  static constexpr int kTileBytes = TILE_ROWS * fp8::kTileK;
  static constexpr int kTokenSlots = TOKEN_SLOTS;
  static constexpr int kWeightSlots = WEIGHT_SLOTS;
  static constexpr int kSlotBytes = GROUPS * kStageBytes;
  static constexpr int kSharedBytes = TOKEN_SLOTS * kTileBytes + WEIGHT_SLOTS * kSlotBytes;
  static constexpr int kThreads = (GROUPS + 1) * 128;
  static constexpr int kRegisters = REGISTERS;  // of a consumer thread
  static constexpr int kProducerRegisters = GROUPS == 2 ? 40 : 32;
  static_assert(kSharedBytes <= 230000);
  static_assert(128 * (GROUPS * REGISTERS + kProducerRegisters) <= 65536);
};

struct Arguments {
  const uint8_t* activations;  // [tiles, 23, tile bytes]
  const uint8_t* weights;      // [experts, row_tiles, kStages, kStageBytes]
  const uint8_t* tops;         // [experts, row_tiles * 64] the largest scale of each row
  const __nv_bfloat16* bias;   // [experts, row_tiles * 64]
  const TokenTile* tiles;
  const int* tile_count;
  const float* row_factor;     // [tiles * tile rows] by slot: the token's scale, or its routing weight
  void* out;                   // e4m3 [tiles, 23, tile bytes], or bf16 [tiles * tile rows, 2880]
  int row_tiles;

  template <typename S>
  __device__ __forceinline__ int tiles_n() const {
    return (row_tiles + S::kGroups - 1) / S::kGroups;
  }
};

// From the pointers that launchers are given.
inline Arguments arguments(const void* activations, const void* weights, const void* tops, const void* bias,
                           const void* tiles, const int* tile_count, const float* row_factor, void* out,
                           int row_tiles) {
  return {static_cast<const uint8_t*>(activations),
          static_cast<const uint8_t*>(weights),
          static_cast<const uint8_t*>(tops),
          static_cast<const __nv_bfloat16*>(bias),
          static_cast<const TokenTile*>(tiles),
          tile_count,
          row_factor,
          out,
          row_tiles};
}

struct Work {
  TokenTile tile;
  int tile_m, tile_n;
};

// Work items in the order expert, weight tile, token tile, so that neighbours in time share a weight tile.
template <typename S>
__device__ __forceinline__ Work work_at(const Arguments& a, int index) {
  const int tiles_n = a.tiles_n<S>();
  const TokenTile some = a.tiles[index / tiles_n];
  const int local = index - some.first * tiles_n;
  const int tile_n = local / some.count, tile_m = some.first + local % some.count;
  return {a.tiles[tile_m], tile_m, tile_n};
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
  uint32_t tokens, weights;                                     // data
  uint32_t token_full, token_empty, weight_full, weight_empty;  // barriers
};

template <typename S>
__device__ __forceinline__ void stream_tokens(const Arguments& a, int total, const Shared& s) {
  Cursor<S::kTokenSlots> at;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<S>(a, index);
    const uint32_t bytes = (work.tile.rows + 15) / 16 * 16 * fp8::kTileK;
    const uint8_t* source = a.activations + static_cast<size_t>(work.tile_m) * kTilesK * S::kTileBytes;
    for (int k = 0; k < kTilesK; ++k) {
      const uint32_t ready = s.token_full + 8 * at.slot;
      mbarrier_wait(s.token_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, bytes);
      bulk_copy(s.tokens + at.slot * S::kTileBytes, source + static_cast<size_t>(k) * S::kTileBytes, bytes, ready);
      at.advance();
    }
  }
}

template <typename S>
__device__ __forceinline__ void stream_weights(const Arguments& a, int total, const Shared& s) {
  Cursor<S::kWeightSlots> at;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<S>(a, index);
    const uint8_t* expert = a.weights + static_cast<size_t>(work.tile.expert) * a.row_tiles * kStages * kStageBytes;
    for (int stage = 0; stage < kStages; ++stage) {
      const uint32_t ready = s.weight_full + 8 * at.slot, target = s.weights + at.slot * S::kSlotBytes;
      mbarrier_wait(s.weight_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, S::kSlotBytes);
#pragma unroll
      for (int group = 0; group < S::kGroups; ++group) {  // rows beyond the matrix: the last ones again
        const int row_tile = min(work.tile_n * S::kGroups + group, a.row_tiles - 1);
        bulk_copy(target + group * kStageBytes, expert + (row_tile * kStages + stage) * kStageBytes, kStageBytes, ready);
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
  const Magnitudes* magnitudes;
  int group;
  Cursor<S::kTokenSlots> tokens;
  Cursor<S::kWeightSlots> stage;
  int pair_of_stage = 0;

  // The next 64 columns of this warpgroup's rows.
  __device__ __forceinline__ Packed read() {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if (pair_of_stage == 0) mbarrier_wait(shared.weight_full + 8 * stage.slot, stage.parity);
    const uint8_t* source = weights + stage.slot * S::kSlotBytes + group * kStageBytes;
    Packed packed;
    packed.words = *reinterpret_cast<const uint4*>(source + ((pair_of_stage * 4 + warp) * 32 + lane) * 16);
    packed.scales = *reinterpret_cast<const uint32_t*>(source + kStageWeightBytes + (warp * 8 + lane / 4) * 12 +
                                                       pair_of_stage * 4);
    if (++pair_of_stage == kStagePairs) {
      pair_of_stage = 0;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.weight_empty + 8 * stage.slot);
      stage.advance();
    }
    return packed;
  }

  // The same as operands of two products of 32 columns, scales included.
  __device__ __forceinline__ void widen(uint32_t offsets, uint32_t (&operand)[8]) {
    const Packed packed = read();
    widen_pair(packed.words, packed.scales, offsets, magnitudes, operand);
#pragma unroll
    for (int i = 0; i < 8; ++i) pin(operand[i]);
  }

  // Without the scales, which are returned.
  __device__ __forceinline__ uint32_t expand(uint32_t (&operand)[8]) {
    const Packed packed = read();
    expand_pair(packed.words, operand);
#pragma unroll
    for (int i = 0; i < 8; ++i) pin(operand[i]);
    return packed.scales;
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
