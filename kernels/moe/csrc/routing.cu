// Before the expert GEMMs of a small batch, in one launch: RMSNorm, router logits, top-k, softmax, grouping by expert,
// and the split of the activations; or the grouping alone.
//
// Every sum has a fixed order and every list a fixed sequence, so results are identical from run to run.

#include "split_tokens.cuh"
#include "top_experts.cuh"

namespace antiphon {
namespace {

constexpr int kHidden = 2880;
constexpr int kMaxExperts = 128;
constexpr int kMaxPairs = 2048;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxTokens = 8;       // tokens per block of the logits, at most
constexpr int kExperts = 4;         // experts per block of the logits, four warps each
constexpr int kChunks = kHidden / 8;

struct Grouping {
  int* order;       // [pairs] pair of each slot: by expert, then by pair
  int4* tiles;      // {local expert, first slot, slots, 0}
  int* tile_count;
  int* ready;        // [tiles], set to zero
  int first_expert;  // this rank's experts are first_expert .. first_expert + experts - 1
  int experts;
  int token_tile;
};

struct Scratch {
  short expert[kMaxPairs];  // local expert of each pair, -1 when it is not ours
  short before[kMaxPairs / 32][kMaxExperts];  // of each 32 pairs: an expert's pairs in it, then in all earlier ones
  int count[kMaxExperts], first[kMaxExperts], first_tile[kMaxExperts];
};

// Exclusive prefix sums over experts by one warp: first slot and first tile of each; returns the tiles in all.
__device__ int place_experts(const Grouping& g, Scratch& scratch) {
  constexpr int kEach = kMaxExperts / 32;
  const int lane = threadIdx.x % 32;
  int slots[kEach], tiles[kEach], slot_sum = 0, tile_sum = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane * kEach + i;
    const int count = expert < g.experts ? scratch.count[expert] : 0;
    slots[i] = slot_sum;
    tiles[i] = tile_sum;
    slot_sum += count;
    tile_sum += (count + g.token_tile - 1) / g.token_tile;
  }
  int slot_end = slot_sum, tile_end = tile_sum;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int slot_before = __shfl_up_sync(0xFFFFFFFFu, slot_end, step);
    const int tile_before = __shfl_up_sync(0xFFFFFFFFu, tile_end, step);
    if (lane >= step) {
      slot_end += slot_before;
      tile_end += tile_before;
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane * kEach + i;
    if (expert < g.experts) {
      scratch.first[expert] = slot_end - slot_sum + slots[i];
      scratch.first_tile[expert] = tile_end - tile_sum + tiles[i];
    }
  }
  return __shfl_sync(0xFFFFFFFFu, tile_end, 31);
}

// The same sort for at most 32 pairs, by one warp that holds one each; expert < 0: not ours. Comparing each with each
// takes no barrier.
__device__ void group_few(const Grouping& g, int expert) {
  const int lane = threadIdx.x % 32;
  const uint32_t peers = __match_any_sync(0xFFFFFFFFu, expert);
  const int rank = __popc(peers & ((1u << lane) - 1));
  const bool leads = expert >= 0 && rank % g.token_tile == 0;
  const uint32_t leaders = __ballot_sync(0xFFFFFFFFu, leads);
  int slot = 0, tile = 0;  // pairs, and first pairs of tiles, in front of this one
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    const int theirs = __shfl_sync(0xFFFFFFFFu, expert, other);
    const bool in_front = theirs >= 0 && (theirs < expert || (theirs == expert && other < lane));
    slot += in_front ? 1 : 0;
    tile += in_front && (leaders >> other & 1u) != 0 ? 1 : 0;
  }
  if (expert >= 0) g.order[slot] = lane;
  if (leads) {
    g.tiles[tile] = make_int4(expert, slot, min(g.token_tile, __popc(peers) - rank), 0);
    g.ready[tile] = 0;
  }
  if (lane == 0) *g.tile_count = __popc(leaders);
}

// A stable counting sort by expert. Called by a whole block, after scratch.expert is written and synchronised.
__device__ void group_pairs(const Grouping& g, int pairs, Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunks = (pairs + 31) / 32;
  for (int i = threadIdx.x; i < chunks * kMaxExperts; i += kThreads) scratch.before[i / kMaxExperts][i % kMaxExperts] = 0;
  __syncthreads();
  for (int chunk = warp; chunk < chunks; chunk += kWarps) {
    const int pair = chunk * 32 + lane;
    const int expert = pair < pairs ? scratch.expert[pair] : -1;
    const uint32_t peers = __match_any_sync(0xFFFFFFFFu, expert);
    if (expert >= 0 && (peers & ((1u << lane) - 1)) == 0)
      scratch.before[chunk][expert] = static_cast<short>(__popc(peers));
  }
  __syncthreads();
  if (threadIdx.x < g.experts) {
    int sum = 0;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int here = scratch.before[chunk][threadIdx.x];
      scratch.before[chunk][threadIdx.x] = static_cast<short>(sum);
      sum += here;
    }
    scratch.count[threadIdx.x] = sum;
  }
  __syncthreads();
  if (warp == 0) {
    const int tiles = place_experts(g, scratch);
    if (lane == 0) *g.tile_count = tiles;
  }
  __syncthreads();
  for (int chunk = warp; chunk < chunks; chunk += kWarps) {
    const int pair = chunk * 32 + lane;
    const int expert = pair < pairs ? scratch.expert[pair] : -1;
    const uint32_t peers = __match_any_sync(0xFFFFFFFFu, expert);
    if (expert >= 0)
      g.order[scratch.first[expert] + scratch.before[chunk][expert] + __popc(peers & ((1u << lane) - 1))] = pair;
  }
  if (threadIdx.x < g.experts) {
    const int expert = threadIdx.x, count = scratch.count[expert];
    int tile = scratch.first_tile[expert];
    for (int begin = 0; begin < count; begin += g.token_tile, ++tile) {
      g.tiles[tile] = make_int4(expert, scratch.first[expert] + begin, min(g.token_tile, count - begin), 0);
      g.ready[tile] = 0;
    }
  }
}

__device__ __forceinline__ short local_expert(const Grouping& g, long long id) {
  const long long local = id - g.first_expert;
  return id >= 0 && local >= 0 && local < g.experts ? static_cast<short>(local) : static_cast<short>(-1);
}

__global__ void __launch_bounds__(kThreads, 1)
    group_kernel(const long long* ids, int pairs, const __grid_constant__ Grouping g) {
  __shared__ Scratch scratch;
  grid_dependency_trigger();
  grid_dependency_wait();
  for (int i = threadIdx.x; i < pairs; i += kThreads) scratch.expert[i] = local_expert(g, ids[i]);
  __syncthreads();
  group_pairs(g, pairs, scratch);
}

// Top-4 of one token's logits by one warp: highest first, the lowest id among equals; softmax over the four.
__device__ void choose_experts(const float* logits, int experts, long long* ids, __nv_bfloat16* weights,
                               int (&chosen)[4]) {
  constexpr int kEach = kMaxExperts / 32;
  const int lane = threadIdx.x % 32;
  uint32_t keys[kEach];  // 0 is below every float's key
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = lane + 32 * i;
    keys[i] = expert < experts ? ordered_key(__ldcg(logits + expert)) : 0;
  }
  float values[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t best;
    chosen[k] = take_best(keys, best);
    values[k] = from_ordered_key(best);
  }
  float exponentials[4];
  const float total = exponentials_of(values, exponentials);
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ids[k] = chosen[k];
      weights[k] = __float2bfloat16_rn(exponentials[k] / total);
    }
  }
}

struct RouteArguments {
  stream::SplitArguments split;  // x and its norm among them
  const __nv_bfloat16* weight;   // [experts, kHidden]
  const __nv_bfloat16* bias;    // [experts]
  float* logits;                // [tokens, experts], scratch
  long long* ids;               // [tokens, 4]
  __nv_bfloat16* weights;       // [tokens, 4]
  uint32_t* tickets;            // [1 + token groups], zero before the launch and after it
  int tokens;
  int experts;
};

// The router's weights of this lane, in float32 and times the norm's gain: they are constant, so this happens while
// the predecessor drains. Beyond the row they are zero.
__device__ void load_router(const RouteArguments& a, int expert, int quarter, float (&w)[3][8]) {
  const uint4* row = reinterpret_cast<const uint4*>(a.weight + static_cast<size_t>(expert) * kHidden);
  const uint4* gain = reinterpret_cast<const uint4*>(a.split.norm);
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int chunk = quarter * 32 + threadIdx.x % 32 + 128 * i;
    const bool inside = chunk < kChunks;
    const uint4 raw = inside ? row[chunk] : make_uint4(0, 0, 0, 0);
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      w[i][2 * j] = low_half(words[j]);
      w[i][2 * j + 1] = high_half(words[j]);
    }
    if (gain != nullptr && inside) {
      const uint4 g = gain[chunk];
      const uint32_t gains[4] = {g.x, g.y, g.z, g.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        w[i][2 * j] *= low_half(gains[j]);
        w[i][2 * j + 1] *= high_half(gains[j]);
      }
    }
  }
}

// Logits of TOKENS tokens and 4 experts by one block, four warps an expert. The norm's factor multiplies a finished
// sum; the squares that it needs are shared out over the experts' warps.
template <int TOKENS>
__device__ void block_logits(const RouteArguments& a, float (&partial)[kExperts][4][kMaxTokens],
                             float (&squares)[4][kMaxTokens]) {
  constexpr int kSquared = (TOKENS + kExperts - 1) / kExperts;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sub = warp / 4, quarter = warp % 4, expert = min(blockIdx.x * kExperts + sub, a.experts - 1);
  const int first_token = blockIdx.y * TOKENS;
  float w[3][8];
  load_router(a, expert, quarter, w);
  grid_dependency_wait();
  float acc[TOKENS] = {}, square[TOKENS] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int chunk = min(quarter * 32 + lane + 128 * i, kChunks - 1);
    const bool inside = quarter * 32 + lane + 128 * i < kChunks;
    uint4 raw[TOKENS];  // all loads before the first use; tokens beyond the last repeat it
#pragma unroll
    for (int n = 0; n < TOKENS; ++n) {
      const size_t token = min(first_token + n, a.tokens - 1);
      raw[n] = load_fresh(reinterpret_cast<const uint4*>(a.split.x + token * kHidden) + chunk);
    }
#pragma unroll
    for (int n = 0; n < TOKENS; ++n) {
      const uint32_t x[4] = {raw[n].x, raw[n].y, raw[n].z, raw[n].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc[n] = fmaf(w[i][2 * j], low_half(x[j]), acc[n]);
        acc[n] = fmaf(w[i][2 * j + 1], high_half(x[j]), acc[n]);
      }
      if (n / kSquared == sub && inside) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          square[n] = fmaf(low_half(x[j]), low_half(x[j]), square[n]);
          square[n] = fmaf(high_half(x[j]), high_half(x[j]), square[n]);
        }
      }
    }
  }
#pragma unroll
  for (int n = 0; n < TOKENS; ++n) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) acc[n] += __shfl_xor_sync(0xFFFFFFFFu, acc[n], step);
    if (lane == 0) partial[sub][quarter][n] = acc[n];
    if (n / kSquared == sub) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) square[n] += __shfl_xor_sync(0xFFFFFFFFu, square[n], step);
      if (lane == 0) squares[quarter][n] = square[n];
    }
  }
  __syncthreads();
  if (threadIdx.x < kExperts * TOKENS) {
    const int s = threadIdx.x / TOKENS, n = threadIdx.x % TOKENS;
    const int e = blockIdx.x * kExperts + s, token = first_token + n;
    if (e < a.experts && token < a.tokens) {
      float sum = (partial[s][0][n] + partial[s][1][n]) + (partial[s][2][n] + partial[s][3][n]);
      if (a.split.norm != nullptr) {
        const float all = (squares[0][n] + squares[1][n]) + (squares[2][n] + squares[3][n]);
        sum *= rsqrtf(all / kHidden + a.split.eps);
      }
      a.logits[static_cast<size_t>(token) * a.experts + e] = sum + __bfloat162float(a.bias[e]);
    }
  }
}

// Of the blocks that share a token group the last one splits its activations and all others compute logits; whichever
// of those is done last chooses the group's experts, and the last block that chose groups all pairs.
template <int TOKENS>
__global__ void __launch_bounds__(kThreads, 1)
    route_kernel(const __grid_constant__ RouteArguments a, const __grid_constant__ Grouping g) {
  __shared__ float partial[kExperts][4][kMaxTokens], squares[4][kMaxTokens];
  __shared__ Scratch scratch;
  __shared__ bool last;
  grid_dependency_trigger();
  if (blockIdx.x + 1 == gridDim.x) {
    grid_dependency_wait();
    stream::split_block<TOKENS>(a.split, blockIdx.y * TOKENS);
    return;
  }
  block_logits<TOKENS>(a, partial, squares);
  if (!arrive_last(a.tickets + 1 + blockIdx.y, gridDim.x - 1, last)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, token = blockIdx.y * TOKENS + warp;
  if (warp < TOKENS && token < a.tokens) {
    int chosen[4];
    choose_experts(a.logits + static_cast<size_t>(token) * a.experts, a.experts, a.ids + token * 4,
                   a.weights + token * 4, chosen);
    if (lane < 4) {
      const int id = lane == 0 ? chosen[0] : lane == 1 ? chosen[1] : lane == 2 ? chosen[2] : chosen[3];
      scratch.expert[token * 4 + lane] = local_expert(g, id);
    }
  }
  if (gridDim.y > 1) {
    if (!arrive_last(a.tickets, gridDim.y, last)) return;
    for (int i = threadIdx.x; i < a.tokens * 4; i += kThreads) scratch.expert[i] = local_expert(g, __ldcg(a.ids + i));
  }
  __syncthreads();
  if (a.tokens <= 8) {
    if (warp == 0) group_few(g, lane < a.tokens * 4 ? scratch.expert[lane] : -1);
  } else {
    group_pairs(g, a.tokens * 4, scratch);
  }
}

}  // namespace
}  // namespace antiphon

using antiphon::Grouping;

extern "C" const char* antiphon_moe_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

extern "C" int antiphon_moe_group(const void* ids, int pairs, int* order, void* tiles, int* tile_count, int* ready,
                                  int first_expert, int experts, int token_tile, int overlap, void* stream) {
  if (pairs > antiphon::kMaxPairs || experts > antiphon::kMaxExperts) return cudaErrorInvalidValue;
  const Grouping g = {order, static_cast<int4*>(tiles), tile_count, ready, first_expert, experts, token_tile};
  return antiphon::launch(antiphon::group_kernel, dim3(1), dim3(antiphon::kThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, static_cast<const long long*>(ids), pairs,
                          g);
}

// `all_experts` rows of the router; this rank holds `experts` of them from `first_expert` on. With `norm`, x is the
// residual stream and what is routed and split is its RMSNorm.
extern "C" int antiphon_moe_route(const void* x, const void* norm, float eps, const void* weight, const void* bias,
                                  float* logits, void* ids, void* weights, void* activations, float* scale,
                                  unsigned* tickets, int tokens, int all_experts, int* order, void* tiles,
                                  int* tile_count, int* ready, int first_expert, int experts, int token_tile,
                                  int overlap, void* stream) {
  if (tokens * 4 > antiphon::kMaxPairs || all_experts > antiphon::kMaxExperts) return cudaErrorInvalidValue;
  const auto bf16 = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  const antiphon::RouteArguments a = {{bf16(x), bf16(norm), eps, antiphon::stream::low_factor(token_tile),
                                       static_cast<uint8_t*>(activations), scale, tokens},
                                      bf16(weight),
                                      bf16(bias),
                                      logits,
                                      static_cast<long long*>(ids),
                                      static_cast<__nv_bfloat16*>(weights),
                                      tickets,
                                      tokens,
                                      all_experts};
  const Grouping g = {order, static_cast<int4*>(tiles), tile_count, ready, first_expert, experts, token_tile};
  const int per_block = tokens == 1 ? 1 : tokens <= 4 ? 2 : antiphon::kMaxTokens;
  const dim3 grid((all_experts + antiphon::kExperts - 1) / antiphon::kExperts + 1,
                  (tokens + per_block - 1) / per_block);
  const auto kernel = per_block == 1   ? antiphon::route_kernel<1>
                      : per_block == 2 ? antiphon::route_kernel<2>
                                       : antiphon::route_kernel<antiphon::kMaxTokens>;
  return antiphon::launch(kernel, grid, dim3(antiphon::kThreads), 0, static_cast<cudaStream_t>(stream), overlap != 0,
                          a, g);
}
