// The activations of a small batch as e4m3 high and low parts, token by token; alone, or with the RMSNorm in front.
#pragma once

#include "stream_layout.cuh"

namespace antiphon::stream {

struct SplitArguments {
  const __nv_bfloat16* x;     // [tokens, kDim]
  const __nv_bfloat16* norm;  // [kDim]: x is RMS-normalised and rounded to bf16 first; null: it is normed already
  float eps;
  float low_factor;
  uint8_t* activations;  // [tokens, kTokenBytes]
  float* scale;          // [tokens]: what the sums of products must be multiplied by
  int tokens;
};

constexpr int kSplitThreads = 512;
constexpr int kSplitWarps = kSplitThreads / 32;
constexpr int kSplitChunks = kDim / 8;

// Sum or maximum over the warps of one token, of values that are the same in a warp's lanes.
template <int WARPS, typename Value, typename Combine>
__device__ __forceinline__ Value over_warps(Value value, Value* scratch, Combine combine) {
  const int warp = threadIdx.x / 32, first = warp / WARPS * WARPS;
  if constexpr (WARPS == 1) return value;
  if (threadIdx.x % 32 == 0) scratch[warp] = value;
  __syncthreads();
  value = scratch[first];
#pragma unroll
  for (int i = 1; i < WARPS; ++i) value = combine(value, scratch[first + i]);
  return value;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// RMSNorm of one token, whose words lie in 512 / TOKENS threads: chunk `thread + i * kGroup` in words[4 i ..].
template <int TOKENS>
__device__ __forceinline__ void norm_words(const SplitArguments& a, uint32_t* words, int thread, float* scratch) {
  constexpr int kGroup = kSplitThreads / TOKENS, kEach = (kSplitChunks + kGroup - 1) / kGroup;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach * 4; ++i) {
    squares = fmaf(low_half(words[i]), low_half(words[i]), squares);
    squares = fmaf(high_half(words[i]), high_half(words[i]), squares);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, step);
  squares = over_warps<kGroup / 32>(squares, scratch, [](float x, float y) { return x + y; });
  const float factor = rsqrtf(squares / kDim + a.eps);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = min(thread + i * kGroup, kSplitChunks - 1);
    const uint4 gain = reinterpret_cast<const uint4*>(a.norm)[chunk];
    const uint32_t gains[4] = {gain.x, gain.y, gain.z, gain.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t& word = words[4 * i + j];
      word = pack_bf16(low_half(word) * factor * low_half(gains[j]), high_half(word) * factor * high_half(gains[j]));
    }
  }
}

// TOKENS tokens by one block of kSplitThreads; those beyond the last are left out.
template <int TOKENS>
__device__ __forceinline__ void split_block(const SplitArguments& a, int first_token) {
  constexpr int kGroup = kSplitThreads / TOKENS, kEach = (kSplitChunks + kGroup - 1) / kGroup;
  __shared__ float sums[kSplitWarps];
  __shared__ uint32_t peaks[kSplitWarps];
  const int thread = threadIdx.x % kGroup, token = first_token + threadIdx.x / kGroup;
  const bool live = token < a.tokens;
  const uint4* row = reinterpret_cast<const uint4*>(a.x + static_cast<size_t>(live ? token : 0) * kDim);
  uint32_t words[kEach * 4];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = thread + i * kGroup;
    const uint4 raw = chunk < kSplitChunks ? load_fresh(row + chunk) : make_uint4(0, 0, 0, 0);
    words[4 * i] = raw.x, words[4 * i + 1] = raw.y, words[4 * i + 2] = raw.z, words[4 * i + 3] = raw.w;
  }
  if (a.norm != nullptr) norm_words<TOKENS>(a, words, thread, sums);
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < kEach * 4; ++i) peak = max(peak, max((words[i] << 16) & 0x7FFF0000u, words[i] & 0x7FFF0000u));
  peak = __reduce_max_sync(0xFFFFFFFFu, peak);
  peak = over_warps<kGroup / 32>(peak, peaks, [](uint32_t x, uint32_t y) { return max(x, y); });
  // A factor 2^p that puts the largest magnitude into [128, 256).
  const int shift = min(134 - static_cast<int>(peak >> 23) + 127, 254);  // biased exponent of 2^p
  const float factor = __uint_as_float(static_cast<uint32_t>(shift) << 23);
  if (!live) return;
  if (thread == 0) a.scale[token] = __uint_as_float(static_cast<uint32_t>(254 + 6 - shift) << 23);  // 2^(6-p)
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const int chunk = thread + i * kGroup;
    if (chunk >= kSplitChunks) break;
    uint32_t high[2] = {0, 0}, low[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t word = words[4 * i + j];
      const SplitPair pair = split(make_float2(low_half(word) * factor, high_half(word) * factor), a.low_factor);
      high[j / 2] |= static_cast<uint32_t>(pair.high) << (16 * (j % 2));
      low[j / 2] |= static_cast<uint32_t>(pair.low) << (16 * (j % 2));
    }
    // Eight columns are half of a run of 16 high parts, with 16 low parts behind it.
    uint8_t* place = a.activations + static_cast<size_t>(token) * kTokenBytes + chunk / 2 * 32 + chunk % 2 * 8;
    *reinterpret_cast<uint2*>(place) = make_uint2(high[0], high[1]);
    *reinterpret_cast<uint2*>(place + 16) = make_uint2(low[0], low[1]);
  }
}

inline float low_factor(int token_tile) {
  switch (token_tile) {
    case 4: return kLowFactor<4>;
    case 8: return kLowFactor<8>;
    case 16: return kLowFactor<16>;
    default: return kLowFactor<24>;
  }
}

}  // namespace antiphon::stream
