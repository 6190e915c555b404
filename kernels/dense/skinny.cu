// Dense projections for few tokens (decode), sm_90a.
//
// out[t, n] = sum_k x[t, k] W[n, k] with 1 <= T <= 8 * TOKEN_TILES. At these sizes the weight stream is the whole
// cost, so one block owns 16 weight rows, its warps split K, and every lane streams its own 16-byte pieces
// from memory straight into mma.sync A fragments:
//
//   m16n8k16, lane = 4 g + q: A holds rows g and g + 8. A sum over k does not care about order, so each lane reads
//   8 consecutive k (16 bytes) of its two rows and feeds elements 0..3 to the first mma and 4..7 to the second;
//   B (the tokens) is read with the same permutation. No shuffle of the weights is needed.
//
// The first stages of weights are requested before griddepcontrol.wait, since they do not depend on the kernel
// before. Sums over warps are taken in a fixed order: results are identical from run to run.

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace {

using bf16 = __nv_bfloat16;

enum Epilogue { QKV_ROPE = 0, RESIDUAL = 1 };

struct Args {
  const bf16* x;            // [T, K]
  const bf16* weight;       // [N, K]
  const bf16* bias;         // [N] or null
  const bf16* norm_weight;  // [K] or null: x is RMS-normalised on the way in
  float eps;
  int tokens;
  int rows;
  // QKV_ROPE
  const int64_t* positions;  // [T]
  const int64_t* slot;       // [T], negative: not stored
  const float2* rotation;    // [max_positions, 32] (cos, sin), concentration included
  bf16* query;               // [T, Q, 64]
  bf16* kv_layer;            // [N, G, 2, S, 64] view
  int64_t page_stride;       // elements
  int query_heads;
  int kv_heads;
  int page_size;
  // RESIDUAL
  bf16* residual;  // [T, N], updated in place
  // logits_stream
  float* logits;  // [T, N]
};

__device__ __forceinline__ void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 stream_load(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load_activation(const void* p) {
  // Written by the kernel before: must not go through the non-coherent path.
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}

__device__ __forceinline__ uint32_t scale_pair(uint32_t x, uint32_t w, float& sum_of_squares) {
  float2 a = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&x));
  float2 b = __bfloat1622float2(*reinterpret_cast<__nv_bfloat162*>(&w));
  sum_of_squares = fmaf(a.x, a.x, fmaf(a.y, a.y, sum_of_squares));
  __nv_bfloat162 y = __floats2bfloat162_rn(a.x * b.x, a.y * b.y);
  return *reinterpret_cast<uint32_t*>(&y);
}

template <int WARPS, int CHUNKS, int TOKEN_TILES, int DEPTH, int EPILOGUE, bool NORM, int BLOCKS_PER_SM>
__global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) skinny_gemm(const Args args) {
  constexpr int K = WARPS * CHUNKS * 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, q = lane % 4;

  int row_low, row_high;  // this lane's two weight rows
  if constexpr (EPILOGUE == QKV_ROPE) {
    // Rows d and d + 32 of one head are a rotary pair: put them at g and g + 8.
    const int head = blockIdx.x / 4, offset = (blockIdx.x % 4) * 8;
    row_low = head * 64 + offset + g;
    row_high = row_low + 32;
  } else {
    row_low = blockIdx.x * 16 + g;
    row_high = row_low + 8;
  }
  const int k_lane = warp * (CHUNKS * 32) + q * 8;
  const bf16* w_low = args.weight + static_cast<int64_t>(row_low) * K + k_lane;
  const bf16* w_high = args.weight + static_cast<int64_t>(row_high) * K + k_lane;

  const bf16* norm_lane = args.norm_weight + k_lane;
  uint4 low[DEPTH], high[DEPTH];
#pragma unroll
  for (int c = 0; c < DEPTH; ++c) {
    low[c] = stream_load(w_low + c * 32);
    high[c] = stream_load(w_high + c * 32);
  }

  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  const bf16* x_lane[TOKEN_TILES];
  bool live[TOKEN_TILES];
#pragma unroll
  for (int t = 0; t < TOKEN_TILES; ++t) {
    live[t] = t * 8 + g < args.tokens;
    x_lane[t] = args.x + static_cast<int64_t>(live[t] ? t * 8 + g : 0) * K + k_lane;
  }
  uint4 x[DEPTH][TOKEN_TILES];
#pragma unroll
  for (int c = 0; c < DEPTH; ++c)
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; ++t)
      x[c][t] = live[t] ? load_activation(x_lane[t] + c * 32) : make_uint4(0, 0, 0, 0);

  float acc[TOKEN_TILES][4] = {};
  float squares[TOKEN_TILES] = {};
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    const int s = c % DEPTH;
    uint4 scale;
    // The same for every block, so the blocks of an SM share it in L1.
    if constexpr (NORM) scale = __ldg(reinterpret_cast<const uint4*>(norm_lane + c * 32));
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; ++t) {
      uint4 b = x[s][t];
      if constexpr (NORM) {
        b.x = scale_pair(b.x, scale.x, squares[t]);
        b.y = scale_pair(b.y, scale.y, squares[t]);
        b.z = scale_pair(b.z, scale.z, squares[t]);
        b.w = scale_pair(b.w, scale.w, squares[t]);
      }
      mma(acc[t], low[s].x, high[s].x, low[s].y, high[s].y, b.x, b.y);
      mma(acc[t], low[s].z, high[s].z, low[s].w, high[s].w, b.z, b.w);
    }
    if (c + DEPTH < CHUNKS) {
      low[s] = stream_load(w_low + (c + DEPTH) * 32);
      high[s] = stream_load(w_high + (c + DEPTH) * 32);
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; ++t)
        x[s][t] = live[t] ? load_activation(x_lane[t] + (c + DEPTH) * 32) : make_uint4(0, 0, 0, 0);
    }
  }

  __shared__ float partial[WARPS][TOKEN_TILES][8][17];  // token within the tile, weight row; padded against conflicts
  __shared__ float partial_squares[WARPS][TOKEN_TILES * 8];
#pragma unroll
  for (int t = 0; t < TOKEN_TILES; ++t) {
    partial[warp][t][2 * q][g] = acc[t][0];
    partial[warp][t][2 * q + 1][g] = acc[t][1];
    partial[warp][t][2 * q][g + 8] = acc[t][2];
    partial[warp][t][2 * q + 1][g + 8] = acc[t][3];
    if constexpr (NORM) {
      float s = squares[t];
      s += __shfl_xor_sync(0xffffffffu, s, 1);
      s += __shfl_xor_sync(0xffffffffu, s, 2);
      if (q == 0) partial_squares[warp][t * 8 + g] = s;
    }
  }
  __syncthreads();

  for (int i = threadIdx.x; i < TOKEN_TILES * 64; i += WARPS * 32) {
    const int token = i / 8, r = i % 8;
    if (token >= args.tokens) continue;
    float first = 0.f, second = 0.f, sum_squares = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      first += partial[w][token / 8][token % 8][r];
      second += partial[w][token / 8][token % 8][r + 8];
      if constexpr (NORM) sum_squares += partial_squares[w][token];
    }
    if constexpr (NORM) {
      const float norm = rsqrtf(sum_squares / K + args.eps);
      first *= norm;
      second *= norm;
    }
    if constexpr (EPILOGUE == QKV_ROPE) {
      const int head = blockIdx.x / 4, d = (blockIdx.x % 4) * 8 + r;
      first += __bfloat162float(args.bias[head * 64 + d]);
      second += __bfloat162float(args.bias[head * 64 + d + 32]);
      if (head < args.query_heads + args.kv_heads) {
        const float2 cs = args.rotation[args.positions[token] * 32 + d];
        const float rotated = first * cs.x - second * cs.y;
        second = second * cs.x + first * cs.y;
        first = rotated;
      }
      bf16* out;
      if (head < args.query_heads) {
        out = args.query + (static_cast<int64_t>(token) * args.query_heads + head) * 64;
      } else {
        const int64_t slot = args.slot[token];
        if (slot < 0) continue;
        const int kv = head - args.query_heads;
        const int is_value = kv >= args.kv_heads;
        const int kv_head = is_value ? kv - args.kv_heads : kv;
        out = args.kv_layer + (slot / args.page_size) * args.page_stride +
              (static_cast<int64_t>(kv_head * 2 + is_value) * args.page_size + slot % args.page_size) * 64;
      }
      out[d] = __float2bfloat16_rn(first);
      out[d + 32] = __float2bfloat16_rn(second);
    } else {
      const int n = blockIdx.x * 16 + r;
      const int64_t at = static_cast<int64_t>(token) * args.rows + n;
      first += __bfloat162float(args.bias[n]) + __bfloat162float(args.residual[at]);
      second += __bfloat162float(args.bias[n + 8]) + __bfloat162float(args.residual[at + 8]);
      args.residual[at] = __float2bfloat16_rn(first);
      args.residual[at + 8] = __float2bfloat16_rn(second);
    }
  }
}

// Unembedding: 12,568 tiles of 16 rows. Blocks are persistent and the weight stream runs on into the next tile while
// this one is summed over warps. The tokens lie in shared memory, rows 5,824 bytes apart so that the eight lanes of
// a 128-byte phase never meet in a bank.
template <int TOKEN_TILES, int BLOCKS_PER_SM>
__global__ void __launch_bounds__(288, BLOCKS_PER_SM) logits_stream(const Args args) {
  constexpr int K = 2880, WARPS = 9, CHUNKS = 10, DEPTH = 5, PITCH = K + 32;
  extern __shared__ __align__(16) bf16 tokens[];
  __shared__ float partial[2][WARPS][TOKEN_TILES][8][17];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int g = lane / 4, q = lane % 4;
  const int k_lane = warp * (CHUNKS * 32) + q * 8;
  const int tiles = args.rows / 16;

  int tile = blockIdx.x;
  const bf16* w = args.weight + static_cast<int64_t>(tile * 16 + g) * K + k_lane;
  uint4 low[DEPTH], high[DEPTH];
#pragma unroll
  for (int c = 0; c < DEPTH; ++c) {
    low[c] = stream_load(w + c * 32);
    high[c] = stream_load(w + 8 * K + c * 32);
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  for (int i = threadIdx.x; i < args.tokens * (K / 8); i += 288)
    *reinterpret_cast<uint4*>(tokens + (i / (K / 8)) * PITCH + (i % (K / 8)) * 8) =
        load_activation(args.x + static_cast<int64_t>(i) * 8);
  __syncthreads();

  for (int turn = 0; tile < tiles; turn ^= 1) {
    const int next = tile + gridDim.x;
    const bf16* w_next = args.weight + static_cast<int64_t>(min(next, tiles - 1) * 16 + g) * K + k_lane;
    float acc[TOKEN_TILES][4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      const int s = c % DEPTH;
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; ++t) {
        uint4 b = make_uint4(0, 0, 0, 0);
        if (t * 8 + g < args.tokens)
          b = *reinterpret_cast<const uint4*>(tokens + (t * 8 + g) * PITCH + k_lane + c * 32);
        mma(acc[t], low[s].x, high[s].x, low[s].y, high[s].y, b.x, b.y);
        mma(acc[t], low[s].z, high[s].z, low[s].w, high[s].w, b.z, b.w);
      }
      const bf16* from = c + DEPTH < CHUNKS ? w + (c + DEPTH) * 32 : w_next + (c + DEPTH - CHUNKS) * 32;
      low[s] = stream_load(from);
      high[s] = stream_load(from + 8 * K);
    }
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; ++t) {
      partial[turn][warp][t][2 * q][g] = acc[t][0];
      partial[turn][warp][t][2 * q + 1][g] = acc[t][1];
      partial[turn][warp][t][2 * q][g + 8] = acc[t][2];
      partial[turn][warp][t][2 * q + 1][g + 8] = acc[t][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < TOKEN_TILES * 128; i += 288) {
      const int token = i / 16, r = i % 16;
      if (token >= args.tokens) break;
      float sum = 0.f;
#pragma unroll
      for (int v = 0; v < WARPS; ++v) sum += partial[turn][v][token / 8][token % 8][r];
      args.logits[static_cast<int64_t>(token) * args.rows + tile * 16 + r] = sum;
    }
    tile = next;
    w = w_next;
  }
}

template <typename Kernel>
int launch(Kernel kernel, const Args& args, int blocks, int threads, bool pdl, cudaStream_t stream,
           int shared_bytes = 0) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.dynamicSmemBytes = shared_bytes;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = pdl ? 1 : 0;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, args));
}

template <int WARPS, int CHUNKS, int EPILOGUE, bool NORM>
int dispatch(const Args& args, int blocks, bool pdl, cudaStream_t stream) {
  if (args.tokens < 1 || args.tokens > 16) return static_cast<int>(cudaErrorInvalidValue);
  const int threads = WARPS * 32;
  // Three resident blocks per SM let all 320 blocks of QKV run in one wave.
  if (args.tokens <= 8)
    return launch(skinny_gemm<WARPS, CHUNKS, 1, 4, EPILOGUE, NORM, 3>, args, blocks, threads, pdl, stream);
  return launch(skinny_gemm<WARPS, CHUNKS, 2, 4, EPILOGUE, NORM, 2>, args, blocks, threads, pdl, stream);
}

}  // namespace

extern "C" {

// QKV + bias + rotation; queries to `query`, keys and values to their pages. K = 2880. With `norm_weight` x is the
// residual stream and is RMS-normalised on the way in; without it x is normed already.
int antiphon_qkv_rope(const void* x, const void* weight, const void* bias, const void* norm_weight, float eps,
                      int tokens, const void* positions, const void* slot, const void* rotation, void* query,
                      void* kv_layer, int64_t page_stride, int query_heads, int kv_heads, int page_size, int pdl,
                      void* stream) {
  Args args = {};
  args.x = static_cast<const bf16*>(x);
  args.weight = static_cast<const bf16*>(weight);
  args.bias = static_cast<const bf16*>(bias);
  args.norm_weight = static_cast<const bf16*>(norm_weight);
  args.eps = eps;
  args.tokens = tokens;
  args.rows = (query_heads + 2 * kv_heads) * 64;
  args.positions = static_cast<const int64_t*>(positions);
  args.slot = static_cast<const int64_t*>(slot);
  args.rotation = static_cast<const float2*>(rotation);
  args.query = static_cast<bf16*>(query);
  args.kv_layer = static_cast<bf16*>(kv_layer);
  args.page_stride = page_stride;
  args.query_heads = query_heads;
  args.kv_heads = kv_heads;
  args.page_size = page_size;
  const auto run = norm_weight ? dispatch<9, 10, QKV_ROPE, true> : dispatch<9, 10, QKV_ROPE, false>;
  return run(args, args.rows / 16, pdl != 0, static_cast<cudaStream_t>(stream));
}

// residual += x W^T + bias. K = 4096, rows a multiple of 16.
int antiphon_output_projection(const void* x, const void* weight, const void* bias, void* residual, int tokens,
                               int rows, int pdl, void* stream) {
  Args args = {};
  args.x = static_cast<const bf16*>(x);
  args.weight = static_cast<const bf16*>(weight);
  args.bias = static_cast<const bf16*>(bias);
  args.tokens = tokens;
  args.rows = rows;
  args.residual = static_cast<bf16*>(residual);
  return dispatch<8, 16, RESIDUAL, false>(args, rows / 16, pdl != 0, static_cast<cudaStream_t>(stream));
}

// Unembedding of normed hidden states; logits in float32. K = 2880, rows a multiple of 16. The norm is not fused
// here: 12,568 blocks would each read its weight again.
int antiphon_logits(const void* x, const void* weight, float* logits, int tokens, int rows, int pdl, void* stream) {
  Args args = {};
  args.x = static_cast<const bf16*>(x);
  args.weight = static_cast<const bf16*>(weight);
  args.tokens = tokens;
  args.rows = rows;
  args.logits = logits;
  if (tokens < 1 || tokens > 16) return static_cast<int>(cudaErrorInvalidValue);
  const bool few = tokens <= 8;
  const auto kernel = few ? logits_stream<1, 3> : logits_stream<2, 2>;
  const int shared_bytes = tokens * (2880 + 32) * 2;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (status != cudaSuccess) return static_cast<int>(status);
  int device = 0, processors = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  return launch(kernel, args, processors * (few ? 3 : 2), 288, pdl != 0, static_cast<cudaStream_t>(stream),
                shared_bytes);
}

}  // extern "C"
