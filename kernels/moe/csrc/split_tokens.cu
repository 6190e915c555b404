// The activations of a small batch, gathered by expert and split into e4m3 high and low parts, in the tiles that
// the streaming kernel copies to shared memory.

#include "stream_layout.cuh"

namespace antiphon::stream {
namespace {

constexpr int kThreads = 384;  // 360 of them own eight columns each

struct SplitArguments {
  const __nv_bfloat16* x;  // [tokens, kDim]
  const int* order;        // [pairs]
  const int4* tiles;
  const int* tile_count;
  uint8_t* activations;  // [tiles, ActivationTile::kBytes]
  float* scale;          // [pairs] by slot: what the sum of products must be multiplied by
  int top_k;
};

// One block per (tile, token of the tile).
template <int TOKENS>
__global__ void __launch_bounds__(kThreads) split_kernel(const __grid_constant__ SplitArguments a) {
  using Tile = ActivationTile<TOKENS>;
  __shared__ uint32_t peaks[kThreads / 32];
  grid_dependency_wait();
  grid_dependency_trigger();
  const int index = blockIdx.x, n = blockIdx.y, thread = threadIdx.x;
  if (index >= *a.tile_count) return;
  const int4 tile = a.tiles[index];
  if (n >= tile.z) return;
  const int token = a.order[tile.y + n] / a.top_k;
  uint4 raw = make_uint4(0, 0, 0, 0);
  if (thread < kDim / 8) raw = reinterpret_cast<const uint4*>(a.x + static_cast<size_t>(token) * kDim)[thread];
  const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
  uint32_t peak = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) peak = max(peak, max((words[i] << 16) & 0x7FFF0000u, words[i] & 0x7FFF0000u));
  peak = __reduce_max_sync(0xFFFFFFFFu, peak);
  if (thread % 32 == 0) peaks[thread / 32] = peak;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) peak = max(peak, peaks[i]);
  // A factor 2^p that puts the largest magnitude into [128, 256); e4m3 ends at 448.
  const int shift = min(134 - static_cast<int>(peak >> 23) + 127, 254);  // biased exponent of 2^p
  const float factor = __uint_as_float(static_cast<uint32_t>(shift) << 23);
  if (thread == 0) a.scale[tile.y + n] = __uint_as_float(static_cast<uint32_t>(254 + 6 - shift) << 23);  // 2^(6-p)
  if (thread >= kDim / 8) return;
  uint32_t high[2] = {0, 0}, low[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const SplitPair pair = split(make_float2(__uint_as_float(words[i] << 16) * factor,
                                             __uint_as_float(words[i] & 0xFFFF0000u) * factor));
    high[i / 2] |= static_cast<uint32_t>(pair.high) << (16 * (i % 2));
    low[i / 2] |= static_cast<uint32_t>(pair.low) << (16 * (i % 2));
  }
  uint8_t* place = a.activations + static_cast<size_t>(index) * Tile::kBytes + Tile::place(n, thread * 8);
  *reinterpret_cast<uint2*>(place) = make_uint2(high[0], high[1]);
  *reinterpret_cast<uint2*>(place + Tile::kLowOffset) = make_uint2(low[0], low[1]);
}

template <int TOKENS>
cudaError_t start(const SplitArguments& a, int max_tiles, cudaStream_t stream, bool overlap) {
  return launch(split_kernel<TOKENS>, dim3(max_tiles, TOKENS), dim3(kThreads), 0, stream, overlap, a);
}

}  // namespace
}  // namespace antiphon::stream

extern "C" int antiphon_moe_split(const void* x, const int* order, const void* tiles, const int* tile_count,
                                  void* activations, float* scale, int top_k, int token_tile, int max_tiles,
                                  int overlap, void* stream) {
  namespace stream_ = antiphon::stream;
  const stream_::SplitArguments a = {static_cast<const __nv_bfloat16*>(x), order,
                                     static_cast<const int4*>(tiles),      tile_count,
                                     static_cast<uint8_t*>(activations),   scale,
                                     top_k};
  const auto queue = static_cast<cudaStream_t>(stream);
  switch (token_tile) {
    case 4: return stream_::start<4>(a, max_tiles, queue, overlap != 0);
    case 8: return stream_::start<8>(a, max_tiles, queue, overlap != 0);
    case 16: return stream_::start<16>(a, max_tiles, queue, overlap != 0);
    case 24: return stream_::start<24>(a, max_tiles, queue, overlap != 0);
    default: return cudaErrorInvalidValue;
  }
}
