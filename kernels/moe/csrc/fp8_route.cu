// Around the grouped FP8 GEMM: ranks of the (token, k) pairs within their experts and the token tiles; the
// activations quantised per row and 128 columns and laid out for the tensor core; the combine.

#include "fp8_quantise.cuh"
#include "token_tiles.cuh"

namespace antiphon::fp8 {
namespace {

constexpr int kTopK = 4;
constexpr int kRankThreads = 1024;
constexpr int kWarpPairs = 1024;  // pairs a warp looks at in a row

struct Ranking {
  const long long* ids;  // [pairs]
  int* rank;             // [pairs] place among the pairs of the same expert
  int* counts;           // [experts]
  int* first_tile;       // [experts]
  TokenTile* tiles;
  int* tile_count;
  uint32_t* ticket;  // zero before the launch and after it
  int pairs;
  int first_expert;
  int experts;
  int tile_rows;
};

// One block per expert; the last one lays out the tiles.
__global__ void __launch_bounds__(kRankThreads) rank_kernel(const __grid_constant__ Ranking a) {
  __shared__ int warp_counts[kRankThreads / 32];
  __shared__ int counts[kMaxExperts], tile_counts[kMaxExperts];
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, expert = blockIdx.x;
  const long long wanted = expert + a.first_expert;
  int before = 0;  // matches in earlier segments
  for (int segment = 0; segment < a.pairs; segment += 32 * kWarpPairs) {
    const int begin = segment + warp * kWarpPairs;
    uint32_t mine = 0;  // lane i keeps the matches of the i-th 32 pairs
    int count = 0;
#pragma unroll 8
    for (int i = 0; i < kWarpPairs / 32; ++i) {
      const int pair = begin + i * 32 + lane;
      const uint32_t mask = __ballot_sync(0xFFFFFFFFu, pair < a.pairs && a.ids[min(pair, a.pairs - 1)] == wanted);
      if (lane == i) mine = mask;
      count += __popc(mask);
    }
    __syncthreads();
    if (lane == 0) warp_counts[warp] = count;
    __syncthreads();
    int rank = before;
    for (int other = 0; other < kRankThreads / 32; ++other) {
      if (other < warp) rank += warp_counts[other];
      before += warp_counts[other];
    }
    for (int i = 0; i < kWarpPairs / 32; ++i) {
      const uint32_t mask = __shfl_sync(0xFFFFFFFFu, mine, i);
      if (mask >> lane & 1) a.rank[begin + i * 32 + lane] = rank + __popc(mask & ((1u << lane) - 1));
      rank += __popc(mask);
    }
  }
  if (threadIdx.x == 0) {
    a.counts[expert] = before;
    __threadfence();
    last = atomicAdd(a.ticket, 1) == gridDim.x - 1;
    if (last) *a.ticket = 0;
    __threadfence();
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x < a.experts) counts[threadIdx.x] = __ldcg(a.counts + threadIdx.x);
  __syncthreads();
  lay_out_tiles(counts, tile_counts, a.experts, a.tile_rows, a.first_tile, a.tiles, a.tile_count);
}

struct Quantisation {
  const __nv_bfloat16* x;              // [tokens, kDim]
  const long long* ids;                // [tokens, 4]
  const __nv_bfloat16* expert_weight;  // [tokens, 4]
  const int* rank;                     // [tokens * 4]
  const int* first_tile;               // [experts]
  uint8_t* activations;                // [tiles, 23, kScaled bytes]
  float* row_weight;                   // [tiles * tile rows]
  int* slots;                          // [tokens * 4] row of each pair among all tiles, -1 when not ours
  int tokens, first_expert, experts;
};

constexpr int kQuantiseWarps = 8;

// One warp per token: quantised once, written to the row of each of its experts.
template <int TILE_ROWS>
__global__ void __launch_bounds__(kQuantiseWarps * 32) quantise_kernel(const __grid_constant__ Quantisation a) {
  const int token = blockIdx.x * kQuantiseWarps + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (token >= a.tokens) return;
  int slot[kTopK];
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const int pair = token * kTopK + k;
    const long long local = a.ids[pair] - a.first_expert;
    slot[k] = -1;
    if (local >= 0 && local < a.experts) slot[k] = a.first_tile[local] * TILE_ROWS + a.rank[pair];
    if (lane == 0) {
      a.slots[pair] = slot[k];
      if (slot[k] >= 0) a.row_weight[slot[k]] = __bfloat162float(a.expert_weight[pair]);
    }
  }
  using Tile = TokenTileBytes<TILE_ROWS>;
  quantise_row<kDim>(a.x + static_cast<size_t>(token) * kDim, [&](int i, uint32_t word, float scale) {
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      if (slot[k] < 0) continue;
      const int row = slot[k] % TILE_ROWS;
      uint8_t* tile = a.activations + (static_cast<size_t>(slot[k] / TILE_ROWS) * kTilesK + i) * Tile::kScaled;
      *reinterpret_cast<uint32_t*>(tile + swizzled(row, lane * 4)) = word;
      if (lane == 0) *reinterpret_cast<float*>(tile + Tile::kValues + row * 4) = scale;
    }
  });
}

constexpr int kCombineThreads = 360;  // eight columns each

// Sum of a token's weighted rows in the order of k, in float32.
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __nv_bfloat16* rows, const int* slots, __nv_bfloat16* out) {
  const int token = blockIdx.x, column = threadIdx.x * 8;
  uint4 raw[kTopK];
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const int slot = slots[token * kTopK + k];
    raw[k] = make_uint4(0, 0, 0, 0);
    if (slot >= 0) raw[k] = *reinterpret_cast<const uint4*>(rows + static_cast<size_t>(slot) * kDim + column);
  }
  float sum[8] = {};
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const uint32_t words[4] = {raw[k].x, raw[k].y, raw[k].z, raw[k].w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sum[2 * i] += __uint_as_float(words[i] << 16);
      sum[2 * i + 1] += __uint_as_float(words[i] & 0xFFFF0000u);
    }
  }
  uint32_t packed[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    packed[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  *reinterpret_cast<uint4*>(out + static_cast<size_t>(token) * kDim + column) =
      make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

}  // namespace
}  // namespace antiphon::fp8

extern "C" int antiphon_moe_fp8_rank(const void* ids, int* rank, int* counts, int* first_tile, void* tiles,
                                     int* tile_count, unsigned* ticket, int pairs, int first_expert, int experts,
                                     int tile_rows, void* stream) {
  namespace fp8 = antiphon::fp8;
  if (experts > fp8::kMaxExperts) return cudaErrorInvalidValue;
  const fp8::Ranking a = {static_cast<const long long*>(ids), rank,   counts, first_tile,
                          static_cast<fp8::TokenTile*>(tiles), tile_count, ticket, pairs,
                          first_expert, experts, tile_rows};
  return antiphon::launch(fp8::rank_kernel, dim3(experts), dim3(fp8::kRankThreads), 0,
                          static_cast<cudaStream_t>(stream), false, a);
}

extern "C" int antiphon_moe_fp8_quantise(const void* x, const void* ids, const void* expert_weight, const int* rank,
                                         const int* first_tile, void* activations, float* row_weight, int* slots,
                                         int tokens, int first_expert, int experts, int tile_rows, void* stream) {
  namespace fp8 = antiphon::fp8;
  if (tile_rows != 128 && tile_rows != 256) return cudaErrorInvalidValue;
  const fp8::Quantisation a = {static_cast<const __nv_bfloat16*>(x),
                               static_cast<const long long*>(ids),
                               static_cast<const __nv_bfloat16*>(expert_weight),
                               rank,
                               first_tile,
                               static_cast<uint8_t*>(activations),
                               row_weight,
                               slots,
                               tokens,
                               first_expert,
                               experts};
  const dim3 grid((tokens + fp8::kQuantiseWarps - 1) / fp8::kQuantiseWarps), block(fp8::kQuantiseWarps * 32);
  return antiphon::launch(tile_rows == 128 ? fp8::quantise_kernel<128> : fp8::quantise_kernel<256>, grid, block, 0,
                          static_cast<cudaStream_t>(stream), false, a);
}

extern "C" int antiphon_moe_fp8_combine(const void* rows, const int* slots, void* out, int tokens, void* stream) {
  namespace fp8 = antiphon::fp8;
  return antiphon::launch(fp8::combine_kernel, dim3(tokens), dim3(fp8::kCombineThreads), 0,
                          static_cast<cudaStream_t>(stream), false, static_cast<const __nv_bfloat16*>(rows), slots,
                          static_cast<__nv_bfloat16*>(out));
}
