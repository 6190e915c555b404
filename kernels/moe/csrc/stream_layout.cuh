// What the streaming kernels share: sizes, the choice for each token tile, and where an activation lies in a tile.
#pragma once

#include "hopper.cuh"

namespace antiphon::stream {

constexpr int kDim = 2880;          // columns of both projections
constexpr int kBlocks = kDim / 32;  // MXFP4 blocks per row

// What was measured best for a tile of TOKENS tokens.
// kGroups: consumer warpgroups, each takes 1 / kGroups of K (3 or 5).
// kBatch: blocks whose products are in flight between two waits.
// kSideBySide: high and low parts are columns of one product; otherwise two products add up in place.
// kBuffers: activation tiles in shared memory.
template <int GROUPS, int BATCH, bool SIDE_BY_SIDE, int BUFFERS>
struct Choice {
  static constexpr int kGroups = GROUPS;
  static constexpr int kBatch = BATCH;
  static constexpr bool kSideBySide = SIDE_BY_SIDE;
  static constexpr int kBuffers = BUFFERS;
};
template <int TOKENS>
struct Tuning;
template <>
struct Tuning<4> : Choice<5, 3, true, 2> {};
template <>
struct Tuning<8> : Choice<5, 3, true, 2> {};
template <>
struct Tuning<16> : Choice<5, 3, false, 1> {};
template <>
struct Tuning<24> : Choice<3, 3, false, 1> {};

// A tile of activations as wgmma reads it: [90 blocks][2 halves of 16 columns][rows][16 bytes]. The rows are the
// tokens' high parts and then their low parts, or the low parts are a second such region.
template <int TOKENS>
struct ActivationTile {
  static constexpr bool kSideBySide = Tuning<TOKENS>::kSideBySide;
  static constexpr int kRows = kSideBySide ? 2 * TOKENS : TOKENS;
  static constexpr int kBytes = 2 * kDim * TOKENS;
  static constexpr int kBlockBytes = 2 * kRows * 16;
  static constexpr int kLowOffset = kSideBySide ? TOKENS * 16 : kDim * TOKENS;

  // Offset of the high part of a token's column.
  __device__ __forceinline__ static int place(int token, int column) {
    return column / 16 * (kRows * 16) + token * 16 + column % 16;
  }
};

// The high parts lie in [-256, 256], so that what they leave is at most 8. Where the low parts are columns of their
// own, they are stored this many times larger: a number far below its token's largest then loses 2^-22 of that instead
// of 2^-17.
template <int TOKENS>
constexpr float kLowFactor = Tuning<TOKENS>::kSideBySide ? 32.0f : 1.0f;

// Two floats as the sum of two pairs of e4m3 numbers, the second ones times low_factor. Exact for bf16 values of
// magnitude 2^-2 and more, and off by at most 2^-10 / low_factor below.
struct SplitPair {
  uint16_t high, low;
};
__device__ __forceinline__ SplitPair split(float2 value, float low_factor) {
  const __nv_fp8x2_storage_t high = __nv_cvt_float2_to_fp8x2(value, __NV_SATFINITE, __NV_E4M3);
  const float2 rounded = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(high, __NV_E4M3)));
  const __nv_fp8x2_storage_t low =
      __nv_cvt_float2_to_fp8x2(make_float2((value.x - rounded.x) * low_factor, (value.y - rounded.y) * low_factor),
                               __NV_SATFINITE, __NV_E4M3);
  return {high, low};
}

// |swiglu| <= 7 * (7 + 1) = 56 by the clamps, so that one power of two suits every hidden state: 56 * 4 = 224.
constexpr float kHiddenFactor = 4.0f;

// A token's split activations before they are gathered into tiles: 16 high parts, 16 low parts, and so on.
constexpr int kTokenBytes = 2 * kDim;

}  // namespace antiphon::stream
