// After the products: bias, SwiGLU or routing weight, and the store. Weight rows are the rows of the sums, tokens the
// columns; what is stored has the tokens as rows.
#pragma once

#include "mixed_pipeline.cuh"

namespace antiphon::mixed {

// 4 x 4 bytes: the lane with g % 4 = r gives bytes for tokens 0..3 and receives token r's of all four lanes.
__device__ __forceinline__ uint32_t transpose_rows(uint32_t word) {
  const int r = threadIdx.x / 4 % 4;
  uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, word, 4);
  word = permute(word, other, r % 2 == 0 ? 0x6240 : 0x3715);
  other = __shfl_xor_sync(0xFFFFFFFFu, word, 8);
  return permute(word, other, r < 2 ? 0x5410 : 0x3276);
}

// Groups of 8 tokens between two looks at whether there are more: what lies between can be reordered.
constexpr int kCheck = 4;

// A thread's two weight rows: their factors and biases.
struct RowTerms {
  float factor[2], bias[2];
};

__device__ __forceinline__ float row_factor(int top) {  // 2^(top - 127 - kTopExponent)
  return __uint_as_float(static_cast<uint32_t>(max(top - kTopExponent, 0)) << 23);
}

// Rows alternate gate, up; the thread holds both of one hidden column. Of N sums those of the `tokens` from the tile's
// `first` on. row_tile: 64 rows of an expert.
template <typename S, int N, bool SPLIT>
__device__ __forceinline__ void store_hidden(const Arguments& a, int tile_m, int first, int tokens,
                                             const float* acc, const float* scales, const RowTerms& terms,
                                             int row_tile) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const int tiles = SPLIT ? a.hidden_spans * kSpanTiles : kTilesK;
  uint8_t* tile = a.hidden + (static_cast<size_t>(tile_m) * tiles + row_tile / 4) * S::kTileBytes;
  const int column = row_tile % 4 * 32 + warp * 8 + g / 4 * 4;
#pragma unroll
  for (int j = 0; j < N / 8; j += 2) {
    if (j % kCheck == 0 && 8 * j >= tokens) break;
    float hidden[4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 scale = *reinterpret_cast<const float2*>(scales + first + (j + i) * 8 + 2 * t);
      const float* sum = acc + 4 * (j + i);
      hidden[2 * i] = clamped_swiglu(fmaf(sum[0], terms.factor[0] * scale.x, terms.bias[0]),
                                     fmaf(sum[2], terms.factor[1] * scale.x, terms.bias[1]));
      hidden[2 * i + 1] = clamped_swiglu(fmaf(sum[1], terms.factor[0] * scale.y, terms.bias[0]),
                                         fmaf(sum[3], terms.factor[1] * scale.y, terms.bias[1]));
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) hidden[i] *= fp8::kHiddenFactor;
    const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(hidden[0], hidden[1]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(hidden[2], hidden[3]), __NV_SATFINITE, __NV_E4M3);
    const uint32_t word = transpose_rows(low | (high << 16));
    const int r = g % 4, row = first + (j + r / 2) * 8 + 2 * t + r % 2;
    if (row < first + tokens) *reinterpret_cast<uint32_t*>(tile + fp8::swizzled(row, column)) = word;
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

template <typename S, int N>
__device__ __forceinline__ void store_weighted(const Arguments& a, int tile_m, int first, int tokens,
                                               const float* acc, const float* factors, const RowTerms& terms,
                                               int row_tile) {
  const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const size_t slot = static_cast<size_t>(tile_m) * S::kTileRows;
  // Even lanes take rows 0 .. 7 of the warp's 16, odd lanes rows 8 .. 15: four rows each.
  auto* out = a.rows + row_tile * 64 + warp * 16 + t % 2 * 8 + t / 2 * 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    if (j % kCheck == 0 && 8 * j >= tokens) break;
    const float2 weight = *reinterpret_cast<const float2*>(factors + first + j * 8 + 2 * t);
    const float* sum = acc + 4 * j;
    uint32_t upper = pack(weight.x * fmaf(sum[0], terms.factor[0], terms.bias[0]),
                          weight.y * fmaf(sum[1], terms.factor[0], terms.bias[0]));
    uint32_t lower = pack(weight.x * fmaf(sum[2], terms.factor[1], terms.bias[1]),
                          weight.y * fmaf(sum[3], terms.factor[1], terms.bias[1]));
    pin(upper);  // or the compiler reads the factors of all tokens before the first store
    upper = transpose_8x8(upper);  // token g, rows 2 t and 2 t + 1
    lower = transpose_8x8(lower);  // 8 rows on
    const uint32_t given = __shfl_xor_sync(0xFFFFFFFFu, t % 2 == 0 ? lower : upper, 1);
    const uint2 words = t % 2 == 0 ? make_uint2(upper, given) : make_uint2(given, lower);
    const int row = first + j * 8 + g;
    if (row < first + tokens) *reinterpret_cast<uint2*>(out + (slot + row) * kDim) = words;
  }
}

// A thread's two weight rows of a tile: what is needed before the products, and the store after them.
template <typename S, bool SPLIT>
struct Rows {
  const uint8_t* terms;
  bool gated;
  int tokens, tile_m, tile_n, row, next, tops[2];  // `row` and `next` within the block

  // terms: of the tile, in shared memory.
  __device__ __forceinline__ Rows(const uint8_t* terms, int group) : terms(terms) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    const int4 item = *reinterpret_cast<const int4*>(terms);
    gated = __shfl_sync(0xFFFFFFFFu, item.x, 0) != 0;
    tokens = __shfl_sync(0xFFFFFFFFu, item.y, 0);
    tile_m = item.z;
    tile_n = item.w;
    row = group * 64 + warp * 16 + (gated ? 2 * g : g);
    next = row + (gated ? 1 : 8);
    tops[0] = terms[16 + row];
    tops[1] = terms[16 + next];
  }

  // Of N sums those of the `count` tokens from the tile's `first` on. factors: of the two rows' sums.
  template <int N>
  __device__ __forceinline__ void store(const Arguments& a, int first, int count, const float* acc,
                                        const float (&factors)[2]) const {
    const int row_tile = tile_n * S::kGroups + row / 64;
    if (row_tile >= (gated ? a.gate_up : a.down).row_tiles) return;
    const auto* bias = reinterpret_cast<const __nv_bfloat16*>(terms + S::kBiasAt);
    const auto* of_tokens = reinterpret_cast<const float*>(terms + S::kFactorAt);
    const float scale = gated ? 1.0f : 1.0f / fp8::kHiddenFactor;
    const RowTerms of_rows = {{factors[0] * scale, factors[1] * scale},
                              {__bfloat162float(bias[row]), __bfloat162float(bias[next])}};
    if (gated) {
      store_hidden<S, N, SPLIT>(a, tile_m, first, count, acc, of_tokens, of_rows, row_tile);
    } else {
      store_weighted<S, N>(a, tile_m, first, count, acc, of_tokens, of_rows, row_tile);
    }
  }
};

}  // namespace antiphon::mixed
