// MXFP4 grouped GEMM for small token counts: a persistent kernel that streams 4-bit weights once.
//
// A bf16 activation, scaled by a power of two, is split exactly into the sum of two e4m3 numbers (4 + 4
// significant bits), and an FP4 weight is an e4m3 number, so FP8 tensor-core products lose nothing. The block
// scale of the weights multiplies the partial sum of its 32 columns in float32. That costs ten integer
// operations per 16 x 32 weights and warp, and the operand that is shared by all rows, the activations, is
// read by the tensor core from shared memory.
//
// One block per SM: a producer thread keeps a ring of shared-memory stages full with bulk copies; three
// consumer warpgroups each take a third of K. Work is an ordered list of items (token tile, 64 weight rows,
// K slice) cut into equal contiguous runs, one per block, so a block changes its token tile rarely.

#include "hopper.cuh"

namespace antiphon {
namespace {

constexpr int kDim = 2880;          // columns of both projections
constexpr int kBlocks = kDim / 32;  // MXFP4 blocks per row
constexpr int kTileRows = 64;
constexpr int kStageBlocks = 6;
constexpr int kStages = kBlocks / kStageBlocks;  // 15 per row tile
constexpr int kStageWeightBytes = kStageBlocks * kTileRows * 16;
constexpr int kStageBytes = kStageWeightBytes + kStageBlocks * kTileRows;  // weights, then scales
constexpr int kGroups = 3;                                                // consumer warpgroups
constexpr int kConsumers = kGroups * 128;
constexpr int kThreads = kConsumers + 32;
constexpr int kChunk = 8;  // activation elements per thread and token; 360 threads cover a token
constexpr int kSharedLimit = 232448;

// Names of the hardware barriers; 0 is __syncthreads().
constexpr int kActivationBarrier = 1;
constexpr int kReducedBarrier = 2;   // + buffer
constexpr int kReleasedBarrier = 4;  // + buffer

template <int N>
struct Geometry {
  static constexpr int kActivationBytes = kDim * N;  // of the high or the low halves
  static constexpr int kReduceBuffers = N <= 16 ? 2 : 1;
  static constexpr int kReduceFloats = kTileRows * N;  // one warpgroup's partial sums
  static constexpr int kReduceBytes = kReduceBuffers * (kGroups - 1) * kReduceFloats * 4;
  static constexpr int kFixedBytes = 2 * kActivationBytes + kReduceBytes + 1024;
  static constexpr int kDepth = (kSharedLimit - kFixedBytes) / (kStageBytes * kGroups);  // stages a warpgroup
  static constexpr int kSlots = kDepth * kGroups;
  static constexpr int kSharedBytes = kFixedBytes + kSlots * kStageBytes;
  static constexpr int kBatch = N <= 16 ? kStageBlocks : 3;  // blocks in flight between two waits
};

struct Arguments {
  const uint8_t* weights;           // [experts, row_tiles, kStages, kStageBytes]
  const __nv_bfloat16* bias;        // [experts, row_tiles * 64]
  const __nv_bfloat16* activation;  // [*, kDim]
  const int* order;                 // [pairs] pair of each slot, grouped by expert
  const int4* tiles;                // {local expert, first slot, slots, unused}
  const int* tile_count;
  const __nv_bfloat16* pair_weight;  // [pairs]
  void* out;
  int pairs;
  int top_k;
  int row_tiles;
  int splits;  // K slices that become separate items: 1 or 5
};

struct Item {
  int tile, row_tile, slice;
};

__device__ __forceinline__ Item item_at(const Arguments& a, int index) {
  const int per_tile = a.row_tiles * a.splits;
  const int tile = index / per_tile;
  const int rest = index - tile * per_tile;
  const int row_tile = rest / a.splits;
  return {tile, row_tile, rest - row_tile * a.splits};
}

// Two registers of four e4m3 bytes out of eight packed FP4 codes. Per byte, bits 7 4 3 2 are sign, exponent
// and mantissa of the first value where e4m3 wants them; bits 5 6 1 0 are those of the second. The value read
// as e4m3 is 2^-6 of the FP4 value (FP4's exponent bias is 1, e4m3's is 7; the subnormals agree as well).
__device__ __forceinline__ void expand(uint32_t packed, uint32_t& first, uint32_t& second) {
  first = packed & 0x9C9C9C9Cu;
  second = ((packed << 2) & 0x8C8C8C8Cu) | ((packed >> 2) & 0x10101010u);
}

// Per-token facts of the current tile, written by load_tokens and read by the epilogue.
struct TokenTable {
  uint32_t peak[24];
  float scale[24];   // multiplies the accumulated sum
  int slot_or_pair[24];
  float weight[24];
};

// Reads the tile's activations, splits them into e4m3 high and low parts and lays them out for wgmma:
// [90 blocks][2 halves of 16 columns][N tokens][16 bytes]. Tokens beyond the count are left as they are: they
// only reach columns that nobody reads.
template <int N, bool GATHER>
__device__ __forceinline__ void load_tokens(const Arguments& a, int4 tile, uint8_t* high, uint8_t* low,
                                            TokenTable& table) {
  const int thread = threadIdx.x;
  barrier_sync(kActivationBarrier, kConsumers);  // the previous tile is no longer read
  if (thread < N) {
    table.peak[thread] = 0;
    if (thread < tile.z) {
      const int slot = tile.y + thread;
      const int pair = a.order[slot];
      table.slot_or_pair[thread] = GATHER ? slot : pair;
      table.weight[thread] = GATHER ? 0.0f : __bfloat162float(a.pair_weight[pair]);
    }
  }
  barrier_sync(kActivationBarrier, kConsumers);
  constexpr int kAtOnce = 8;
#pragma unroll 1
  for (int base = 0; base < tile.z; base += kAtOnce) {
    uint4 raw[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      raw[j] = make_uint4(0, 0, 0, 0);
      if (base + j < tile.z && thread < kDim / kChunk) {
        const int slot = tile.y + base + j;
        const int row = GATHER ? a.order[slot] / a.top_k : slot;
        raw[j] = *reinterpret_cast<const uint4*>(a.activation + static_cast<size_t>(row) * kDim + thread * kChunk);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
      uint32_t peak = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) peak = max(peak, max((words[i] << 16) & 0x7FFF0000u, words[i] & 0x7FFF0000u));
      peak = __reduce_max_sync(0xFFFFFFFFu, peak);
      if (thread % 32 == 0 && base + j < tile.z) atomicMax(&table.peak[base + j], peak);
    }
    barrier_sync(kActivationBarrier, kConsumers);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int n = base + j;
      if (n >= tile.z) break;
      // The largest magnitude lands in [128, 256): 448 is e4m3's largest number.
      const int exponent = static_cast<int>(table.peak[n] >> 23);
      const int shift = min(134 - exponent + 127, 254);  // biased exponent of the factor 2^p
      const float factor = __uint_as_float(static_cast<uint32_t>(shift) << 23);
      if (thread == 0) table.scale[n] = __uint_as_float(static_cast<uint32_t>(254 + 6 - shift) << 23);  // 2^(6-p)
      if (thread < kDim / kChunk) {
        const uint32_t words[4] = {raw[j].x, raw[j].y, raw[j].z, raw[j].w};
        uint32_t high_words[2] = {0, 0}, low_words[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 value = make_float2(__uint_as_float(words[i] << 16) * factor,
                                           __uint_as_float(words[i] & 0xFFFF0000u) * factor);
          const __nv_fp8x2_storage_t upper = __nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3);
          const __half2 back = __half2(__nv_cvt_fp8x2_to_halfraw2(upper, __NV_E4M3));
          const float2 rounded = __half22float2(back);
          const __nv_fp8x2_storage_t rest = __nv_cvt_float2_to_fp8x2(
              make_float2(value.x - rounded.x, value.y - rounded.y), __NV_SATFINITE, __NV_E4M3);
          high_words[i / 2] |= static_cast<uint32_t>(upper) << (16 * (i % 2));
          low_words[i / 2] |= static_cast<uint32_t>(rest) << (16 * (i % 2));
        }
        const int half_block = thread / 2;  // 16 columns
        const int offset = half_block * (N * 16) + n * 16 + (thread % 2) * 8;
        *reinterpret_cast<uint2*>(high + offset) = make_uint2(high_words[0], high_words[1]);
        *reinterpret_cast<uint2*>(low + offset) = make_uint2(low_words[0], low_words[1]);
      }
    }
  }
  fence_async_proxy();
  barrier_sync(kActivationBarrier, kConsumers);
}

// One stage: 64 rows x 192 columns times N tokens, added to acc.
template <int N>
__device__ __forceinline__ void multiply_stage(const uint4 (&packed)[3], const uint32_t (&scales)[3],
                                               uint32_t high, uint32_t low, float (&acc)[N / 8][4]) {
  constexpr int kBatch = Geometry<N>::kBatch;
  constexpr uint32_t kBlockStep = 2 * N;  // in units of 16 bytes
  const uint64_t high_operand = wgmma_descriptor(high, N * 16, 128);
  const uint64_t low_operand = wgmma_descriptor(low, N * 16, 128);
#pragma unroll
  for (int begin = 0; begin < kStageBlocks; begin += kBatch) {
    uint32_t a[kBatch][4];
    float part[kBatch][N / 8][4];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int block = begin + i;
      const uint4 words = packed[block / 2];
      expand(block % 2 ? words.z : words.x, a[i][0], a[i][1]);
      expand(block % 2 ? words.w : words.y, a[i][2], a[i][3]);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      wgmma_e4m3<N, 0>(part[i], a[i], high_operand + (begin + i) * kBlockStep);
      wgmma_e4m3<N, 1>(part[i], a[i], low_operand + (begin + i) * kBlockStep);
    }
    wgmma_commit();
    wgmma_wait_all();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int block = begin + i;
      const uint32_t word = scales[block / 2];
      const float upper = __uint_as_float((block % 2 ? word << 7 : word << 23) & 0x7F800000u);
      const float lower = __uint_as_float((block % 2 ? word >> 1 : word << 15) & 0x7F800000u);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          pin(part[i][j][c]);
          acc[j][c] = fmaf(part[i][j][c], c < 2 ? upper : lower, acc[j][c]);
        }
      }
    }
  }
}

__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  gate = fminf(gate, 7.0f);
  up = fminf(fmaxf(up, -7.0f), 7.0f);
  return gate / (1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
}

// GATED: first projection, activations gathered by token, SwiGLU, bf16 out [slots, 2880].
// Otherwise: second projection, activations by slot, routing weight, float32 out [splits, pairs, 2880].
template <int N, bool GATED>
__device__ __forceinline__ void store_tile(const Arguments& a, const float (&acc)[N / 8][4], int4 tile, Item item,
                                           float2 bias, const TokenTable& table) {
  const int warp = (threadIdx.x % 128) / 32, g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int n = 8 * j + 2 * t + c;
      if (n >= tile.z) continue;
      const float scale = table.scale[n];
      const float upper = acc[j][c] * scale + bias.x, lower = acc[j][c + 2] * scale + bias.y;
      if constexpr (GATED) {
        const size_t row = table.slot_or_pair[n];
        auto* out = static_cast<__nv_bfloat16*>(a.out) + row * kDim + item.row_tile * 32 + warp * 8 + g;
        *out = __float2bfloat16_rn(clamped_swiglu(upper, lower));
      } else {
        const size_t row = static_cast<size_t>(item.slice) * a.pairs + table.slot_or_pair[n];
        float* out = static_cast<float*>(a.out) + row * kDim + item.row_tile * 64 + warp * 16 + g;
        out[0] = table.weight[n] * upper;
        out[8] = table.weight[n] * lower;
      }
    }
  }
}

template <int N, bool GATED>
__global__ void __launch_bounds__(kThreads, 1) stream_gemm(const __grid_constant__ Arguments a) {
  using G = Geometry<N>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* ring = shared;
  uint8_t* high = ring + G::kSlots * kStageBytes;
  uint8_t* low = high + G::kActivationBytes;
  float* reduce = reinterpret_cast<float*>(low + G::kActivationBytes);
  __shared__ __align__(8) uint64_t full[G::kSlots], empty[G::kSlots];
  __shared__ TokenTable table;

  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // uniform, and known to be
  if (threadIdx.x == 0) {
    for (int i = 0; i < G::kSlots; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  // The routing that the first projection reads comes from its predecessor. When the second projection runs,
  // the first has passed this wait, so its routing is complete: only its activations must be waited for, and
  // its weights can start to stream before.
  if (GATED) grid_dependency_wait();
  const int total = *a.tile_count * a.row_tiles * a.splits;
  const int first = static_cast<int>(static_cast<long long>(total) * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(static_cast<long long>(total) * (blockIdx.x + 1) / gridDim.x);
  const int item_stages = kStages / a.splits, group_stages = item_stages / kGroups;

  if (group == kGroups) {  // producer
    if (threadIdx.x % 32 != 0) return;
    int depth = 0;
    uint32_t parity = 1;  // a fresh barrier passes the wait for the phase before its first
    for (int index = first; index < last; ++index) {
      const Item item = item_at(a, index);
      const size_t row_tile = static_cast<size_t>(a.tiles[item.tile].x) * a.row_tiles + item.row_tile;
      const uint8_t* source = a.weights + (row_tile * kStages + item.slice * item_stages) * kStageBytes;
      for (int s = 0; s < group_stages; ++s) {
        for (int w = 0; w < kGroups; ++w) {
          const int slot = depth * kGroups + w;
          mbarrier_wait(shared_address(&empty[slot]), parity);
          mbarrier_expect(shared_address(&full[slot]), kStageBytes);
          bulk_copy(shared_address(ring + slot * kStageBytes), source + (w * group_stages + s) * kStageBytes,
                    kStageBytes, shared_address(&full[slot]));
        }
        if (++depth == G::kDepth) {
          depth = 0;
          parity ^= 1;
        }
      }
    }
    return;
  }

  if (!GATED) grid_dependency_wait();
  if (threadIdx.x == 0) grid_dependency_trigger();
  const int lane = threadIdx.x % 32, warp = (threadIdx.x % 128) / 32, g = lane / 4;
  int depth = 0, loaded_tile = -1;
  uint32_t parity = 0;
  int4 tile = make_int4(0, 0, 0, 0);
  for (int index = first; index < last; ++index) {
    const Item item = item_at(a, index);
    if (item.tile != loaded_tile) {
      loaded_tile = item.tile;
      tile = a.tiles[loaded_tile];
      load_tokens<N, GATED>(a, tile, high, low, table);
    }
    float2 bias = make_float2(0.0f, 0.0f);
    if (group == 0 && item.slice == 0) {  // early, so that the epilogue does not wait for memory
      const int row = item.row_tile * kTileRows + warp * 16 + (GATED ? 2 * g : g);
      const __nv_bfloat16* source = a.bias + static_cast<size_t>(tile.x) * a.row_tiles * kTileRows + row;
      bias = make_float2(__bfloat162float(source[0]), __bfloat162float(source[GATED ? 1 : 8]));
    }
    float acc[N / 8][4] = {};
    for (int s = 0; s < group_stages; ++s) {
      const int slot = depth * kGroups + group;
      const uint8_t* stage = ring + slot * kStageBytes;
      mbarrier_wait(shared_address(&full[slot]), parity);
      uint4 packed[3];
      uint32_t scales[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        packed[i] = *reinterpret_cast<const uint4*>(stage + ((i * 4 + warp) * 32 + lane) * 16);
        scales[i] = *reinterpret_cast<const uint32_t*>(stage + kStageWeightBytes + (warp * 8 + g) * 12 + i * 4);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared_address(&empty[slot]));
      const int k_stage = item.slice * item_stages + group * group_stages + s;
      const uint32_t offset = k_stage * kStageBlocks * (2 * N * 16);
      multiply_stage<N>(packed, scales, shared_address(high) + offset, shared_address(low) + offset, acc);
      if (++depth == G::kDepth) {
        depth = 0;
        parity ^= 1;
      }
    }
    // Sum of the three thirds of K, always in the order 0, 1, 2.
    const int done = index - first, buffer = done % G::kReduceBuffers, thread = threadIdx.x % 128;
    float* partial = reduce + buffer * (kGroups - 1) * G::kReduceFloats;
    if (group != 0) {
      if (done >= G::kReduceBuffers) barrier_sync(kReleasedBarrier + buffer, kConsumers);
      float* mine = partial + (group - 1) * G::kReduceFloats;
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) mine[(j * 4 + c) * 128 + thread] = acc[j][c];
      }
      barrier_arrive(kReducedBarrier + buffer, kConsumers);
    } else {
      barrier_sync(kReducedBarrier + buffer, kConsumers);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int at = (j * 4 + c) * 128 + thread;
          acc[j][c] = (acc[j][c] + partial[at]) + partial[G::kReduceFloats + at];
        }
      }
      if (index + G::kReduceBuffers < last) barrier_arrive(kReleasedBarrier + buffer, kConsumers);
      store_tile<N, GATED>(a, acc, tile, item, bias, table);
    }
  }
}

template <int N, bool GATED>
cudaError_t start(const Arguments& a, int grid, cudaStream_t stream, bool overlap) {
  static const cudaError_t prepared = cudaFuncSetAttribute(
      stream_gemm<N, GATED>, cudaFuncAttributeMaxDynamicSharedMemorySize, Geometry<N>::kSharedBytes - 1024);
  if (prepared != cudaSuccess) return prepared;
  return launch(stream_gemm<N, GATED>, dim3(grid), dim3(kThreads), Geometry<N>::kSharedBytes - 1024, stream, overlap,
                a);
}

template <bool GATED>
cudaError_t start(int token_tile, const Arguments& a, int grid, cudaStream_t stream, bool overlap) {
  switch (token_tile) {
    case 8: return start<8, GATED>(a, grid, stream, overlap);
    case 16: return start<16, GATED>(a, grid, stream, overlap);
    case 24: return start<24, GATED>(a, grid, stream, overlap);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon

// hidden[slot, 2880] = swiglu(gate_up[expert] x[token] + bias), bf16.
extern "C" int antiphon_moe_gate_up(const void* weights, const void* bias, const void* x, const int* order,
                                    const void* tiles, const int* tile_count, void* hidden, int pairs, int top_k,
                                    int token_tile, int grid, int overlap, void* stream) {
  const antiphon::Arguments a = {static_cast<const uint8_t*>(weights),
                                 static_cast<const __nv_bfloat16*>(bias),
                                 static_cast<const __nv_bfloat16*>(x),
                                 order,
                                 static_cast<const int4*>(tiles),
                                 tile_count,
                                 nullptr,
                                 hidden,
                                 pairs,
                                 top_k,
                                 2 * antiphon::kDim / antiphon::kTileRows,
                                 1};
  return antiphon::start<true>(token_tile, a, grid, static_cast<cudaStream_t>(stream), overlap != 0);
}

// partial[split, pair, 2880] = weight[pair] * (down[expert] hidden[slot] + bias), float32; the bias is in split 0.
extern "C" int antiphon_moe_down(const void* weights, const void* bias, const void* hidden, const int* order,
                                 const void* tiles, const int* tile_count, const void* pair_weight, float* partial,
                                 int pairs, int splits, int token_tile, int grid, int overlap, void* stream) {
  if (splits != 1 && splits != 5) return cudaErrorInvalidValue;
  const antiphon::Arguments a = {static_cast<const uint8_t*>(weights),
                                 static_cast<const __nv_bfloat16*>(bias),
                                 static_cast<const __nv_bfloat16*>(hidden),
                                 order,
                                 static_cast<const int4*>(tiles),
                                 tile_count,
                                 static_cast<const __nv_bfloat16*>(pair_weight),
                                 partial,
                                 pairs,
                                 1,
                                 antiphon::kDim / antiphon::kTileRows,
                                 splits};
  return antiphon::start<false>(token_tile, a, grid, static_cast<cudaStream_t>(stream), overlap != 0);
}
