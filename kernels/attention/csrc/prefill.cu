// Prefill attention with sinks over paged KV on sm_90: 8 query heads a kv head, head dim 64, pages of 64 positions.
//
// A block owns 24 query tokens of one kv head. Their 8 query heads are packed into 192 rows, 64 for each of three
// consumer warpgroups, so that keys and values are fetched once for all of them: by a producer thread, 128 positions
// (two pages) at a time, through a tensor map of the cache that delivers swizzled operands. The scores of a stage are
// computed while the values of the stage before are summed up, and one warpgroup's exponentials run beside another's
// products. The sink is where each row's running maximum starts, with a weight of one. Blocks are persistent and take
// the longest rows first.

#include "prefill_pipeline.cuh"

namespace antiphon::attention {
namespace {

// 64 rows (8 tokens x 8 heads) into shared memory, swizzled; rows of tokens that do not exist are zeros.
__device__ __forceinline__ void load_query(const Arguments& a, const Item& item, const Shared& s, int group) {
  const int thread = threadIdx.x % 128, heads = a.kv_heads * kGroup;
  uint8_t* target = s.query_bytes + group * kQueryBytes;
  uint4 chunk[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 16 + thread / 8, token = item.token + group * 8 + row / kGroup;
    chunk[i] = make_uint4(0, 0, 0, 0);
    if (token < item.count) {
      const size_t at = (static_cast<size_t>(item.begin + token) * heads + item.head * kGroup + row % kGroup) * kDim;
      chunk[i] = *reinterpret_cast<const uint4*>(a.query + at + thread % 8 * 8);
    }
  }
  barrier_sync(kQueryBarrier + group, 128);  // all warps are done with the queries before
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = i * 16 + thread / 8;
    *reinterpret_cast<uint4*>(target + row * 128 + ((thread % 8) ^ (row % 8)) * 16) = chunk[i];
  }
  fence_async_proxy();
  barrier_sync(kQueryBarrier + group, 128);
}

// Values of positions that were never written are zeroed: a NaN there would survive a probability of zero. Every
// warpgroup does so for itself, before its products read the stage.
__device__ __forceinline__ void clear_unwritten(uint8_t* values, int written, int group) {
  for (int i = threadIdx.x % 128; i < (kKeys - written) * 8; i += 128)
    *reinterpret_cast<uint4*>(values + written * 128 + i * 16) = make_uint4(0, 0, 0, 0);
  fence_async_proxy();
  barrier_sync(kQueryBarrier + group, 128);
}

__device__ __forceinline__ void multiply_keys(float (&scores)[64], uint64_t query, uint64_t keys) {
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) wgmma_bf16_n128(scores, query + 2 * k, keys + 2 * k, k > 0);
  wgmma_commit();
}

__device__ __forceinline__ void multiply_values(float (&out)[32], const uint32_t (&probabilities)[32], uint64_t values,
                                                int accumulate) {
#pragma unroll
  for (int k = 0; k < kKeys / 16; ++k)
    wgmma_bf16_n64_values(out, probabilities + 4 * k, values + k * (16 * kDim * 2 / 16), k > 0 ? 1 : accumulate);
  wgmma_commit();
}

__device__ __forceinline__ float exp2_fast(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The running softmax of a thread's two rows. `weight`: this thread's part of the sum of exponentials.
struct Softmax {
  float peak[2], weight[2], decay[2];

  __device__ __forceinline__ void mask(float (&scores)[64], int first_key, const int (&position)[2], int window) const {
    const int column = first_key + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int key = column + 8 * j + c % 2, seen_to = position[c / 2];
        if (key > seen_to || (window > 0 && key <= seen_to - window)) scores[4 * j + c] = -INFINITY;
      }
    }
  }

  // Scores become probabilities relative to the new peak; `decay` is what earlier sums must be multiplied by.
  __device__ __forceinline__ void step(float (&scores)[64], float scale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = fmaxf(scores[2 * r], scores[2 * r + 1]);
#pragma unroll
      for (int j = 1; j < 16; ++j) largest = fmaxf(largest, fmaxf(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, 2));
      largest = fmaxf(largest * scale, peak[r]);
      decay[r] = exp2_fast(peak[r] - largest);
      peak[r] = largest;
      float sum[2] = {0.0f, 0.0f};
#pragma unroll
      for (int j = 0; j < 16; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float& score = scores[4 * j + 2 * r + c];
          score = exp2_fast(fmaf(score, scale, -largest));
          sum[c] += score;
        }
      }
      weight[r] = fmaf(weight[r], decay[r], sum[0] + sum[1]);
    }
  }
};

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ __forceinline__ void pack_probabilities(const float (&scores)[64], uint32_t (&probabilities)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) probabilities[i] = pack(scores[2 * i], scores[2 * i + 1]);
}

__device__ __forceinline__ void store(const Arguments& a, const Item& item, Softmax& softmax, const float (&out)[32],
                                      int group) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, heads = a.kv_heads * kGroup;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float weight = softmax.weight[r];
    weight += __shfl_xor_sync(0xFFFFFFFFu, weight, 1);
    weight += __shfl_xor_sync(0xFFFFFFFFu, weight, 2);
    const float factor = 1.0f / weight;
    const int token = item.token + group * 8 + warp * 2 + r;
    if (token >= item.count) continue;
    const size_t at = (static_cast<size_t>(item.begin + token) * heads + item.head * kGroup + lane / 4) * kDim;
#pragma unroll
    for (int j = 0; j < 8; ++j)
      *reinterpret_cast<uint32_t*>(a.out + at + 8 * j + lane % 4 * 2) =
          pack(out[4 * j + 2 * r] * factor, out[4 * j + 2 * r + 1] * factor);
  }
}

// With ORDERED, warpgroups issue their products in turn, so that they never queue up behind one another at the same
// point of the loop.
template <bool ORDERED>
struct Turn {
  int group;
  __device__ __forceinline__ void start() const {
    if (ORDERED && group == kWarpgroups - 1) barrier_arrive(kTurnBarrier, 256);
  }
  __device__ __forceinline__ void wait() const {
    if (ORDERED) barrier_sync(kTurnBarrier + group, 256);
  }
  __device__ __forceinline__ void pass() const {
    if (ORDERED) barrier_arrive(kTurnBarrier + (group + 1) % kWarpgroups, 256);
  }
};

template <bool ORDERED>
__device__ __forceinline__ void attend(const Arguments& a, const Item& item, const Shared& s, int passed,
                                       const Turn<ORDERED>& turn) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, group = turn.group;
  load_query(a, item, s, group);
  const uint64_t query = swizzled_operand(s.queries + group * kQueryBytes);
  const int first = item.position(item.token + group * 8);
  const int position[2] = {first + warp * 2, first + warp * 2 + 1};
  const float sink = a.sinks[item.head * kGroup + lane / 4] * 1.4426950408889634f;
  Softmax softmax = {{sink, sink}, {lane % 4 == 0 ? 1.0f : 0.0f, lane % 4 == 0 ? 1.0f : 0.0f}, {1.0f, 1.0f}};
  float scores[64], out[32] = {};
  uint32_t probabilities[32];
  if (item.stages == 0) return store(a, item, softmax, out, group);
  // Broadcast, so that operands are described in uniform registers.
  const int before = __shfl_sync(0xFFFFFFFFu, passed, 0), stages = __shfl_sync(0xFFFFFFFFu, item.stages, 0);

  const auto soften = [&](int stage) {
    const int key = (item.first_stage + stage) * kKeys;
    if (key + kKeys > first || a.window > 0) softmax.mask(scores, key, position, a.window);
    softmax.step(scores, a.scale);
    if (key + kKeys > item.length)
      clear_unwritten(s.stage_bytes + slot_of(before + stage) * kStageBytes + 2 * kPageBytes, item.length - key, group);
  };
  const auto keys = [&](int stage) { return swizzled_operand(s.stages + slot_of(before + stage) * kStageBytes); };
  const auto values = [&](int stage) {
    return swizzled_operand(s.stages + slot_of(before + stage) * kStageBytes + 2 * kPageBytes);
  };
  const auto wait = [&](int stage) {
    mbarrier_wait(s.full + 8 * slot_of(before + stage), parity_of(before + stage));
  };
  const auto release = [&](int stage) {
    if (lane == 0) mbarrier_arrive(s.empty + 8 * slot_of(before + stage));
  };

  wait(0);
  wgmma_fence();
  multiply_keys(scores, query, keys(0));
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 64; ++i) pin(scores[i]);
  soften(0);
  pack_probabilities(scores, probabilities);
#pragma unroll 1
  for (int stage = 1; stage < stages; ++stage) {
    wait(stage);
    turn.wait();
    wgmma_fence();
    multiply_keys(scores, query, keys(stage));
    multiply_values(out, probabilities, values(stage - 1), stage > 1);
    turn.pass();
    wgmma_wait<1>();
#pragma unroll
    for (int i = 0; i < 64; ++i) pin(scores[i]);
    soften(stage);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 32; ++i) pin(out[i]);
    release(stage - 1);
    if (__any_sync(0xFFFFFFFFu, softmax.decay[0] != 1.0f || softmax.decay[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < 32; ++i) out[i] *= softmax.decay[i / 2 % 2];
    }
    pack_probabilities(scores, probabilities);
  }
  wgmma_fence();
  multiply_values(out, probabilities, values(stages - 1), stages > 1);
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < 32; ++i) pin(out[i]);
  release(stages - 1);
  store(a, item, softmax, out, group);
}

template <bool ORDERED>
__global__ void __launch_bounds__(kThreads, 1)
    prefill_attention(const __grid_constant__ Arguments a, const __grid_constant__ CUtensorMap map) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(8) uint64_t full[kStages], empty[kStages];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), kWarpgroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  grid_dependency_wait();
  uint8_t* queries = shared + kStages * kStageBytes;
  const Shared s = {shared_address(shared), shared_address(queries), shared_address(full),
                    shared_address(empty),  shared,                  queries};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == kWarpgroups) {
    give_registers<32>();
    if (threadIdx.x == kWarpgroups * 128) produce(a, map, s);
  } else {
    take_registers<160>();
    const Turn<ORDERED> turn = {group};
    turn.start();
    int passed = 0;
    bool beyond = false;
    for (int number = 0; !beyond; ++number) {
      Item item;
      if (!find_item(a, number, beyond, item)) continue;
      attend(a, item, s, passed, turn);
      passed += item.stages;
    }
  }
}

// A map of the pages of one layer: [pages, kv heads, keys | values, 64, 64] bf16, page after page `page_stride` apart.
CUresult describe(CUtensorMap& map, const void* kv, int pages, int kv_heads, long long page_stride) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found) !=
            cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
      function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (encode == nullptr) return CUDA_ERROR_NOT_FOUND;
  const cuuint64_t sizes[5] = {kDim, kPage, 2, static_cast<cuuint64_t>(kv_heads), static_cast<cuuint64_t>(pages)};
  const cuuint64_t strides[4] = {kDim * 2, kPageBytes, 2 * kPageBytes, static_cast<cuuint64_t>(page_stride) * 2};
  const cuuint32_t box[5] = {kDim, kPage, 1, 1, 1}, steps[5] = {1, 1, 1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 5, const_cast<void*>(kv), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

template <bool ORDERED>
cudaError_t start(const Arguments& a, const CUtensorMap& map, int grid, bool overlap, void* stream) {
  const cudaError_t prepared = prepare(prefill_attention<ORDERED>, kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(prefill_attention<ORDERED>, dim3(grid), dim3(kThreads), kSharedBytes,
                static_cast<cudaStream_t>(stream), overlap, a, map);
}

}  // namespace
}  // namespace antiphon::attention

extern "C" int antiphon_prefill_attention(const void* query, const void* kv, const float* sinks, const int* table,
                                          const int* query_start, const int* kv_len, void* out, int pages,
                                          int kv_heads, long long page_stride, int table_stride, int batch,
                                          int max_query_tokens, int window, float scale, int grid, int ordered,
                                          int overlap, void* stream) {
  namespace attention = antiphon::attention;
  CUtensorMap map;
  if (attention::describe(map, kv, pages, kv_heads, page_stride) != CUDA_SUCCESS) return cudaErrorInvalidValue;
  const attention::Arguments a = {static_cast<const __nv_bfloat16*>(query),
                                  static_cast<__nv_bfloat16*>(out),
                                  sinks,
                                  table,
                                  query_start,
                                  kv_len,
                                  table_stride,
                                  kv_heads,
                                  batch,
                                  (max_query_tokens + attention::kTokens - 1) / attention::kTokens,
                                  window,
                                  scale * 1.4426950408889634f};
  const auto start = ordered ? attention::start<true> : attention::start<false>;
  return start(a, map, grid, overlap != 0, stream);
}
