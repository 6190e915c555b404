// The widening grouped GEMM with warps of their own for the widening: who does what in a block, and its copies.
#pragma once

#include "mixed_pipeline.cuh"

namespace antiphon::mixed {

// Roles by warpgroup: two that multiply, one that widens and copies.
struct Apart {
  static constexpr int kGroups = 2;
  static constexpr int kTileRows = 256;
  static constexpr int kTileBytes = kTileRows * fp8::kTileK;
  static constexpr int kTokenSlots = 4;
  static constexpr int kWeightSlots = 3;  // packed
  static constexpr int kSlotBytes = kGroups * kStageBytes;
  static constexpr int kWideSlots = 3;   // widened
  static constexpr int kRowTileBytes = 64 * fp8::kTileK;
  static constexpr int kWideBytes = kGroups * kRowTileBytes;
  static constexpr int kSharedBytes = kTokenSlots * kTileBytes + kWideSlots * kWideBytes + kWeightSlots * kSlotBytes;
  static constexpr int kThreads = (kGroups + 1) * 128;
  static constexpr int kRegisters = 208, kWideningRegisters = 88;
  // When a slot for the widened tile k is free, the products of tile k - kWideSlots are over, and so is the use of the
  // tokens' slot for tile k + kTokensAhead.
  static constexpr int kTokensAhead = kTokenSlots - kWideSlots;
  static_assert(kTokensAhead > 0 && kSharedBytes <= 230000);
  static_assert(128 * (kGroups * kRegisters + kWideningRegisters) <= 65536);
};

struct Wide {
  uint8_t* data;
  uint32_t full, empty;  // barriers
};

// Issues copies in the order in which they are used, from one work item to the next.
template <int STEPS, int SLOTS>
struct Copies {
  int index, total;
  int step = 0;
  Work work;
  Cursor<SLOTS> target;

  __device__ __forceinline__ void begin(const Arguments& a) {
    index = blockIdx.x;
    if (index < total) work = work_at<Apart>(a, index);
  }

  __device__ __forceinline__ void advance(const Arguments& a) {
    target.advance();
    if (++step < STEPS) return;
    step = 0;
    index += gridDim.x;
    if (index < total) work = work_at<Apart>(a, index);
  }
};

struct Copier {
  const Arguments& a;
  const Shared& shared;
  Copies<kTilesK, Apart::kTokenSlots> tokens;
  Copies<kStages, Apart::kWeightSlots> weights;

  __device__ __forceinline__ void next_tokens() {
    if (tokens.index >= tokens.total) return;
    const Work& work = tokens.work;
    const uint32_t bytes = (work.tile.rows + 15) / 16 * 16 * fp8::kTileK;
    const uint8_t* source =
        a.activations + (static_cast<size_t>(work.tile_m) * kTilesK + tokens.step) * Apart::kTileBytes;
    const uint32_t ready = shared.token_full + 8 * tokens.target.slot;
    mbarrier_wait(shared.token_empty + 8 * tokens.target.slot, tokens.target.parity ^ 1);
    mbarrier_expect(ready, bytes);
    bulk_copy(shared.tokens + tokens.target.slot * Apart::kTileBytes, source, bytes, ready);
    tokens.advance(a);
  }

  __device__ __forceinline__ void next_weights() {
    if (weights.index >= weights.total) return;
    const Work& work = weights.work;
    const uint8_t* expert = a.weights + static_cast<size_t>(work.tile.expert) * a.row_tiles * kStages * kStageBytes;
    const uint32_t ready = shared.weight_full + 8 * weights.target.slot;
    const uint32_t target = shared.weights + weights.target.slot * Apart::kSlotBytes;
    mbarrier_wait(shared.weight_empty + 8 * weights.target.slot, weights.target.parity ^ 1);
    mbarrier_expect(ready, Apart::kSlotBytes);
#pragma unroll
    for (int group = 0; group < Apart::kGroups; ++group) {  // rows beyond the matrix: the last ones again
      const int row_tile = min(work.tile_n * Apart::kGroups + group, a.row_tiles - 1);
      bulk_copy(target + group * kStageBytes, expert + (row_tile * kStages + weights.step) * kStageBytes, kStageBytes,
                ready);
    }
    weights.advance(a);
  }
};

}  // namespace antiphon::mixed
