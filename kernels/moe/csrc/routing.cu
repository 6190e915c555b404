// Around the expert GEMMs of a small batch: router logits, top-k, softmax and grouping by expert in one launch;
// grouping alone; and the combine, plain or fused with the residual add and the next RMSNorm.
//
// Every sum has a fixed order and every list a fixed sequence, so results are identical from run to run.

#include "hopper.cuh"

namespace antiphon {
namespace {

constexpr int kHidden = 2880;
constexpr int kMaxExperts = 128;
constexpr int kMaxPairs = 2048;
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 8;          // tokens per block of the logits
constexpr int kExperts = 4;         // experts per block of the logits, four warps each
constexpr int kChunks = kHidden / 8;

struct Grouping {
  int* order;       // [pairs] pair of each slot: by expert, then by pair
  int4* tiles;      // {local expert, first slot, slots, 0}
  int* tile_count;
  int first_expert;  // this rank's experts are first_expert .. first_expert + experts - 1
  int experts;
  int token_tile;
};

struct Scratch {
  short expert[kMaxPairs];  // local expert of each pair, -1 when it is not ours
  int count[kMaxExperts], first[kMaxExperts], first_tile[kMaxExperts];
};

// Called by a whole block, after scratch.expert is written and synchronised.
__device__ void group_pairs(const Grouping& g, int pairs, Scratch& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int expert = warp; expert < g.experts; expert += kWarps) {
    int count = 0;
    for (int base = 0; base < pairs; base += 32) {
      const bool match = base + lane < pairs && scratch.expert[base + lane] == expert;
      count += __popc(__ballot_sync(0xFFFFFFFFu, match));
    }
    if (lane == 0) scratch.count[expert] = count;
  }
  __syncthreads();
  if (warp == 0) {  // exclusive prefix sums, four experts a lane
    constexpr int kEach = kMaxExperts / 32;
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
    if (lane == 31) *g.tile_count = tile_end;
  }
  __syncthreads();
  for (int expert = warp; expert < g.experts; expert += kWarps) {
    const int count = scratch.count[expert], first = scratch.first[expert];
    if (count == 0) continue;
    int slot = first;
    for (int base = 0; base < pairs; base += 32) {
      const bool match = base + lane < pairs && scratch.expert[base + lane] == expert;
      const uint32_t mask = __ballot_sync(0xFFFFFFFFu, match);
      if (match) g.order[slot + __popc(mask & ((1u << lane) - 1))] = base + lane;
      slot += __popc(mask);
    }
    for (int i = lane; i * g.token_tile < count; i += 32) {
      const int begin = i * g.token_tile;
      g.tiles[scratch.first_tile[expert] + i] =
          make_int4(expert, first + begin, min(g.token_tile, count - begin), 0);
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
  grid_dependency_wait();
  grid_dependency_trigger();
  for (int i = threadIdx.x; i < pairs; i += kThreads) scratch.expert[i] = local_expert(g, ids[i]);
  __syncthreads();
  group_pairs(g, pairs, scratch);
}

// Larger floats have larger keys.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
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
    uint32_t best = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) best = max(best, keys[i]);
    best = __reduce_max_sync(0xFFFFFFFFu, best);
    int candidate = kMaxExperts;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) candidate = keys[i] == best ? lane + 32 * i : candidate;
    const int winner = __reduce_min_sync(0xFFFFFFFFu, candidate);
#pragma unroll
    for (int i = 0; i < kEach; ++i) keys[i] = lane + 32 * i == winner ? 0 : keys[i];
    chosen[k] = winner;
    values[k] = from_ordered_key(best);
  }
  float exponentials[4], total = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    exponentials[k] = expf(values[k] - values[0]);
    total += exponentials[k];
  }
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      ids[k] = chosen[k];
      weights[k] = __float2bfloat16_rn(exponentials[k] / total);
    }
  }
}

struct RouteArguments {
  const __nv_bfloat16* x;       // [tokens, kHidden]
  const __nv_bfloat16* weight;  // [experts, kHidden]
  const __nv_bfloat16* bias;    // [experts]
  float* logits;                // [tokens, experts], scratch
  long long* ids;               // [tokens, 4]
  __nv_bfloat16* weights;       // [tokens, 4]
  uint32_t* ticket;             // zero before the launch, and after it
  int tokens;
  int experts;
};

__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

// Every block computes the logits of 8 tokens and 4 experts; the last one to finish chooses and groups.
__global__ void __launch_bounds__(kThreads, 1)
    route_kernel(const __grid_constant__ RouteArguments a, const __grid_constant__ Grouping g) {
  __shared__ float partial[kExperts][4][kTokens];
  __shared__ Scratch scratch;
  __shared__ bool last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sub = warp / 4, quarter = warp % 4, expert = blockIdx.x * kExperts + sub;
  const int first_token = blockIdx.y * kTokens;
  uint4 row[3];  // the router's weights are constant: fetched while the predecessor drains
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int chunk = quarter * 32 + lane + 128 * i;
    row[i] = make_uint4(0, 0, 0, 0);
    if (chunk < kChunks && expert < a.experts)
      row[i] = reinterpret_cast<const uint4*>(a.weight + static_cast<size_t>(expert) * kHidden)[chunk];
  }
  grid_dependency_wait();
  grid_dependency_trigger();
  float acc[kTokens] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    const int chunk = quarter * 32 + lane + 128 * i;
    const uint32_t w[4] = {row[i].x, row[i].y, row[i].z, row[i].w};
#pragma unroll
    for (int n = 0; n < kTokens; ++n) {
      if (chunk >= kChunks || first_token + n >= a.tokens) continue;
      const uint4 raw = reinterpret_cast<const uint4*>(a.x + static_cast<size_t>(first_token + n) * kHidden)[chunk];
      const uint32_t x[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        acc[n] = fmaf(low_half(w[j]), low_half(x[j]), acc[n]);
        acc[n] = fmaf(high_half(w[j]), high_half(x[j]), acc[n]);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTokens; ++n) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) acc[n] += __shfl_xor_sync(0xFFFFFFFFu, acc[n], step);
    if (lane == 0) partial[sub][quarter][n] = acc[n];
  }
  __syncthreads();
  if (threadIdx.x < kExperts * kTokens) {
    const int s = threadIdx.x / kTokens, n = threadIdx.x % kTokens;
    const int e = blockIdx.x * kExperts + s, token = first_token + n;
    if (e < a.experts && token < a.tokens) {
      const float sum = (partial[s][0][n] + partial[s][1][n]) + (partial[s][2][n] + partial[s][3][n]);
      a.logits[static_cast<size_t>(token) * a.experts + e] = sum + __bfloat162float(a.bias[e]);
    }
    __threadfence();
  }
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(a.ticket, 1) == gridDim.x * gridDim.y - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int token = warp; token < a.tokens; token += kWarps) {
    int chosen[4];
    choose_experts(a.logits + static_cast<size_t>(token) * a.experts, a.experts, a.ids + token * 4,
                   a.weights + token * 4, chosen);
    if (lane < 4) {
      const int id = lane == 0 ? chosen[0] : lane == 1 ? chosen[1] : lane == 2 ? chosen[2] : chosen[3];
      scratch.expert[token * 4 + lane] = local_expert(g, id);
    }
  }
  __syncthreads();
  group_pairs(g, a.tokens * 4, scratch);
  if (threadIdx.x == 0) *a.ticket = 0;
}

struct CombineArguments {
  const float* partial;          // [splits, tokens * top_k, kHidden]
  const long long* ids;          // [tokens, top_k]
  const __nv_bfloat16* residual;  // [tokens, kHidden], of the fused form
  const __nv_bfloat16* norm;      // [kHidden]
  __nv_bfloat16* out;             // the sum, or its norm
  __nv_bfloat16* new_residual;
  float eps;
  int tokens, top_k, splits, first_expert, experts;
};

// Sum over a token's experts and splits of four columns, in a fixed order; pairs of other ranks count nothing.
__device__ __forceinline__ float4 sum_pairs(const CombineArguments& a, int token, int column) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int k = 0; k < a.top_k; ++k) {
    const long long local = a.ids[token * a.top_k + k] - a.first_expert;
    if (local < 0 || local >= a.experts) continue;
#pragma unroll 5
    for (int s = 0; s < a.splits; ++s) {
      const size_t row = static_cast<size_t>(s) * a.tokens * a.top_k + token * a.top_k + k;
      const float4 part = *reinterpret_cast<const float4*>(a.partial + row * kHidden + column);
      sum.x += part.x;
      sum.y += part.y;
      sum.z += part.z;
      sum.w += part.w;
    }
  }
  return sum;
}

__device__ __forceinline__ uint2 pack4(float4 v) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
}

__device__ __forceinline__ float4 unpack4(uint2 v) {
  return make_float4(low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y));
}

constexpr int kCombineThreads = 240;

__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ CombineArguments a) {
  grid_dependency_wait();
  grid_dependency_trigger();
  const int token = blockIdx.y, column = (blockIdx.x * kCombineThreads + threadIdx.x) * 4;
  *reinterpret_cast<uint2*>(a.out + static_cast<size_t>(token) * kHidden + column) =
      pack4(sum_pairs(a, token, column));
}

constexpr int kNormThreads = 736;  // 720 of them own four columns each

__global__ void __launch_bounds__(kNormThreads) combine_norm_kernel(const __grid_constant__ CombineArguments a) {
  __shared__ float squares[kNormThreads / 32];
  const int token = blockIdx.x, column = threadIdx.x * 4, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t at = static_cast<size_t>(token) * kHidden + column;
  const bool active = column < kHidden;
  uint2 gain = make_uint2(0, 0);
  if (active) gain = *reinterpret_cast<const uint2*>(a.norm + column);
  grid_dependency_wait();
  grid_dependency_trigger();
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (active) {
    const float4 moe = unpack4(pack4(sum_pairs(a, token, column)));  // rounded, as the plain op returns it
    const float4 before = unpack4(*reinterpret_cast<const uint2*>(a.residual + at));
    const uint2 packed =
        pack4(make_float4(moe.x + before.x, moe.y + before.y, moe.z + before.z, moe.w + before.w));
    *reinterpret_cast<uint2*>(a.new_residual + at) = packed;
    total = unpack4(packed);
  }
  float sum = total.x * total.x + total.y * total.y + total.z * total.z + total.w * total.w;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) all += squares[i];
  const float factor = rsqrtf(all / kHidden + a.eps);
  if (active) {
    const float4 w = unpack4(gain);
    *reinterpret_cast<uint2*>(a.out + at) = pack4(make_float4(total.x * factor * w.x, total.y * factor * w.y,
                                                              total.z * factor * w.z, total.w * factor * w.w));
  }
}

}  // namespace
}  // namespace antiphon

using antiphon::CombineArguments;
using antiphon::Grouping;

extern "C" const char* antiphon_moe_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

extern "C" int antiphon_moe_group(const void* ids, int pairs, int* order, void* tiles, int* tile_count,
                                  int first_expert, int experts, int token_tile, int overlap, void* stream) {
  if (pairs > antiphon::kMaxPairs || experts > antiphon::kMaxExperts) return cudaErrorInvalidValue;
  const Grouping g = {order, static_cast<int4*>(tiles), tile_count, first_expert, experts, token_tile};
  return antiphon::launch(antiphon::group_kernel, dim3(1), dim3(antiphon::kThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, static_cast<const long long*>(ids), pairs,
                          g);
}

// `all_experts` rows of the router; this rank holds `experts` of them from `first_expert` on.
extern "C" int antiphon_moe_route(const void* x, const void* weight, const void* bias, float* logits, void* ids,
                                  void* weights, unsigned* ticket, int tokens, int all_experts, int* order,
                                  void* tiles, int* tile_count, int first_expert, int experts, int token_tile,
                                  int overlap, void* stream) {
  if (tokens * 4 > antiphon::kMaxPairs || all_experts > antiphon::kMaxExperts) return cudaErrorInvalidValue;
  const antiphon::RouteArguments a = {static_cast<const __nv_bfloat16*>(x),
                                      static_cast<const __nv_bfloat16*>(weight),
                                      static_cast<const __nv_bfloat16*>(bias),
                                      logits,
                                      static_cast<long long*>(ids),
                                      static_cast<__nv_bfloat16*>(weights),
                                      ticket,
                                      tokens,
                                      all_experts};
  const Grouping g = {order, static_cast<int4*>(tiles), tile_count, first_expert, experts, token_tile};
  const dim3 grid((all_experts + antiphon::kExperts - 1) / antiphon::kExperts,
                  (tokens + antiphon::kTokens - 1) / antiphon::kTokens);
  return antiphon::launch(antiphon::route_kernel, grid, dim3(antiphon::kThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, a, g);
}

extern "C" int antiphon_moe_combine(const float* partial, const void* ids, void* out, int tokens, int top_k,
                                    int splits, int first_expert, int experts, int overlap, void* stream) {
  const CombineArguments a = {partial, static_cast<const long long*>(ids), nullptr, nullptr,
                              static_cast<__nv_bfloat16*>(out), nullptr, 0.0f, tokens, top_k, splits, first_expert,
                              experts};
  return antiphon::launch(antiphon::combine_kernel, dim3(3, tokens), dim3(antiphon::kCombineThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, a);
}

extern "C" int antiphon_moe_combine_norm(const float* partial, const void* ids, const void* residual,
                                         const void* norm, void* out, void* new_residual, float eps, int tokens,
                                         int top_k, int splits, int first_expert, int experts, int overlap,
                                         void* stream) {
  const CombineArguments a = {partial,
                              static_cast<const long long*>(ids),
                              static_cast<const __nv_bfloat16*>(residual),
                              static_cast<const __nv_bfloat16*>(norm),
                              static_cast<__nv_bfloat16*>(out),
                              static_cast<__nv_bfloat16*>(new_residual),
                              eps,
                              tokens,
                              top_k,
                              splits,
                              first_expert,
                              experts};
  return antiphon::launch(antiphon::combine_norm_kernel, dim3(tokens), dim3(antiphon::kNormThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, a);
}
