// The same as one_shot.cu, with rows written to the others instead of read from them: nobody waits for a read to come
// back over a link, and each rank needs room for the rows of all.
//
// Every rank writes its rows into the memory of each other one, says so there, waits for the others' word and adds what
// lies in its own memory to its own rows, in the order of ranks, so that every rank computes the same bits. Rows alternate
// between two places: a rank that writes a place for the second time has heard from its owner in between, so the owner's
// launch that read what was there is over.

#include "peer_reduce.cuh"

namespace antiphon {
namespace {

struct Pushed {
  uint4* rows[kMaxRanks];      // of each rank: [2, ranks, max rows, width] bf16, by who wrote them; its own are not used
  uint32_t* words[kMaxRanks];  // of each rank: [max rows, ranks]
  const uint4* x;              // [rows, width] bf16, this rank's part
  uint32_t* counts;            // [max rows], launches so far
  Following following;
  int rank, ranks, chunks, max_rows;
};

__global__ void __launch_bounds__(kReduceThreads) pushed(const Pushed a) {
  const int row = blockIdx.x;
  const uint32_t count = a.counts[row] + 1;
  const size_t here = static_cast<size_t>(row) * a.chunks;
  const size_t matrix = static_cast<size_t>(a.max_rows) * a.chunks;
  const size_t place = (count & 1) * a.ranks * matrix + here;  // of what rank 0 wrote

  for (int i = threadIdx.x; i < a.chunks; i += kReduceThreads) {
    const uint4 value = a.x[here + i];
    for (int peer = 0; peer < a.ranks; ++peer) {
      if (peer != a.rank) a.rows[peer][place + a.rank * matrix + i] = value;
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x < a.ranks) {
    say(a.words[threadIdx.x] + static_cast<size_t>(row) * a.ranks + a.rank, count);
    wait_for(a.words[a.rank] + static_cast<size_t>(row) * a.ranks + threadIdx.x, count);
  }
  __syncthreads();

  float squares = 0.f;
  for (int i = threadIdx.x; i < a.chunks; i += kReduceThreads) {
    float sum[8] = {};
    for (int rank = 0; rank < a.ranks; ++rank) {
      add(sum, rank == a.rank ? a.x[here + i] : read_peer(a.rows[a.rank] + place + rank * matrix + i));
    }
    squares += add_to_residual(a.following, here + i, pack(sum));
  }
  if (threadIdx.x == 0) a.counts[row] = count;
  norm_row(a.following, here, a.chunks, squares);
}

}  // namespace
}  // namespace antiphon

extern "C" int antiphon_pushed_add_norm(void* const* rows_of, void* const* words_of, const void* x, void* residual,
                                        const void* weight, void* out, void* counts, float eps, int rows, int width,
                                        int max_rows, int rank, int ranks, void* stream) {
  if (rows < 1 || rows > max_rows || ranks < 1 || ranks > antiphon::kMaxRanks || width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  antiphon::Pushed a{};
  for (int peer = 0; peer < ranks; ++peer) {
    a.rows[peer] = static_cast<uint4*>(rows_of[peer]);
    a.words[peer] = static_cast<uint32_t*>(words_of[peer]);
  }
  a.x = static_cast<const uint4*>(x);
  a.counts = static_cast<uint32_t*>(counts);
  a.following = {static_cast<uint4*>(residual), static_cast<const uint4*>(weight), static_cast<uint4*>(out), eps};
  a.rank = rank;
  a.ranks = ranks;
  a.chunks = width / 8;
  a.max_rows = max_rows;
  return antiphon::launch_rows(antiphon::pushed, a, rows, stream);
}
