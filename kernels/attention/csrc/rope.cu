// Behind the QKV projection of a chunk: rotation of queries and keys, and the write of keys and values to their pages.

#include "../../moe/csrc/hopper.cuh"

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
  __nv_bfloat16* kv;           // [pages, kv_heads, 2, page_size, 64], pages `page_stride` apart
  long long page_stride;
  int kv_heads, page_size;
};

struct Pairs {
  float first[8], second[8];
};

__device__ __forceinline__ void unpack(uint4 raw, float (&values)[8]) {
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half(words[i]);
    values[2 * i + 1] = high_half(words[i]);
  }
}

__device__ __forceinline__ uint4 pack(const float (&values)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(values[2 * i], values[2 * i + 1]);
    words[i] = *reinterpret_cast<const uint32_t*>(&pair);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// One block a token, four threads a head.
__global__ void rope_kernel(const __grid_constant__ Rotation a) {
  const int token = blockIdx.x, head = threadIdx.x / kThreadsOfHead, column = threadIdx.x % kThreadsOfHead * 8;
  const int heads = a.kv_heads * kGroup;
  const __nv_bfloat16* source =
      a.qkv + (static_cast<size_t>(token) * (heads + 2 * a.kv_heads) + head) * kDim + column;
  uint4 first = *reinterpret_cast<const uint4*>(source);
  uint4 second = *reinterpret_cast<const uint4*>(source + kHalf);
  if (head < heads + a.kv_heads) {
    Pairs in, out;
    unpack(first, in.first);
    unpack(second, in.second);
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
  __nv_bfloat16* target;
  if (head < heads) {
    target = a.query + (static_cast<size_t>(token) * heads + head) * kDim;
  } else {
    const long long slot = a.slots[token];
    if (slot < 0) return;
    const int kv = head - heads, values = kv >= a.kv_heads ? 1 : 0;
    const long long row = ((kv - values * a.kv_heads) * 2 + values) * a.page_size + slot % a.page_size;
    target = a.kv + slot / a.page_size * a.page_stride + row * kDim;
  }
  *reinterpret_cast<uint4*>(target + column) = first;
  *reinterpret_cast<uint4*>(target + column + kHalf) = second;
}

}  // namespace
}  // namespace antiphon::attention

extern "C" int antiphon_chunk_rope(const void* qkv, const void* positions, const void* slots, const void* table,
                                   void* query, void* kv, long long page_stride, int tokens, int kv_heads,
                                   int page_size, void* stream) {
  namespace attention = antiphon::attention;
  const attention::Rotation a = {static_cast<const __nv_bfloat16*>(qkv),
                                 static_cast<const long long*>(positions),
                                 static_cast<const long long*>(slots),
                                 static_cast<const float4*>(table),
                                 static_cast<__nv_bfloat16*>(query),
                                 static_cast<__nv_bfloat16*>(kv),
                                 page_stride,
                                 kv_heads,
                                 page_size};
  const int threads = (attention::kGroup + 2) * kv_heads * attention::kThreadsOfHead;
  return antiphon::launch(attention::rope_kernel, dim3(tokens), dim3(threads), 0, static_cast<cudaStream_t>(stream),
                          false, a);
}
