// MXFP4 grouped GEMM for small token counts: a persistent kernel that streams 4-bit weights once.
//
// A bf16 activation, scaled by a power of two, is split exactly into the sum of two e4m3 numbers (4 + 4
// significant bits), and an FP4 weight is an e4m3 number, so FP8 tensor-core products lose nothing. The block
// scale of the weights multiplies the partial sum of its 32 columns in float32. That costs ten integer
// operations per 16 x 32 weights and warp, and the operand that is shared by all rows, the activations, is
// read by the tensor core from shared memory.
//
// One block per SM. Two producer threads keep shared memory full by bulk copies: a ring of weight stages, and
// the activations of the token tile in work and the next. Three or five consumer warpgroups take the stages of a
// row tile in turn. Work is an ordered list of items (token tile, 64 weight rows).

#include "stream_epilogue.cuh"
#include "stream_pipeline.cuh"

namespace antiphon::stream {
namespace {

// The items of this block: a run of neighbours, so that it changes its token tile rarely.
struct Schedule {
  int first, count;
};

__device__ __forceinline__ Schedule schedule(const Arguments& a) {
  const long long total = *a.tile_count * a.row_tiles;
  const int first = static_cast<int>(total * blockIdx.x / gridDim.x);
  return {first, static_cast<int>(total * (blockIdx.x + 1) / gridDim.x) - first};
}

// Two registers of four e4m3 bytes out of eight packed FP4 codes. Per byte, bits 7 4 3 2 are sign, exponent
// and mantissa of the first value where e4m3 wants them; bits 5 6 1 0 are those of the second. The value read
// as e4m3 is 2^-6 of the FP4 value (FP4's exponent bias is 1, e4m3's is 7; the subnormals agree as well).
__device__ __forceinline__ void expand(uint32_t packed, uint32_t& first, uint32_t& second) {
  first = packed & 0x9C9C9C9Cu;
  second = ((packed << 2) & 0x8C8C8C8Cu) | ((packed >> 2) & 0x10101010u);
}

// One stage: 64 rows x 192 columns times the tile's tokens, added to acc. `operand` describes the activations of
// the stage's first block.
template <int TOKENS>
__device__ __forceinline__ void multiply_stage(const uint4 (&packed)[3], const uint32_t (&scales)[3],
                                               uint64_t operand,
                                               float (&acc)[ActivationTile<TOKENS>::kRows / 8][4]) {
  using Tile = ActivationTile<TOKENS>;
  constexpr int kBatch = Geometry<TOKENS>::kBatch, kRows = Tile::kRows;
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
#pragma unroll
      for (int r = 0; r < 4; ++r) pin(a[i][r]);
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const uint64_t block = operand + (begin + i) * (Tile::kBlockBytes / 16);
      wgmma_e4m3<kRows, 0>(part[i], a[i], block);
      if constexpr (!Tile::kSideBySide) wgmma_e4m3<kRows, 1>(part[i], a[i], block + Tile::kLowOffset / 16);
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

template <int TOKENS>
__device__ __forceinline__ void stream_weights(const Arguments& a, const Schedule& work, Ring<TOKENS> ring) {
  constexpr int kGroups = Geometry<TOKENS>::kGroups, kGroupStages = kStages / kGroups;
  for (int i = 0; i < work.count; ++i) {
    const int index = work.first + i, tile = index / a.row_tiles;
    const size_t row_tile = static_cast<size_t>(a.tiles[tile].x) * a.row_tiles + index % a.row_tiles;
    const uint8_t* source = a.weights + row_tile * kStages * kStageBytes;
    for (int s = 0; s < kGroupStages; ++s) {
      for (int w = 0; w < kGroups; ++w) ring.fill(w, source + (s * kGroups + w) * kStageBytes);
      ring.advance();
    }
  }
}

template <int TOKENS>
__device__ __forceinline__ void stream_activations(const Arguments& a, const Schedule& work, TileBuffers<TOKENS> buffers) {
  int loaded = -1;
  for (int i = 0; i < work.count; ++i) {
    const int tile = (work.first + i) / a.row_tiles;
    if (tile == loaded) continue;
    loaded = tile;
    buffers.fill(a.activations + static_cast<size_t>(tile) * ActivationTile<TOKENS>::kBytes);
  }
}

template <int TOKENS, bool GATED>
__device__ __forceinline__ void consume(const Arguments& a, const Schedule& work, const uint8_t* stages,
                                        Ring<TOKENS> ring, TileBuffers<TOKENS> buffers, float* reduce, int group) {
  using G = Geometry<TOKENS>;
  using Tile = ActivationTile<TOKENS>;
  constexpr int kGroupStages = kStages / G::kGroups;
  const int lane = threadIdx.x % 32, warp = threadIdx.x % 128 / 32, g = lane / 4;
  int loaded = -1;
  for (int i = 0; i < work.count; ++i) {
    const int index = work.first + i, tile = index / a.row_tiles, row_tile = index % a.row_tiles;
    if (tile != loaded) {
      loaded = tile;
      buffers.next();
    }
    Epilogue<TOKENS, GATED> epilogue;
    if (group == 0) epilogue.load(a, a.tiles[tile], row_tile);
    const uint64_t operand = wgmma_descriptor(buffers.address(), Tile::kRows * 16, 128);
    float acc[Tile::kRows / 8][4] = {};
    for (int s = 0; s < kGroupStages; ++s) {
      ring.wait_full(group);
      const uint8_t* stage = stages + ring.index(group) * kStageBytes;
      uint4 packed[3];
      uint32_t scales[3];
#pragma unroll
      for (int p = 0; p < 3; ++p) {
        packed[p] = *reinterpret_cast<const uint4*>(stage + ((p * 4 + warp) * 32 + lane) * 16);
        scales[p] = *reinterpret_cast<const uint32_t*>(stage + kStageWeightBytes + (warp * 8 + g) * 12 + p * 4);
      }
      __syncwarp();
      if (lane == 0) ring.release(group);
      ring.advance();
      const int block = (s * G::kGroups + group) * kStageBlocks;
      multiply_stage<TOKENS>(packed, scales, operand + block * (Tile::kBlockBytes / 16), acc);
    }
    float sum[G::kWidth / 8][4];
    add_parts<TOKENS>(acc, sum);
    const bool before = i >= G::kReduceBuffers, again = i + G::kReduceBuffers < work.count;
    if (reduce_groups<TOKENS>(sum, reduce, group, i % G::kReduceBuffers, before, again))
      epilogue.store(a, sum, tile, row_tile);
  }
}

template <int TOKENS, bool GATED>
__global__ void __launch_bounds__(Geometry<TOKENS>::kThreads, 1)
    stream_gemm(const __grid_constant__ Arguments a) {
  using G = Geometry<TOKENS>;
  extern __shared__ __align__(1024) uint8_t shared[];
  uint8_t* activations = shared + G::kSlots * kStageBytes;
  float* reduce = reinterpret_cast<float*>(activations + G::kBuffers * ActivationTile<TOKENS>::kBytes);
  __shared__ __align__(8) uint64_t full[G::kSlots], empty[G::kSlots], tile_full[G::kBuffers], tile_empty[G::kBuffers];

  if (threadIdx.x == 0) {
    for (int i = 0; i < G::kSlots; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), 4);
    }
    for (int i = 0; i < G::kBuffers; ++i) {
      mbarrier_init(shared_address(&tile_full[i]), 1);
      mbarrier_init(shared_address(&tile_empty[i]), G::kConsumers / 32);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  // The routing and the split activations that the first projection reads come from its predecessors. When the
  // second runs, the first has passed this wait, so the routing is complete: only its activations must be waited
  // for, and its weights can start to stream before.
  if (GATED) grid_dependency_wait();
  const Schedule work = schedule(a);
  const Ring<TOKENS> ring = {shared_address(shared), shared_address(full), shared_address(empty)};
  const TileBuffers<TOKENS> buffers = {shared_address(activations), shared_address(tile_full), shared_address(tile_empty)};
  const int group = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 128, 0);  // uniform, and known to be
  if (group < G::kGroups) {
    consume<TOKENS, GATED>(a, work, shared, ring, buffers, reduce, group);
  } else if (threadIdx.x == G::kConsumers) {
    stream_weights<TOKENS>(a, work, ring);
  } else if (threadIdx.x == G::kConsumers + 32) {
    if (!GATED) grid_dependency_wait();  // even without work: this kernel must not finish before its predecessor
    grid_dependency_trigger();
    fence_async_global();
    stream_activations<TOKENS>(a, work, buffers);
  }
}

template <int TOKENS, bool GATED>
cudaError_t start(const Arguments& a, int grid, cudaStream_t stream, bool overlap) {
  using G = Geometry<TOKENS>;
  const cudaError_t prepared = cudaFuncSetAttribute(
      stream_gemm<TOKENS, GATED>, cudaFuncAttributeMaxDynamicSharedMemorySize, G::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  return launch(stream_gemm<TOKENS, GATED>, dim3(grid), dim3(G::kThreads), G::kSharedBytes, stream, overlap, a);
}

template <bool GATED>
cudaError_t start(int token_tile, const Arguments& a, int grid, void* stream, int overlap) {
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (token_tile) {
    case 4: return start<4, GATED>(a, grid, queue, overlap != 0);
    case 8: return start<8, GATED>(a, grid, queue, overlap != 0);
    case 16: return start<16, GATED>(a, grid, queue, overlap != 0);
    case 24: return start<24, GATED>(a, grid, queue, overlap != 0);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace
}  // namespace antiphon::stream

// hidden tile = split(swiglu(gate_up[expert] x + bias)), from the tiles and scales that antiphon_moe_split wrote.
extern "C" int antiphon_moe_gate_up(const void* weights, const void* bias, const void* activations,
                                    const float* scale, const void* tiles, const int* tile_count, void* hidden,
                                    int token_tile, int grid, int overlap, void* stream) {
  namespace stream_ = antiphon::stream;
  const stream_::Arguments a = {static_cast<const uint8_t*>(weights),
                                static_cast<const __nv_bfloat16*>(bias),
                                static_cast<const uint8_t*>(activations),
                                static_cast<const int4*>(tiles),
                                tile_count,
                                scale,
                                nullptr,
                                nullptr,
                                hidden,
                                2 * stream_::kDim / stream_::kTileRows};
  return stream_::start<true>(token_tile, a, grid, stream, overlap);
}

// partial[pair, 2880] = weight[pair] * (down[expert] hidden + bias), float32.
extern "C" int antiphon_moe_down(const void* weights, const void* bias, const void* hidden, const int* order,
                                 const void* tiles, const int* tile_count, const void* pair_weight, float* partial,
                                 int token_tile, int grid, int overlap, void* stream) {
  namespace stream_ = antiphon::stream;
  const stream_::Arguments a = {static_cast<const uint8_t*>(weights),
                                static_cast<const __nv_bfloat16*>(bias),
                                static_cast<const uint8_t*>(hidden),
                                static_cast<const int4*>(tiles),
                                tile_count,
                                nullptr,
                                order,
                                static_cast<const __nv_bfloat16*>(pair_weight),
                                partial,
                                stream_::kDim / stream_::kTileRows};
  return stream_::start<false>(token_tile, a, grid, stream, overlap);
}
