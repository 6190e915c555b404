// Decode attention with sinks over FP8 pages on sm_90: one query token a sequence, 8 query heads a kv head, head dim
// 64, pages of 64 positions.
//
// A block has one sequence, one kv head and one of the splits of its keys; its four warps take tiles of 32 keys in
// turn and meet at the end. Keys and values go from memory to registers, a tile ahead of the one that is computed, in
// the very places where mma.sync wants them: sums over k do not care about order, so that
//
//   of eight keys lane 4 g + q loads numbers 16 q .. 16 q + 15 of one key, which are its part of four products, and
//   of sixteen values it loads numbers 8 g .. 8 g + 7 of four, its columns of eight products.
//
// The bits of an e4m3 number, moved into a bf16, are that number times 2^-120. Queries and probabilities come times
// 2^60, and what is left is part of factors that are there anyway. A key's scale multiplies its scores, a value's its
// probability. Rows of the fragments beyond the 8 query heads stay zero. A number that is NaN reads as 480; its scale is
// NaN too, and so will be the result.

#include "fp8_pages.cuh"

namespace antiphon::fp8_pages {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kPage = 64;
constexpr int kGroup = 8;  // query heads of a kv head
constexpr int kWarps = 4;
constexpr int kTile = 32;  // keys
constexpr int kHeadBytes = head_bytes(kPage);
constexpr float kTwo60 = 1152921504606846976.0f;
constexpr float kTwo120 = kTwo60 * kTwo60;

struct Arguments {
  const bf16* query;     // [batch, heads, 64]
  const uint8_t* pages;  // `page_stride` bytes apart
  const int* table;      // [batch, table_stride]
  const int* kv_len;     // [batch]
  const float* sinks;    // [heads]
  bf16* out;             // [batch, heads, 64], of one split
  float* part_acc;       // [batch, heads, splits, 64], of several
  float* part_max;       // [batch, heads, splits], in log2
  float* part_sum;       // [batch, heads, splits]
  long long page_stride;
  int table_stride, kv_heads, splits;
  float scale;           // of scores, in log2, times 2^60
};

#ifdef ANTIPHON_ON_HOST
template <typename Value>
inline Value load_once(const void* from) {
  return *static_cast<const Value*>(from);
}
#else
// What nobody of this block reads again, and what the launches ahead may have written.
template <typename Value>
__device__ __forceinline__ Value load_once(const void* from);
template <>
__device__ __forceinline__ uint4 load_once<uint4>(const void* from) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}
template <>
__device__ __forceinline__ uint2 load_once<uint2>(const void* from) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}
#endif

__device__ __forceinline__ float exp2_fast(float x) {
#ifdef ANTIPHON_ON_HOST
  return std::exp2(x);
#else
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
#endif
}

// e4m3 numbers of the bytes 1 and 3, or 0 and 2, of a word as two bf16, times 2^-120.
__device__ __forceinline__ uint32_t odd_bytes(uint32_t word) {
  return (word & 0x80008000u) | ((word >> 4) & 0x07F007F0u);
}
__device__ __forceinline__ uint32_t even_bytes(uint32_t word) { return odd_bytes(word << 8); }

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Of four scales the `i`-th.
__device__ __forceinline__ float scale_of(uint2 scales, int i) {
  const uint32_t two = i / 2 ? scales.y : scales.x;
  return i % 2 ? high_half(two) : low_half(two);
}

// A lane's part of 32 keys. Of each sixteen keys its own are 4 q .. 4 q + 3, as columns 2 q, 2 q + 1 of two groups of
// eight, and as rows of the values.
struct Tile {
  uint4 keys[4];
  uint2 values[8];
  uint2 key_scales[2], value_scales[2];
};

// Where a lane's parts of a tile begin.
struct Lane {
  int keys, values, scales;
  __device__ __forceinline__ Lane() {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    keys = (4 * (g / 2) + g % 2) * kDim + 16 * q;
    values = (kPage + 4 * q) * kDim + 8 * g;
    scales = 2 * kPage * kDim + 2 * 4 * q;
  }
};

// `half`: which half of the page at `head` it is.
__device__ __forceinline__ void load_tile(Tile& tile, const uint8_t* head, int half, const Lane& lane) {
  const uint8_t* scales = head + (2 * half * kTile + lane.scales);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    tile.key_scales[i] = load_once<uint2>(scales + 2 * 16 * i);
    tile.value_scales[i] = load_once<uint2>(scales + 2 * (kPage + 16 * i));
  }
  const uint8_t* keys = head + (half * kTile * kDim + lane.keys);
#pragma unroll
  for (int j = 0; j < 4; ++j) tile.keys[j] = load_once<uint4>(keys + (16 * (j / 2) + 2 * (j % 2)) * kDim);
  const uint8_t* values = head + (half * kTile * kDim + lane.values);
#pragma unroll
  for (int j = 0; j < 8; ++j) tile.values[j] = load_once<uint2>(values + (16 * (j / 4) + j % 4) * kDim);
}

// What a warp has seen, for query head g: the sum is this lane's part, numbers are 16 q .. 16 q + 15 of the output.
// The sum is times 2^60, the numbers times 2^-60.
struct Running {
  float peak, sum;
  float acc[8][4];
};

__device__ __forceinline__ void scores_of(const Tile& tile, const uint32_t (&query)[4][2], float (&scores)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t words[4] = {tile.keys[j].x, tile.keys[j].y, tile.keys[j].z, tile.keys[j].w};
#pragma unroll
    for (int c = 0; c < 4; ++c) scores[j][c] = 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k)
      mma_bf16(scores[j], query[k][0], 0, query[k][1], 0, even_bytes(words[k]), odd_bytes(words[k]));
#pragma unroll
    for (int c = 0; c < 2; ++c) scores[j][c] *= scale_of(tile.key_scales[j / 2], 2 * (j % 2) + c);
  }
}

// Sixteen values by their probabilities.
__device__ __forceinline__ void add_values(Running& seen, const uint2* values, uint32_t low, uint32_t high) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t words[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) words[r] = half ? values[r].y : values[r].x;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const uint32_t selector = pair ? 0x7632 : 0x5410;
      const uint32_t first = __byte_perm(words[0], words[1], selector);
      const uint32_t second = __byte_perm(words[2], words[3], selector);
      const int column = 4 * half + 2 * pair;
      mma_bf16(seen.acc[column], low, 0, high, 0, even_bytes(first), even_bytes(second));
      mma_bf16(seen.acc[column + 1], low, 0, high, 0, odd_bytes(first), odd_bytes(second));
    }
  }
}

// Keys from `visible` on, counted from the tile's first, are hidden. `scale`: of the scores, into log2.
__device__ __forceinline__ void attend(Running& seen, const Tile& tile, const uint32_t (&query)[4][2], float scale,
                                       int visible) {
  const int q = threadIdx.x % 4;
  float scores[4][4];
  scores_of(tile, query, scores);
  const bool whole = visible >= kTile;
  if (!whole) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (16 * (j / 2) + 4 * q + 2 * (j % 2) + c >= visible) scores[j][c] = -INFINITY;
  }
  float peak = fmaxf(scores[0][0], scores[0][1]);
#pragma unroll
  for (int j = 1; j < 4; ++j) peak = fmaxf(peak, fmaxf(scores[j][0], scores[j][1]));
  peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, 1));
  peak = fmaxf(peak, __shfl_xor_sync(0xFFFFFFFFu, peak, 2));
  peak = fmaxf(peak * scale, seen.peak);
  if (__ballot_sync(0xFFFFFFFFu, peak > seen.peak)) {
    const float decay = exp2_fast(seen.peak - peak);
    seen.sum *= decay;
#pragma unroll
    for (int t = 0; t < 8; ++t) {
      seen.acc[t][0] *= decay;
      seen.acc[t][1] *= decay;
    }
    seen.peak = peak;
  }
  uint32_t probabilities[4];
  const float offset = 60.0f - peak;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float weighted[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float p = exp2_fast(fmaf(scores[j][c], scale, offset));
      seen.sum += p;
      const bool hidden = !whole && 16 * (j / 2) + 4 * q + 2 * (j % 2) + c >= visible;
      weighted[c] = hidden ? 0.0f : p * scale_of(tile.value_scales[j / 2], 2 * (j % 2) + c);
    }
    probabilities[j] = pack(weighted[0], weighted[1]);
  }
  add_values(seen, tile.values, probabilities[0], probabilities[1]);
  add_values(seen, tile.values + 4, probabilities[2], probabilities[3]);
}

// Query head g's numbers 16 q .. 16 q + 15 in the order of the products, times 2^60.
__device__ __forceinline__ void load_query(const Arguments& a, int row, uint32_t (&query)[4][2]) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const uint4* source = reinterpret_cast<const uint4*>(a.query + static_cast<size_t>(row + g) * kDim + 16 * q);
  float numbers[2][8];
  unpack(load_fresh(source), numbers[0]);
  unpack(load_fresh(source + 1), numbers[1]);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const float* four = numbers[k / 2] + 4 * (k % 2);
    query[k][0] = pack(four[0] * kTwo60, four[2] * kTwo60);
    query[k][1] = pack(four[1] * kTwo60, four[3] * kTwo60);
  }
}

struct Shared {
  float acc[kWarps][kGroup][kDim];
  float peak[kWarps][kGroup], sum[kWarps][kGroup];
};

// The block's result from its warps': sixteen threads a query head.
__device__ __forceinline__ void finish(const Arguments& a, const Shared& s, int row, int split) {
  const int head = threadIdx.x / 16, column = threadIdx.x % 16 * 4;
  float peak = s.peak[0][head];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) peak = fmaxf(peak, s.peak[w][head]);
  float sum = 0.0f, numbers[4] = {};
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const float weight = exp2_fast(s.peak[w][head] - peak);
    sum += s.sum[w][head] * weight;
#pragma unroll
    for (int i = 0; i < 4; ++i) numbers[i] += s.acc[w][head][column + i] * weight;
  }
  const size_t part = static_cast<size_t>(row + head) * a.splits + split;
  const float factor = a.splits == 1 ? kTwo120 / sum : kTwo120;
#pragma unroll
  for (int i = 0; i < 4; ++i) numbers[i] *= factor;
  if (a.splits == 1) {
    *reinterpret_cast<uint2*>(a.out + part * kDim + column) =
        make_uint2(pack(numbers[0], numbers[1]), pack(numbers[2], numbers[3]));
    return;
  }
  *reinterpret_cast<float4*>(a.part_acc + part * kDim + column) =
      make_float4(numbers[0], numbers[1], numbers[2], numbers[3]);
  if (column == 0) {
    a.part_max[part] = peak;
    a.part_sum[part] = sum;
  }
}

__device__ __forceinline__ void publish(const Running& seen, Shared& s) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  float sum = seen.sum;
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
  sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
  if (q == 0) {
    s.peak[warp][g] = seen.peak;
    s.sum[warp][g] = sum;
  }
#pragma unroll
  for (int t = 0; t < 8; ++t) {
    s.acc[warp][g][16 * q + t] = seen.acc[t][0];
    s.acc[warp][g][16 * q + 8 + t] = seen.acc[t][1];
  }
}

__global__ void __launch_bounds__(kWarps * 32, 3) decode(const __grid_constant__ Arguments a) {
  __shared__ Shared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int sequence = blockIdx.x / a.kv_heads, kv_head = blockIdx.x % a.kv_heads, split = blockIdx.y;
  const int row = blockIdx.x * kGroup;
  const int length = a.kv_len[sequence], pages = (length + kPage - 1) / kPage;
  const int each = (pages + a.splits - 1) / a.splits;
  const int end = min(2 * min((split + 1) * each, pages), (length + kTile - 1) / kTile);
  const int* table = a.table + static_cast<size_t>(sequence) * a.table_stride;
  const auto head_of = [&](int page) { return a.pages + page * a.page_stride + kv_head * kHeadBytes; };

  int tile = 2 * split * each + warp;
  int page = tile < end ? table[tile / 2] : 0, after = tile + kWarps < end ? table[(tile + kWarps) / 2] : 0;
  // All keys but the last were there before the launch ahead: the first ones come while it runs.
  if (tile < end) prefetch_line(head_of(page) + lane / 16 * kPage * kDim + tile % 2 * kTile * kDim + lane % 16 * 128);
  grid_dependency_wait();
  grid_dependency_trigger();

  Tile even, odd;
  const Lane lane_at;
  if (tile < end) load_tile(even, head_of(page), tile % 2, lane_at);
  uint32_t query[4][2];
  load_query(a, row, query);
  const bool holds_sink = split == 0 && warp == 0;
  Running seen = {};
  seen.peak = holds_sink ? a.sinks[row % (a.kv_heads * kGroup) + lane / 4] * 1.4426950408889634f : -1.0e30f;
  seen.sum = holds_sink && lane % 4 == 0 ? kTwo60 : 0.0f;
  const auto step = [&](const Tile& now, Tile& next) {
    const int following = tile + kWarps;
    if (following < end) load_tile(next, head_of(after), following % 2, lane_at);
    if (following + kWarps < end) after = table[(following + kWarps) / 2];
    attend(seen, now, query, a.scale, length - tile * kTile);
    tile = following;
  };
  while (tile < end) {
    step(even, odd);
    if (tile >= end) break;
    step(odd, even);
  }
  publish(seen, shared);
  __syncthreads();
  finish(a, shared, row, split);
}

}  // namespace
}  // namespace antiphon::fp8_pages

extern "C" int antiphon_fp8_decode(const void* query, const void* pages, const int* table, const int* kv_len,
                                   const float* sinks, void* out, float* part_acc, float* part_max, float* part_sum,
                                   long long page_stride, int table_stride, int batch, int kv_heads, int splits,
                                   float scale, int pdl, void* stream) {
  namespace pages_of = antiphon::fp8_pages;
  const pages_of::Arguments a = {static_cast<const __nv_bfloat16*>(query),
                                 static_cast<const uint8_t*>(pages),
                                 table,
                                 kv_len,
                                 sinks,
                                 static_cast<__nv_bfloat16*>(out),
                                 part_acc,
                                 part_max,
                                 part_sum,
                                 page_stride,
                                 table_stride,
                                 kv_heads,
                                 splits,
                                 scale * 1.4426950408889634f * pages_of::kTwo60};
  return antiphon::launch(pages_of::decode, dim3(batch * kv_heads, splits), dim3(pages_of::kWarps * 32), 0,
                          static_cast<cudaStream_t>(stream), pdl != 0, a);
}
