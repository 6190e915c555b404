// Kernels with and without a barrier that their memory needs; the order in which the host runs their threads hides it.

#include "../../../kernels/moe/csrc/hopper.cuh"

namespace antiphon::race_cases {
namespace {

constexpr int kBytes = 512;  // of a slot: 16 a lane

// A warp exchanges words by way of shared memory.
__global__ void exchange(int* out, bool together) {
  __shared__ int words[32];
  const int lane = threadIdx.x;
  words[lane] = lane;
  if (together) __syncwarp();
  out[lane] = __shfl_sync(0xFFFFFFFFu, words[lane ^ 1], lane);
}

// A warp adds up tiles that another one's thread copies into one slot.
__global__ void add_tiles(const uint4* tiles, int* out, int count, bool waits, bool together) {
  DYNAMIC_SHARED(slot);
  __shared__ __align__(8) uint64_t full, empty;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    mbarrier_init(shared_address(&full), 1);
    mbarrier_init(shared_address(&empty), 1);
  }
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < count; ++i) {
    if (threadIdx.x == 32) {
      mbarrier_wait(shared_address(&empty), (i & 1) ^ 1);
      mbarrier_expect(shared_address(&full), kBytes);
      bulk_copy(shared_address(slot), tiles + i * 32, kBytes, shared_address(&full));
    } else if (threadIdx.x < 32) {
      if (waits || lane == 0) mbarrier_wait(shared_address(&full), i & 1);
      __shfl_sync(0xFFFFFFFFu, 0, 0);  // all lanes are behind the wait, but the others' memory is not
      sum += reinterpret_cast<const int4*>(slot)[lane].x;
      if (together) __syncwarp();
      __shfl_sync(0xFFFFFFFFu, 0, 0);
      if (lane == 0) mbarrier_arrive(shared_address(&empty));
    }
  }
  if (threadIdx.x < 32) out[lane] = sum;
}

// The second block reads what the first one wrote before it counted.
__global__ void hand_over(int* word, int* counter, int* out, bool fenced) {
  if (blockIdx.x == 1) {
    wait_for_count(counter, 1);
    *out = *word;
    return;
  }
  *word = 7;
  if (fenced) __threadfence();
  atomicAdd(counter, 1);
}

}  // namespace
}  // namespace antiphon::race_cases

extern "C" {

int antiphon_exchange(int* out, int together, void*) {
  return antiphon::launch(antiphon::race_cases::exchange, dim3(1), dim3(32), 0, nullptr, false, out, together != 0);
}
int antiphon_add_tiles(const void* tiles, int* out, int count, int waits, int together, void*) {
  return antiphon::launch(antiphon::race_cases::add_tiles, dim3(1), dim3(64), 0, nullptr, false,
                          static_cast<const uint4*>(tiles), out, count, waits != 0, together != 0);
}
int antiphon_hand_over(int* word, int* counter, int* out, int fenced, void*) {
  return antiphon::launch(antiphon::race_cases::hand_over, dim3(2), dim3(1), 0, nullptr, false, word, counter, out,
                          fenced != 0);
}
}
