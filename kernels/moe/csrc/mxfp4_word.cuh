// Eight packed FP4 codes of two weight rows, as every road stores them. Compiled for the host as well, where the tests
// run it.
//
// Per byte, bits 7 4 3 2 are sign, exponent and mantissa of the first row's value, where e4m3 has them; bits 5 6 1 0 are
// those of the second row's. The streaming kernel is bound by its integer operations more than the one that widens, so
// the form is what expands with the fewest.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace antiphon {

// e4m3 bytes of FP4's magnitudes 0, 0.5, 1, 1.5 and 2, 3, 4, 6.
struct Magnitudes {
  uint32_t low, high;
};

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

// Four e4m3 bytes of each row. Read as e4m3 the packed form is 2^-kExpandedExponent of the FP4 value: FP4's exponent
// bias is 1, e4m3's is 7, and the subnormals agree as well.
constexpr int kExpandedExponent = 6;
__host__ __device__ inline void expand(uint32_t word, uint32_t& first, uint32_t& second) {
  first = word & 0x9C9C9C9Cu;
  second = ((word << 2) & 0x8C8C8C8Cu) | ((word >> 2) & 0x10101010u);
}

// The same out of tables of the rows' magnitudes.
__host__ __device__ inline void look_up(uint32_t word, Magnitudes of_first, Magnitudes of_second, uint32_t& first,
                                        uint32_t& second) {
  const uint32_t codes = ((word >> 2) & 0x07070707u) | ((word << 4) & 0x30303030u) | (word & 0x40404040u);
  const uint32_t upper = codes >> 16;
  first = permute(permute(of_first.low, of_first.high, codes), permute(of_first.low, of_first.high, upper), 0x6420) |
          (word & 0x80808080u);
  second =
      permute(permute(of_second.low, of_second.high, codes), permute(of_second.low, of_second.high, upper), 0x7531) |
      ((word << 2) & 0x80808080u);
}

}  // namespace antiphon
