// Thin wrappers over the Hopper instructions that the MoE kernels use: mbarriers, bulk copies, FP8 wgmma,
// named barriers and programmatic dependent launch. One wrapper per instruction, no policy.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

// The tests run kernels on the host, thread by thread: ANTIPHON_ON_HOST names a header with the same functions.
#ifdef ANTIPHON_ON_HOST
#include ANTIPHON_ON_HOST
#else

// The block's dynamic shared memory.
#define DYNAMIC_SHARED(name) extern __shared__ __align__(1024) uint8_t name[]

#endif

namespace antiphon {

// The two bf16 numbers of a word.
__device__ __forceinline__ float low_half(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }

#ifndef ANTIPHON_ON_HOST

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The gated activation of GPT-OSS. The clamps pass NaN on, which fminf would replace by the limit.
__device__ __forceinline__ float clamped_swiglu(float gate, float up) {
  asm("min.NaN.f32 %0, %0, 0f40E00000;" : "+f"(gate));  // 7
  asm("min.NaN.f32 %0, %0, 0f40E00000;" : "+f"(up));
  asm("max.NaN.f32 %0, %0, 0fC0E00000;" : "+f"(up));
  return __fdividef(gate, 1.0f + __expf(-1.702f * gate)) * (up + 1.0f);
}

// ---------------------------------------------------------------------------------- mbarrier, bulk copy

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to the copy engine.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Spins inside one asm statement: a loop in C would make the path divergent and serialise wgmma after it.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@p bra done;\n"
      "bra again;\n"
      "done:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Contiguous global -> shared copy by the copy engine; completes on the barrier's byte count.
// `bytes` and both addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(uint32_t destination, const void* source, uint32_t bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// The same for bytes that nobody reads again: L2 gives them up first.
__device__ __forceinline__ void bulk_copy_once(uint32_t destination, const void* source, uint32_t bytes,
                                               uint32_t barrier) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], policy;\n"
      "}\n" ::"r"(destination),
      "l"(source), "r"(bytes), "r"(barrier)
      : "memory");
}

// Has L2 fetch the line of 128 bytes around an address; nobody waits for it.
__device__ __forceinline__ void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// 16 bytes from global to shared memory by this thread, until wait_copies().
__device__ __forceinline__ void copy16(uint32_t destination, const void* source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Ordinary shared-memory stores before this fence are seen by wgmma and the copy engine after a barrier, and loads
// before it are done before what the copy engine writes then. An arrival alone does not wait for them.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Ordinary global stores that are visible here are seen by bulk copies issued after this fence.
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// ------------------------------------------------------------------------- global memory that others write

// Loads of what an earlier kernel wrote: never through the read-only path, and in program order.
__device__ __forceinline__ uint4 load_fresh(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from));
  return v;
}
__device__ __forceinline__ __nv_bfloat16 load_fresh(const __nv_bfloat16* from) {
  unsigned short bits;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(bits) : "l"(from));
  return __ushort_as_bfloat16(bits);
}

// Adds to a counter that blocks of this launch wait for; what this thread has written, or seen written before a
// barrier, is visible to whoever sees the count. The fence takes about as long as a round trip to memory.
__device__ __forceinline__ void count_up(int* counter, int by) {
  __threadfence();
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(counter), "r"(by) : "memory");
}
__device__ __forceinline__ void wait_for_count(const int* counter, int count) {
  int seen;
  do {
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < count);
}

// ------------------------------------------------------------------------------------------ named barriers

__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ------------------------------------------------------------------------------ programmatic dependent launch

// Returns once every kernel this one depends on has finished and its writes are visible.
__device__ __forceinline__ void grid_dependency_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void grid_dependency_trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ------------------------------------------------------------------------------------------- mma.sync, wgmma

// d[16, 8] += a[16, 16] x b[8, 16]^T of one warp, bf16 -> float32; fragments as PTX lays them out.
__device__ __forceinline__ void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                         uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait_all() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// Until at most PENDING groups are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads of an accumulator above the wait that completes it.
__device__ __forceinline__ void pin(float& value) { asm volatile("" : "+f"(value)::"memory"); }
// Keeps the computation of an operand above the fence that follows.
__device__ __forceinline__ void pin(uint32_t& value) { asm volatile("" : "+r"(value)::"memory"); }

// sum += value * factor, not moved above a wait before it. Unlike pin it defines no register of other products, which
// may still be under way: the assembler would have them wait for one another.
__device__ __forceinline__ void multiply_add_in_order(float& sum, const float& value, float factor) {
  asm volatile("fma.rn.f32 %0, %1, %2, %0;" : "+f"(sum) : "f"(value), "f"(factor));
}

// Descriptor of a K-major operand without swizzle: core matrices of 8 rows x 16 bytes, contiguous.
// `k_stride`: bytes from a core matrix to the next along K; `row_stride`: to the next 8 rows.
// Adding bytes / 16 moves the address.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t k_stride, uint32_t row_stride) {
  return static_cast<uint64_t>(address >> 4) | (static_cast<uint64_t>(k_stride >> 4) << 16) |
         (static_cast<uint64_t>(row_stride >> 4) << 32);
}

// Descriptor of an operand in rows of 128 bytes whose 16-byte chunks are exchanged within each 8 rows (128-byte
// swizzle). Adding bytes / 16 moves along a row, or by whole rows.
__device__ __forceinline__ uint64_t swizzled_operand(uint32_t address) {
  return static_cast<uint64_t>(address >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

// d[64, N] (+)= a[64, 32] (registers) x b[N, 32]^T (shared), e4m3 x e4m3 -> float32.
// d: lane (g = lane / 4, t = lane % 4) of a warp holds rows g and g + 8 of its 16, columns 8 j + 2 t + {0, 1}.
template <int N, int ACCUMULATE>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {
  static_assert(N == 8 || N == 16 || N == 24 || N == 32, "unsupported width");
  if constexpr (N == 8) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, p, 1, 1;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE));
  } else if constexpr (N == 16) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE));
  } else if constexpr (N == 24) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %17, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n24k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11}, {%12,%13,%14,%15}, %16, p, 1, 1;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE));
  } else {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1;\n}\n"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(ACCUMULATE));
  }
}

// d[64, 128] (+)= a[64, 32] x b[128, 32]^T, both from shared memory (128-byte swizzle), e4m3 -> float32.
// d: lane (g, t) holds rows g and g + 8, columns 8 j + 2 t + {0, 1} at 4 j + {0, 1} and 4 j + {2, 3}.
__device__ __forceinline__ void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32,"
      " %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(accumulate));
}

// ---------------------------------------------------------------------------------------------- registers

// The whole warpgroup gives up or takes registers, down to or up to so many a thread.
template <int COUNT>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// An 8 x 8 matrix of 16-bit values over the warp, lane (g, t) holding row g, columns 2 t and 2 t + 1, transposed.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t word) {
  uint32_t result;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(word));
  return result;
}

// ------------------------------------------------------------------------------------------------ launching

// Allows a kernel its dynamic shared memory.
template <typename Kernel>
inline cudaError_t prepare(Kernel kernel, int shared_bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// Blocks of a prepared kernel that the current device holds at one time; 0 when it does not say.
template <typename Kernel>
inline int resident_blocks(Kernel kernel, int threads, int shared_bytes) {
  int device = 0, processors = 0, each = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared_bytes) != cudaSuccess)
    return 0;
  return processors * each;
}

// Launches with programmatic stream serialisation when `overlap` is set: the kernel may start while its
// predecessor drains, and must call grid_dependency_wait() before touching what that one writes.
template <typename... Parameters, typename... Arguments>
inline cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                          cudaStream_t stream, bool overlap, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

#endif  // ANTIPHON_ON_HOST

// Arrivals that a warp makes at an mbarrier for what all of its lanes have done: one, behind a barrier of the warp. In a
// build for racecheck every lane arrives, since that tool takes an arrival to speak for the arriving thread alone.
#ifdef ANTIPHON_FOR_RACECHECK
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

// By all lanes of a warp: they have done what comes before. True in one of them.
__device__ __forceinline__ bool warp_arrive(uint32_t barrier) {
  __syncwarp();
  const bool first = threadIdx.x % 32 == 0;
  if (kWarpArrivals == 32 || first) mbarrier_arrive(barrier);
  return first;
}

}  // namespace antiphon
