// Copies runs of bytes between any memories that this device maps: its own, or that of another GPU of the host.
//
// One launch moves up to hundreds of megabytes while the model's own kernels run beside it, so it takes few blocks, and
// each keeps many bytes in flight: a thread has eight loads under way before its first store. Stores into a peer are
// not waited for. The runs travel as a kernel parameter, so nothing has to outlive the launch. Each block moves an equal
// share of all bytes, whatever the runs' lengths.

#include "../moe/csrc/hopper.cuh"

namespace antiphon {
namespace {

constexpr int kThreads = 512;
constexpr int kInFlight = 8;       // words of 16 bytes, of each thread
constexpr int kShareWords = 8;     // shares begin at multiples of 128 bytes
constexpr int64_t kMostWords = int64_t{1} << 31;  // of one launch

template <int RUNS>
struct Runs {
  const uint4* from[RUNS];
  uint4* to[RUNS];
  uint32_t end[RUNS];  // words of this run and all before it
  int count;
};
constexpr int kFew = 160, kMany = 1024;
static_assert(sizeof(Runs<kFew>) <= 4096 && sizeof(Runs<kMany>) <= 32764);

template <int RUNS>
__device__ __forceinline__ uint32_t share(const Runs<RUNS>& runs, uint32_t block) {
  const uint64_t total = runs.end[runs.count - 1];
  return block == gridDim.x ? total : total * block / gridDim.x / kShareWords * kShareWords;
}

template <int RUNS>
__global__ void __launch_bounds__(kThreads) run_copy(const __grid_constant__ Runs<RUNS> runs) {
  uint32_t at = share(runs, blockIdx.x);
  const uint32_t stop = share(runs, blockIdx.x + 1);
  if (at == stop) return;
  int run = 0;
  for (int last = runs.count - 1; run < last;) {  // the first that ends after `at`
    const int middle = (run + last) / 2;
    if (runs.end[middle] > at) {
      last = middle;
    } else {
      run = middle + 1;
    }
  }
  for (; at < stop; ++run) {
    const uint32_t begin = run == 0 ? 0 : runs.end[run - 1];
    const uint32_t end = runs.end[run] < stop ? runs.end[run] : stop;
    const uint4* from = runs.from[run];
    uint4* to = runs.to[run];
    for (uint32_t first = at - begin + threadIdx.x; first < end - begin; first += kThreads * kInFlight) {
      uint4 words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (first + i * kThreads < end - begin) words[i] = from[first + i * kThreads];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        if (first + i * kThreads < end - begin) to[first + i * kThreads] = words[i];
    }
    at = end;
  }
}

template <int RUNS>
int launch_some(const int64_t* rows, int count, int blocks, void* stream) {
  Runs<RUNS> runs;
  runs.count = count;
  int64_t words = 0;
  for (int i = 0; i < count; ++i) {
    runs.from[i] = reinterpret_cast<const uint4*>(rows[3 * i]);
    runs.to[i] = reinterpret_cast<uint4*>(rows[3 * i + 1]);
    words += rows[3 * i + 2] / 16;
    if (words >= kMostWords) return cudaErrorInvalidValue;
    runs.end[i] = static_cast<uint32_t>(words);
  }
  return launch(run_copy<RUNS>, dim3(blocks), dim3(kThreads), 0, static_cast<cudaStream_t>(stream), false, runs);
}

}  // namespace
}  // namespace antiphon

#ifndef ANTIPHON_ON_HOST
extern "C" int antiphon_run_copy_load() {
  using namespace antiphon;
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, run_copy<kFew>);
  return status == cudaSuccess ? cudaFuncGetAttributes(&attributes, run_copy<kMany>) : status;
}
#endif

// rows: [count, 3] of (address to read, address to write, bytes), multiples of 16, read before this returns.
extern "C" int antiphon_run_copy(const int64_t* rows, int count, int blocks, void* stream) {
  using namespace antiphon;
  if (count < 1 || blocks < 1) return cudaErrorInvalidValue;
  for (int i = 0; i < count; ++i)
    if ((rows[3 * i] | rows[3 * i + 1] | rows[3 * i + 2]) % 16 || rows[3 * i + 2] <= 0) return cudaErrorInvalidValue;
  for (int first = 0; first < count; first += kMany) {
    const int some = count - first < kMany ? count - first : kMany;
    const int64_t* begin = rows + 3 * static_cast<int64_t>(first);
    const int status = some <= kFew ? launch_some<kFew>(begin, some, blocks, stream)
                                    : launch_some<kMany>(begin, some, blocks, stream);
    if (status != cudaSuccess) return status;
  }
  return cudaSuccess;
}
