// What both routers have in common, that of decode steps and that of chunks: who of several blocks is last, and the choice
// of the best four experts by one warp.
#pragma once

#include "hopper.cuh"

namespace antiphon {

// True in every thread of the block that arrives last of `arrivals`; the others' writes are then visible. Resets
// the ticket. One thread's fence covers what the block wrote before the barrier.
__device__ inline bool arrive_last(uint32_t* ticket, uint32_t arrivals, bool& flag) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    flag = atomicAdd(ticket, 1) == arrivals - 1;
    if (flag) *ticket = 0;
    __threadfence();
  }
  __syncthreads();
  return flag;
}

// Larger floats have larger keys, and 0 is below every float's key.
__device__ __forceinline__ uint32_t ordered_key(float value) {
  const uint32_t bits = __float_as_uint(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float from_ordered_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7FFFFFFFu : ~key);
}

// Takes the largest key of a warp, which becomes 0; lane l holds those of experts l, l + 32, and so on. Returns the
// expert, the lowest of equal ones.
template <int EACH>
__device__ __forceinline__ int take_best(uint32_t (&keys)[EACH], uint32_t& best) {
  const int lane = threadIdx.x % 32;
  best = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) best = max(best, keys[i]);
  best = __reduce_max_sync(0xFFFFFFFFu, best);
  int candidate = 32 * EACH;
#pragma unroll
  for (int i = EACH - 1; i >= 0; --i) candidate = keys[i] == best ? lane + 32 * i : candidate;
  const int winner = __reduce_min_sync(0xFFFFFFFFu, candidate);
#pragma unroll
  for (int i = 0; i < EACH; ++i) keys[i] = lane + 32 * i == winner ? 0 : keys[i];
  return winner;
}

// exp(value - the first) of four values by falling size; returns their sum.
__device__ __forceinline__ float exponentials_of(const float (&values)[4], float (&exponentials)[4]) {
  float total = 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    exponentials[k] = expf(values[k] - values[0]);
    total += exponentials[k];
  }
  return total;
}

}  // namespace antiphon
