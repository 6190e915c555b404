// Behind the QKV projection of a chunk: rotation of queries and keys, and the write of keys and values to their pages,
// in bf16 or in FP8.

#include "fp8_pages.cuh"

namespace antiphon::attention {
namespace {

constexpr int kDim = 64;
constexpr int kHalf = kDim / 2;
constexpr int kGroup = 8;          // query heads of a kv head
constexpr int kThreadsOfHead = 4;  // eight pairs of columns each

struct Rotation {
  const __nv_bfloat16* qkv;    // [tokens, (heads + 2 kv_heads) * 64]
  const long long* positions;  // [tokens]
  const long long* slots;      // [tokens] page * page_size + offset, negative: not stored
  const float4* table;         // [positions, 32] cos and sin of two pairs at a time
  __nv_bfloat16* query;        // [tokens, heads, 64]
  void* kv;                    // bf16 [pages, kv_heads, 2, page_size, 64], or FP8 pages
  long long page_stride;       // from a page to the next, in numbers
  int kv_heads, page_size;
  bool overlap;  // with the kernel that follows, which should find every SM nearly free
};

struct Pairs {
  float first[8], second[8];
};

__device__ __forceinline__ uint4 pack(const float (&values)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// A thread's columns of a head's keys or values, which are of bf16's precision by now.
__device__ __forceinline__ void store_fp8(const Rotation& a, uint4 first, uint4 second, int head, int column,
                                          long long slot) {
  float low[8], high[8];
  fp8_pages::unpack(first, low);
  fp8_pages::unpack(second, high);
  uint32_t peak = max(fp8_pages::peak_of(low), fp8_pages::peak_of(high));
  // The last warp may have fewer threads, always whole heads.
  const int lanes = min(32, static_cast<int>(blockDim.x - threadIdx.x / 32 * 32));
  const uint32_t mask = 0xFFFFFFFFu >> (32 - lanes);
  peak = max(peak, __shfl_xor_sync(mask, peak, 1));
  peak = max(peak, __shfl_xor_sync(mask, peak, 2));
  const int kv = head - a.kv_heads * kGroup, values = kv >= a.kv_heads ? 1 : 0;
  if (kv < 0 || slot < 0) return;
  const __nv_bfloat16 scale = fp8_pages::scale_for(peak);
  const float factor = fp8_pages::inverse(scale);
  const fp8_pages::Place place = fp8_pages::place_of(static_cast<uint8_t*>(a.kv), a.page_stride, a.page_size, slot,
                                                     kv - values * a.kv_heads, values);
  *reinterpret_cast<uint2*>(place.numbers + column) = fp8_pages::scaled(low, factor);
  *reinterpret_cast<uint2*>(place.numbers + column + kHalf) = fp8_pages::scaled(high, factor);
  if (column == 0) *place.scale = scale;
}

// One block a token, four threads a head.
template <bool FP8>
__global__ void rope_kernel(const __grid_constant__ Rotation a) {
  const int token = blockIdx.x, head = threadIdx.x / kThreadsOfHead, column = threadIdx.x % kThreadsOfHead * 8;
  const int heads = a.kv_heads * kGroup;
  const __nv_bfloat16* source =
      a.qkv + (static_cast<size_t>(token) * (heads + 2 * a.kv_heads) + head) * kDim + column;
  grid_dependency_wait();
  uint4 first = *reinterpret_cast<const uint4*>(source);
  uint4 second = *reinterpret_cast<const uint4*>(source + kHalf);
  if (head < heads + a.kv_heads) {
    Pairs in, out;
    fp8_pages::unpack(first, in.first);
    fp8_pages::unpack(second, in.second);
    const float4* angles = a.table + (a.positions[token] * kHalf + column) / 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 two = angles[i];  // cos, sin, cos, sin
      const float cosines[2] = {two.x, two.z}, sines[2] = {two.y, two.w};
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float x = in.first[2 * i + c], y = in.second[2 * i + c];
        out.first[2 * i + c] = x * cosines[c] - y * sines[c];
        out.second[2 * i + c] = y * cosines[c] + x * sines[c];
      }
    }
    first = pack(out.first);
    second = pack(out.second);
  }
  if (a.overlap) grid_dependency_trigger();
  if constexpr (FP8) store_fp8(a, first, second, head, column, a.slots[token]);
  __nv_bfloat16* target;
  if (head < heads) {
    target = a.query + (static_cast<size_t>(token) * heads + head) * kDim;
  } else {
    const long long slot = a.slots[token];
    if (FP8 || slot < 0) return;
    const int kv = head - heads, values = kv >= a.kv_heads ? 1 : 0;
    const long long row = ((kv - values * a.kv_heads) * 2 + values) * a.page_size + slot % a.page_size;
    target = static_cast<__nv_bfloat16*>(a.kv) + slot / a.page_size * a.page_stride + row * kDim;
  }
  *reinterpret_cast<uint4*>(target + column) = first;
  *reinterpret_cast<uint4*>(target + column + kHalf) = second;
}

}  // namespace
}  // namespace antiphon::attention

extern "C" int antiphon_chunk_rope(const void* qkv, const void* positions, const void* slots, const void* table,
                                   void* query, void* kv, long long page_stride, int tokens, int kv_heads,
                                   int page_size, int fp8, int overlap, void* stream) {
  namespace attention = antiphon::attention;
  const attention::Rotation a = {static_cast<const __nv_bfloat16*>(qkv),
                                 static_cast<const long long*>(positions),
                                 static_cast<const long long*>(slots),
                                 static_cast<const float4*>(table),
                                 static_cast<__nv_bfloat16*>(query),
                                 kv,
                                 page_stride,
                                 kv_heads,
                                 page_size,
                                 overlap != 0};
  const int threads = (attention::kGroup + 2) * kv_heads * attention::kThreadsOfHead;
  return antiphon::launch(fp8 ? attention::rope_kernel<true> : attention::rope_kernel<false>, dim3(tokens),
                          dim3(threads), 0, static_cast<cudaStream_t>(stream), overlap != 0, a);
}
