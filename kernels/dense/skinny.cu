// Dense projections for few tokens (decode), sm_90a.
//
// out[t, n] = sum_k x[t, k] W[n, k] with 1 <= T <= 16. At these sizes the weight stream is the whole cost. One block
// per SM walks over tiles of 8 weight rows; a producer warp keeps a ring of tiles in shared memory full by bulk copies
// and starts before the kernel ahead has finished, since weights depend on nothing. The other warps split K: each
// holds its columns of the tokens in registers for the whole launch and multiplies with mma.sync,
//
//   m16n8k16, lane = 4 g + q: A is the tokens (rows g and g + 8), B the weights (row g). A sum over k does not care
//   about order, so each lane reads 8 consecutive k (16 bytes) of its rows and feeds elements 0..3 to one mma and
//   4..7 to another: no shuffle of the weights is needed.
//
// Warps of their own add up the parts, always in the same order, and do what stands behind the projection; its
// operands are on their way before the sums are there. Results are identical from run to run.

#include "../moe/csrc/hopper.cuh"

namespace antiphon::skinny {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kTileRows = 8;

enum class Epilogue { kQkvRope, kResidual, kPlain, kLogits };

struct Args {
  const bf16* x;       // [T, K]
  const bf16* weight;  // [N, K]
  const bf16* bias;    // [N], not for logits
  int tokens;
  int rows;
  // kQkvRope
  const int64_t* positions;  // [T]
  const int64_t* slot;       // [T], negative: not stored
  const float2* rotation;    // [max_positions, 32] (cos, sin), concentration included
  bf16* query;               // [T, Q, 64]
  bf16* kv_layer;            // [N, G, 2, S, 64] view
  int64_t page_stride;       // elements
  int query_heads;
  int kv_heads;
  int page_size;
  // kResidual
  bf16* residual;  // [T, N], updated in place
  // kPlain
  bf16* out;  // [T, N]
  // kLogits
  float* logits;  // [T, N]
};

// WARPS * CHUNKS * 32 columns, up to TOKENS (8 or 16) tokens, STAGES tiles in flight.
template <int WARPS, int CHUNKS, int TOKENS, int STAGES>
struct Shape {
  static constexpr int kWarps = WARPS;
  static constexpr int kChunks = CHUNKS;
  static constexpr int kTokens = TOKENS;
  static constexpr int kStages = STAGES;
  static constexpr int kRowBytes = WARPS * CHUNKS * 64;
  // Rows 64 bytes off a multiple of 128: the two rows of a quarter-warp's 16-byte loads never meet in a bank.
  static constexpr int kPitch = kRowBytes + 64;
  static constexpr int kTileBytes = kTileRows * kPitch;
  static constexpr int kOutputs = TOKENS * kTileRows;  // one epilogue thread each
  static constexpr int kConsumers = WARPS * 32;
  static constexpr int kThreads = kConsumers + kOutputs + 32;
  static constexpr int kPartialBytes = 2 * WARPS * kOutputs * 4;
  static constexpr int kSharedBytes = STAGES * kTileBytes + kPartialBytes;
  static_assert(kRowBytes % 128 == 0 && kSharedBytes <= 230000);
};
using HiddenFew = Shape<9, 10, 8, 4>;
using HiddenMore = Shape<9, 10, 16, 4>;
using QueryFew = Shape<16, 8, 8, 3>;
using QueryMore = Shape<16, 8, 16, 3>;
// Of a rank that has a part of the query's width: all of a block's tiles are on their way at once.
template <int CHUNKS, int TOKENS>
using QueryPart = Shape<16, CHUNKS, TOKENS, 3>;

// Names of the hardware barriers; 0 is __syncthreads().
constexpr int kFilledBarrier = 1;    // + buffer of partial sums
constexpr int kReleasedBarrier = 3;  // + buffer

// Weight row of a tile's row. Rows d and d + 32 of one head are a rotary pair: four pairs make a tile.
template <Epilogue EPILOGUE>
__device__ __forceinline__ int weight_row(int tile, int r) {
  if constexpr (EPILOGUE == Epilogue::kQkvRope) return tile / 8 * 64 + tile % 8 * 4 + r % 4 + r / 4 * 32;
  return tile * kTileRows + r;
}

template <typename S, Epilogue EPILOGUE>
__device__ __forceinline__ void produce(const Args& a, uint32_t stages, uint32_t full, uint32_t empty) {
  const int lane = threadIdx.x % 32, tiles = a.rows / kTileRows;
  int slot = 0;
  uint32_t turn = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (lane == 0) {
      mbarrier_wait(empty + 8 * slot, (turn & 1) ^ 1);
      mbarrier_expect(full + 8 * slot, kTileRows * S::kRowBytes);
    }
    __syncwarp();
    if (lane < kTileRows)
      bulk_copy(stages + slot * S::kTileBytes + lane * S::kPitch,
                a.weight + static_cast<size_t>(weight_row<EPILOGUE>(tile, lane)) * (S::kRowBytes / 2), S::kRowBytes,
                full + 8 * slot);
    if (++slot == S::kStages) {
      slot = 0;
      ++turn;
    }
  }
}

template <typename S>
__device__ __forceinline__ void multiply(const Args& a, const uint8_t* stages, uint32_t full, uint32_t empty,
                                         float* partial) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const int tiles = a.rows / kTileRows;
  constexpr bool kUpper = S::kTokens > 8;
  grid_dependency_wait();
  uint4 low[S::kChunks], high[kUpper ? S::kChunks : 1];
  const uint4* x = reinterpret_cast<const uint4*>(a.x) + warp * (S::kChunks * 4) + q;
#pragma unroll
  for (int c = 0; c < S::kChunks; ++c) {
    low[c] = make_uint4(0, 0, 0, 0);
    if (g < a.tokens) low[c] = load_fresh(x + static_cast<size_t>(g) * (S::kRowBytes / 16) + c * 4);
    if constexpr (kUpper) {
      high[c] = make_uint4(0, 0, 0, 0);
      if (g + 8 < a.tokens) high[c] = load_fresh(x + static_cast<size_t>(g + 8) * (S::kRowBytes / 16) + c * 4);
    }
  }
  int slot = 0, turn = 0, done = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x, ++done) {
    mbarrier_wait(full + 8 * slot, turn & 1);
    const uint8_t* rows = stages + slot * S::kTileBytes + g * S::kPitch + warp * (S::kChunks * 64) + q * 16;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int c = 0; c < S::kChunks; ++c) {
      const uint4 w = *reinterpret_cast<const uint4*>(rows + c * 64);
      const uint4 h = kUpper ? high[kUpper ? c : 0] : make_uint4(0, 0, 0, 0);
      mma_bf16(even, low[c].x, h.x, low[c].y, h.y, w.x, w.y);
      mma_bf16(odd, low[c].z, h.z, low[c].w, h.w, w.z, w.w);
    }
    fence_async_proxy();  // a bulk copy would not queue behind loads of the slot that are still under way
    warp_arrive(empty + 8 * slot);
    const int buffer = done % 2;
    if (done >= 2) barrier_sync(kReleasedBarrier + buffer, S::kConsumers + S::kOutputs);
    float* mine = partial + (buffer * S::kWarps + warp) * S::kOutputs + g * kTileRows + 2 * q;
    *reinterpret_cast<float2*>(mine) = make_float2(even[0] + odd[0], even[1] + odd[1]);
    if constexpr (kUpper)
      *reinterpret_cast<float2*>(mine + 8 * kTileRows) = make_float2(even[2] + odd[2], even[3] + odd[3]);
    barrier_arrive(kFilledBarrier + buffer, S::kConsumers + S::kOutputs);
    if (++slot == S::kStages) {
      slot = 0;
      ++turn;
    }
  }
}

// What one epilogue thread needs for its output besides the sum, as loaded: to convert is to wait.
struct Operands {
  bf16 bias;
  bf16 before;                            // residual
  float2 turn = make_float2(1.0f, 0.0f);  // rotation
};

template <Epilogue EPILOGUE>
__device__ __forceinline__ const float2* rotation_of(const Args& a, int tile, int r, int64_t position) {
  return a.rotation + position * 32 + tile % 8 * 4 + r % 4;
}

template <Epilogue EPILOGUE>
__device__ __forceinline__ Operands load_operands(const Args& a, int tile, int token, int r, int64_t position) {
  Operands o;
  const int n = weight_row<EPILOGUE>(tile, r);
  if constexpr (EPILOGUE != Epilogue::kLogits) o.bias = a.bias[n];
  if constexpr (EPILOGUE == Epilogue::kResidual) o.before = load_fresh(a.residual + static_cast<size_t>(token) * a.rows + n);
  if constexpr (EPILOGUE == Epilogue::kQkvRope)
    if (tile / 8 < a.query_heads + a.kv_heads) o.turn = *rotation_of<EPILOGUE>(a, tile, r, position);
  return o;
}

template <Epilogue EPILOGUE>
__device__ __forceinline__ void store(const Args& a, const Operands& o, float sum, int tile, int token, int r, bool live,
                                      int64_t slot) {
  const int n = weight_row<EPILOGUE>(tile, r);
  if constexpr (EPILOGUE == Epilogue::kLogits) {
    if (live) a.logits[static_cast<size_t>(token) * a.rows + n] = sum;
    return;
  }
  sum += __bfloat162float(o.bias);
  if constexpr (EPILOGUE == Epilogue::kResidual) {
    if (live) a.residual[static_cast<size_t>(token) * a.rows + n] = __float2bfloat16_rn(sum + __bfloat162float(o.before));
  }
  if constexpr (EPILOGUE == Epilogue::kPlain) {
    if (live) a.out[static_cast<size_t>(token) * a.rows + n] = __float2bfloat16_rn(sum);
  }
  if constexpr (EPILOGUE == Epilogue::kQkvRope) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, sum, 4);  // the other half of the rotary pair
    const float turned = r < 4 ? sum * o.turn.x - other * o.turn.y : sum * o.turn.x + other * o.turn.y;
    const int head = tile / 8, d = n % 64;
    bf16* out = nullptr;
    if (head < a.query_heads) {
      out = a.query + (static_cast<size_t>(token) * a.query_heads + head) * 64;
    } else if (slot >= 0) {
      const int kv = head - a.query_heads;
      const int is_value = kv >= a.kv_heads;
      const int kv_head = is_value ? kv - a.kv_heads : kv;
      out = a.kv_layer + (slot / a.page_size) * a.page_stride +
            (static_cast<int64_t>(kv_head * 2 + is_value) * a.page_size + slot % a.page_size) * 64;
    }
    if (live && out != nullptr) out[d] = __float2bfloat16_rn(turned);
  }
}

template <typename S, Epilogue EPILOGUE>
__device__ __forceinline__ void finish(const Args& a, const float* partial) {
  const int output = threadIdx.x - S::kConsumers, token = output / kTileRows, r = output % kTileRows;
  const int tiles = a.rows / kTileRows, stride = gridDim.x;
  const bool live = token < a.tokens;
  const int known = live ? token : 0;
  int64_t position = 0, slot = -1;
  if constexpr (EPILOGUE == Epilogue::kQkvRope) {
    // Written before the launch ahead began.
    position = a.positions[known];
    slot = a.slot[known];
  }
  if constexpr (EPILOGUE != Epilogue::kLogits) {
    // Constants, which memory would otherwise be asked for tile by tile.
    for (int tile = blockIdx.x; tile < tiles; tile += stride) {
      prefetch_line(a.bias + weight_row<EPILOGUE>(tile, r));
      if constexpr (EPILOGUE == Epilogue::kQkvRope) prefetch_line(rotation_of<EPILOGUE>(a, tile, r, position));
    }
  }
  grid_dependency_wait();
  Operands operands = load_operands<EPILOGUE>(a, blockIdx.x, known, r, position);
  int done = 0;
  for (int tile = blockIdx.x; tile < tiles; tile += stride, ++done) {
    const int buffer = done % 2;
    barrier_sync(kFilledBarrier + buffer, S::kConsumers + S::kOutputs);
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < S::kWarps; ++w) sum += partial[(buffer * S::kWarps + w) * S::kOutputs + output];
    if (tile + 2 * stride < tiles) barrier_arrive(kReleasedBarrier + buffer, S::kConsumers + S::kOutputs);
    const Operands now = operands;
    if (tile + stride < tiles) operands = load_operands<EPILOGUE>(a, tile + stride, known, r, position);
    store<EPILOGUE>(a, now, sum, tile, known, r, live, slot);
  }
}

template <typename S, Epilogue EPILOGUE>
__global__ void __launch_bounds__(S::kThreads, 1) project(const __grid_constant__ Args a) {
  DYNAMIC_SHARED(stages);
  __shared__ __align__(8) uint64_t full[S::kStages], empty[S::kStages];
  float* partial = reinterpret_cast<float*>(stages + S::kStages * S::kTileBytes);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kStages; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), S::kWarps * kWarpArrivals);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < S::kConsumers) {
    multiply<S>(a, stages, shared_address(full), shared_address(empty), partial);
  } else if (threadIdx.x < S::kConsumers + S::kOutputs) {
    finish<S, EPILOGUE>(a, partial);
  } else {
    produce<S, EPILOGUE>(a, shared_address(stages), shared_address(full), shared_address(empty));
    // Even without work: this kernel must not finish before its predecessor.
    grid_dependency_wait();
    grid_dependency_trigger();
  }
}

template <typename S, Epilogue EPILOGUE>
int start(const Args& a, int grid, int pdl, void* stream) {
  if (a.tokens < 1 || a.tokens > S::kTokens || a.rows % kTileRows != 0) return cudaErrorInvalidValue;
  const cudaError_t prepared = prepare(project<S, EPILOGUE>, S::kSharedBytes);
  if (prepared != cudaSuccess) return prepared;
  // No more blocks than shorten the longest run of tiles.
  const int tiles = a.rows / kTileRows, most = (tiles + grid - 1) / grid;
  return launch(project<S, EPILOGUE>, dim3((tiles + most - 1) / most), dim3(S::kThreads), S::kSharedBytes,
                static_cast<cudaStream_t>(stream), pdl != 0, a);
}

// What every projection has; without a bias where there is none.
inline Args projection(const void* x, const void* weight, const void* bias, int tokens, int rows) {
  Args a = {};
  a.x = static_cast<const bf16*>(x);
  a.weight = static_cast<const bf16*>(weight);
  a.bias = static_cast<const bf16*>(bias);
  a.tokens = tokens;
  a.rows = rows;
  return a;
}

template <int CHUNKS>
int start_part(const Args& a, int grid, int pdl, void* stream) {
  return a.tokens <= 8 ? start<QueryPart<CHUNKS, 8>, Epilogue::kPlain>(a, grid, pdl, stream)
                       : start<QueryPart<CHUNKS, 16>, Epilogue::kPlain>(a, grid, pdl, stream);
}

}  // namespace
}  // namespace antiphon::skinny

extern "C" {

// QKV + bias + rotation of normed states; queries to `query`, keys and values to their pages. K = 2880. `grid`:
// blocks, one per SM.
int antiphon_qkv_rope(const void* x, const void* weight, const void* bias, int tokens, const void* positions,
                      const void* slot, const void* rotation, void* query, void* kv_layer, int64_t page_stride,
                      int query_heads, int kv_heads, int page_size, int grid, int pdl, void* stream) {
  using namespace antiphon::skinny;
  Args a = projection(x, weight, bias, tokens, (query_heads + 2 * kv_heads) * 64);
  a.positions = static_cast<const int64_t*>(positions);
  a.slot = static_cast<const int64_t*>(slot);
  a.rotation = static_cast<const float2*>(rotation);
  a.query = static_cast<bf16*>(query);
  a.kv_layer = static_cast<bf16*>(kv_layer);
  a.page_stride = page_stride;
  a.query_heads = query_heads;
  a.kv_heads = kv_heads;
  a.page_size = page_size;
  return tokens <= 8 ? start<HiddenFew, Epilogue::kQkvRope>(a, grid, pdl, stream)
                     : start<HiddenMore, Epilogue::kQkvRope>(a, grid, pdl, stream);
}

// residual += x W^T + bias. K = 4096, rows a multiple of 8.
int antiphon_output_projection(const void* x, const void* weight, const void* bias, void* residual, int tokens,
                               int rows, int grid, int pdl, void* stream) {
  using namespace antiphon::skinny;
  Args a = projection(x, weight, bias, tokens, rows);
  a.residual = static_cast<bf16*>(residual);
  return tokens <= 8 ? start<QueryFew, Epilogue::kResidual>(a, grid, pdl, stream)
                     : start<QueryMore, Epilogue::kResidual>(a, grid, pdl, stream);
}

// out = x W^T + bias of a rank's columns of x: 512, 1024 or 2048 of them, rows a multiple of 8.
int antiphon_partial_projection(const void* x, const void* weight, const void* bias, void* out, int tokens, int columns,
                                int rows, int grid, int pdl, void* stream) {
  using namespace antiphon::skinny;
  Args a = projection(x, weight, bias, tokens, rows);
  a.out = static_cast<bf16*>(out);
  switch (columns) {
    case 512: return start_part<1>(a, grid, pdl, stream);
    case 1024: return start_part<2>(a, grid, pdl, stream);
    case 2048: return start_part<4>(a, grid, pdl, stream);
    default: return cudaErrorInvalidValue;
  }
}

// Unembedding of normed hidden states; logits in float32. K = 2880, rows a multiple of 8.
int antiphon_logits(const void* x, const void* weight, float* logits, int tokens, int rows, int grid, int pdl,
                    void* stream) {
  using namespace antiphon::skinny;
  Args a = projection(x, weight, nullptr, tokens, rows);
  a.logits = logits;
  return tokens <= 8 ? start<HiddenFew, Epilogue::kLogits>(a, grid, pdl, stream)
                     : start<HiddenMore, Epilogue::kLogits>(a, grid, pdl, stream);
}

}  // extern "C"
