// The router of a chunk and the ranks of its pairs in one launch: logits, top-4, softmax, each pair's place among the
// pairs of its expert, and the token tiles.
//
// A group of 32 tokens is shared by kSplits blocks, each with its part of the columns; whichever of them is done last
// adds their parts up and chooses, and the last group to have chosen places the pairs of all. Tickets decide who works,
// never in which order anything is added or listed, so results are identical from run to run; and since the columns are
// cut in the same places for every chunk, a token's logits do not depend on how many are computed with it.

#include "token_tiles.cuh"
#include "top_experts.cuh"

namespace antiphon::fp8 {
namespace {

constexpr int kTopK = 4;
constexpr int kGroup = 32;          // tokens
constexpr int kSplits = 4;          // blocks of a group
constexpr int kDepths = 4;          // warps of a block along the columns, and as many along the experts
constexpr int kWarps = 4 * kDepths;
constexpr int kThreads = 32 * kWarps;
constexpr int kSteps = kDim / 32;   // 32 columns: 16 bytes of a row for each lane of a quad, two products
constexpr int kSlices = kSplits * kDepths;
constexpr int kChunks = kDim / 8;   // 16 bytes of a row
constexpr int kPairs = kGroup * kTopK;
constexpr int kParts = kThreads / kMaxExperts;  // of the groups, when counts are added up
constexpr int kBatch = 4;           // loads that are under way before the first is used

struct Chunk {
  const __nv_bfloat16* x;       // [tokens, kDim]
  const __nv_bfloat16* weight;  // [all_experts, kDim]
  const __nv_bfloat16* bias;    // [all_experts]
  const int* live;              // tokens that are not padding; null: all
  float* partial;               // [kSplits, tokens, all_experts], scratch
  long long* ids;               // [tokens, 4]
  __nv_bfloat16* weights;       // [tokens, 4]
  int* rank;                    // [tokens * 4] place among the pairs of the same expert, where that is ours
  int* counts;                  // [experts]
  int* first_tile;              // [experts]
  TokenTile* tiles;
  int* tile_count;
  int* group_counts;  // [groups, experts], scratch
  uint32_t* tickets;  // [1 + groups], zero before the launch and after it
  int tokens, all_experts, first_expert, experts, tile_rows;
};

struct Choosing {
  int expert[kPairs];                    // of this rank, -1 when not ours
  int counts[kPairs / 32][kMaxExperts];  // pairs of each 32
};

struct Placing {
  int before[kParts][kMaxExperts];  // pairs of an expert in the groups ahead of a part
  int count[kMaxExperts], tiles[kMaxExperts];
};

// A block is in one of these phases at a time.
template <int EIGHTS>
union Scratch {
  float sums[kDepths / 2][4][2 * EIGHTS * 4][32];
  Choosing choosing;
  Placing placing;
};

// What of the group's logits this warp's columns add up to. The columns of 32 are dealt to the fragments in another
// order than PTX names them, the same for both operands.
template <int EIGHTS>
__device__ __forceinline__ void multiply(const Chunk& a, float (&sums)[2][EIGHTS][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const int slice = blockIdx.x * kDepths + warp / 4, end = kSteps * (slice + 1) / kSlices;
  const int token = blockIdx.y * kGroup + row, expert = warp % 4 * 8 * EIGHTS + row;
  const uint4* x[4];
  const uint4* w[EIGHTS];
#pragma unroll
  for (int i = 0; i < 4; ++i)  // beyond the last one repeats it
    x[i] = reinterpret_cast<const uint4*>(a.x) + static_cast<size_t>(min(token + 8 * i, a.tokens - 1)) * kChunks + lane % 4;
#pragma unroll
  for (int n = 0; n < EIGHTS; ++n)
    w[n] = reinterpret_cast<const uint4*>(a.weight) + min(expert + 8 * n, a.all_experts - 1) * kChunks + lane % 4;
  for (int step = kSteps * slice / kSlices; step < end; step += 2) {
    uint4 left[2][4], right[2][EIGHTS];
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int chunk = min(step + s, end - 1) * 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) left[s][i] = x[i][chunk];
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) right[s][n] = w[n][chunk];
    }
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      if (step + s >= end) break;
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const uint4 upper = left[s][2 * m], lower = left[s][2 * m + 1], other = right[s][n];
          mma_bf16(sums[m][n], upper.x, lower.x, upper.y, lower.y, other.x, other.y);
          mma_bf16(sums[m][n], upper.z, lower.z, upper.w, lower.w, other.z, other.w);
        }
      }
    }
  }
}

// Adds up the block's four depths, (0 + 2) + (1 + 3), and leaves its part of the logits in memory.
template <int EIGHTS>
__device__ __forceinline__ void leave_part(const Chunk& a, float (&sums)[2][EIGHTS][4], Scratch<EIGHTS>& scratch) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, depth = warp / 4, columns = warp % 4;
#pragma unroll
  for (int half = kDepths / 2; half > 0; half /= 2) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS * 4; ++i)
      if (depth >= half && depth < 2 * half)
        scratch.sums[depth - half][columns][i][lane] = sums[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS * 4; ++i)
      if (depth < half) sums[i / 4 / EIGHTS][i / 4 % EIGHTS][i % 4] += scratch.sums[depth][columns][i][lane];
    __syncthreads();
  }
  if (depth > 0) return;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int token = blockIdx.y * kGroup + 16 * m + 8 * upper + lane / 4;
        const int expert = (columns * EIGHTS + n) * 8 + lane % 4 * 2;
        if (token >= a.tokens || expert >= a.all_experts) continue;
        const size_t row = static_cast<size_t>(blockIdx.x) * a.tokens + token;
        *reinterpret_cast<float2*>(a.partial + row * a.all_experts + expert) =
            make_float2(sums[m][n][2 * upper], sums[m][n][2 * upper + 1]);
      }
    }
  }
}

// Top-4 of one token by one warp: highest first, the lowest id among equals; softmax over the four. A row of NaN has
// expert 0, and NaN for a weight.
__device__ void choose_experts(const Chunk& a, int token, bool live, int (&expert_of)[kPairs]) {
  constexpr int kEach = kMaxExperts / 32;
  const int lane = threadIdx.x % 32;
  uint32_t keys[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int expert = min(lane + 32 * i, a.all_experts - 1);
    float parts[kSplits];
#pragma unroll
    for (int s = 0; s < kSplits; ++s)
      parts[s] = __ldcg(a.partial + (static_cast<size_t>(s) * a.tokens + token) * a.all_experts + expert);
    const float logit = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + __bfloat162float(a.bias[expert]);
    // NaN has the key of nothing. Sums that begin at zero are never -0.
    keys[i] = lane + 32 * i < a.all_experts && logit == logit ? ordered_key(logit) : 0;
  }
  float values[kTopK];
  int chosen[kTopK];
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    uint32_t best;
    const int winner = take_best(keys, best);
    chosen[k] = best == 0 ? 0 : winner;
    values[k] = best == 0 ? __uint_as_float(k == 0 ? 0x7FC00000u : 0xFF800000u) : from_ordered_key(best);
  }
  float exponentials[kTopK];
  const float total = exponentials_of(values, exponentials);
  if (lane > 0) return;
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const int id = live ? chosen[k] : -1, local = id - a.first_expert;
    a.ids[token * kTopK + k] = id;
    a.weights[token * kTopK + k] = __float2bfloat16_rn(exponentials[k] / total);
    expert_of[token % kGroup * kTopK + k] = id >= 0 && local >= 0 && local < a.experts ? local : -1;
  }
}

// The group's choices, each pair's place among those of its expert within the group, and how many an expert has.
__device__ void choose_group(const Chunk& a, Choosing& c) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.y * kGroup;
  for (int i = threadIdx.x; i < kPairs / 32 * kMaxExperts; i += kThreads) c.counts[i / kMaxExperts][i % kMaxExperts] = 0;
  if (threadIdx.x < kPairs) c.expert[threadIdx.x] = -1;
  __syncthreads();
  const int live = a.live == nullptr ? a.tokens : *a.live;
#pragma unroll
  for (int i = 0; i < kGroup / kWarps; ++i) {
    const int token = first + warp * (kGroup / kWarps) + i;
    if (token < a.tokens) choose_experts(a, token, token < live, c.expert);
  }
  __syncthreads();
  int expert = -1, place = 0;
  if (warp < kPairs / 32) {
    expert = c.expert[threadIdx.x];
    const uint32_t peers = __match_any_sync(0xFFFFFFFFu, expert);
    place = __popc(peers & ((1u << lane) - 1));
    if (expert >= 0 && place == 0) c.counts[warp][expert] = __popc(peers);
  }
  __syncthreads();
  if (expert >= 0) {
    for (int earlier = 0; earlier < warp; ++earlier) place += c.counts[earlier][expert];
    a.rank[first * kTopK + threadIdx.x] = place;
  }
  if (threadIdx.x < a.experts) {
    int sum = 0;
    for (int i = 0; i < kPairs / 32; ++i) sum += c.counts[i][threadIdx.x];
    a.group_counts[blockIdx.y * a.experts + threadIdx.x] = sum;
  }
}

// From places within groups to places in the chunk, and the tiles.
__device__ void place_all(const Chunk& a, Placing& p) {
  const int groups = gridDim.y, each = (groups + kParts - 1) / kParts;
  const int expert = threadIdx.x % kMaxExperts, part = threadIdx.x / kMaxExperts;
  int sum = 0;
  if (expert < a.experts) {
    const int end = min(groups, (part + 1) * each);
    for (int group = part * each; group < end; group += kBatch) {
      int here[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) here[i] = __ldcg(a.group_counts + min(group + i, end - 1) * a.experts + expert);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (group + i >= end) break;
        a.group_counts[(group + i) * a.experts + expert] = sum;
        sum += here[i];
      }
    }
  }
  p.before[part][expert] = sum;
  __syncthreads();
  if (threadIdx.x < kMaxExperts) {
    int all = 0;
    for (int i = 0; i < kParts; ++i) {
      const int here = p.before[i][expert];
      p.before[i][expert] = all;
      all += here;
    }
    p.count[expert] = all;
  }
  __syncthreads();
  for (int begin = threadIdx.x; begin < a.tokens * kTopK; begin += kBatch * kThreads) {
    long long local[kBatch];
    int rank[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = min(begin + i * kThreads, a.tokens * kTopK - 1);
      local[i] = __ldcg(a.ids + pair) - a.first_expert;
      if (begin + i * kThreads != pair || local[i] >= a.experts) local[i] = -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int pair = begin + i * kThreads, group = pair / kPairs;
      if (local[i] < 0) continue;
      rank[i] = __ldcg(a.rank + pair) + __ldcg(a.group_counts + group * a.experts + local[i]);
      rank[i] += p.before[group / each][local[i]];
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      if (local[i] >= 0) a.rank[begin + i * kThreads] = rank[i];
  }
  if (threadIdx.x < a.experts) a.counts[threadIdx.x] = p.count[threadIdx.x];
  fp8::lay_out_tiles(p.count, p.tiles, a.experts, a.tile_rows, a.first_tile, a.tiles, a.tile_count);
}

template <int EIGHTS>
__global__ void __launch_bounds__(kThreads, 1) chunk_route_kernel(const __grid_constant__ Chunk a) {
  __shared__ Scratch<EIGHTS> scratch;
  __shared__ bool last;
  grid_dependency_wait();
  {
    float sums[2][EIGHTS][4] = {};
    multiply<EIGHTS>(a, sums);
    leave_part<EIGHTS>(a, sums, scratch);
  }
  if (!arrive_last(a.tickets + 1 + blockIdx.y, kSplits, last)) return;
  choose_group(a, scratch.choosing);
  if (!arrive_last(a.tickets, gridDim.y, last)) return;
  grid_dependency_trigger();  // what follows finds all SMs but this one free
  place_all(a, scratch.placing);
}

}  // namespace
}  // namespace antiphon::fp8

// `all_experts` rows of the router, an even number; this rank holds `experts` of them from `first_expert` on.
extern "C" int antiphon_moe_chunk_route(const void* x, const void* weight, const void* bias, const int* live,
                                        float* partial, void* ids, void* weights, int* rank, int* counts,
                                        int* first_tile, void* tiles, int* tile_count, int* group_counts,
                                        unsigned* tickets, int tokens, int all_experts, int first_expert, int experts,
                                        int tile_rows, int overlap, void* stream) {
  namespace fp8 = antiphon::fp8;
  if (tokens < 1 || all_experts % 2 != 0 || all_experts < fp8::kTopK || all_experts > fp8::kMaxExperts ||
      experts > all_experts)
    return cudaErrorInvalidValue;
  const auto bf16 = [](const void* p) { return static_cast<const __nv_bfloat16*>(p); };
  const fp8::Chunk a = {bf16(x), bf16(weight), bf16(bias), live, partial, static_cast<long long*>(ids),
                        static_cast<__nv_bfloat16*>(weights), rank, counts, first_tile,
                        static_cast<fp8::TokenTile*>(tiles), tile_count, group_counts, tickets,
                        tokens, all_experts, first_expert, experts, tile_rows};
  const dim3 grid(fp8::kSplits, (tokens + fp8::kGroup - 1) / fp8::kGroup);
  return antiphon::launch(all_experts <= 32 ? fp8::chunk_route_kernel<1> : fp8::chunk_route_kernel<4>, grid,
                          dim3(fp8::kThreads), 0, static_cast<cudaStream_t>(stream), overlap != 0, a);
}
