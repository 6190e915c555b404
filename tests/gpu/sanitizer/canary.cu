// A ring of bulk copies that a warp reads: what racecheck must say nothing of, and what it must report.

#include "../../../kernels/moe/csrc/hopper.cuh"

namespace antiphon::canary {
namespace {

constexpr int kSlots = 2, kFloats = 64, kTurns = 8;

// ordered: every lane says that it has read a slot before the next copy fills it. Otherwise the first one alone does,
// and nothing makes it wait for the others.
__global__ void ring(const float* source, float* sums, int ordered) {
  __shared__ __align__(128) float slots[kSlots][kFloats];
  __shared__ uint64_t full[kSlots], empty[kSlots];
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; ++i) {
      mbarrier_init(shared_address(&full[i]), 1);
      mbarrier_init(shared_address(&empty[i]), ordered ? 32 : 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  if (threadIdx.x < 32) {
    float sum = 0.0f;
    for (int turn = 0; turn < kTurns; ++turn) {
      const int slot = turn % kSlots;
      mbarrier_wait(shared_address(&full[slot]), turn / kSlots % 2);
      sum += slots[slot][lane] + slots[slot][63 - lane];
      fence_async_proxy();
      if (ordered || lane == 0) mbarrier_arrive(shared_address(&empty[slot]));
    }
    sums[lane] = sum;
  } else if (lane == 0) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const int slot = turn % kSlots;
      mbarrier_wait(shared_address(&empty[slot]), turn / kSlots % 2 ^ 1);
      mbarrier_expect(shared_address(&full[slot]), sizeof(slots[slot]));
      bulk_copy(shared_address(slots[slot]), source, sizeof(slots[slot]), shared_address(&full[slot]));
    }
  }
}

}  // namespace
}  // namespace antiphon::canary

// source: [64] float32, read eight times; sums: [32].
extern "C" int antiphon_canary(const void* source, void* sums, int ordered, void* stream) {
  using namespace antiphon;
  return launch(canary::ring, dim3(1), dim3(64), 0, static_cast<cudaStream_t>(stream), false, source, sums, ordered);
}
