// Sum of one bf16 matrix over the GPUs of a host, added to the residual stream, and its RMSNorm: one launch.
//
// Every rank puts its rows into memory that all ranks can read, says so to each of them, waits for their word,
// and reads the rows of all ranks in the order of ranks, so that every rank computes the same bits. One block
// does one row. Rows alternate between two places: a rank that writes a place for the second time has heard from
// every rank in between, so nobody still reads what was there.

#include "peer_reduce.cuh"

namespace antiphon {
namespace {

struct OneShot {
  const uint4* rows[kMaxRanks];  // of each rank: [2, max rows, width] bf16
  uint32_t* words[kMaxRanks];    // of each rank: [max rows, ranks]
  const uint4* x;                // [rows, width] bf16, this rank's part
  uint32_t* counts;              // [max rows], launches so far
  Following following;
  int rank, ranks, chunks, max_rows;
  bool overlap;  // with the launch that follows
};

__global__ void __launch_bounds__(kReduceThreads) one_shot(const OneShot a) {
  if (a.overlap) grid_dependency_trigger();  // what follows fetches its weights while ranks wait for one another
  grid_dependency_wait();
  const int row = blockIdx.x;
  const uint32_t count = a.counts[row] + 1;
  const size_t place = (static_cast<size_t>(count & 1) * a.max_rows + row) * a.chunks;
  const size_t here = static_cast<size_t>(row) * a.chunks;

  uint4* mine = const_cast<uint4*>(a.rows[a.rank]) + place;
  for (int i = threadIdx.x; i < a.chunks; i += kReduceThreads) mine[i] = a.x[here + i];
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
    for (int rank = 0; rank < a.ranks; ++rank) add(sum, read_peer(a.rows[rank] + place + i));
    squares += add_to_residual(a.following, here + i, pack(sum));
  }
  if (threadIdx.x == 0) a.counts[row] = count;
  norm_row(a.following, here, a.chunks, squares);
}

}  // namespace
}  // namespace antiphon

extern "C" int antiphon_one_shot_add_norm(const void* const* rows_of, void* const* words_of, const void* x,
                                          void* residual, const void* weight, void* out, void* counts, float eps,
                                          int rows, int width, int max_rows, int rank, int ranks, int overlap,
                                          void* stream) {
  if (rows < 1 || rows > max_rows || ranks < 1 || ranks > antiphon::kMaxRanks || width % 8 != 0) {
    return cudaErrorInvalidValue;
  }
  antiphon::OneShot a{};
  for (int peer = 0; peer < ranks; ++peer) {
    a.rows[peer] = static_cast<const uint4*>(rows_of[peer]);
    a.words[peer] = static_cast<uint32_t*>(words_of[peer]);
  }
  a.x = static_cast<const uint4*>(x);
  a.counts = static_cast<uint32_t*>(counts);
  a.following = {static_cast<uint4*>(residual), static_cast<const uint4*>(weight), static_cast<uint4*>(out), eps};
  a.rank = rank;
  a.ranks = ranks;
  a.chunks = width / 8;
  a.max_rows = max_rows;
  a.overlap = overlap != 0;
  return antiphon::launch_rows(antiphon::one_shot, a, rows, overlap != 0, stream);
}
