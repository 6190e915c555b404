// From streamed MXFP4 to the e4m3 operand of a wgmma, in registers. Compiled for the host as well, where the tests
// run it: the arithmetic is exact or rounds to nearest even in both places.
//
// An FP4 value times 2^d is an e4m3 number for -8 <= d <= 6. A row of weights has one exponent, that of its largest
// block: its blocks lose nothing when they lie within 2^14 of it, and what is lost beyond is below 2^-16 of the row's
// largest value.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace antiphon::mixed {

constexpr int kTopExponent = 6;       // a row's largest block exponent becomes 2^6: 6 * 64 = 384 < 448
constexpr int kExpandedExponent = 6;  // the packed form read as e4m3 is 2^-6 of the value
constexpr int kHalfBias = 15;
// Biased half-precision exponent of the factor of a row's largest block, and the most that a factor may be.
constexpr int kLargestFactor = kTopExponent + kExpandedExponent + kHalfBias;

// Twice in a word: what turns a block's scale into the biased exponent of its factor. `top`: the row's largest scale.
__host__ __device__ inline uint32_t factor_offset(int top) {
  return (static_cast<uint32_t>(kLargestFactor - top) & 0xFFFFu) * 0x10001u;
}

// Two halves of 2^(scale - top + 12). Zero below 2^-14, where every product would round to zero in e4m3; blocks above
// the row's largest hold zeros only, and any factor does.
__host__ __device__ inline uint32_t block_factor(uint32_t scales, int byte, uint32_t offset) {
  constexpr uint32_t kLimit = kLargestFactor * 0x10001u;
#ifdef __CUDA_ARCH__
  const uint32_t twice = __byte_perm(scales, 0, 0x4040 + 0x0101 * byte);
#else
  const uint32_t twice = (scales >> (8 * byte) & 0xFF) * 0x10001u;
#endif
  return __viaddmin_s16x2_relu(twice, offset, kLimit) << 10;
}

// Two e4m3 values times two halves, rounded to e4m3.
__host__ __device__ inline uint16_t scale_two(uint16_t values, uint32_t factors) {
#ifdef __CUDA_ARCH__
  uint16_t result;
  asm("{\n.reg .b32 wide;\n"
      "cvt.rn.f16x2.e4m3x2 wide, %1;\n"
      "mul.rn.f16x2 wide, wide, %2;\n"
      "cvt.rn.satfinite.e4m3x2.f16x2 %0, wide;\n}\n"
      : "=h"(result)
      : "h"(values), "r"(factors));
  return result;
#else
  __half2_raw raw;
  raw.x = static_cast<unsigned short>(factors);
  raw.y = static_cast<unsigned short>(factors >> 16);
  const __half2_raw moved = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(values, __NV_E4M3)), __half2(raw));
  return __nv_cvt_halfraw2_to_fp8x2(moved, __NV_SATFINITE, __NV_E4M3);
#endif
}

__host__ __device__ inline uint32_t scale_values(uint32_t values, uint32_t factors) {
  const uint32_t low = scale_two(static_cast<uint16_t>(values), factors);
  return low | static_cast<uint32_t>(scale_two(static_cast<uint16_t>(values >> 16), factors)) << 16;
}

// A lane's share of 64 rows x 64 columns: 16 packed bytes and four block scales (row g, row g + 8, then the second
// block) -> the operand registers of two products of 32 columns each.
__host__ __device__ inline void widen_pair(const uint4& packed, uint32_t scales, const uint32_t (&offsets)[2],
                                           uint32_t (&operand)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint32_t first = block_factor(scales, 2 * block, offsets[0]);
    const uint32_t second = block_factor(scales, 2 * block + 1, offsets[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // columns 0 .. 15 and 16 .. 31
      const uint32_t word = words[2 * block + half];
      operand[4 * block + 2 * half] = scale_values(word & 0x9C9C9C9Cu, first);
      operand[4 * block + 2 * half + 1] =
          scale_values(((word << 2) & 0x8C8C8C8Cu) | ((word >> 2) & 0x10101010u), second);
    }
  }
}

}  // namespace antiphon::mixed
