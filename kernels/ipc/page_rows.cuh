// From what a caller says of pages to rows of addresses, each of which lies where it may.
#pragma once

#include <cstdint>

namespace antiphon {

// What goes from one span to another. An entry lies at its number times a step, and has a run at each of the places.
struct Part {
  const int64_t* entries;  // [entry_count, stride]: number at the source and at the destination, a length if stride is 3
  int64_t entry_count, stride;
  int64_t steps[2];       // bytes: source, destination
  const int64_t* places;  // [place_count, 2] bytes from the entry: source, destination
  int64_t place_count;
  int64_t length;         // bytes of every run, if stride is 2
  int64_t spans[2][2];    // address and bytes: source, destination
};
static_assert(sizeof(Part) == 12 * sizeof(int64_t));

enum Fault : int64_t { kSourceOutside = 1, kDestinationOutside, kNoWholeWords };

struct BadRun {
  int64_t fault, part, offsets[2], length;
};

// Runs of all parts, each counted by itself.
inline int64_t count_runs(const Part* parts, int count) {
  int64_t total = 0;
  for (int i = 0; i < count; ++i) total += parts[i].entry_count * parts[i].place_count;
  return total;
}

// rows: [count_runs, 3] of (address to read, address to write, bytes). A run that goes on where the one before it ends,
// on both sides, is one with it. Returns how many there are, or -1 with `bad` filled in.
inline int64_t page_rows(const Part* parts, int count, int64_t* rows, BadRun* bad) {
  int64_t made = 0;
  for (int i = 0; i < count; ++i) {
    const Part& part = parts[i];
    for (int64_t entry = 0; entry < part.entry_count; ++entry) {
      const int64_t* numbers = part.entries + entry * part.stride;
      const int64_t length = part.stride == 3 ? numbers[2] : part.length;
      for (int64_t place = 0; place < part.place_count; ++place) {
        __int128 offsets[2];  // of numbers that a peer has said, whose products may pass 64 bits
        int64_t fault = 0, at[2] = {};
        for (int side = 1; side >= 0; --side) {
          offsets[side] = static_cast<__int128>(numbers[side]) * part.steps[side] + part.places[2 * place + side];
          if (length <= 0 || offsets[side] < 0 || offsets[side] > part.spans[side][1] - length) {
            fault = side ? kDestinationOutside : kSourceOutside;
          } else {
            at[side] = part.spans[side][0] + static_cast<int64_t>(offsets[side]);
          }
        }
        if (fault == 0 && (at[0] | at[1] | length) % 16) fault = kNoWholeWords;
        if (fault != 0) {
          *bad = {fault, i, {static_cast<int64_t>(offsets[0]), static_cast<int64_t>(offsets[1])}, length};
          return -1;
        }
        int64_t* row = rows + 3 * made;
        if (made > 0 && row[-3] + row[-1] == at[0] && row[-2] + row[-1] == at[1]) {
          row[-1] += length;
          continue;
        }
        row[0] = at[0], row[1] = at[1], row[2] = length;
        ++made;
      }
    }
  }
  return made;
}

}  // namespace antiphon
