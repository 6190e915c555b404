// From streamed MXFP4 to the e4m3 operand of a wgmma, in registers. Compiled for the host as well, where the tests
// run it.
//
// An FP4 value times 2^d is an e4m3 number for -8 <= d <= 6. A row of weights has one exponent, that of its largest
// block: its blocks lose nothing when they lie within 2^14 of it, and what is lost beyond is below 2^-16 of the row's
// largest value. The eight magnitudes of a block are looked up, since byte permutations are what the chip does fast.
#pragma once

#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>

namespace antiphon::mixed {

constexpr int kTopExponent = 6;       // a row's largest block exponent becomes 2^6: 6 * 64 = 384 < 448
constexpr int kExpandedExponent = 6;  // the packed form read as e4m3 is 2^-6 of the value
constexpr int kLevels = 20;           // distances from the row's largest block; at the last every value rounds to zero

// The e4m3 bytes of FP4's magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6 at each distance.
struct Magnitudes {
  uint32_t low, high;
};

// Byte `code` of level `level`: FP4's magnitude times 2^(kTopExponent - level).
__host__ __device__ inline uint8_t magnitude(int level, int code) {
  const float value = code < 2 ? 0.5f * code : (1.0f + 0.5f * (code % 2)) * (1 << (code / 2 - 1));
  return __nv_cvt_float_to_fp8(ldexpf(value, kTopExponent - level), __NV_SATFINITE, __NV_E4M3);
}

__host__ __device__ inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return result;
#endif
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

// Four operand bytes of each of two rows out of a packed word. Per byte, bits 7 4 3 2 are sign and magnitude of row
// g, bits 5 6 1 0 those of row g + 8.
__host__ __device__ inline void look_up(uint32_t word, Magnitudes row, Magnitudes next, uint32_t& operand,
                                        uint32_t& next_operand) {
  const uint32_t codes = ((word >> 2) & 0x07070707u) | ((word << 4) & 0x30303030u) | (word & 0x40404040u);
  const uint32_t upper = codes >> 16;
  operand = permute(permute(row.low, row.high, codes), permute(row.low, row.high, upper), 0x6420) |
            (word & 0x80808080u);
  next_operand = permute(permute(next.low, next.high, codes), permute(next.low, next.high, upper), 0x7531) |
                 ((word << 2) & 0x80808080u);
}

// A lane's share of 64 rows x 64 columns: 16 packed bytes and four block scales (row g, row g + 8, then the second
// block) -> the operand registers of two products of 32 columns each.
__host__ __device__ inline void widen_pair(const uint4& packed, uint32_t scales, uint32_t offsets,
                                           const Magnitudes* magnitudes, uint32_t (&operand)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint32_t levels = level_bytes(scales, block, offsets);
    const auto* table = reinterpret_cast<const uint8_t*>(magnitudes);
    const Magnitudes row = *reinterpret_cast<const Magnitudes*>(table + (levels & 0xFFFF));
    const Magnitudes next = *reinterpret_cast<const Magnitudes*>(table + (levels >> 16));
#pragma unroll
    for (int half = 0; half < 2; ++half)  // columns 0 .. 15 and 16 .. 31
      look_up(words[2 * block + half], row, next, operand[4 * block + 2 * half], operand[4 * block + 2 * half + 1]);
  }
}

// The same without the scales: the packed form read as e4m3, 2^-6 of the values.
__host__ __device__ inline void expand_pair(const uint4& packed, uint32_t (&operand)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    operand[2 * i] = words[i] & 0x9C9C9C9Cu;
    operand[2 * i + 1] = ((words[i] << 2) & 0x8C8C8C8Cu) | ((words[i] >> 2) & 0x10101010u);
  }
}

}  // namespace antiphon::mixed
