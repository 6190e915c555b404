// From streamed MXFP4 to e4m3 tiles of 128 x 128, one thread at a time. Compiled for the host as well, where the
// tests run it: the arithmetic is exact or rounds to nearest even in both places.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace antiphon::widen {

// The streamed format (see streamed.py): stages of 6 blocks of 64 rows, weights and then scales.
constexpr int kStages = 15;
constexpr int kStageWeightBytes = 6144;
constexpr int kStageBytes = 6528;
constexpr int kRowTileBytes = kStages * kStageBytes;
constexpr int kPairs = 45;      // pairs of blocks in a row
constexpr int kTilePairs = 2;   // of a 128-column tile
constexpr int kThreads = 256;   // 8 warps of 16 rows
constexpr int kTileBytes = 128 * 128;
constexpr int kTopExponent = 6;  // the largest block exponent becomes 2^6: 6 * 64 = 384 < 448

// What a thread holds of a tile: two rows of each of four blocks, eight values of a row and block.
struct Piece {
  uint32_t words[kTilePairs][4];  // per pair: block 0 low and high columns, block 1 low and high columns
  uint32_t scales[kTilePairs];    // a byte for block 0 row g, row g + 8, block 1 row g, row g + 8

  __host__ __device__ int scale(int pair, int block, int row) const {
    return static_cast<int>(scales[pair] >> (16 * block + 8 * row) & 0xFF);
  }
};

// The e4m3 forms of a packed word's two rows, 2^-6 of the value.
__host__ __device__ inline void expand(uint32_t packed, uint32_t (&rows)[2]) {
  rows[0] = packed & 0x9C9C9C9Cu;
  rows[1] = ((packed << 2) & 0x8C8C8C8Cu) | ((packed >> 2) & 0x10101010u);
}

// Loads a thread's piece of (row tile of 64, column tile); columns beyond the matrix are zeros.
__host__ __device__ inline Piece load_piece(const uint8_t* row_tile, int column_tile, int warp, int lane) {
  Piece piece = {};
#pragma unroll
  for (int p = 0; p < kTilePairs; ++p) {
    const int pair = column_tile * kTilePairs + p;
    if (pair >= kPairs) continue;
    const uint8_t* stage = row_tile + pair / 3 * kStageBytes;
    const uint4 words = *reinterpret_cast<const uint4*>(stage + ((pair % 3 * 4 + warp) * 32 + lane) * 16);
    piece.words[p][0] = words.x;
    piece.words[p][1] = words.y;
    piece.words[p][2] = words.z;
    piece.words[p][3] = words.w;
    piece.scales[p] = *reinterpret_cast<const uint32_t*>(stage + kStageWeightBytes + (warp * 8 + lane / 4) * 12 +
                                                         pair % 3 * 4);
  }
  return piece;
}

// Whether the thread's values of one block and row hold anything but zeros (bits 4 3 2, or 6 1 0).
__host__ __device__ inline bool used(const Piece& piece, int pair, int block, int row) {
  const uint32_t magnitudes = row == 0 ? 0x1C1C1C1Cu : 0x43434343u;
  return ((piece.words[pair][2 * block] | piece.words[pair][2 * block + 1]) & magnitudes) != 0;
}

// Four expanded values times 2^exponent as e4m3, rounded to nearest even; `exact` is cleared when one was rounded.
__host__ __device__ inline uint32_t shift_values(uint32_t values, int exponent, bool& exact) {
  // The product is exact in half precision down to 2^-17 (an expanded value's last bit is 2^-7); below, e4m3 has
  // nothing but zero.
  constexpr int kSmallest = -17;
  const float factor = exponent < kSmallest ? 0.0f : ldexpf(1.0f, exponent);
  const __half2 factors = __float2half2_rn(factor);
  uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto pair = static_cast<__nv_fp8x2_storage_t>(values >> (16 * i));
    const __half2_raw moved = __hmul2(__half2(__nv_cvt_fp8x2_to_halfraw2(pair, __NV_E4M3)), factors);
    const __nv_fp8x2_storage_t narrow = __nv_cvt_halfraw2_to_fp8x2(moved, __NV_SATFINITE, __NV_E4M3);
    const __half2_raw back = __nv_cvt_fp8x2_to_halfraw2(narrow, __NV_E4M3);
    exact = exact && back.x == moved.x && back.y == moved.y;
    result |= static_cast<uint32_t>(narrow) << (16 * i);
  }
  exact = exact && (exponent >= kSmallest || (values & 0x7F7F7F7Fu) == 0);
  return result;
}

// Row of the 128-row tile that a thread's row is. `upper`: the second of the tile's two row tiles.
__host__ __device__ inline int tile_row(int upper, int warp, int g, int row, bool interleaved) {
  return upper * 64 + warp * 16 + (interleaved ? 2 * g + row : g + 8 * row);
}

// Writes the thread's values into the swizzled tile. `top`: the tile's largest used scale.
__host__ __device__ inline bool store_piece(const Piece& piece, int top, int upper, int warp, int lane,
                                            bool interleaved, uint8_t* tile) {
  bool exact = true;
#pragma unroll
  for (int p = 0; p < kTilePairs; ++p) {
#pragma unroll
    for (int block = 0; block < 2; ++block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t rows[2];
        expand(piece.words[p][2 * block + half], rows);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          // + 6: expand gives 2^-6. A block of zeros may have a scale above the tile's.
          const int exponent = min(piece.scale(p, block, row) - top, 0) + kTopExponent + 6;
          const int at = tile_row(upper, warp, lane / 4, row, interleaved);
          const int chunk = (p * 2 + block) * 2 + half;
          auto* place = reinterpret_cast<uint32_t*>(tile + at * 128 + (chunk ^ (at % 8)) * 16 + lane % 4 * 4);
          *place = shift_values(rows[row], exponent, exact);
        }
      }
    }
  }
  return exact;
}

}  // namespace antiphon::widen
