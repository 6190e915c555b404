// How weights and activations reach shared memory: both sides of each pipeline, in step.
#pragma once

#include "stream_geometry.cuh"

namespace antiphon::stream {

// Position in the ring of stages: `depth` slots for each warpgroup. The producer and each consumer walk it in
// step; `turn` counts the times around.
template <int TOKENS>
struct Ring {
  uint32_t stages, full, empty;
  int depth = 0;
  uint32_t turn = 0;

  __device__ __forceinline__ int index(int group) const { return depth * Geometry<TOKENS>::kGroups + group; }
  __device__ __forceinline__ void advance() {
    if (++depth == Geometry<TOKENS>::kDepth) {
      depth = 0;
      ++turn;
    }
  }
  // A fresh barrier passes the wait for the turn before its first.
  __device__ __forceinline__ void fill(int group, const uint8_t* source) const {
    const int slot = index(group);
    mbarrier_wait(empty + 8 * slot, (turn & 1) ^ 1);
    mbarrier_expect(full + 8 * slot, kStageBytes);
    bulk_copy(stages + slot * kStageBytes, source, kStageBytes, full + 8 * slot);
  }
  __device__ __forceinline__ void wait_full(int group) const { mbarrier_wait(full + 8 * index(group), turn & 1); }
  __device__ __forceinline__ void release(int group) const { mbarrier_arrive(empty + 8 * index(group)); }
};

// Activation tiles in turn over kBuffers buffers; both sides count the tiles that this block has met.
template <int TOKENS>
struct TileBuffers {
  static constexpr int kBuffers = Tuning<TOKENS>::kBuffers;
  uint32_t base, full, empty;
  int met = -1;

  __device__ __forceinline__ int buffer() const { return met % kBuffers; }
  __device__ __forceinline__ uint32_t turn() const { return met / kBuffers; }
  __device__ __forceinline__ uint32_t address() const { return base + buffer() * ActivationTile<TOKENS>::kBytes; }
  __device__ __forceinline__ void fill(const uint8_t* source) {
    ++met;
    mbarrier_wait(empty + 8 * buffer(), (turn() & 1) ^ 1);
    mbarrier_expect(full + 8 * buffer(), ActivationTile<TOKENS>::kBytes);
    bulk_copy(address(), source, ActivationTile<TOKENS>::kBytes, full + 8 * buffer());
  }
  __device__ __forceinline__ void next() {
    __syncwarp();
    if (met >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * buffer());
    ++met;
    mbarrier_wait(full + 8 * buffer(), turn() & 1);
  }
};

}  // namespace antiphon::stream
