// From streamed MXFP4 to the e4m3 operand of a wgmma, in registers. Compiled for the host as well, where the tests
// run it.
//
// An FP4 value times 2^d is an e4m3 number for -8 <= d <= 6. A row of weights has one exponent, that of its largest
// block: its blocks lose nothing when they lie within 2^14 of it, and what is lost beyond is below 2^-16 of the row's
// largest value. The eight magnitudes of a block are looked up, since byte permutations are what the chip does fast.
#pragma once

#include <cuda_fp8.h>

#include <cmath>

#include "mxfp4_word.cuh"

namespace antiphon::mixed {

constexpr int kTopExponent = 6;       // a row's largest block exponent becomes 2^6: 6 * 64 = 384 < 448
constexpr int kLevels = 20;           // distances from the row's largest block; at the last every value rounds to zero

// Byte `code` of level `level`: FP4's magnitude times 2^(kTopExponent - level).
__host__ __device__ inline uint8_t magnitude(int level, int code) {
  const float value = code < 2 ? 0.5f * code : (1.0f + 0.5f * (code % 2)) * (1 << (code / 2 - 1));
  return __nv_cvt_float_to_fp8(ldexpf(value, kTopExponent - level), __NV_SATFINITE, __NV_E4M3);
}

// What a block's scale is taken from to be its level, for rows g (low half) and g + 8 (high half).
__host__ __device__ inline uint32_t level_offsets(int top, int next_top) {
  return static_cast<uint32_t>(top + 1) | static_cast<uint32_t>(next_top + 1) << 16;
}

// Levels of both rows times 8, in halves. Blocks above a row's largest hold zeros only, and any level does.
__host__ __device__ inline uint32_t level_bytes(uint32_t scales, int block, uint32_t offsets) {
  const uint32_t minus = permute(scales, 0, block == 0 ? 0x4140 : 0x4342) ^ 0xFFFFFFFFu;  // -scale - 1
  constexpr uint32_t kLast = (kLevels - 1) * 0x10001u;
  return __viaddmin_s16x2_relu(minus, offsets, kLast) * 8;
}

// What a lane's four block scales (row g, row g + 8, then the second block) look its magnitudes up in.
struct PairMagnitudes {
  Magnitudes at[2][2];  // block, row
};

__host__ __device__ inline PairMagnitudes pair_magnitudes(uint32_t scales, uint32_t offsets,
                                                          const Magnitudes* magnitudes) {
  const auto* table = reinterpret_cast<const uint8_t*>(magnitudes);
  PairMagnitudes found;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint32_t levels = level_bytes(scales, block, offsets);
    found.at[block][0] = *reinterpret_cast<const Magnitudes*>(table + (levels & 0xFFFF));
    found.at[block][1] = *reinterpret_cast<const Magnitudes*>(table + (levels >> 16));
  }
  return found;
}

// A lane's share of 64 rows x 64 columns: 16 packed bytes -> the operand registers of two products of 32 columns each.
__host__ __device__ inline void widen_pair(const uint4& packed, const PairMagnitudes& by, uint32_t (&operand)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half)  // columns 0 .. 15 and 16 .. 31
      look_up(words[2 * block + half], by.at[block][0], by.at[block][1], operand[4 * block + 2 * half],
              operand[4 * block + 2 * half + 1]);
  }
}

// The same without the scales: 2^-kExpandedExponent of the values.
__host__ __device__ inline void expand_pair(const uint4& packed, uint32_t (&operand)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) expand(words[i], operand[2 * i], operand[2 * i + 1]);
}

}  // namespace antiphon::mixed
