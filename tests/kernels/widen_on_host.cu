// The widening kernel's threads, run one after the other on the host: the same functions on the same bytes.

#include "widen.cuh"

namespace widen = antiphon::widen;

// streamed [row_tiles, 15, 6528] -> values [ceil(row_tiles / 2), 23, 16384], scales; returns the rounded tiles.
extern "C" int widen_on_host(const uint8_t* streamed, int row_tiles, int interleaved, uint8_t* values, float* scales) {
  int inexact = 0;
  const int tiles = (row_tiles + 1) / 2;
  for (int tile = 0; tile < tiles; ++tile) {
    for (int column = 0; column < 23; ++column) {
      static widen::Piece pieces[widen::kThreads];
      int top = 0;
      for (int thread = 0; thread < widen::kThreads; ++thread) {
        const int row_tile = tile * 2 + thread / 128;
        pieces[thread] = {};
        if (row_tile < row_tiles)
          pieces[thread] = widen::load_piece(streamed + static_cast<size_t>(row_tile) * widen::kRowTileBytes, column,
                                             thread / 32 % 4, thread % 32);
        for (int i = 0; i < 8; ++i)
          if (widen::used(pieces[thread], i / 4, i / 2 % 2, i % 2))
            top = pieces[thread].scale(i / 4, i / 2 % 2, i % 2) > top ? pieces[thread].scale(i / 4, i / 2 % 2, i % 2) : top;
      }
      const size_t index = static_cast<size_t>(tile) * 23 + column;
      bool exact = true;
      for (int thread = 0; thread < widen::kThreads; ++thread)
        exact = widen::store_piece(pieces[thread], top, thread / 128, thread / 32 % 4, thread % 32, interleaved != 0,
                                   values + index * widen::kTileBytes) && exact;
      scales[index] = ldexpf(1.0f, top - 127 - widen::kTopExponent);
      inexact += exact ? 0 : 1;
    }
  }
  return inexact;
}
