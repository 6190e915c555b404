// MXFP4 grouped GEMM for small token counts: a persistent kernel that streams 4-bit weights once.
//
// A bf16 activation, scaled by a power of two, is split exactly into the sum of two e4m3 numbers (4 + 4
// significant bits), and an FP4 weight is an e4m3 number, so FP8 tensor-core products lose nothing. The block
// scale of the weights multiplies the partial sum of its 32 columns in float32. That costs ten integer
// operations per 16 x 32 weights and warp, and the operand that is shared by all rows, the activations, is
// read by the tensor core from shared memory.
//
// One block per SM: a producer thread keeps a ring of shared-memory stages full with bulk copies; three or five
// consumer warpgroups each take an equal part of K. Work is an ordered list of items (token tile, 64 weight rows)
// cut into equal contiguous runs, one per block, so a block changes its token tile rarely.

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
constexpr int kChunk = 8;  // activation elements per thread and token; 360 threads cover a token
constexpr int kSharedLimit = 232448;
constexpr int kStaticBytes = 1024;  // barriers and the token table

// Names of the hardware barriers; 0 is __syncthreads().
constexpr int kActivationBarrier = 1;
constexpr int kReducedBarrier = 2;   // + buffer
constexpr int kReleasedBarrier = 4;  // + buffer

// What was measured best for a tile of TOKENS tokens.
// kGroups: consumer warpgroups, each takes 1 / kGroups of K (3 or 5).
// kBatch: blocks whose products are in flight between two waits.
// kSideBySide: high and low parts are columns of one product; otherwise two products add up in place.
template <int TOKENS>
struct Tuning;
#ifndef ANTIPHON_TUNE_4
#define ANTIPHON_TUNE_4 561
#endif
#ifndef ANTIPHON_TUNE_8
#define ANTIPHON_TUNE_8 531
#endif
#ifndef ANTIPHON_TUNE_16
#define ANTIPHON_TUNE_16 530
#endif
#ifndef ANTIPHON_TUNE_24
#define ANTIPHON_TUNE_24 330
#endif
template <int CODE>
struct TuningOf {
  static constexpr int kGroups = CODE / 100;
  static constexpr int kBatch = CODE / 10 % 10;
  static constexpr bool kSideBySide = CODE % 10 == 1;
};
template <>
struct Tuning<4> : TuningOf<ANTIPHON_TUNE_4> {};
template <>
struct Tuning<8> : TuningOf<ANTIPHON_TUNE_8> {};
template <>
struct Tuning<16> : TuningOf<ANTIPHON_TUNE_16> {};
template <>
struct Tuning<24> : TuningOf<ANTIPHON_TUNE_24> {};

template <int TOKENS>
struct Geometry : Tuning<TOKENS> {
  using Tuning<TOKENS>::kGroups;
  using Tuning<TOKENS>::kSideBySide;
  static constexpr int kConsumers = kGroups * 128;
  static constexpr int kThreads = kConsumers + 32;
  static constexpr int kRows = kSideBySide ? 2 * TOKENS : TOKENS;  // columns of a product
  static constexpr int kWidth = TOKENS < 8 ? 8 : TOKENS;           // columns after high and low are added
  static constexpr int kActivationBytes = 2 * kDim * TOKENS;
  // High and low parts of a token: rows of the same core matrices, or of two regions.
  static constexpr int kLowOffset = kSideBySide ? TOKENS * 16 : kDim * TOKENS;
  static constexpr int kReduceBuffers = TOKENS <= 8 ? 2 : 1;
  static constexpr int kReduceFloats = kTileRows * kWidth;  // one warpgroup's partial sums
  static constexpr int kReduceBytes = kReduceBuffers * (kGroups - 1) * kReduceFloats * 4;
  static constexpr int kFixedBytes = kActivationBytes + kReduceBytes + kStaticBytes;
  static constexpr int kDepth = (kSharedLimit - kFixedBytes) / (kStageBytes * kGroups);  // stages a warpgroup
  static constexpr int kSlots = kDepth * kGroups;
  static constexpr int kDynamicBytes = kActivationBytes + kReduceBytes + kSlots * kStageBytes;
  static_assert(kDepth >= 1 && kRows % 8 == 0 && kStageBlocks % Tuning<TOKENS>::kBatch == 0 && kStages % kGroups == 0);
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
  int top_k;
  int row_tiles;
};

struct Item {
  int tile, row_tile;
};

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
// [90 blocks][2 halves of 16 columns][rows][16 bytes]. Tokens beyond the count are left as they are: they only
// reach columns that nobody reads.
template <int TOKENS, bool GATHER>
__device__ __forceinline__ void load_tokens(const Arguments& a, int4 tile, uint8_t* high, TokenTable& table) {
  using G = Geometry<TOKENS>;
  constexpr int kConsumers = G::kConsumers;
  const int thread = threadIdx.x;
  barrier_sync(kActivationBarrier, kConsumers);  // the previous tile is no longer read
  if (thread < TOKENS) {
    table.peak[thread] = 0;
    if (thread < tile.z) {
      const int slot = tile.y + thread;
      const int pair = a.order[slot];
      table.slot_or_pair[thread] = GATHER ? slot : pair;
      table.weight[thread] = GATHER ? 0.0f : __bfloat162float(a.pair_weight[pair]);
    }
  }
  grid_dependency_wait();  // the activations come from the predecessor; returns at once after the first time
  barrier_sync(kActivationBarrier, kConsumers);
  constexpr int kAtOnce = TOKENS < 8 ? TOKENS : 8;
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
        uint8_t* place = high + half_block * (G::kRows * 16) + n * 16 + (thread % 2) * 8;
        *reinterpret_cast<uint2*>(place) = make_uint2(high_words[0], high_words[1]);
        *reinterpret_cast<uint2*>(place + G::kLowOffset) = make_uint2(low_words[0], low_words[1]);
      }
    }
  }
  fence_async_proxy();
  barrier_sync(kActivationBarrier, kConsumers);
}

// One stage: 64 rows x 192 columns times the tile's tokens, added to acc. `activations` is the stage's first block.
template <int TOKENS>
__device__ __forceinline__ void multiply_stage(const uint4 (&packed)[3], const uint32_t (&scales)[3],
                                               uint32_t activations, float (&acc)[Geometry<TOKENS>::kRows / 8][4]) {
  using G = Geometry<TOKENS>;
  constexpr int kBatch = G::kBatch, kRows = G::kRows;
  constexpr uint32_t kBlockStep = 2 * kRows;  // in units of 16 bytes
  const uint64_t operand = wgmma_descriptor(activations, kRows * 16, 128);
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
    }
#ifndef ANTIPHON_NO_PIN
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int r = 0; r < 4; ++r) pin(a[i][r]);
    }
#endif
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      wgmma_e4m3<kRows, 0>(part[i], a[i], operand + (begin + i) * kBlockStep);
      if constexpr (!G::kSideBySide)
        wgmma_e4m3<kRows, 1>(part[i], a[i], operand + (begin + i) * kBlockStep + G::kLowOffset / 16);
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

// Adds the products of the high and the low parts where they are different columns.
template <int TOKENS>
__device__ __forceinline__ void add_parts(const float (&acc)[Geometry<TOKENS>::kRows / 8][4],
                                          float (&sum)[Geometry<TOKENS>::kWidth / 8][4]) {
#pragma unroll
  for (int j = 0; j < Geometry<TOKENS>::kWidth / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if constexpr (!Geometry<TOKENS>::kSideBySide) {
        sum[j][c] = acc[j][c];
      } else if constexpr (TOKENS == 4) {  // columns 0..3 and 4..7: two lanes apart
        sum[j][c] = acc[j][c] + __shfl_xor_sync(0xFFFFFFFFu, acc[j][c], 2);
      } else {
        sum[j][c] = acc[j][c] + acc[j + TOKENS / 8][c];
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
// Otherwise: second projection, activations by slot, routing weight, float32 out [pairs, 2880].
template <int WIDTH, bool GATED>
__device__ __forceinline__ void store_tile(const Arguments& a, const float (&acc)[WIDTH / 8][4], int4 tile, Item item,
                                           float2 bias, const TokenTable& table) {
  const int warp = (threadIdx.x % 128) / 32, g = (threadIdx.x % 32) / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int j = 0; j < WIDTH / 8; ++j) {
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
        const size_t row = table.slot_or_pair[n];
        float* out = static_cast<float*>(a.out) + row * kDim + item.row_tile * 64 + warp * 16 + g;
        out[0] = table.weight[n] * upper;
        out[8] = table.weight[n] * lower;
      }
    }
  }
}

// Sum over the warpgroups' parts of K, always in the order 0, 1, 2, ...; true in the warpgroup that holds it.
template <int TOKENS>
__device__ __forceinline__ bool reduce_groups(float (&sum)[Geometry<TOKENS>::kWidth / 8][4], float* reduce, int group,
                                              int buffer, bool written_before, bool written_again) {
  using G = Geometry<TOKENS>;
  float* partial = reduce + buffer * (G::kGroups - 1) * G::kReduceFloats + threadIdx.x % 128;
  if (group != 0) {
    if (written_before) barrier_sync(kReleasedBarrier + buffer, G::kConsumers);
    float* mine = partial + (group - 1) * G::kReduceFloats;
#pragma unroll
    for (int j = 0; j < G::kWidth / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) mine[(j * 4 + c) * 128] = sum[j][c];
    }
    barrier_arrive(kReducedBarrier + buffer, G::kConsumers);
    return false;
  }
  barrier_sync(kReducedBarrier + buffer, G::kConsumers);
#pragma unroll
  for (int j = 0; j < G::kWidth / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int other = 0; other < G::kGroups - 1; ++other)
        sum[j][c] += partial[other * G::kReduceFloats + (j * 4 + c) * 128];
    }
  }
  if (written_again) barrier_arrive(kReleasedBarrier + buffer, G::kConsumers);
  return true;
}

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
  __device__ __forceinline__ void fill(int group, const uint8_t* source) const {
    const int slot = index(group);
    mbarrier_wait(empty + 8 * slot, (turn & 1) ^ 1);  // a fresh barrier passes the wait for the turn before its first
    mbarrier_expect(full + 8 * slot, kStageBytes);
    bulk_copy(stages + slot * kStageBytes, source, kStageBytes, full + 8 * slot);
  }
  __device__ __forceinline__ void wait_full(int group) const { mbarrier_wait(full + 8 * index(group), turn & 1); }
  __device__ __forceinline__ void release(int group) const { mbarrier_arrive(empty + 8 * index(group)); }
};

template <int TOKENS, bool GATED>
__global__ void __launch_bounds__(Geometry<TOKENS>::kThreads, 1)
    stream_gemm(const __grid_constant__ Arguments a) {
  using G = Geometry<TOKENS>;
  constexpr int kGroups = G::kGroups, kGroupStages = kStages / kGroups, kBlockBytes = 2 * G::kRows * 16;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* ring = shared;
  uint8_t* activations = ring + G::kSlots * kStageBytes;
  float* reduce = reinterpret_cast<float*>(activations + G::kActivationBytes);
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
  const int total = *a.tile_count * a.row_tiles;
  const int first = static_cast<int>(static_cast<long long>(total) * blockIdx.x / gridDim.x);
  const int last = static_cast<int>(static_cast<long long>(total) * (blockIdx.x + 1) / gridDim.x);

  if (group == kGroups) {
    if (threadIdx.x % 32 == 0) {
      Ring<TOKENS> slots = {shared_address(ring), shared_address(full), shared_address(empty)};
      for (int index = first; index < last; ++index) {
        const Item item = {index / a.row_tiles, index % a.row_tiles};
        const size_t row_tile = static_cast<size_t>(a.tiles[item.tile].x) * a.row_tiles + item.row_tile;
        const uint8_t* source = a.weights + row_tile * kStages * kStageBytes;
        for (int s = 0; s < kGroupStages; ++s) {
          for (int w = 0; w < kGroups; ++w) slots.fill(w, source + (w * kGroupStages + s) * kStageBytes);
          slots.advance();
        }
      }
    }
    return;
  }

  if (first == last) {  // even so, this kernel must not finish before its predecessor
    grid_dependency_wait();
    return;
  }
  const int lane = threadIdx.x % 32, warp = (threadIdx.x % 128) / 32, g = lane / 4;
  Ring<TOKENS> slots = {shared_address(ring), shared_address(full), shared_address(empty)};
  int loaded_tile = -1;
  int4 tile = make_int4(0, 0, 0, 0);
  for (int index = first; index < last; ++index) {
    const Item item = {index / a.row_tiles, index % a.row_tiles};
    if (item.tile != loaded_tile) {
      loaded_tile = item.tile;
      tile = a.tiles[loaded_tile];
      load_tokens<TOKENS, GATED>(a, tile, activations, table);
      if (threadIdx.x == 0 && index == first) grid_dependency_trigger();
    }
    float2 bias = make_float2(0.0f, 0.0f);
    if (group == 0) {  // early, so that the epilogue does not wait for memory
      const int row = item.row_tile * kTileRows + warp * 16 + (GATED ? 2 * g : g);
      const __nv_bfloat16* source = a.bias + static_cast<size_t>(tile.x) * a.row_tiles * kTileRows + row;
      bias = make_float2(__bfloat162float(source[0]), __bfloat162float(source[GATED ? 1 : 8]));
    }
    float acc[G::kRows / 8][4] = {};
    for (int s = 0; s < kGroupStages; ++s) {
      slots.wait_full(group);
      const uint8_t* stage = ring + slots.index(group) * kStageBytes;
      uint4 packed[3];
      uint32_t scales[3];
#pragma unroll
      for (int i = 0; i < 3; ++i) {
        packed[i] = *reinterpret_cast<const uint4*>(stage + ((i * 4 + warp) * 32 + lane) * 16);
        scales[i] = *reinterpret_cast<const uint32_t*>(stage + kStageWeightBytes + (warp * 8 + g) * 12 + i * 4);
      }
      __syncwarp();
      if (lane == 0) slots.release(group);
      slots.advance();
      const int block = (group * kGroupStages + s) * kStageBlocks;
      multiply_stage<TOKENS>(packed, scales, shared_address(activations) + block * kBlockBytes, acc);
    }
    float sum[G::kWidth / 8][4];
    add_parts<TOKENS>(acc, sum);
    const int done = index - first, buffer = done % G::kReduceBuffers;
    const bool written_before = done >= G::kReduceBuffers, written_again = index + G::kReduceBuffers < last;
    if (reduce_groups<TOKENS>(sum, reduce, group, buffer, written_before, written_again))
      store_tile<G::kWidth, GATED>(a, sum, tile, item, bias, table);
  }
}

template <int TOKENS, bool GATED>
cudaError_t start(const Arguments& a, int grid, cudaStream_t stream, bool overlap) {
  using G = Geometry<TOKENS>;
  static const cudaError_t prepared = cudaFuncSetAttribute(
      stream_gemm<TOKENS, GATED>, cudaFuncAttributeMaxDynamicSharedMemorySize, G::kDynamicBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(stream_gemm<TOKENS, GATED>, dim3(grid), dim3(G::kThreads), G::kDynamicBytes, stream, overlap, a);
}

template <bool GATED>
cudaError_t start(int token_tile, const Arguments& a, int grid, cudaStream_t stream, bool overlap) {
  switch (token_tile) {
    case 4: return start<4, GATED>(a, grid, stream, overlap);
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
                                    const void* tiles, const int* tile_count, void* hidden, int top_k,
                                    int token_tile, int grid, int overlap, void* stream) {
  const antiphon::Arguments a = {static_cast<const uint8_t*>(weights),
                                 static_cast<const __nv_bfloat16*>(bias),
                                 static_cast<const __nv_bfloat16*>(x),
                                 order,
                                 static_cast<const int4*>(tiles),
                                 tile_count,
                                 nullptr,
                                 hidden,
                                 top_k,
                                 2 * antiphon::kDim / antiphon::kTileRows};
  return antiphon::start<true>(token_tile, a, grid, static_cast<cudaStream_t>(stream), overlap != 0);
}

// partial[pair, 2880] = weight[pair] * (down[expert] hidden[slot] + bias), float32.
extern "C" int antiphon_moe_down(const void* weights, const void* bias, const void* hidden, const int* order,
                                 const void* tiles, const int* tile_count, const void* pair_weight, float* partial,
                                 int token_tile, int grid, int overlap, void* stream) {
  const antiphon::Arguments a = {static_cast<const uint8_t*>(weights),
                                 static_cast<const __nv_bfloat16*>(bias),
                                 static_cast<const __nv_bfloat16*>(hidden),
                                 order,
                                 static_cast<const int4*>(tiles),
                                 tile_count,
                                 static_cast<const __nv_bfloat16*>(pair_weight),
                                 partial,
                                 1,
                                 antiphon::kDim / antiphon::kTileRows};
  return antiphon::start<false>(token_tile, a, grid, static_cast<cudaStream_t>(stream), overlap != 0);
}
