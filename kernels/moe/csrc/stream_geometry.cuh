// Shared-memory budget, stage format and arguments of the streaming GEMM.
#pragma once

#include "stream_layout.cuh"

namespace antiphon::stream {

constexpr int kTileRows = 64;
constexpr int kStageBlocks = 6;
constexpr int kStageColumns = kStageBlocks * 32;
constexpr int kSplitColumns = 2 * kStageColumns;  // columns of split experts are a multiple of so many, for all roads
constexpr int kStages = kBlocks / kStageBlocks;  // 15 per row tile
constexpr int kStageWeightBytes = kStageBlocks * kTileRows * 16;
constexpr int kStageBytes = kStageWeightBytes + kStageBlocks * kTileRows;  // weights, then scales
constexpr int kSharedLimit = 232448;
constexpr int kStaticBytes = 3072;  // barriers, token tiles
constexpr int kMaxTiles = 640;      // of 2,048 pairs and 128 experts: 128 + 2048 / 4

template <int TOKENS>
struct Geometry : Tuning<TOKENS> {
  using Tile = ActivationTile<TOKENS>;
  using Tuning<TOKENS>::kBuffers;
  using Tuning<TOKENS>::kGroups;
  static constexpr int kConsumers = kGroups * 128;
  static constexpr int kGatherWarps = 3;
  static constexpr int kThreads = kConsumers + 32 + kGatherWarps * 32;
  static constexpr int kWidth = TOKENS < 8 ? 8 : TOKENS;  // columns after high and low are added
  static constexpr int kReduceBuffers = TOKENS <= 8 ? 2 : 1;
  static constexpr int kReduceFloats = kTileRows * kWidth;  // one warpgroup's partial sums
  static constexpr int kReduceBytes = kReduceBuffers * (kGroups - 1) * kReduceFloats * 4;
  static constexpr int kFixedBytes = kBuffers * Tile::kBytes + kReduceBytes;
  static constexpr int kDepth =
      (kSharedLimit - kStaticBytes - kFixedBytes) / (kStageBytes * kGroups);  // stages a warpgroup
  static constexpr int kSlots = kDepth * kGroups;
  static constexpr int kSharedBytes = kFixedBytes + kSlots * kStageBytes;
  static_assert(kDepth >= 1 && Tile::kRows % 8 == 0 && kStages % kGroups == 0);
  static_assert(kStageBlocks % Tuning<TOKENS>::kBatch == 0);
};

struct Projection {
  const uint8_t* weights;     // [experts, row_tiles, stages, kStageBytes]
  const __nv_bfloat16* bias;  // [experts, row_tiles * 64]
  int row_tiles;
};

struct Arguments {
  Projection gate_up, down;
  const uint8_t* tokens;  // [tokens, kTokenBytes]
  const float* scale;     // [tokens]: what the sums of a token's products must be multiplied by
  const int* order;       // [pairs] pair of each slot; pair = token * 4 + choice
  const int4* tiles;      // {local expert, first slot, slots, unused}
  const int* tile_count;
  int max_tiles;
  int* ready;                        // [tiles], zero: row tiles of the hidden state that are stored, times 4 warps
  uint8_t* hidden;                   // [tiles, HiddenTile::bytes]
  const __nv_bfloat16* pair_weight;  // [pairs]
  float* partial;                    // [pairs, kDim]
  int hidden_stages;                 // of the second projection; kStages where experts are whole
};

// An activation tile of the second projection, which of split experts has fewer columns.
template <int TOKENS, bool SPLIT>
struct HiddenTile {
  using Tile = ActivationTile<TOKENS>;
  __device__ __forceinline__ static int bytes(const Arguments& a) {
    return SPLIT ? 2 * TOKENS * kStageColumns * a.hidden_stages : Tile::kBytes;
  }
  __device__ __forceinline__ static int low_offset(const Arguments& a) {
    return SPLIT && !Tile::kSideBySide ? TOKENS * kStageColumns * a.hidden_stages : Tile::kLowOffset;
  }
};

// A token tile in one word of shared memory, where every item finds it at once.
struct TokenTile {
  uint32_t word;
  __device__ __forceinline__ static TokenTile of(int4 tile) {
    return {static_cast<uint32_t>(tile.x & 0xFF) | static_cast<uint32_t>(tile.z & 0xFF) << 8 |
            static_cast<uint32_t>(tile.y) << 16};
  }
  __device__ __forceinline__ int expert() const { return static_cast<int>(word & 0xFF); }
  __device__ __forceinline__ int slots() const { return static_cast<int>(word >> 8 & 0xFF); }
  __device__ __forceinline__ int first_slot() const { return static_cast<int>(word >> 16); }
};

}  // namespace antiphon::stream
