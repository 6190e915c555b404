// Behind a projection of a chunk: the residual add and the next RMSNorm, in one pass over the token; behind the experts
// with the sum over a token's four rows in front. Sums have a fixed order, so results are identical from run to run.

#include "hopper.cuh"

namespace antiphon {
namespace {

constexpr int kHidden = 2880;
constexpr int kTopK = 4;
constexpr int kThreads = 384;  // 360 of them own eight columns each

struct NormArguments {
  const __nv_bfloat16* rows;  // [slots, kHidden] weighted outputs of experts, or [tokens, kHidden]
  const int* slots;           // [tokens, 4] row of each expert's output, negative when it is not ours
  __nv_bfloat16* residual;    // [tokens, kHidden], in place
  const __nv_bfloat16* norm;  // [kHidden]
  __nv_bfloat16* out;         // [tokens, kHidden]
  float eps;
};

struct Eight {
  float value[8];

  __device__ __forceinline__ static Eight of(uint4 raw) {
    return {{low_half(raw.x), high_half(raw.x), low_half(raw.y), high_half(raw.y), low_half(raw.z), high_half(raw.z),
             low_half(raw.w), high_half(raw.w)}};
  }

  __device__ __forceinline__ uint4 rounded() const {
    uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
      words[i] = *reinterpret_cast<const uint32_t*>(&pair);
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
  }
};

__device__ __forceinline__ uint4 load(const __nv_bfloat16* source) { return *reinterpret_cast<const uint4*>(source); }

// What the projection adds to eight columns of a token, rounded as the plain op returns it.
template <bool EXPERTS>
__device__ __forceinline__ Eight addend(const NormArguments& a, int token, int column) {
  if constexpr (!EXPERTS) {
    return Eight::of(load(a.rows + static_cast<size_t>(token) * kHidden + column));
  } else {
    uint4 raw[kTopK];
#pragma unroll
    for (int k = 0; k < kTopK; ++k) {
      const int slot = a.slots[token * kTopK + k];
      raw[k] = make_uint4(0, 0, 0, 0);
      if (slot >= 0) raw[k] = load(a.rows + static_cast<size_t>(slot) * kHidden + column);
    }
    Eight sum = Eight::of(raw[0]);
#pragma unroll
    for (int k = 1; k < kTopK; ++k) {
      const Eight part = Eight::of(raw[k]);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum.value[i] += part.value[i];
    }
    return Eight::of(sum.rounded());
  }
}

template <bool EXPERTS>
__global__ void __launch_bounds__(kThreads) chunk_norm_kernel(const __grid_constant__ NormArguments a) {
  __shared__ float squares[kThreads / 32];
  const int token = blockIdx.x, column = threadIdx.x * 8, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t at = static_cast<size_t>(token) * kHidden + column;
  const bool active = column < kHidden;
  Eight total = {};
  if (active) {
    const Eight before = Eight::of(load(a.residual + at));
    total = addend<EXPERTS>(a, token, column);
#pragma unroll
    for (int i = 0; i < 8; ++i) total.value[i] += before.value[i];
    const uint4 packed = total.rounded();
    *reinterpret_cast<uint4*>(a.residual + at) = packed;
    total = Eight::of(packed);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) sum = fmaf(total.value[i], total.value[i], sum);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, step);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  if (!active) return;
  float all = 0.0f;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) all += squares[i];
  const float factor = rsqrtf(all / kHidden + a.eps);
  const Eight gain = Eight::of(load(a.norm + column));
#pragma unroll
  for (int i = 0; i < 8; ++i) total.value[i] *= factor * gain.value[i];
  *reinterpret_cast<uint4*>(a.out + at) = total.rounded();
}

}  // namespace
}  // namespace antiphon

// residual += sum of the token's four rows; out = its norm.
extern "C" int antiphon_moe_chunk_combine_norm(const void* rows, const int* slots, void* residual, const void* norm,
                                               void* out, float eps, int tokens, void* stream) {
  const antiphon::NormArguments a = {static_cast<const __nv_bfloat16*>(rows), slots,
                                     static_cast<__nv_bfloat16*>(residual),
                                     static_cast<const __nv_bfloat16*>(norm),
                                     static_cast<__nv_bfloat16*>(out), eps};
  return antiphon::launch(antiphon::chunk_norm_kernel<true>, dim3(tokens), dim3(antiphon::kThreads), 0,
                          static_cast<cudaStream_t>(stream), false, a);
}

// residual += delta; out = its norm.
extern "C" int antiphon_moe_chunk_add_norm(const void* delta, void* residual, const void* norm, void* out, float eps,
                                           int tokens, void* stream) {
  const antiphon::NormArguments a = {static_cast<const __nv_bfloat16*>(delta), nullptr,
                                     static_cast<__nv_bfloat16*>(residual),
                                     static_cast<const __nv_bfloat16*>(norm),
                                     static_cast<__nv_bfloat16*>(out), eps};
  return antiphon::launch(antiphon::chunk_norm_kernel<false>, dim3(tokens), dim3(antiphon::kThreads), 0,
                          static_cast<cudaStream_t>(stream), false, a);
}
