// After the expert GEMMs of a small batch: the sum over a token's experts, plain or fused with the residual add and
// the next RMSNorm. Every sum has a fixed order, so results are identical from run to run.

#include "hopper.cuh"

namespace antiphon {
namespace {

constexpr int kHidden = 2880;
constexpr int kTopK = 4;

struct CombineArguments {
  const float* partial;           // [tokens * 4, kHidden]
  const long long* ids;           // [tokens, 4]
  const __nv_bfloat16* residual;  // [tokens, kHidden], of the fused form
  const __nv_bfloat16* norm;      // [kHidden]
  __nv_bfloat16* out;             // the sum, or its norm
  __nv_bfloat16* new_residual;
  float eps;
  int first_expert, experts;
};

// Sum over a token's four experts of four columns, in order; pairs of other ranks and of padding count nothing. All
// are loaded, whoever they belong to: their addresses do not have to wait for the ids.
__device__ __forceinline__ float4 sum_pairs(const CombineArguments& a, int token, int column) {
  float4 part[kTopK];
  const float* row = a.partial + static_cast<size_t>(token * kTopK) * kHidden + column;
#pragma unroll
  for (int k = 0; k < kTopK; ++k) part[k] = *reinterpret_cast<const float4*>(row + static_cast<size_t>(k) * kHidden);
#pragma unroll
  for (int k = 0; k < kTopK; ++k) {
    const long long local = a.ids[token * kTopK + k] - a.first_expert;
    if (local < 0 || local >= a.experts) part[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  float4 sum = part[0];
#pragma unroll
  for (int k = 1; k < kTopK; ++k) {
    sum.x += part[k].x;
    sum.y += part[k].y;
    sum.z += part[k].z;
    sum.w += part[k].w;
  }
  return sum;
}

__device__ __forceinline__ uint2 pack4(float4 v) {
  const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
}

__device__ __forceinline__ float4 unpack4(uint2 v) {
  return make_float4(low_half(v.x), high_half(v.x), low_half(v.y), high_half(v.y));
}

constexpr int kCombineThreads = 240;

__global__ void __launch_bounds__(kCombineThreads) combine_kernel(const __grid_constant__ CombineArguments a) {
  grid_dependency_trigger();  // what follows fetches its weights meanwhile
  grid_dependency_wait();
  const int token = blockIdx.y, column = (blockIdx.x * kCombineThreads + threadIdx.x) * 4;
  *reinterpret_cast<uint2*>(a.out + static_cast<size_t>(token) * kHidden + column) =
      pack4(sum_pairs(a, token, column));
}

constexpr int kNormThreads = 736;  // 720 of them own four columns each

__global__ void __launch_bounds__(kNormThreads) combine_norm_kernel(const __grid_constant__ CombineArguments a) {
  __shared__ float squares[kNormThreads / 32];
  const int token = blockIdx.x, column = threadIdx.x * 4, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t at = static_cast<size_t>(token) * kHidden + column;
  const bool active = column < kHidden;
  uint2 gain = make_uint2(0, 0);
  if (active) gain = *reinterpret_cast<const uint2*>(a.norm + column);
  grid_dependency_trigger();  // what follows fetches its weights meanwhile
  grid_dependency_wait();
  float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (active) {
    const float4 moe = unpack4(pack4(sum_pairs(a, token, column)));  // rounded, as the plain op returns it
    const float4 before = unpack4(*reinterpret_cast<const uint2*>(a.residual + at));
    const uint2 packed =
        pack4(make_float4(moe.x + before.x, moe.y + before.y, moe.z + before.z, moe.w + before.w));
    *reinterpret_cast<uint2*>(a.new_residual + at) = packed;
    total = unpack4(packed);
  }
  float sum = total.x * total.x + total.y * total.y + total.z * total.z + total.w * total.w;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kNormThreads / 32; ++i) all += squares[i];
  const float factor = rsqrtf(all / kHidden + a.eps);
  if (active) {
    const float4 w = unpack4(gain);
    *reinterpret_cast<uint2*>(a.out + at) = pack4(make_float4(total.x * factor * w.x, total.y * factor * w.y,
                                                              total.z * factor * w.z, total.w * factor * w.w));
  }
}

}  // namespace
}  // namespace antiphon

using antiphon::CombineArguments;

extern "C" int antiphon_moe_combine(const float* partial, const void* ids, void* out, int tokens, int first_expert,
                                    int experts, int overlap, void* stream) {
  const CombineArguments a = {partial, static_cast<const long long*>(ids), nullptr, nullptr,
                              static_cast<__nv_bfloat16*>(out), nullptr, 0.0f, first_expert, experts};
  return antiphon::launch(antiphon::combine_kernel, dim3(3, tokens), dim3(antiphon::kCombineThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, a);
}

extern "C" int antiphon_moe_combine_norm(const float* partial, const void* ids, const void* residual,
                                         const void* norm, void* out, void* new_residual, float eps, int tokens,
                                         int first_expert, int experts, int overlap, void* stream) {
  const CombineArguments a = {partial,
                              static_cast<const long long*>(ids),
                              static_cast<const __nv_bfloat16*>(residual),
                              static_cast<const __nv_bfloat16*>(norm),
                              static_cast<__nv_bfloat16*>(out),
                              static_cast<__nv_bfloat16*>(new_residual),
                              eps,
                              first_expert,
                              experts};
  return antiphon::launch(antiphon::combine_norm_kernel, dim3(tokens), dim3(antiphon::kNormThreads), 0,
                          static_cast<cudaStream_t>(stream), overlap != 0, a);
}
