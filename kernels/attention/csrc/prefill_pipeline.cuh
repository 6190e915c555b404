// What a block of prefill attention works on, item after item, and how keys and values reach its shared memory.
#pragma once

#include <cuda.h>

#include "wgmma_bf16.cuh"

namespace antiphon::attention {

constexpr int kDim = 64;
constexpr int kPage = 64;
constexpr int kGroup = 8;                              // query heads of a kv head
constexpr int kWarpgroups = 3;
constexpr int kTokens = kWarpgroups * 64 / kGroup;     // of a block
constexpr int kKeys = 2 * kPage;                       // of a stage
constexpr int kStages = 4;
constexpr int kPageBytes = kPage * kDim * 2;           // keys or values
constexpr int kStageBytes = 4 * kPageBytes;            // keys of two pages, values of two pages
constexpr int kQueryBytes = 64 * kDim * 2;             // of a warpgroup
constexpr int kSharedBytes = kStages * kStageBytes + kWarpgroups * kQueryBytes;
constexpr int kThreads = (kWarpgroups + 1) * 128;
constexpr int kQueryBarrier = 1;                       // + warpgroup
constexpr int kTurnBarrier = kQueryBarrier + kWarpgroups;  // + warpgroup

struct Arguments {
  const __nv_bfloat16* query;  // [tokens, heads, 64]
  __nv_bfloat16* out;          // [tokens, heads, 64]
  const float* sinks;          // [heads]
  const int* table;            // [batch, table_stride] page of every 64 positions
  const int* query_start;      // [batch + 1]
  const int* kv_len;           // [batch]
  int table_stride, kv_heads, batch;
  int token_blocks;            // of the sequence with the most query tokens
  int window;                  // keys that a query sees, itself included; 0: all before it
  float scale;                 // of scores
};

// What one block computes, and which pages it needs for that.
struct Item {
  int sequence, head, begin, count, length, token, first_stage, stages;

  __device__ __forceinline__ int position(int query_token) const { return length - count + query_token; }
};

// The `number`-th item of this block. Waves of items run forwards and backwards in turn, so that the sum of the
// lengths, which fall from item to item, is the same for every block. False: beyond the last, or nothing to do.
__device__ __forceinline__ bool find_item(const Arguments& a, int number, bool& beyond, Item& item) {
  const int column = number % 2 == 0 ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  const int index = number * gridDim.x + column, wide = a.kv_heads * a.batch;
  beyond = number * gridDim.x >= a.token_blocks * wide;
  if (index >= a.token_blocks * wide) return false;
  item.token = (a.token_blocks - 1 - index / wide) * kTokens;
  item.head = index % a.kv_heads;
  item.sequence = index / a.kv_heads % a.batch;
  item.begin = a.query_start[item.sequence];
  item.count = a.query_start[item.sequence + 1] - item.begin;
  item.length = a.kv_len[item.sequence];
  if (item.token >= item.count) return false;
  const int first = item.position(item.token), end = min(first + kTokens, item.length);
  item.first_stage = a.window == 0 ? 0 : max(first - a.window + 1, 0) / kKeys;
  item.stages = end <= 0 ? 0 : (end + kKeys - 1) / kKeys - item.first_stage;  // none for a padding row
  return true;
}

// Where the `passed`-th stage of this block lies.

__device__ __forceinline__ int slot_of(unsigned passed) { return passed % kStages; }
__device__ __forceinline__ uint32_t parity_of(unsigned passed) { return passed / kStages % 2; }

struct Shared {
  uint32_t stages, queries, full, empty;
  uint8_t* stage_bytes;
  uint8_t* query_bytes;
};

__device__ __forceinline__ void load_page(uint32_t target, const CUtensorMap& map, int page, int head, int values,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %3, %4, %5}], [%6];"
      ::"r"(target), "l"(&map), "r"(0), "r"(values), "r"(head), "r"(page), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void produce(const Arguments& a, const CUtensorMap& map, const Shared& s) {
  int passed = 0;
  bool beyond = false;
  for (int number = 0; !beyond; ++number) {
    Item item;
    if (!find_item(a, number, beyond, item)) continue;
    const int* table = a.table + static_cast<size_t>(item.sequence) * a.table_stride;
    // Pages outside of what the queries see may not exist any more: a seen one stands in, and the mask hides it.
    const int first = item.position(item.token), last_page = (min(first + kTokens, item.length) - 1) / kPage;
    const int first_page = a.window == 0 ? 0 : max(first - a.window + 1, 0) / kPage;
    for (int i = 0; i < item.stages; ++i) {
      const int page = (item.first_stage + i) * 2;
      const int pages[2] = {table[max(page, first_page)], table[min(page + 1, last_page)]};
      const int slot = slot_of(passed);
      const uint32_t ready = s.full + 8 * slot, target = s.stages + slot * kStageBytes;
      mbarrier_wait(s.empty + 8 * slot, parity_of(passed) ^ 1);
      mbarrier_expect(ready, kStageBytes);
#pragma unroll
      for (int values = 0; values < 2; ++values)
#pragma unroll
        for (int p = 0; p < 2; ++p)
          load_page(target + (2 * values + p) * kPageBytes, map, pages[p], item.head, values, ready);
      ++passed;
    }
  }
}

}  // namespace antiphon::attention
