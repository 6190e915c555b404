// How activations and weights reach the consumers of the FP8 GEMM, and its products.
#pragma once

#include "fp8_layout.cuh"
#include "hopper.cuh"

namespace antiphon::fp8 {

constexpr int kConsumerGroups = 2;
constexpr int kThreads = (kConsumerGroups + 1) * 128;

// A block: TILE_ROWS tokens x 128 weight rows. With 256 tokens a warpgroup has two blocks of 64 and multiplies one
// after the other; with 128 it has one, and registers for two sets of sums, so that the next products run while the
// last ones are promoted.
template <int TILE_ROWS>
struct Shape : TokenTileBytes<TILE_ROWS> {
  using Bytes = TokenTileBytes<TILE_ROWS>;
  static constexpr int kTileRows = TILE_ROWS;
  static constexpr int kBlocks = TILE_ROWS / 64 / kConsumerGroups;
  static constexpr int kStages = TILE_ROWS == 256 ? 4 : 6;
  static constexpr int kScaleSpace = 1024;  // operands begin at multiples of this
  static constexpr int kStageBytes = Bytes::kValues + kWeightTileBytes + kScaleSpace;
  static constexpr int kSharedBytes = kStages * kStageBytes;
  static_assert(Bytes::kScales <= kScaleSpace && kSharedBytes <= 230000);
};

struct Arguments {
  const uint8_t* activations;   // [tiles, K tiles, kScaled or kValues bytes]
  const uint8_t* weights;       // [experts, tiles_n, K tiles, kWeightTileBytes]
  const float* weight_scales;   // [experts, tiles_n, K tiles]
  const __nv_bfloat16* bias;    // [experts, rows]
  const TokenTile* tiles;       // grouped products
  const int* tile_count;
  const float* row_weight;      // [tiles * tile rows], second projection of experts
  void* out;
  int tiles_n;
  int rows;                     // weight rows that exist
  int tokens;                   // products of one matrix
};

struct Work {
  TokenTile tile;
  int tile_m, tile_n;
};

// Which products: COLUMNS of both operands, whether activations have scales of their own (otherwise kHiddenFactor),
// and whether there is one matrix instead of experts with their tiles.
template <int COLUMNS, bool SCALED, bool SINGLE>
struct Products {
  static constexpr int kTiles = (COLUMNS + kTileK - 1) / kTileK;
  static constexpr int kLastSteps = (COLUMNS - 1) % kTileK / 32 + 1;  // of 32 columns
  static constexpr bool kScaled = SCALED;
  static constexpr bool kSingle = SINGLE;
};

// How many work items there are; and one of them, in the order expert, weight tile, token tile, so that neighbours in
// time share a weight tile.
template <typename P, typename S>
__device__ __forceinline__ int count_work(const Arguments& a) {
  if constexpr (P::kSingle) return (a.tokens + S::kTileRows - 1) / S::kTileRows * a.tiles_n;
  return __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0) * a.tiles_n;
}

template <typename P, typename S>
__device__ __forceinline__ Work work_at(const Arguments& a, int index) {
  if constexpr (P::kSingle) {
    const int tiles_m = (a.tokens + S::kTileRows - 1) / S::kTileRows;
    const int tile_n = index / tiles_m, tile_m = index % tiles_m;
    return {{0, min(S::kTileRows, a.tokens - tile_m * S::kTileRows), 0, tiles_m}, tile_m, tile_n};
  }
  const TokenTile some = a.tiles[index / a.tiles_n];
  const int local = index - some.first * a.tiles_n;
  const int tile_n = local / some.count, tile_m = some.first + local % some.count;
  return {a.tiles[tile_m], tile_m, tile_n};
}

template <typename P, typename S>
__device__ __forceinline__ void produce(const Arguments& a, int total, uint32_t stages, uint32_t full, uint32_t empty) {
  constexpr int kSourceBytes = P::kScaled ? S::kScaled : S::kValues;
  int stage = 0;
  uint32_t parity = 1;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<P, S>(a, index);
    const uint32_t row_bytes = (work.tile.rows + 63) / 64 * 64 * kTileK;
    const uint8_t* source = a.activations + static_cast<size_t>(work.tile_m) * P::kTiles * kSourceBytes;
    const uint8_t* weights =
        a.weights + (static_cast<size_t>(work.tile.expert) * a.tiles_n + work.tile_n) * P::kTiles * kWeightTileBytes;
    for (int k = 0; k < P::kTiles; ++k) {
      const uint32_t base = stages + stage * S::kStageBytes, ready = full + 8 * stage;
      const uint8_t* tokens = source + k * kSourceBytes;
      mbarrier_wait(empty + 8 * stage, parity);
      mbarrier_expect(ready, row_bytes + kWeightTileBytes + (P::kScaled ? S::kScales : 0));
      bulk_copy(base + S::kValues, weights + k * kWeightTileBytes, kWeightTileBytes, ready);
      bulk_copy(base, tokens, row_bytes, ready);
      if (P::kScaled) bulk_copy(base + S::kValues + kWeightTileBytes, tokens + S::kValues, S::kScales, ready);
      if (++stage == S::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
  }
}

// What the sums of a thread's two rows are multiplied by.
struct Factors {
  float upper, lower;
};

// What a consumer warpgroup keeps from tile to tile.
template <typename P, typename S>
struct Consumer {
  const uint8_t* stages;
  uint32_t full, empty;
  int group;
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ const uint8_t* wait() const {
    mbarrier_wait(full + 8 * stage, parity);
    return stages + stage * S::kStageBytes;
  }

  __device__ __forceinline__ void advance() {
    if (++stage == S::kStages) {
      stage = 0;
      parity ^= 1;
    }
  }

  __device__ __forceinline__ void release(int which) const {
    if constexpr (P::kScaled) fence_async_proxy();  // the row scales are read before a bulk copy may replace them
    warp_arrive(empty + 8 * which);
  }

  __device__ __forceinline__ Factors factors(const uint8_t* data, float weight_scale, int block) const {
    if constexpr (!P::kScaled) return {weight_scale / kHiddenFactor, weight_scale / kHiddenFactor};
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    const float* scales = reinterpret_cast<const float*>(data + S::kValues + kWeightTileBytes) + block + warp * 16 + g;
    return {weight_scale * scales[0], weight_scale * scales[8]};
  }

  // Begins 64 tokens x 128 weight rows over STEPS * 32 columns.
  template <int STEPS>
  __device__ __forceinline__ void start(float (&part)[64], const uint8_t* data, int block) const {
    const uint64_t a_operand = swizzled_operand(shared_address(data)) + block * (kTileK / 16);
    const uint64_t b_operand = swizzled_operand(shared_address(data + S::kValues));
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k)  // 32 bytes on within the swizzled row
      wgmma_e4m3_n128(part, a_operand + 2 * k, b_operand + 2 * k, k > 0);
    wgmma_commit();
  }

  __device__ __forceinline__ static void promote(float (&acc)[64], float (&part)[64], Factors by) {
#pragma unroll
    for (int c = 0; c < 64; ++c) {
      pin(part[c]);
      acc[c] = fmaf(part[c], c % 4 < 2 ? by.upper : by.lower, acc[c]);
    }
  }

  // The same while other products are under way.
  __device__ __forceinline__ static void promote_in_order(float (&acc)[64], const float (&part)[64], Factors by) {
#pragma unroll
    for (int c = 0; c < 64; ++c) multiply_add_in_order(acc[c], part[c], c % 4 < 2 ? by.upper : by.lower);
  }

  // One stage, every 64-token block of this warpgroup that has rows, one after the other.
  template <int STEPS>
  __device__ __forceinline__ void multiply(float (&acc)[S::kBlocks][64], const uint8_t* data, float weight_scale,
                                           int rows) const {
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      const int block = (group + kConsumerGroups * i) * 64;
      if (block >= rows) break;
      float part[64];
      start<STEPS>(part, data, block);
      const Factors by = factors(data, weight_scale, block);
      wgmma_wait_all();
      promote(acc[i], part, by);
    }
  }

  __device__ __forceinline__ void accumulate_in_turn(float (&acc)[S::kBlocks][64], const float* scales, int rows) {
    float weight_scale = scales[0];
#pragma unroll 1
    for (int k = 0; k < P::kTiles; ++k) {
      const float next_scale = scales[min(k + 1, P::kTiles - 1)];
      const uint8_t* data = wait();
      if (k < P::kTiles - 1) {
        multiply<kTileK / 32>(acc, data, weight_scale, rows);
      } else {
        multiply<P::kLastSteps>(acc, data, weight_scale, rows);
      }
      release(stage);
      weight_scale = next_scale;
      advance();
    }
  }

  // Two stages at a time: the first one's sums are promoted while the second one's products run. Products that are
  // under way from one turn of the loop to the next would overlap more, but the assembler makes them wait.
  __device__ __forceinline__ void accumulate_overlapped(float (&acc)[64], const float* scales, int rows) {
    static_assert(P::kTiles % 2 == 1 || P::kLastSteps == kTileK / 32);
    const int block = group * 64;
    if (block >= rows) {
#pragma unroll 1
      for (int k = 0; k < P::kTiles; ++k) {
        wait();
        release(stage);
        advance();
      }
      return;
    }
    float first[64], second[64];
    float2 scale = {scales[0], scales[1]};
#pragma unroll 1
    for (int k = 0; k < P::kTiles / 2; ++k) {
      const float2 next = {scales[min(2 * k + 2, P::kTiles - 1)], scales[min(2 * k + 3, P::kTiles - 1)]};
      const uint8_t* data = wait();
      start<kTileK / 32>(first, data, block);
      Factors by = factors(data, scale.x, block);
      const int held = stage;
      advance();
      data = wait();
      start<kTileK / 32>(second, data, block);
      wgmma_wait<1>();
      promote_in_order(acc, first, by);
      release(held);
      by = factors(data, scale.y, block);
      wgmma_wait<0>();
      promote(acc, second, by);
      release(stage);
      advance();
      scale = next;
    }
    if constexpr (P::kTiles % 2 == 1) {
      const uint8_t* data = wait();
      start<P::kLastSteps>(first, data, block);
      const Factors by = factors(data, scale.x, block);
      wgmma_wait<0>();
      promote(acc, first, by);
      release(stage);
      advance();
    }
  }

  __device__ __forceinline__ void accumulate(float (&acc)[S::kBlocks][64], const float* scales, int rows) {
    if constexpr (S::kBlocks == 1) {
      accumulate_overlapped(acc[0], scales, rows);
    } else {
      accumulate_in_turn(acc, scales, rows);
    }
  }
};

// Of weight rows `column` and the next, counted from the first of the tile.
__device__ __forceinline__ float2 bias_pair(const Arguments& a, const Work& work, int column) {
  const size_t at = static_cast<size_t>(work.tile.expert) * a.rows + work.tile_n * kTileN + column;
  return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(a.bias + at));
}

// A whole kernel; `Store` is called as (arguments, work, sums, first token of the 64 within the tile).
template <typename P, typename S, typename Store>
__device__ __forceinline__ void run(const Arguments& a, uint8_t* shared, uint64_t* full, uint64_t* empty) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(shared_address(full + i), 1);
      mbarrier_init(shared_address(empty + i), kConsumerGroups * 4 * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int total = count_work<P, S>(a);
  const uint32_t ready = shared_address(full), released = shared_address(empty);
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == kConsumerGroups) {
    give_registers<40>();
    if (threadIdx.x == kConsumerGroups * 128) produce<P, S>(a, total, shared_address(shared), ready, released);
    return;
  }
  take_registers<232>();
  Consumer<P, S> consumer = {shared, ready, released, group};
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<P, S>(a, index);
    const int rows = __shfl_sync(0xFFFFFFFFu, work.tile.rows, 0);
    const float* scales =
        a.weight_scales + (static_cast<size_t>(work.tile.expert) * a.tiles_n + work.tile_n) * P::kTiles;
    float acc[S::kBlocks][64] = {};
    consumer.accumulate(acc, scales, rows);
#pragma unroll
    for (int i = 0; i < S::kBlocks; ++i) {
      const int block = (group + kConsumerGroups * i) * 64;
      if (block >= rows) break;
      Store::template apply<S>(a, work, acc[i], block);
    }
  }
}

}  // namespace antiphon::fp8
