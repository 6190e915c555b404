// After the products of a row tile: the sum over the warpgroups, then bias, SwiGLU or routing weight, and the store.
#pragma once

#include "stream_geometry.cuh"

namespace antiphon::stream {

// Names of the hardware barriers; 0 is __syncthreads().
constexpr int kReducedBarrier = 2;   // + buffer
constexpr int kReleasedBarrier = 4;  // + buffer

// Adds the products of the high and the low parts where they are different columns.
template <int TOKENS>
__device__ __forceinline__ void add_parts(const float (&acc)[ActivationTile<TOKENS>::kRows / 8][4],
                                          float (&sum)[Geometry<TOKENS>::kWidth / 8][4]) {
#pragma unroll
  for (int j = 0; j < Geometry<TOKENS>::kWidth / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if constexpr (!ActivationTile<TOKENS>::kSideBySide) {
        sum[j][c] = acc[j][c];
      } else if constexpr (TOKENS == 4) {  // columns 0..3 and 4..7: two lanes apart
        const float mine = threadIdx.x % 4 < 2 ? acc[j][c] : acc[j][c] * (1.0f / kLowFactor<TOKENS>);
        sum[j][c] = mine + __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
      } else {
        sum[j][c] = fmaf(acc[j + TOKENS / 8][c], 1.0f / kLowFactor<TOKENS>, acc[j][c]);
      }
    }
  }
}

// Sum over the warpgroups' parts of K, always in the order 0, 1, 2, ...; true in the warpgroup that holds it.
template <int TOKENS>
__device__ __forceinline__ bool reduce_groups(float (&sum)[Geometry<TOKENS>::kWidth / 8][4], float* reduce, int group,
                                              int buffer, bool written_before, bool written_again) {
  using G = Geometry<TOKENS>;
  float* partial = reduce + buffer * (G::kGroups - 1) * G::kReduceFloats + threadIdx.x % 128;
  if (group != 0) {
    if (written_before) barrier_sync(kReleasedBarrier + buffer, G::kConsumers);
    float* mine = partial + (group - 1) * G::kReduceFloats;
#pragma unroll
    for (int j = 0; j < G::kWidth / 8; ++j) {
#pragma unroll
      for (int c = 0; c < 4; ++c) mine[(j * 4 + c) * 128] = sum[j][c];
    }
    barrier_arrive(kReducedBarrier + buffer, G::kConsumers);
    return false;
  }
  barrier_sync(kReducedBarrier + buffer, G::kConsumers);
#pragma unroll
  for (int j = 0; j < G::kWidth / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
#pragma unroll
      for (int other = 0; other < G::kGroups - 1; ++other)
        sum[j][c] += partial[other * G::kReduceFloats + (j * 4 + c) * 128];
    }
  }
  if (written_again) barrier_arrive(kReleasedBarrier + buffer, G::kConsumers);
  return true;
}

// What the epilogue needs from global memory for this lane's rows and columns, loaded ahead so that it does not wait:
// what depends on the token tile once for all of its items, since those are loads behind loads. GATED: first projection, whose rows alternate gate, up and whose output is the next
// activation tile. Otherwise: second projection, routing weight, float32 out.
template <int TOKENS, bool GATED, bool SPLIT>
struct Epilogue {
  static constexpr int kColumns = Geometry<TOKENS>::kWidth / 4;
  // All as loaded: to convert a number is to wait for it, and that would be before the products.
  uint32_t bias[2];           // bf16
  uint32_t factor[kColumns];  // of the sum, float32, or the routing weight, bf16; column n is 8 (i / 2) + 2 t + i % 2
  int pair[kColumns];         // -1 beyond the tile's tokens

  __device__ __forceinline__ float factor_of(int i) const { return __uint_as_float(GATED ? factor[i] : factor[i] << 16); }

  __device__ __forceinline__ void load_rows(const Arguments& a, TokenTile tile, int row_tile) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    const int row = row_tile * kTileRows + warp * 16 + (GATED ? 2 * g : g);
    const Projection& p = GATED ? a.gate_up : a.down;
    const __nv_bfloat16* source = p.bias + static_cast<size_t>(tile.expert()) * p.row_tiles * kTileRows + row;
    bias[0] = __bfloat16_as_ushort(source[0]);
    bias[1] = __bfloat16_as_ushort(source[GATED ? 1 : 8]);
  }

  __device__ __forceinline__ void load_tokens(const Arguments& a, TokenTile tile) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < kColumns; ++i) {
      const int n = i / 2 * 8 + 2 * t + i % 2;
      pair[i] = -1;
      factor[i] = 0;
      if (n < tile.slots()) {
        if constexpr (GATED) {
          pair[i] = n;
          factor[i] = __float_as_uint(a.scale[a.order[tile.first_slot() + n] / 4]);
        } else {
          pair[i] = a.order[tile.first_slot() + n];
          factor[i] = __bfloat16_as_ushort(a.pair_weight[pair[i]]);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const Arguments& a, const float (&sum)[Geometry<TOKENS>::kWidth / 8][4],
                                        int tile, int row_tile) {
    const int warp = threadIdx.x % 128 / 32, g = threadIdx.x % 32 / 4;
    pin(bias[0]);  // and not before
    pin(bias[1]);
    const float upper = __uint_as_float(bias[0] << 16), lower = __uint_as_float(bias[1] << 16);
#pragma unroll
    for (int i = 0; i < kColumns; i += 2) {
      if constexpr (GATED) {
        using Tile = ActivationTile<TOKENS>;
        using Hidden = HiddenTile<TOKENS, SPLIT>;
        float hidden[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
          hidden[c] = clamped_swiglu(sum[i / 2][c] * factor_of(i + c) + upper, sum[i / 2][c + 2] * factor_of(i + c) + lower);
        // Rounded to bf16 first: the sum of two e4m3 numbers then holds it exactly.
        const float2 rounded = __bfloat1622float2(__floats2bfloat162_rn(hidden[0], hidden[1]));
        const SplitPair parts = split(make_float2(rounded.x * kHiddenFactor, rounded.y * kHiddenFactor),
                                      kLowFactor<TOKENS>);
        uint8_t* out = a.hidden + static_cast<size_t>(tile) * Hidden::bytes(a);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (pair[i + c] < 0) continue;
          uint8_t* place = out + Tile::place(pair[i + c], row_tile * 32 + warp * 8 + g);
          *place = static_cast<uint8_t>(parts.high >> (8 * c));
          *(place + Hidden::low_offset(a)) = static_cast<uint8_t>(parts.low >> (8 * c));
        }
      } else {
        constexpr float kScale = 64.0f / kHiddenFactor;  // 2^6 for the weights' e4m3 form
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          if (pair[i + c] < 0) continue;
          float* out = a.partial + static_cast<size_t>(pair[i + c]) * kDim + row_tile * 64 + warp * 16 + g;
          out[0] = factor_of(i + c) * (sum[i / 2][c] * kScale + upper);
          out[8] = factor_of(i + c) * (sum[i / 2][c + 2] * kScale + lower);
        }
      }
    }
  }
};

}  // namespace antiphon::stream
