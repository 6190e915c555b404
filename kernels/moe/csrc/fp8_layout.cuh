// Layout shared by the kernels of the FP8 road.
//
// Activations and weights are stored as the tensor core reads them: tiles of 128 columns in 128-byte rows whose
// 16-byte chunks are exchanged within each 8 rows (chunk ^ row % 8), so that a plain contiguous bulk copy
// delivers a swizzled operand and no tensor map is needed.
#pragma once

#include "hopper.cuh"

namespace antiphon::fp8 {

constexpr int kDim = 2880;                          // hidden and expert size
constexpr int kTileK = 128;
constexpr int kTilesK = (kDim + kTileK - 1) / kTileK;  // 23, the last one half full
constexpr int kTileN = 128;                         // rows of a weight tile
constexpr int kWeightTileBytes = kTileN * kTileK;

// A tile of ROWS tokens of one expert: 128 columns of values, then one float a row.
template <int ROWS>
struct TokenTileBytes {
  static constexpr int kValues = ROWS * kTileK;
  static constexpr int kScales = ROWS * 4;
  static constexpr int kScaled = kValues + kScales;
};

// |swiglu| <= 7 * (7 + 1) = 56 by the clamps: one factor fits e4m3 (448) for every value, whatever the token.
constexpr float kHiddenFactor = 8.0f;

__device__ __forceinline__ int swizzled(int row, int byte) {
  return row * kTileK + (((byte / 16) ^ (row % 8)) * 16) + byte % 16;
}

// One token tile: rows of one expert; `first` and `count` span the expert's tiles.
struct TokenTile {
  int expert, rows, first, count;
};

}  // namespace antiphon::fp8
