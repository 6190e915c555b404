// Sum of one bf16 matrix over the GPUs of a host, added to the residual stream, and its RMSNorm: one launch.
//
// Every rank puts its rows into memory that all ranks can read, says so to each of them, waits for their word,
// and reads the rows of all ranks in the order of ranks, so that every rank computes the same bits. One block
// does one row. Words are numbers that only grow, and rows alternate between two places: a rank that writes a
// place for the second time has heard from every rank in between, so nobody still reads what was there.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 384;
constexpr int kMaxRanks = 8;

struct Peers {
  const uint4* rows[kMaxRanks];  // of each rank: [2, max rows, width] bf16
  uint32_t* words[kMaxRanks];    // of each rank: [max rows, ranks]
};

struct Arguments {
  Peers peers;
  const uint4* x;        // [rows, width] bf16, this rank's part
  uint4* residual;       // [rows, width] bf16, the sum is added here
  const uint4* weight;   // [width] bf16; null: no norm
  uint4* out;            // [rows, width] bf16, the norm of the new residual
  uint32_t* counts;      // [max rows], launches so far
  float eps;
  int rank, ranks, width, max_rows;
};

__device__ __forceinline__ void say(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t heard(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// Past the L1 cache, which does not know of writes by other GPUs.
__device__ __forceinline__ uint4 read_peer(const uint4* at) {
  uint4 value;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(at)
               : "memory");
  return value;
}

__device__ __forceinline__ void add(float (&sum)[8], uint4 packed) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[2 * i] += __uint_as_float(words[i] << 16);
    sum[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

__device__ __forceinline__ uint4 pack(const float (&v)[8]) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

__device__ float block_sum(float value) {
  __shared__ float parts[kThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < kThreads / 32; ++warp) total += parts[warp];
  return total;
}

__global__ void __launch_bounds__(kThreads) reduce_add_norm(const Arguments a) {
  const int row = blockIdx.x;
  const int chunks = a.width / 8;
  const uint32_t count = a.counts[row] + 1;
  const size_t place = (static_cast<size_t>(count & 1) * a.max_rows + row) * chunks;
  const size_t here = static_cast<size_t>(row) * chunks;

  uint4* mine = const_cast<uint4*>(a.peers.rows[a.rank]) + place;
  for (int i = threadIdx.x; i < chunks; i += kThreads) mine[i] = a.x[here + i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < a.ranks) {
    say(a.peers.words[threadIdx.x] + static_cast<size_t>(row) * a.ranks + a.rank, count);
    const uint32_t* word = a.peers.words[a.rank] + static_cast<size_t>(row) * a.ranks + threadIdx.x;
    // Signed difference: the numbers may wrap around.
    while (static_cast<int32_t>(heard(word) - count) < 0) {
    }
  }
  __syncthreads();

  float squares = 0.f;
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    float sum[8] = {};
    for (int rank = 0; rank < a.ranks; ++rank) add(sum, read_peer(a.peers.rows[rank] + place + i));
    float total[8] = {};
    add(total, pack(sum));  // the sum is a bf16 value, as that of other collectives
    add(total, a.residual[here + i]);
    const uint4 rounded = pack(total);
    a.residual[here + i] = rounded;
    float value[8] = {};
    add(value, rounded);
#pragma unroll
    for (int k = 0; k < 8; ++k) squares += value[k] * value[k];
  }
  if (threadIdx.x == 0) a.counts[row] = count;
  if (a.weight == nullptr) return;
  const float scale = rsqrtf(block_sum(squares) / a.width + a.eps);
  for (int i = threadIdx.x; i < chunks; i += kThreads) {
    float value[8] = {}, weight[8] = {};
    add(value, a.residual[here + i]);
    add(weight, a.weight[i]);
#pragma unroll
    for (int k = 0; k < 8; ++k) value[k] *= scale * weight[k];
    a.out[here + i] = pack(value);
  }
}

}  // namespace

extern "C" int antiphon_reduce_add_norm(const void* const* rows_of, void* const* words_of, const void* x,
                                        void* residual, const void* weight, void* out, void* counts, float eps,
                                        int rows, int width, int max_rows, int rank, int ranks, void* stream) {
  if (rows < 1 || rows > max_rows || ranks < 1 || ranks > kMaxRanks || width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  Arguments a{};
  for (int peer = 0; peer < ranks; ++peer) {
    a.peers.rows[peer] = static_cast<const uint4*>(rows_of[peer]);
    a.peers.words[peer] = static_cast<uint32_t*>(words_of[peer]);
  }
  a.x = static_cast<const uint4*>(x);
  a.residual = static_cast<uint4*>(residual);
  a.weight = static_cast<const uint4*>(weight);
  a.out = static_cast<uint4*>(out);
  a.counts = static_cast<uint32_t*>(counts);
  a.eps = eps;
  a.rank = rank;
  a.ranks = ranks;
  a.width = width;
  a.max_rows = max_rows;
  reduce_add_norm<<<rows, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(a);
  return cudaGetLastError();
}
