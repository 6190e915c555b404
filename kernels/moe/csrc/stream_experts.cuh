// MXFP4 grouped GEMM for small token counts: a persistent kernel that streams 4-bit weights once.
//
// A bf16 activation, scaled by a power of two, is split exactly into the sum of two e4m3 numbers (4 + 4
// significant bits), and an FP4 weight is an e4m3 number, so FP8 tensor-core products lose nothing. The block
// scale of the weights multiplies the partial sum of its 32 columns in float32. That costs ten integer
// operations per 16 x 32 weights and warp, and the operand that is shared by all rows, the activations, is
// read by the tensor core from shared memory.
//
// One launch does both projections of a layer. One block per SM. A producer thread keeps a ring of weight stages full
// by bulk copies, without a pause between the projections; three warps gather the activations of the token tile in work
// and the next. Three or five consumer warpgroups take the stages of a row tile in turn. Work is an ordered list of
// items (token tile, 64 weight rows). The second projection of a token tile starts as soon as all blocks have counted
// its hidden state up, so every block must get to run while the others wait: the grid is one block per SM at most, and
// no other kernel that waits in this way may run on the device at the same time.
//
// SPLIT: experts that ranks hold columns of. The first projection has fewer rows, which are an argument in any case, and
// the second fewer columns: its stages are counted at run time, and the warpgroups' shares of them differ by one at most.

#pragma once

#include "mxfp4_word.cuh"
#include "stream_epilogue.cuh"
#include "stream_pipeline.cuh"
#include "stream_schedule.cuh"

namespace antiphon::stream {
namespace {

// One stage: 64 rows x 192 columns times the tile's tokens, added to acc. `operand` describes the activations of
// the stage's first block, `low_offset` is from high parts to low ones. `release` gives the stage's slot back: behind
// the last products, which have the weights in registers, and before anybody waits for them.
template <int TOKENS, typename Release>
__device__ __forceinline__ void multiply_stage(const uint4 (&packed)[3], const uint32_t (&scales)[3],
                                               uint64_t operand, int low_offset,
                                               float (&acc)[ActivationTile<TOKENS>::kRows / 8][4], Release release) {
  using Tile = ActivationTile<TOKENS>;
  constexpr int kBatch = Geometry<TOKENS>::kBatch, kRows = Tile::kRows;
#pragma unroll
  for (int begin = 0; begin < kStageBlocks; begin += kBatch) {
    uint32_t a[kBatch][4];
    float part[kBatch][kRows / 8][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int block = begin + i;
      const uint4 words = packed[block / 2];
      expand(block % 2 ? words.z : words.x, a[i][0], a[i][1]);
      expand(block % 2 ? words.w : words.y, a[i][2], a[i][3]);
#pragma unroll
      for (int r = 0; r < 4; ++r) pin(a[i][r]);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint64_t block = operand + (begin + i) * (Tile::kBlockBytes / 16);
      wgmma_e4m3<kRows, 0>(part[i], a[i], block);
      if constexpr (!Tile::kSideBySide) wgmma_e4m3<kRows, 1>(part[i], a[i], block + low_offset / 16);
    }
    wgmma_commit();
    if (begin + kBatch == kStageBlocks) release();
    wgmma_wait_all();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int block = begin + i;
      const uint32_t word = scales[block / 2];
      const float upper = __uint_as_float((block % 2 ? word << 7 : word << 23) & 0x7F800000u);
      const float lower = __uint_as_float((block % 2 ? word >> 1 : word << 15) & 0x7F800000u);
#pragma unroll
      for (int j = 0; j < kRows / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          pin(part[i][j][c]);
          acc[j][c] = fmaf(part[i][j][c], c < 2 ? upper : lower, acc[j][c]);
        }
      }
    }
  }
}

template <int TOKENS>
__device__ __forceinline__ void stream_weights(const Projection& p, const Work& work, const TokenTile* tiles,
                                               Ring<TOKENS>& ring) {
  constexpr int kGroups = Geometry<TOKENS>::kGroups, kGroupStages = kStages / kGroups;
  for (int i = 0; i < work.count; ++i) {
    const int index = work.first + i, tile = index / p.row_tiles;
    const size_t row_tile = static_cast<size_t>(tiles[tile].expert()) * p.row_tiles + index % p.row_tiles;
    const uint8_t* source = p.weights + row_tile * kStages * kStageBytes;
    for (int s = 0; s < kGroupStages; ++s) {
      for (int w = 0; w < kGroups; ++w) ring.fill(w, source + (s * kGroups + w) * kStageBytes);
      ring.advance();
    }
  }
}

// Those of the second projection of split experts: each warpgroup's ring has a position of its own.
template <int TOKENS>
__device__ __forceinline__ void stream_columns(const Arguments& a, const Work& work, const TokenTile* tiles,
                                               Ring<TOKENS> (&rings)[Geometry<TOKENS>::kGroups]) {
  constexpr int kGroups = Geometry<TOKENS>::kGroups;
  for (int i = 0; i < work.count; ++i) {
    const int index = work.first + i, tile = index / a.down.row_tiles;
    const size_t row_tile = static_cast<size_t>(tiles[tile].expert()) * a.down.row_tiles + index % a.down.row_tiles;
    const uint8_t* source = a.down.weights + row_tile * a.hidden_stages * kStageBytes;
    for (int first = 0; first < a.hidden_stages; first += kGroups) {
#pragma unroll
      for (int w = 0; w < kGroups; ++w) {
        if (first + w >= a.hidden_stages) break;
        rings[w].fill(w, source + (first + w) * kStageBytes);
        rings[w].advance();
      }
    }
  }
}

// The activations of a run of items, tile by tile.
template <int TOKENS, bool GATED, bool SPLIT>
__device__ __forceinline__ void provide_activations(const Arguments& a, const Work& work, const TokenTile* tiles,
                                                    TileBuffers<TOKENS>& buffers, int warp, int lane) {
  const int row_tiles = GATED ? a.gate_up.row_tiles : a.down.row_tiles;
  int loaded = -1;
  for (int i = 0; i < work.count; ++i) {
    const int tile = (work.first + i) / row_tiles;
    if (tile == loaded) continue;
    loaded = tile;
    if constexpr (GATED) {
      buffers.gather(a, tiles[tile], warp, lane);
    } else {
      buffers.fetch(a, tile, HiddenTile<TOKENS, SPLIT>::bytes(a), warp, lane);
    }
  }
}

// Where a consumer is in the block's pipelines; goes on from one run of items to the next.
template <int TOKENS>
struct Position {
  Ring<TOKENS> ring;
  TileBuffers<TOKENS> buffers;
  int done;   // items
  int items;  // in all
};

template <int TOKENS, bool GATED, bool SPLIT>
__device__ __forceinline__ void consume(const Arguments& a, const Work& work, const TokenTile* tiles,
                                        const uint8_t* stages, Position<TOKENS>& at, float* reduce, int group) {
  using G = Geometry<TOKENS>;
  using Tile = ActivationTile<TOKENS>;
  const int group_stages = GATED || !SPLIT ? kStages / G::kGroups
                                           : (a.hidden_stages - group + G::kGroups - 1) / G::kGroups;
  const int low_offset = GATED ? Tile::kLowOffset : HiddenTile<TOKENS, SPLIT>::low_offset(a);
  const int row_tiles = GATED ? a.gate_up.row_tiles : a.down.row_tiles;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, g = lane / 4;
  Epilogue<TOKENS, GATED, SPLIT> epilogue;
  int loaded = -1, stored = 0;
  for (int i = 0; i < work.count; ++i, ++at.done) {
    const int index = work.first + i, tile = index / row_tiles, row_tile = index % row_tiles;
    if (tile != loaded) {
      loaded = tile;
      if (group == 0) epilogue.load_tokens(a, tiles[tile]);
      at.buffers.next();
    }
    if (group == 0) epilogue.load_rows(a, tiles[tile], row_tile);
    const uint64_t operand = wgmma_descriptor(at.buffers.address(), Tile::kRows * 16, 128);
    float acc[Tile::kRows / 8][4] = {};
    for (int s = 0; s < group_stages; ++s) {
      at.ring.wait_full(group);
      const uint8_t* stage = stages + at.ring.index(group) * kStageBytes;
      uint4 packed[3];
      uint32_t scales[3];
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        packed[p] = *reinterpret_cast<const uint4*>(stage + ((p * 4 + warp) * 32 + lane) * 16);
        scales[p] = *reinterpret_cast<const uint32_t*>(stage + kStageWeightBytes + (warp * 8 + g) * 12 + p * 4);
      }
      const int block = (s * G::kGroups + group) * kStageBlocks;
      multiply_stage<TOKENS>(packed, scales, operand + block * (Tile::kBlockBytes / 16), low_offset, acc,
                             [&] { at.ring.release(group); });
      at.ring.advance();
    }
    float sum[G::kWidth / 8][4];
    add_parts<TOKENS>(acc, sum);
    const bool before = at.done >= G::kReduceBuffers, again = at.done + G::kReduceBuffers < at.items;
    if (!reduce_groups<TOKENS>(sum, reduce, group, at.done % G::kReduceBuffers, before, again)) continue;
    epilogue.store(a, sum, tile, row_tile);
    if constexpr (GATED) {
      // Told once for all row tiles of a token tile, since telling is slow, and nobody wants less than all of them.
      ++stored;
      if (i + 1 < work.count && (index + 1) % row_tiles != 0) continue;
      __syncwarp();
      if (lane == 0) count_up(a.ready + tile, stored);
      stored = 0;
    }
  }
}

template <int TOKENS, bool SPLIT>
__global__ void __launch_bounds__(Geometry<TOKENS>::kThreads, 1)
    stream_experts(const __grid_constant__ Arguments a) {
  using G = Geometry<TOKENS>;
  DYNAMIC_SHARED(shared);
  uint8_t* activations = shared + G::kSlots * kStageBytes;
  float* reduce = reinterpret_cast<float*>(activations + G::kBuffers * ActivationTile<TOKENS>::kBytes);
  __shared__ __align__(8) uint64_t full[G::kSlots], empty[G::kSlots], tile_full[G::kBuffers], tile_empty[G::kBuffers];
  __shared__ TokenTile tiles[kMaxTiles];
  __shared__ int tile_count;

  if (threadIdx.x == 0) {
    for (int i = 0; i < G::kSlots; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), 4 * kWarpArrivals);
    }
    for (int i = 0; i < G::kBuffers; ++i) {
      mbarrier_init(shared_address(&tile_full[i]), G::kGatherWarps);
      mbarrier_init(shared_address(&tile_empty[i]), G::kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  grid_dependency_wait();
  // Read together, since each takes a round trip to memory; what lies beyond the last tile is of no use.
  if (threadIdx.x == 0) tile_count = *a.tile_count;
  for (int i = threadIdx.x; i < a.max_tiles; i += G::kThreads) tiles[i] = TokenTile::of(a.tiles[i]);
  __syncthreads();
  // Where two token tiles fit in shared memory, more changes between them cost nothing.
  using Plan = Schedule<(G::kBuffers > 1)>;
  const Plan work = schedule<(G::kBuffers > 1)>(a, tile_count);
  Ring<TOKENS> ring = {shared_address(shared), shared_address(full), shared_address(empty)};
  TileBuffers<TOKENS> buffers = {shared_address(activations), shared_address(tile_full), shared_address(tile_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // uniform, and known to be
  const int lane = threadIdx.x % 32, helper = static_cast<int>(threadIdx.x / 32) - G::kConsumers / 32;
  if (group < G::kGroups) {
    Position<TOKENS> at = {ring, buffers, 0, work.items};
#pragma unroll 1
    for (int part = 0; part < Plan::kParts; ++part)
      consume<TOKENS, true, SPLIT>(a, work.gate_up[part], tiles, shared, at, reduce, group);
#pragma unroll 1
    for (int part = 0; part < Plan::kParts; ++part)
      consume<TOKENS, false, SPLIT>(a, work.down[part], tiles, shared, at, reduce, group);
  } else if (helper == 0) {
    if (lane != 0) return;
    grid_dependency_trigger();
#pragma unroll 1
    for (int part = 0; part < Plan::kParts; ++part) stream_weights<TOKENS>(a.gate_up, work.gate_up[part], tiles, ring);
    if constexpr (SPLIT) {
      Ring<TOKENS> rings[G::kGroups];
#pragma unroll
      for (int w = 0; w < G::kGroups; ++w) rings[w] = ring;
#pragma unroll 1
      for (int part = 0; part < Plan::kParts; ++part) stream_columns<TOKENS>(a, work.down[part], tiles, rings);
    } else {
#pragma unroll 1
      for (int part = 0; part < Plan::kParts; ++part) stream_weights<TOKENS>(a.down, work.down[part], tiles, ring);
    }
  } else {
#pragma unroll 1
    for (int part = 0; part < Plan::kParts; ++part)
      provide_activations<TOKENS, true, SPLIT>(a, work.gate_up[part], tiles, buffers, helper - 1, lane);
#pragma unroll 1
    for (int part = 0; part < Plan::kParts; ++part)
      provide_activations<TOKENS, false, SPLIT>(a, work.down[part], tiles, buffers, helper - 1, lane);
  }
}

template <int TOKENS, bool SPLIT>
cudaError_t start(const Arguments& a, int grid, cudaStream_t stream, bool overlap) {
  using G = Geometry<TOKENS>;
  const auto kernel = stream_experts<TOKENS, SPLIT>;
  const cudaError_t prepared = prepare(kernel, G::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  // A block that is not there cannot be waited for. The devices of a process are alike, so one answer serves all.
  static const int resident = resident_blocks(kernel, G::kThreads, G::kSharedBytes);
  if (grid < 1 || grid > resident) return cudaErrorCooperativeLaunchTooLarge;
  return launch(kernel, dim3(grid), dim3(G::kThreads), G::kSharedBytes, stream, overlap, a);
}

template <bool SPLIT>
cudaError_t start(const Arguments& a, int token_tile, int grid, cudaStream_t stream, bool overlap) {
  if (a.max_tiles > kMaxTiles) return cudaErrorInvalidValue;
  switch (token_tile) {
    case 4: return start<4, SPLIT>(a, grid, stream, overlap);
    case 8: return start<8, SPLIT>(a, grid, stream, overlap);
    case 16: return start<16, SPLIT>(a, grid, stream, overlap);
    case 24: return start<24, SPLIT>(a, grid, stream, overlap);
    default: return cudaErrorInvalidValue;
  }
}

// From what launchers are given. hidden_columns: of the second projection.
Arguments arguments(const void* gate_up, const void* gate_up_bias, const void* down, const void* down_bias,
                           const void* tokens, const float* scale, const int* order, const void* tiles,
                           const int* tile_count, int* ready, void* hidden, const void* pair_weight, float* partial,
                           int max_tiles, int hidden_columns) {
  const auto bf16 = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  const auto bytes = [](const void* p) { return static_cast<const uint8_t*>(p); };
  return {{bytes(gate_up), bf16(gate_up_bias), 2 * hidden_columns / kTileRows},
          {bytes(down), bf16(down_bias), kDim / kTileRows},
          bytes(tokens),
          scale,
          order,
          static_cast<const int4*>(tiles),
          tile_count,
          max_tiles,
          ready,
          static_cast<uint8_t*>(hidden),
          bf16(pair_weight),
          partial,
          hidden_columns / kStageColumns};
}

}  // namespace
}  // namespace antiphon::stream
