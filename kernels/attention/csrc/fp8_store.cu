// Keys and values of a few tokens, as the fused projection left them in bf16, to their FP8 pages: a scale needs the
// whole head, of which a block of that projection has but a part.

#include "fp8_pages.cuh"

namespace antiphon::fp8_pages {
namespace {

constexpr int kThreadsOfHead = 8;  // eight numbers each

struct Store {
  const __nv_bfloat16* source;  // [kv_heads, 2, room, 64]
  const int64_t* slots;         // [tokens] page * page_size + offset, negative: not stored
  uint8_t* pages;
  long long page_stride;
  int kv_heads, room, page_size;
};

// One block a token, eight threads a head's keys or values.
__global__ void store_kernel(const __grid_constant__ Store a) {
  const int token = blockIdx.x, half = threadIdx.x / kThreadsOfHead, column = threadIdx.x % kThreadsOfHead * 8;
  grid_dependency_trigger();
  const long long slot = a.slots[token];  // written before the launch ahead began
  grid_dependency_wait();
  float numbers[8];
  unpack(load_fresh(reinterpret_cast<const uint4*>(
             a.source + (static_cast<size_t>(half) * a.room + token) * kDim + column)),
         numbers);
  uint32_t peak = peak_of(numbers);
#pragma unroll
  for (int step = 1; step < kThreadsOfHead; step *= 2) peak = max(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, step));
  if (slot < 0) return;
  const __nv_bfloat16 scale = scale_for(peak);
  const Place place = place_of(a.pages, a.page_stride, a.page_size, slot, half / 2, half % 2);
  *reinterpret_cast<uint2*>(place.numbers + column) = scaled(numbers, inverse(scale));
  if (column == 0) *place.scale = scale;
}

}  // namespace
}  // namespace antiphon::fp8_pages

// kv_heads is even, so that warps are whole.
extern "C" int antiphon_fp8_store(const void* source, const void* slots, void* pages, long long page_stride, int tokens,
                                  int kv_heads, int room, int page_size, int pdl, void* stream) {
  namespace pages_of = antiphon::fp8_pages;
  if (kv_heads % 2 != 0) return cudaErrorInvalidValue;
  const pages_of::Store a = {static_cast<const __nv_bfloat16*>(source),
                             static_cast<const int64_t*>(slots),
                             static_cast<uint8_t*>(pages),
                             page_stride,
                             kv_heads,
                             room,
                             page_size};
  return antiphon::launch(pages_of::store_kernel, dim3(tokens), dim3(2 * kv_heads * pages_of::kThreadsOfHead), 0,
                          static_cast<cudaStream_t>(stream), pdl != 0, a);
}
