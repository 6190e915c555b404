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
    bulk_copy_once(stages + slot * kStageBytes, source, kStageBytes, full + 8 * slot);
  }
  __device__ __forceinline__ void wait_full(int group) const { mbarrier_wait(full + 8 * index(group), turn & 1); }
  // By all lanes of a warp that has read its share. A bulk copy does not go the way of the loads before it: they may
  // still be queued behind others when it fills the slot again, unless the fence has waited for them.
  __device__ __forceinline__ void release(int group) const {
    fence_async_proxy();
    warp_arrive(empty + 8 * index(group));
  }
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
  // By all lanes of the gathering warps: the next buffer, once it is free.
  __device__ __forceinline__ void begin_fill() {
    __syncwarp();  // a lane that is two turns late would wait for a phase that is over
    ++met;
    mbarrier_wait(empty + 8 * buffer(), (turn() & 1) ^ 1);
  }
  // The activations of a tile of the first projection: pieces of 16 bytes out of the rows of its tokens.
  __device__ __forceinline__ void gather(const Arguments& a, TokenTile tile, int warp, int lane) {
    using Tile = ActivationTile<TOKENS>;
    begin_fill();
    // Four tokens side by side in a warp, each a run of 128 bytes.
    constexpr int kPieces = kTokenBytes / 16;
    for (int first = 0; first < tile.slots(); first += 4) {
      const int n = first + lane % 4;
      if (n < tile.slots()) {
        const uint8_t* source = a.tokens + static_cast<size_t>(a.order[tile.first_slot() + n] / 4) * kTokenBytes;
        for (int piece = warp * 8 + lane / 4; piece < kPieces; piece += Geometry<TOKENS>::kGatherWarps * 8)
          copy16(address() + Tile::place(n, piece / 2 * 16) + piece % 2 * Tile::kLowOffset, source + piece * 16);
      }
    }
    wait_copies();
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) mbarrier_arrive(full + 8 * buffer());
  }
  // Those of the second, which this launch has made, as soon as all of its row tiles are there.
  __device__ __forceinline__ void fetch(const Arguments& a, int tile, int bytes, int warp, int lane) {
    begin_fill();
    if (lane != 0) return;
    if (warp != 0) {
      mbarrier_arrive(full + 8 * buffer());
      return;
    }
    wait_for_count(a.ready + tile, a.gate_up.row_tiles * 4);
    fence_async_global();
    mbarrier_expect(full + 8 * buffer(), bytes);
    bulk_copy(address(), a.hidden + static_cast<size_t>(tile) * bytes, bytes, full + 8 * buffer());
  }
  __device__ __forceinline__ void next() {
    __syncwarp();
    if (met >= 0 && threadIdx.x % 32 == 0) mbarrier_arrive(empty + 8 * buffer());
    ++met;
    mbarrier_wait(full + 8 * buffer(), turn() & 1);
  }
};

}  // namespace antiphon::stream
