// The same as one_shot.cu for more rows: every row is summed by one rank, which hands the sum to all.
//
// A rank puts its rows into memory that all can read and tells each row's owner, rank (row % ranks). The owner reads
// the row of every rank in the order of ranks and writes the sum into the memory of each, and says so there; each adds
// it to its own residual stream. So a rank reads and writes 2 (ranks - 1) / ranks of the matrix over the links instead
// of ranks - 1 times the matrix, and waits twice instead of once.
//
// One place per row is enough. A rank that writes its row again has had the sum of the launch before, for which the
// owner had read that row; an owner that writes a sum again has heard from every rank, which had used the sum before.

#include "peer_reduce.cuh"

namespace antiphon {
namespace {

struct TwoShot {
  const uint4* rows[kMaxRanks];     // of each rank: [max rows, width] bf16, its parts
  uint4* sums[kMaxRanks];           // of each rank: [max rows, width] bf16, written by the owners
  uint32_t* parts_word[kMaxRanks];  // of each rank: [max rows, ranks], whose part of a row is there; used at the owner
  uint32_t* sum_word[kMaxRanks];    // of each rank: [max rows], whether the sum is there
  const uint4* x;                   // [rows, width] bf16, this rank's part
  uint32_t* counts;                 // [max rows], launches so far
  Following following;
  int rank, ranks, chunks;
};

__global__ void __launch_bounds__(kReduceThreads) two_shot(const TwoShot a) {
  const int row = blockIdx.x, owner = row % a.ranks;
  const uint32_t count = a.counts[row] + 1;
  const size_t here = static_cast<size_t>(row) * a.chunks;

  uint4* mine = const_cast<uint4*>(a.rows[a.rank]) + here;
  for (int i = threadIdx.x; i < a.chunks; i += kReduceThreads) mine[i] = a.x[here + i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) say(a.parts_word[owner] + static_cast<size_t>(row) * a.ranks + a.rank, count);
  if (owner == a.rank) {
    if (threadIdx.x < a.ranks) wait_for(a.parts_word[owner] + static_cast<size_t>(row) * a.ranks + threadIdx.x, count);
    __syncthreads();
    for (int i = threadIdx.x; i < a.chunks; i += kReduceThreads) {
      float sum[8] = {};
      for (int rank = 0; rank < a.ranks; ++rank) add(sum, read_peer(a.rows[rank] + here + i));
      const uint4 rounded = pack(sum);
      for (int rank = 0; rank < a.ranks; ++rank) a.sums[rank][here + i] = rounded;
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x < a.ranks) say(a.sum_word[threadIdx.x] + row, count);
  }
  if (threadIdx.x == 0) wait_for(a.sum_word[a.rank] + row, count);
  __syncthreads();

  float squares = 0.f;
  for (int i = threadIdx.x; i < a.chunks; i += kReduceThreads) {
    squares += add_to_residual(a.following, here + i, read_peer(a.sums[a.rank] + here + i));
  }
  if (threadIdx.x == 0) a.counts[row] = count;
  norm_row(a.following, here, a.chunks, squares);
}

}  // namespace
}  // namespace antiphon

extern "C" int antiphon_two_shot_add_norm(const void* const* rows_of, void* const* sums_of, void* const* parts_word_of,
                                          void* const* sum_word_of, const void* x, void* residual, const void* weight,
                                          void* out, void* counts, float eps, int rows, int width, int max_rows,
                                          int rank, int ranks, void* stream) {
  if (rows < 1 || rows > max_rows || ranks < 1 || ranks > antiphon::kMaxRanks || width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  antiphon::TwoShot a{};
  for (int peer = 0; peer < ranks; ++peer) {
    a.rows[peer] = static_cast<const uint4*>(rows_of[peer]);
    a.sums[peer] = static_cast<uint4*>(sums_of[peer]);
    a.parts_word[peer] = static_cast<uint32_t*>(parts_word_of[peer]);
    a.sum_word[peer] = static_cast<uint32_t*>(sum_word_of[peer]);
  }
  a.x = static_cast<const uint4*>(x);
  a.counts = static_cast<uint32_t*>(counts);
  a.following = {static_cast<uint4*>(residual), static_cast<const uint4*>(weight), static_cast<uint4*>(out), eps};
  a.rank = rank;
  a.ranks = ranks;
  a.chunks = width / 8;
  return antiphon::launch_rows(antiphon::two_shot, a, rows, false, stream);
}
