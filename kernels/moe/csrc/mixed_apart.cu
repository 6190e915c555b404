// The widening grouped GEMM with warps of their own for the widening: one warpgroup turns MXFP4 into e4m3 operands in
// shared memory, two multiply. A warpgroup that multiplies has nothing else to do between two products, and what is
// widened for the next 128 columns overlaps them. A product of 64 x 256 needs more registers than a fourth warpgroup
// would leave, so one lane of those that widen issues the copies as well, where they cannot keep it waiting.
//
// A block: 128 weight rows x at most 256 tokens. Weights as the streaming kernel stores them, one exponent a row, so that
// the sums of all columns stay in the tensor core; weight rows are the M of the products, tokens the N. Epilogues as
// where multiplying warps widen (mixed_gemm.cu).

#include "apart_pipeline.cuh"
#include "mixed_epilogue.cuh"
#include "wgmma_shared.cuh"

namespace antiphon::mixed {
namespace {

// The warpgroup that widens: 64 columns of both row tiles at a time.
struct Widener {
  const Shared& shared;
  const uint8_t* packed;
  const Wide& wide;
  const Magnitudes* magnitudes;
  Copier& copier;
  bool copies;  // one lane of all
  Cursor<Apart::kWeightSlots> stage;
  Cursor<Apart::kWideSlots> target;
  int pair_of_stage = 0;

  // A lane's words of a row tile's fragment go where wgmma looks for the same rows and columns; the eight rows and four
  // words that a warp stores at once lie in different banks.
  __device__ __forceinline__ static void store(uint8_t* row_tile, int pair, const uint32_t (&operand)[8]) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // 32 columns, then 16 of them, then the upper or lower eight rows
      const int row = warp * 16 + i % 2 * 8 + g, byte = pair * 64 + i / 4 * 32 + i / 2 % 2 * 16 + 4 * t;
      *reinterpret_cast<uint32_t*>(row_tile + fp8::swizzled(row, byte)) = operand[i];
    }
  }

  __device__ __forceinline__ void widen(uint8_t* tile, int pair, const uint32_t (&offsets)[Apart::kGroups]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32;
    if (pair_of_stage == 0) {
      // Two stages ahead; every warp can finish the one whose place it takes without this one.
      if (copies) copier.next_weights();
      __syncwarp();
      mbarrier_wait(shared.weight_full + 8 * stage.slot, stage.parity);
    }
    uint4 words[Apart::kGroups];
    uint32_t scales[Apart::kGroups];
#pragma unroll
    for (int group = 0; group < Apart::kGroups; ++group) {
      const uint8_t* source = packed + stage.slot * Apart::kSlotBytes + group * kStageBytes;
      words[group] = *reinterpret_cast<const uint4*>(source + ((pair_of_stage * 4 + warp) * 32 + lane) * 16);
      scales[group] = *reinterpret_cast<const uint32_t*>(source + kStageWeightBytes + (warp * 8 + lane / 4) * 12 +
                                                         pair_of_stage * 4);
    }
    if (++pair_of_stage == kStagePairs) {
      pair_of_stage = 0;
      __syncwarp();
      if (lane == 0) mbarrier_arrive(shared.weight_empty + 8 * stage.slot);
      stage.advance();
    }
#pragma unroll
    for (int group = 0; group < Apart::kGroups; ++group) {
      uint32_t operand[8];
      widen_pair(words[group], scales[group], offsets[group], magnitudes, operand);
      store(tile + group * Apart::kRowTileBytes, pair, operand);
    }
  }

  // All columns of a work item's rows.
  __device__ __forceinline__ void run(const uint32_t (&offsets)[Apart::kGroups]) {
#pragma unroll 1
    for (int k = 0; k < kTilesK; ++k) {
      uint8_t* tile = wide.data + target.slot * Apart::kWideBytes;
      mbarrier_wait(wide.empty + 8 * target.slot, target.parity ^ 1);
      if (copies) copier.next_tokens();
      __syncwarp();
      widen(tile, 0, offsets);
      if (k < kTilesK - 1) widen(tile, 1, offsets);  // the last tile is half full
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(wide.full + 8 * target.slot);
      target.advance();
    }
  }
};

// A warpgroup that multiplies: 64 weight rows x N tokens.
struct Multiplier {
  Consumer<Apart> tokens;
  const Wide& wide;
  Cursor<Apart::kWideSlots> source;

  __device__ __forceinline__ void release(int token_slot, int wide_slot) const {
    tokens.release(token_slot);
    if (threadIdx.x % 32 == 0) mbarrier_arrive(wide.empty + 8 * wide_slot);
  }

  template <int N, int STEPS>
  __device__ __forceinline__ void start(float* acc, int accumulate) const {
    const uint64_t b = tokens.wait_tokens();
    mbarrier_wait(wide.full + 8 * source.slot, source.parity);
    const uint64_t a = swizzled_operand(
        shared_address(wide.data + source.slot * Apart::kWideBytes + tokens.group * Apart::kRowTileBytes));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step)
      wgmma_e4m3_shared<N>(acc, a + 2 * step, b + 2 * step, step > 0 ? 1 : accumulate);
    wgmma_commit();
  }

  template <int N>
  __device__ __forceinline__ void accumulate(float* acc) {
    int token_slot = 0, wide_slot = 0;  // whose products may still be running
#pragma unroll 1
    for (int k = 0; k < kTilesK - 1; ++k) {
      start<N, fp8::kTileK / 32>(acc, k > 0);
      wgmma_wait<1>();  // the products before these
      if (k > 0) release(token_slot, wide_slot);
      token_slot = tokens.tokens.slot;
      wide_slot = source.slot;
      tokens.tokens.advance();
      source.advance();
    }
    start<N, 2>(acc, 1);
    wgmma_wait<0>();
    release(token_slot, wide_slot);
    release(tokens.tokens.slot, source.slot);
    tokens.tokens.advance();
    source.advance();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pin(acc[i]);
  }

  template <int N, bool GATED>
  __device__ __forceinline__ void run(const Arguments& a, const Work& work, float* acc) {
    const Rows<Apart, GATED> rows(a, work, tokens.group);
    accumulate<N>(acc);
    rows.template store<N>(a, work, acc, {row_factor(rows.tops[0]), row_factor(rows.tops[1])});
  }
};

template <bool GATED>
__device__ __forceinline__ void multiply_all(const Arguments& a, int total, Multiplier& m) {
  float acc[Apart::kTileRows / 2];  // one array for every width: registers are not moved between branches
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<Apart>(a, index);
    const int tokens = __shfl_sync(0xFFFFFFFFu, work.tile.rows, 0);
    if (tokens <= 64) {
      m.run<64, GATED>(a, work, acc);
    } else if (tokens <= 128) {
      m.run<128, GATED>(a, work, acc);
    } else if (tokens <= 192) {
      m.run<192, GATED>(a, work, acc);
    } else {
      m.run<256, GATED>(a, work, acc);
    }
  }
}

template <bool GATED>
__device__ __forceinline__ void widen_all(const Arguments& a, int total, Widener& w) {
  if (w.copies) {
    w.copier.tokens.begin(a);
    w.copier.weights.begin(a);
    for (int i = 0; i < Apart::kTokensAhead; ++i) w.copier.next_tokens();
    for (int i = 0; i < Apart::kWeightSlots - 1; ++i) w.copier.next_weights();
  }
  __syncwarp();
  for (int index = blockIdx.x; index < total; index += gridDim.x) {
    const Work work = work_at<Apart>(a, index);
    uint32_t offsets[Apart::kGroups];
#pragma unroll
    for (int group = 0; group < Apart::kGroups; ++group) {
      const Rows<Apart, GATED> rows(a, work, group);
      offsets[group] = level_offsets(rows.tops[0], rows.tops[1]);
    }
    w.run(offsets);
  }
}

__device__ __forceinline__ void init_ring(uint64_t* full, uint64_t* empty, int slots, int filling, int reading) {
  for (int i = 0; i < slots; ++i) {
    mbarrier_init(shared_address(full + i), filling);
    mbarrier_init(shared_address(empty + i), reading);
  }
}

template <bool GATED>
__global__ void __launch_bounds__(Apart::kThreads, 1) mixed_apart(const __grid_constant__ Arguments a) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(8) uint64_t token_full[Apart::kTokenSlots], token_empty[Apart::kTokenSlots];
  __shared__ __align__(8) uint64_t weight_full[Apart::kWeightSlots], weight_empty[Apart::kWeightSlots];
  __shared__ __align__(8) uint64_t wide_full[Apart::kWideSlots], wide_empty[Apart::kWideSlots];
  __shared__ __align__(8) Magnitudes magnitudes[kLevels];
  for (int i = threadIdx.x; i < 8 * kLevels; i += Apart::kThreads)
    reinterpret_cast<uint8_t*>(magnitudes)[i] = magnitude(i / 8, i % 8);
  if (threadIdx.x == 0) {
    init_ring(token_full, token_empty, Apart::kTokenSlots, 1, Apart::kGroups * 4);
    init_ring(weight_full, weight_empty, Apart::kWeightSlots, 1, 4);
    init_ring(wide_full, wide_empty, Apart::kWideSlots, 4, Apart::kGroups * 4);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int total = __shfl_sync(0xFFFFFFFFu, *a.tile_count, 0) * a.tiles_n<Apart>();
  uint8_t* widened = shared + Apart::kTokenSlots * Apart::kTileBytes;
  const uint8_t* packed = widened + Apart::kWideSlots * Apart::kWideBytes;
  const Shared s = {shared_address(shared),      shared_address(packed),      shared_address(token_full),
                    shared_address(token_empty), shared_address(weight_full), shared_address(weight_empty)};
  const Wide wide = {widened, shared_address(wide_full), shared_address(wide_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);
  if (group == Apart::kGroups) {
    give_registers<Apart::kWideningRegisters>();
    Copier copier = {a, s, {0, total}, {0, total}};
    Widener w = {s, packed, wide, magnitudes, copier, threadIdx.x == Apart::kGroups * 128};
    widen_all<GATED>(a, total, w);
  } else {
    take_registers<Apart::kRegisters>();
    Multiplier m = {{s, packed, magnitudes, group}, wide};
    multiply_all<GATED>(a, total, m);
  }
}

template <bool GATED>
cudaError_t start(const Arguments& a, int grid, void* stream) {
  const cudaError_t prepared = prepare(mixed_apart<GATED>, Apart::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(mixed_apart<GATED>, dim3(grid), dim3(Apart::kThreads), Apart::kSharedBytes,
                static_cast<cudaStream_t>(stream), false, a);
}

}  // namespace
}  // namespace antiphon::mixed

extern "C" int antiphon_moe_apart_gate_up(const void* activations, const void* weights, const void* tops,
                                          const void* bias, const void* tiles, const int* tile_count,
                                          const float* token_scale, void* hidden, int grid, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = mixed::arguments(activations, weights, tops, bias, tiles, tile_count, token_scale, hidden,
                                              2 * mixed::kDim / 64);
  return mixed::start<true>(a, grid, stream);
}

extern "C" int antiphon_moe_apart_down(const void* hidden, const void* weights, const void* tops, const void* bias,
                                       const void* tiles, const int* tile_count, const float* row_weight, void* out,
                                       int grid, void* stream) {
  namespace mixed = antiphon::mixed;
  const mixed::Arguments a = mixed::arguments(hidden, weights, tops, bias, tiles, tile_count, row_weight, out,
                                              mixed::kDim / 64);
  return mixed::start<false>(a, grid, stream);
}
