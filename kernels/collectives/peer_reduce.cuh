// What kernels need that sum a bf16 matrix over the GPUs of a host, through memory that all of them can read and write.
//
// A row belongs to one block on every rank. Ranks tell one another how far they are by words that only grow: one that
// holds the number of a launch says that its writer has come that far in that launch.
//
// A launch may have more rows than a device holds blocks. Blocks begin in the order of their rows, so the first row
// that is not over has a block on every rank, which waits for nothing but its like: there is always one that goes on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "../moe/csrc/hopper.cuh"

// The tests run kernels on the host, thread by thread.
#ifdef ANTIPHON_ON_HOST
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
#endif

namespace antiphon {

constexpr int kReduceThreads = 384;  // 360 of them own eight of 2880 columns each
constexpr int kMaxRanks = 8;

// Signed difference: numbers of launches may wrap around.
__device__ __forceinline__ bool reached(uint32_t word, uint32_t count) {
  return static_cast<int32_t>(word - count) >= 0;
}

#ifdef ANTIPHON_ON_HOST

inline void say(uint32_t* word, uint32_t value) { __atomic_store_n(word, value, __ATOMIC_RELEASE); }
inline void wait_for(const uint32_t* word, uint32_t count) {
  on_host::wait_until([=] { return reached(__atomic_load_n(word, __ATOMIC_ACQUIRE), count); });
}
inline uint4 read_peer(const uint4* at) { return *at; }

#else

__device__ __forceinline__ void say(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void wait_for(const uint32_t* word, uint32_t count) {
  uint32_t value;
  do {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  } while (!reached(value, count));
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

#endif

// One block a row. With `overlap` the kernel may start while its predecessor drains.
template <typename Arguments>
inline int launch_rows(void (*kernel)(Arguments), const Arguments& arguments, int rows, bool overlap, void* stream) {
  return launch(kernel, dim3(rows), dim3(kReduceThreads), 0, static_cast<cudaStream_t>(stream), overlap, arguments);
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

__device__ inline float block_sum(float value) {
  __shared__ float parts[kReduceThreads / 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < kReduceThreads / 32; ++warp) total += parts[warp];
  return total;
}

// The part of a row behind its sum, alike for every way to find that.
struct Following {
  uint4* residual;      // [rows, width] bf16, the sum is added here
  const uint4* weight;  // [width] bf16; null: no norm
  uint4* out;           // [rows, width] bf16, the norm of the new residual
  float eps;
};

// Adds a chunk of the row's sum, which is a bf16 value as that of other collectives; returns its squares' sum.
__device__ __forceinline__ float add_to_residual(const Following& f, size_t at, uint4 sum) {
  float total[8] = {};
  add(total, sum);
  add(total, f.residual[at]);
  const uint4 rounded = pack(total);
  f.residual[at] = rounded;
  float value[8] = {}, squares = 0.f;
  add(value, rounded);
#pragma unroll
  for (int k = 0; k < 8; ++k) squares += value[k] * value[k];
  return squares;
}

// The norm of one row whose residual is complete; every thread gives the squares of its own chunks.
__device__ __forceinline__ void norm_row(const Following& f, size_t here, int chunks, float squares) {
  if (f.weight == nullptr) return;
  const float scale = rsqrtf(block_sum(squares) / (chunks * 8) + f.eps);
  for (int i = threadIdx.x; i < chunks; i += kReduceThreads) {
    float value[8] = {}, weight[8] = {};
    add(value, f.residual[here + i]);
    add(weight, f.weight[i]);
#pragma unroll
    for (int k = 0; k < 8; ++k) value[k] *= scale * weight[k];
    f.out[here + i] = pack(value);
  }
}

}  // namespace antiphon
