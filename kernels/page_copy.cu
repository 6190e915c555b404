// Copies between KV pages and contiguous memory: the same bytes of every page of a list, page after page.
//
// The list travels as a kernel parameter, so nothing is copied to the device before. A launch moves tens of megabytes
// once, at the speed of memory; its blocks are small, so that it yields SMs to whatever runs beside it.

#include "moe/csrc/hopper.cuh"

namespace antiphon {
namespace {

constexpr int kPages = 896;            // of one launch: parameters are 4 KiB at most
constexpr int kThreads = 256;
constexpr int kBlockWords = 2048;      // of 16 bytes

struct Copy {
  uint8_t* pages;          // the first byte to move of page 0
  uint4* staged;           // [pages, runs, run_words]
  int64_t page_stride;     // bytes
  int64_t run_stride;      // bytes between runs of a page
  int runs, run_words;     // of a page; words of 16 bytes
  int list[kPages];
};
static_assert(sizeof(Copy) <= 4096);

template <bool GATHER>
__global__ void __launch_bounds__(kThreads) page_copy(const __grid_constant__ Copy c) {
  const int page = blockIdx.y / c.runs, run = blockIdx.y % c.runs;
  auto* there = reinterpret_cast<uint4*>(c.pages + c.list[page] * c.page_stride + run * c.run_stride);
  uint4* staged = c.staged + static_cast<int64_t>(blockIdx.y) * c.run_words;
  const int end = min(c.run_words, static_cast<int>(blockIdx.x + 1) * kBlockWords);
#pragma unroll 4
  for (int i = blockIdx.x * kBlockWords + threadIdx.x; i < end; i += kThreads) {
    if (GATHER) {
      staged[i] = there[i];
    } else {
      there[i] = staged[i];
    }
  }
}

}  // namespace
}  // namespace antiphon

// list: `count` of `total` pages, in host memory, read before this returns. gather: pages -> staged; otherwise the
// other way. Nothing is copied when a page of the list does not exist: others' memory lies there.
extern "C" int antiphon_page_copy(void* pages, void* staged, int64_t page_stride, int64_t run_stride, int runs,
                                  int64_t run_bytes, int total, const int32_t* list, int count, int gather,
                                  void* stream) {
  using namespace antiphon;
  if (runs < 1 || runs > 65535 / kPages || run_bytes < 16) return cudaErrorInvalidValue;
  if (run_bytes % 16 || page_stride % 16 || run_stride % 16) return cudaErrorInvalidValue;
  for (int i = 0; i < count; ++i)
    if (list[i] < 0 || list[i] >= total) return cudaErrorInvalidValue;
  Copy c = {static_cast<uint8_t*>(pages), static_cast<uint4*>(staged), page_stride, run_stride, runs,
            static_cast<int>(run_bytes / 16), {}};
  for (int first = 0; first < count; first += kPages) {
    const int some = count - first < kPages ? count - first : kPages;
    for (int i = 0; i < some; ++i) c.list[i] = list[first + i];
    const dim3 grid((c.run_words + kBlockWords - 1) / kBlockWords, some * runs);
    const auto status = launch(gather ? page_copy<true> : page_copy<false>, grid, dim3(kThreads), 0,
                               static_cast<cudaStream_t>(stream), false, c);
    if (status != cudaSuccess) return status;
    c.staged += static_cast<int64_t>(some) * runs * c.run_words;
  }
  return cudaSuccess;
}
