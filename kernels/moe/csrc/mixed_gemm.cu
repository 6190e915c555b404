// Grouped GEMM of a chunk of tokens: MXFP4 weights as the streaming kernel stores them, widened to e4m3 in registers,
// times e4m3 activations with one scale a token; float32 sums in the tensor core.
//
// A weight row has one exponent and a token one scale, so the sums over all 2880 columns stay in the accumulators and
// both factors meet them once, in the epilogue. The first projection's epilogue adds the bias, applies the clamped
// SwiGLU and writes the second projection's e4m3 operand in place; the second's adds the bias inside the routing weight.
//
// Weight rows are the M of the products, tokens the N: the weights need no shared memory beyond their packed bytes.
// Persistent blocks of 128 weight rows x up to 256 tokens. Two producer threads (activations, weights) and two consumer
// warpgroups of 64 rows each, which widen the next 64 columns while the tensor core works on the last.

#include "fp8_layout.cuh"
#include "register_widen.cuh"
#include "wgmma_registers.cuh"

namespace antiphon::mixed {
namespace {

using fp8::kDim;
using fp8::kTileBytes;
using fp8::kTileRows;
using fp8::kTilesK;
using fp8::swizzled;
using fp8::TokenTile;

constexpr int kGroups = 2;                   // consumer warpgroups
constexpr int kThreads = (kGroups + 1) * 128;
constexpr int kPairs = kDim / 64;            // pairs of MXFP4 blocks in a row
constexpr int kStagePairs = 3;               // of the streamed format: stages of 192 columns
constexpr int kStages = kPairs / kStagePairs;
constexpr int kStageWeightBytes = kStagePairs * 2048;
constexpr int kStageBytes = kStageWeightBytes + kStagePairs * 128;
constexpr int kTokenSlots = 4;
constexpr int kWeightSlots = 6;
constexpr int kSlotBytes = kGroups * kStageBytes;
constexpr int kSharedBytes = kTokenSlots * kTileBytes + kWeightSlots * kSlotBytes;

struct Arguments {
  const uint8_t* activations;  // [tiles, 23, kTileBytes]
  const uint8_t* weights;      // [experts, row_tiles, kStages, kStageBytes]
  const uint8_t* tops;         // [experts, row_tiles * 64] the largest scale of each row
  const __nv_bfloat16* bias;   // [experts, row_tiles * 64]
  const TokenTile* tiles;
  const int* tile_count;
  const float* row_factor;     // [tiles * 256] by slot: the token's scale, or its routing weight
  void* out;                   // e4m3 [tiles, 23, kTileBytes], or bf16 [tiles * 256, 2880]
  int row_tiles;
  int stagger_ns;              // delay of the second warpgroup, so that epilogues meet the other's products
};

struct Work {
  TokenTile tile;
  int tile_m, tile_n;
};

// Work items in the order expert, weight tile, token tile, so that neighbours in time share a weight tile.
__device__ __forceinline__ Work work_at(const Arguments& a, int index) {
  const int tiles_n = (a.row_tiles + 1) / kGroups;
  const TokenTile some = a.tiles[index / tiles_n];
  const int local = index - some.first * tiles_n;
  const int tile_n = local / some.count, tile_m = some.first + local % some.count;
  return {a.tiles[tile_m], tile_m, tile_n};
}

// A slot of a ring and how often it was passed; a fresh barrier lets the producer's first turn through.
template <int SLOTS>
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) {
      slot = 0;
      parity ^= 1;
    }
  }
};

struct Shared {
  uint32_t tokens, weights;  // data
  uint32_t token_full, token_empty, weight_full, weight_empty;  // barriers
};

__device__ __forceinline__ void stream_tokens(const Arguments& a, int total, const Shared& s) {
  Cursor<kTokenSlots> at;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at(a, index);
    const uint32_t bytes = (work.tile.rows + 31) / 32 * 32 * fp8::kTileK;
    const uint8_t* source = a.activations + static_cast<size_t>(work.tile_m) * kTilesK * kTileBytes;
    for (int k = 0; k < kTilesK; ++k) {
      const uint32_t ready = s.token_full + 8 * at.slot;
      mbarrier_wait(s.token_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, bytes);
      bulk_copy(s.tokens + at.slot * kTileBytes, source + static_cast<size_t>(k) * kTileBytes, bytes, ready);
      at.advance();
    }
  }
}

__device__ __forceinline__ void stream_weights(const Arguments& a, int total, const Shared& s) {
  Cursor<kWeightSlots> at;
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at(a, index);
    const int first = work.tile_n * kGroups, second = min(first + 1, a.row_tiles - 1);
    const uint8_t* expert = a.weights + static_cast<size_t>(work.tile.expert) * a.row_tiles * kStages * kStageBytes;
    for (int stage = 0; stage < kStages; ++stage) {
      const uint32_t ready = s.weight_full + 8 * at.slot, target = s.weights + at.slot * kSlotBytes;
      mbarrier_wait(s.weight_empty + 8 * at.slot, at.parity ^ 1);
      mbarrier_expect(ready, kSlotBytes);
      bulk_copy(target, expert + (first * kStages + stage) * kStageBytes, kStageBytes, ready);
      bulk_copy(target + kStageBytes, expert + (second * kStages + stage) * kStageBytes, kStageBytes, ready);
      at.advance();
    }
  }
}

// What a consumer warpgroup keeps from tile to tile.
struct Consumer {
  const Shared& shared;
  const uint8_t* weights;
  int group;
  Cursor<kTokenSlots> tokens;
  Cursor<kWeightSlots> stage;
  int pair_of_stage = 0;
  int held = 0;  // token slot whose products may still be running

  // Widens the next 64 columns of this warpgroup's rows.
  __device__ __forceinline__ void widen(const uint32_t (&offsets)[2], uint32_t (&operand)[8]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if (pair_of_stage == 0) mbarrier_wait(shared.weight_full + 8 * stage.slot, stage.parity);
    const uint8_t* source = weights + stage.slot * kSlotBytes + group * kStageBytes;
    const uint4 packed = *reinterpret_cast<const uint4*>(source + ((pair_of_stage * 4 + warp) * 32 + lane) * 16);
    const uint32_t scales = *reinterpret_cast<const uint32_t*>(source + kStageWeightBytes +
                                                               (warp * 8 + lane / 4) * 12 + pair_of_stage * 4);
    if (++pair_of_stage == kStagePairs) {
      pair_of_stage = 0;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.weight_empty + 8 * stage.slot);
      stage.advance();
    }
    widen_pair(packed, scales, offsets, operand);
#pragma unroll
    for (int i = 0; i < 8; ++i) pin(operand[i]);
  }

  __device__ __forceinline__ void release(int slot) const {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared.token_empty + 8 * slot);
  }
};

// Two products of 32 columns each; `operand` describes their tokens.
template <int N>
__device__ __forceinline__ void multiply(float (&acc)[kTileRows / 2], const uint32_t (&weights)[8], uint64_t operand,
                                         int accumulate) {
  wgmma_fence();
  wgmma_e4m3_registers<N>(acc, weights, operand, accumulate);
  wgmma_e4m3_registers<N>(acc, weights + 4, operand + 2, 1);
  wgmma_commit();
}

__device__ __forceinline__ uint64_t swizzled_descriptor(uint32_t address) {
  return static_cast<uint64_t>(address >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// All 2880 columns of 64 rows x N tokens.
template <int N>
__device__ __forceinline__ void accumulate(Consumer& c, const uint32_t (&offsets)[2], float (&acc)[kTileRows / 2]) {
  uint32_t even[8], odd[8];
  c.widen(offsets, even);
#pragma unroll 1
  for (int k = 0; k < kTilesK - 1; ++k) {
    mbarrier_wait(c.shared.token_full + 8 * c.tokens.slot, c.tokens.parity);
    const uint64_t operand = swizzled_descriptor(c.shared.tokens + c.tokens.slot * kTileBytes);
    multiply<N>(acc, even, operand, k > 0);
    wgmma_wait<1>();  // the products before these
    if (k > 0) c.release(c.held);
    c.widen(offsets, odd);
    multiply<N>(acc, odd, operand + 4, 1);
    wgmma_wait<1>();
    c.held = c.tokens.slot;
    c.tokens.advance();
    c.widen(offsets, even);
  }
  mbarrier_wait(c.shared.token_full + 8 * c.tokens.slot, c.tokens.parity);  // the last tile is half full
  multiply<N>(acc, even, swizzled_descriptor(c.shared.tokens + c.tokens.slot * kTileBytes), 1);
  wgmma_wait<0>();
  c.release(c.held);
  c.release(c.tokens.slot);
  c.tokens.advance();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) pin(acc[i]);
}

// 4 x 4 bytes: the lane with g % 4 = r gives bytes for tokens 0..3 and receives token r's of all four lanes.
__device__ __forceinline__ uint32_t transpose_rows(uint32_t word) {
  const int r = threadIdx.x / 4 % 4;
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, word, 4);
  word = __byte_perm(word, other, r % 2 == 0 ? 0x6240 : 0x3715);
  other = __shfl_xor_sync(0xFFFFFFFFu, word, 8);
  return __byte_perm(word, other, r < 2 ? 0x5410 : 0x3276);
}

// A thread's two weight rows: their factors and biases. `row_tile`: 64 rows of an expert.
struct RowTerms {
  float factor[2], bias[2];
};

__device__ __forceinline__ float row_factor(int top) {  // 2^(top - 127 - kTopExponent)
  return __uint_as_float(static_cast<uint32_t>(max(top - kTopExponent, 0)) << 23);
}

// Rows alternate gate, up; the thread holds both of one hidden column.
template <int N>
__device__ __forceinline__ void store_hidden(const Arguments& a, const Work& work, const float (&acc)[kTileRows / 2],
                                             const RowTerms& terms, int row_tile) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float* scales = a.row_factor + static_cast<size_t>(work.tile_m) * kTileRows;
  uint8_t* tile = static_cast<uint8_t*>(a.out) +
                  (static_cast<size_t>(work.tile_m) * kTilesK + row_tile / 4) * kTileBytes;
  const int column = row_tile % 4 * 32 + warp * 8 + g / 4 * 4;
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    float hidden[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + (j + i) * 8 + 2 * t);
      const float* sum = acc + 4 * (j + i);
      hidden[2 * i] = clamped_swiglu(fmaf(sum[0], terms.factor[0] * scale.x, terms.bias[0]),
                                     fmaf(sum[2], terms.factor[1] * scale.x, terms.bias[1]));
      hidden[2 * i + 1] = clamped_swiglu(fmaf(sum[1], terms.factor[0] * scale.y, terms.bias[0]),
                                         fmaf(sum[3], terms.factor[1] * scale.y, terms.bias[1]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) hidden[i] *= fp8::kHiddenFactor;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(hidden[0], hidden[1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(hidden[2], hidden[3]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t word = transpose_rows(low | (high << 16));
    const int r = g % 4, row = (j + r / 2) * 8 + 2 * t + r % 2;
    if (row < work.tile.rows) *reinterpret_cast<uint32_t*>(tile + swizzled(row, column)) = word;
  }
}

__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <int N>
__device__ __forceinline__ void store_weighted(const Arguments& a, const Work& work, const float (&acc)[kTileRows / 2],
                                               const RowTerms& terms, int row_tile) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const size_t first = static_cast<size_t>(work.tile_m) * kTileRows;
  // Even lanes take rows 0 .. 7 of the warp's 16, odd lanes rows 8 .. 15: four rows each.
  auto* out = static_cast<__nv_bfloat16*>(a.out) + row_tile * 64 + warp * 16 + t % 2 * 8 + t / 2 * 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 weight = *reinterpret_cast<const float2*>(a.row_factor + first + j * 8 + 2 * t);
    const float* sum = acc + 4 * j;
    uint32_t upper = pack(weight.x * fmaf(sum[0], terms.factor[0], terms.bias[0]),
                          weight.y * fmaf(sum[1], terms.factor[0], terms.bias[0]));
    uint32_t lower = pack(weight.x * fmaf(sum[2], terms.factor[1], terms.bias[1]),
                          weight.y * fmaf(sum[3], terms.factor[1], terms.bias[1]));
    upper = transpose_8x8(upper);  // token g, rows 2 t and 2 t + 1
    lower = transpose_8x8(lower);  // 8 rows on
    const uint32_t given = __shfl_xor_sync(0xFFFFFFFFu, t % 2 == 0 ? lower : upper, 1);
    const uint2 words = t % 2 == 0 ? make_uint2(upper, given) : make_uint2(given, lower);
    const int row = j * 8 + g;
    if (row < work.tile.rows) *reinterpret_cast<uint2*>(out + (first + row) * kDim) = words;
  }
}

template <int N, bool GATED>
__device__ __forceinline__ void run_tile(const Arguments& a, const Work& work, Consumer& c, float (&acc)[kTileRows / 2]) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
  const int row_tile = work.tile_n * kGroups + c.group, exists = row_tile < a.row_tiles;
  const int row = min(row_tile, a.row_tiles - 1) * 64 + warp * 16 + (GATED ? 2 * g : g);
  const size_t at = static_cast<size_t>(work.tile.expert) * a.row_tiles * 64 + row;
  constexpr int kApart = GATED ? 1 : 8;
  const int tops[2] = {a.tops[at], a.tops[at + kApart]};
  const uint32_t offsets[2] = {factor_offset(tops[0]), factor_offset(tops[1])};
  accumulate<N>(c, offsets, acc);
  if (!exists) return;
  RowTerms terms;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    terms.factor[i] = row_factor(tops[i]) * (GATED ? 1.0f : 1.0f / fp8::kHiddenFactor);
    terms.bias[i] = __bfloat162float(a.bias[at + i * kApart]);
  }
  if constexpr (GATED) {
    store_hidden<N>(a, work, acc, terms, row_tile);
  } else {
    store_weighted<N>(a, work, acc, terms, row_tile);
  }
}

template <bool GATED>
__device__ __forceinline__ void consume(const Arguments& a, int total, Consumer& c) {
  if (c.group == 1 && a.stagger_ns > 0) __nanosleep(a.stagger_ns);
  float acc[kTileRows / 2];  // one array for every width: registers are not moved between branches
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at(a, index);
    const int rows = __shfl_sync(0xFFFFFFFFu, work.tile.rows, 0);
    if (rows <= 32) {
      run_tile<32, GATED>(a, work, c, acc);
    } else if (rows <= 64) {
      run_tile<64, GATED>(a, work, c, acc);
    } else if (rows <= 128) {
      run_tile<128, GATED>(a, work, c, acc);
    } else if (rows <= 192) {
      run_tile<192, GATED>(a, work, c, acc);
    } else {
      run_tile<256, GATED>(a, work, c, acc);
    }
  }
}

template <bool GATED>
__global__ void __launch_bounds__(kThreads, 1) mixed_gemm(const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ __align__(8) uint64_t token_full[kTokenSlots], token_empty[kTokenSlots];
  __shared__ __align__(8) uint64_t weight_full[kWeightSlots], weight_empty[kWeightSlots];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kTokenSlots; ++i) {
      mbarrier_init(shared_address(&token_full[i]), 1);
      mbarrier_init(shared_address(&token_empty[i]), kGroups * 4);
    }
    for (int i = 0; i < kWeightSlots; ++i) {
      mbarrier_init(shared_address(&weight_full[i]), 1);
      mbarrier_init(shared_address(&weight_empty[i]), kGroups * 4);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int total = __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0) * ((a.row_tiles + 1) / kGroups);
  const uint8_t* weights = shared + kTokenSlots * kTileBytes;
  const Shared s = {shared_address(shared),      shared_address(weights),     shared_address(token_full),
                    shared_address(token_empty), shared_address(weight_full), shared_address(weight_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == kGroups) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == kGroups * 128) stream_tokens(a, total, s);
    if (threadIdx.x == kGroups * 128 + 32) stream_weights(a, total, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    Consumer c = {s, weights, group};
    consume<GATED>(a, total, c);
  }
}

template <bool GATED>
cudaError_t start(const Arguments& a, int grid, void* stream) {
  const cudaError_t prepared =
      cudaFuncSetAttribute(mixed_gemm<GATED>, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(mixed_gemm<GATED>, dim3(grid), dim3(kThreads), kSharedBytes, static_cast<cudaStream_t>(stream), false,
                a);
}

}  // namespace
}  // namespace antiphon::mixed

extern "C" int antiphon_moe_mixed_gate_up(const void* activations, const void* weights, const void* tops,
                                          const void* bias, const void* tiles, const int* tile_count,
                                          const float* token_scale, void* hidden, int grid, int stagger_ns,
                                          void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = {static_cast<const uint8_t*>(activations),
                              static_cast<const uint8_t*>(weights),
                              static_cast<const uint8_t*>(tops),
                              static_cast<const __nv_bfloat16*>(bias),
                              static_cast<const antiphon::fp8::TokenTile*>(tiles),
                              tile_count,
                              token_scale,
                              hidden,
                              2 * antiphon::fp8::kDim / 64,
                              stagger_ns};
  return mixed::start<true>(a, grid, stream);
}

extern "C" int antiphon_moe_mixed_down(const void* hidden, const void* weights, const void* tops, const void* bias,
                                       const void* tiles, const int* tile_count, const float* row_weight, void* out,
                                       int grid, int stagger_ns, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = {static_cast<const uint8_t*>(hidden),
                              static_cast<const uint8_t*>(weights),
                              static_cast<const uint8_t*>(tops),
                              static_cast<const __nv_bfloat16*>(bias),
                              static_cast<const antiphon::fp8::TokenTile*>(tiles),
                              tile_count,
                              row_weight,
                              out,
                              antiphon::fp8::kDim / 64,
                              stagger_ns};
  return mixed::start<false>(a, grid, stream);
}
