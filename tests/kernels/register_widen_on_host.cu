// The widening of a lane's weights, run for every lane on the host: the same function on the same bytes.

#include "register_widen.cuh"

namespace mixed = antiphon::mixed;

// One row tile, streamed [15, 6528], and the largest scale of its 64 rows -> e4m3 [64, 2880].
extern "C" void register_widen_on_host(const uint8_t* streamed, const uint8_t* tops, int interleaved, uint8_t* values) {
  antiphon::Magnitudes magnitudes[mixed::kLevels];
  auto* bytes = reinterpret_cast<uint8_t*>(magnitudes);
  for (int i = 0; i < 8 * mixed::kLevels; ++i) bytes[i] = mixed::magnitude(i / 8, i % 8);
  for (int pair = 0; pair < 45; ++pair) {
    for (int thread = 0; thread < 128; ++thread) {
      const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
      const uint8_t* stage = streamed + pair / 3 * 6528;
      const uint4 packed = *reinterpret_cast<const uint4*>(stage + ((pair % 3 * 4 + warp) * 32 + lane) * 16);
      const uint32_t scales =
          *reinterpret_cast<const uint32_t*>(stage + 6144 + (warp * 8 + g) * 12 + pair % 3 * 4);
      const int rows[2] = {warp * 16 + (interleaved ? 2 * g : g), warp * 16 + (interleaved ? 2 * g + 1 : g + 8)};
      uint32_t operand[8];
      const uint32_t offsets = mixed::level_offsets(tops[rows[0]], tops[rows[1]]);
      mixed::widen_pair(packed, mixed::pair_magnitudes(scales, offsets, magnitudes), operand);
      for (int i = 0; i < 8; ++i) {  // the order of wgmma's registers: row, row + 8, then 16 columns on
        const int column = pair * 64 + i / 4 * 32 + i / 2 % 2 * 16 + 4 * t;
        *reinterpret_cast<uint32_t*>(values + rows[i % 2] * 2880 + column) = operand[i];
      }
    }
  }
}
