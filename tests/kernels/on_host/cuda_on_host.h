// CUDA kernels on the host, for tests: every thread of a block is a fiber, every block of a launch a thread of the
// operating system. Included in place of the instructions of kernels/moe/csrc/hopper.cuh (ANTIPHON_ON_HOST).
//
// What is kept: barriers of every kind, warp collectives, fragments and descriptors of the tensor core instructions,
// bulk copies that arrive late and in any order, blocks that wait for one another. What is not: weak memory ordering,
// proxies, and everything about time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "races.h"

#define UNSEEN __attribute__((no_sanitize_thread))  // the emulation's own work, which the check is not told of

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __forceinline__
#undef __grid_constant__
#undef __launch_bounds__
#undef __align__
#define __global__
#define __device__
#define __host__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(name) uint8_t* name = ::antiphon::on_host::dynamic_shared

namespace antiphon::on_host {

struct Fiber {
  ucontext_t beginning;
  jmp_buf place;  // where it goes on: unlike a context, it is left and entered without a system call
  bool begun = false;
  std::unique_ptr<char[]> stack;
  uint3 index;
  bool over = false;
  uint32_t collectives = 0;                       // warp collectives that this thread has begun
  std::vector<std::function<void()>> own_copies;  // cp.async
};

// What one warp exchanges in its collectives; two sets in turn, so that a fast lane cannot overwrite what a slow one
// still reads.
struct Warp {
  int lanes = 0;
  int arrived[2] = {};
  uint32_t finished = 0;
  races::Meeting meetings[2];
  alignas(16) unsigned char values[2][32][32];
};

struct NamedBarrier {
  int arrived = 0;
  uint32_t generation = 0;
  races::Meeting meeting, over;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::vector<std::function<void()>> copies;  // bulk copies under way
  std::mt19937 random;
  jmp_buf scheduler;
  int current = 0, alive = 0;
  dim3 grid, shape;
  uint3 place;
  const std::function<void()>* kernel = nullptr;
};

inline thread_local Block* block = nullptr;
alignas(1024) inline thread_local uint8_t dynamic_shared[232448];

UNSEEN inline Fiber& fiber() { return block->fibers[block->current]; }
UNSEEN inline void yield() {
  if (_setjmp(fiber().place) == 0) _longjmp(block->scheduler, 1);
}
UNSEEN inline void resume(Fiber& f) {
  if (_setjmp(block->scheduler) != 0) {
    races::leave();
    return;
  }
  races::enter(block->current);
  if (f.begun) _longjmp(f.place, 1);
  f.begun = true;
  setcontext(&f.beginning);
}

// Spins for whatever another fiber, or another block, will do. A wait without end is a deadlock of the kernel.
template <typename Condition>
UNSEEN inline void wait_until(Condition condition) {
  for (long spins = 0; !condition(); ++spins) {
    if (spins > 20'000'000) {
      std::fprintf(stderr, "deadlock: thread %d of block %u waits for ever\n", block->current, block->place.x);
      std::abort();
    }
    if (spins > 2'000 && spins % 256 == 0) std::this_thread::yield();
    yield();
  }
}

inline void run_fiber() {
  (*block->kernel)();
  fiber().over = true;
  --block->alive;
  _longjmp(block->scheduler, 1);
}

UNSEEN inline void run_block(const std::function<void()>& kernel, dim3 grid, dim3 shape, uint3 place) {
  constexpr size_t kStack = 64 * 1024;
  Block here;
  block = &here;
  here.grid = grid;
  here.shape = shape;
  here.place = place;
  here.kernel = &kernel;
  here.random.seed(place.x * 131 + place.y);
  const int threads = static_cast<int>(shape.x * shape.y * shape.z);
  here.fibers.resize(threads);
  here.warps.resize((threads + 31) / 32);
  here.alive = threads;
  std::memset(dynamic_shared, 0x7F, sizeof dynamic_shared);
  races::begin_block(static_cast<int>(place.y * grid.x + place.x), threads, dynamic_shared, &block);
  for (int i = 0; i < threads; ++i) {
    Fiber& f = here.fibers[i];
    f.index = {static_cast<unsigned>(i), 0, 0};
    f.stack.reset(new char[kStack]);
    getcontext(&f.beginning);
    f.beginning.uc_stack.ss_sp = f.stack.get();
    f.beginning.uc_stack.ss_size = kStack;
    f.beginning.uc_link = nullptr;
    makecontext(&f.beginning, run_fiber, 0);
    ++here.warps[i / 32].lanes;
  }
  while (here.alive > 0) {
    // Copies land whenever they like, so that nobody can rely on luck.
    for (size_t i = 0; i < here.copies.size();) {
      if (here.random() % 4 != 0) {
        ++i;
        continue;
      }
      here.copies[i]();
      here.copies.erase(here.copies.begin() + static_cast<long>(i));
    }
    for (int i = 0; i < threads; ++i) {
      here.current = i;
      if (!here.fibers[i].over) resume(here.fibers[i]);
    }
  }
  races::end_block();
  block = nullptr;
}

template <typename Kernel, typename... Values>
inline void run_grid(Kernel kernel, dim3 grid, dim3 shape, Values... values) {
  const std::function<void()> body = [=] { kernel(values...); };
  races::begin_launch(static_cast<int>(grid.x * grid.y));
  std::vector<std::thread> blocks;
  for (unsigned y = 0; y < grid.y; ++y) {
    for (unsigned x = 0; x < grid.x; ++x) {
      blocks.emplace_back([&, x, y] { run_block(body, grid, shape, uint3{x, y, 0}); });
      if (blocks.size() < 8) continue;  // blocks that wait for one another must be no more than this
      for (std::thread& each : blocks) each.join();
      blocks.clear();
    }
  }
  for (std::thread& each : blocks) each.join();
}

// Every lane's value, once all lanes of the warp have given theirs. To order memory is __syncwarp's alone.
template <typename Value>
UNSEEN inline void exchange(Value mine, Value (&all)[32], bool orders_memory = false) {
  static_assert(sizeof(Value) <= 32);
  Warp& warp = block->warps[block->current / 32];
  const uint32_t turn = fiber().collectives++;
  const int set = turn % 2, lane = block->current % 32;
  std::memcpy(warp.values[set][lane], &mine, sizeof mine);
  if (warp.arrived[set] == 0) warp.meetings[set].clear();
  if (orders_memory) warp.meetings[set].release();
  if (++warp.arrived[set] == warp.lanes) {
    warp.arrived[set] = 0;
    ++warp.finished;
  }
  wait_until([&]() UNSEEN { return warp.finished > turn; });
  if (orders_memory) warp.meetings[set].acquire();
  for (int i = 0; i < 32; ++i) std::memcpy(&all[i], warp.values[set][i], sizeof mine);
}

// What the codes of e4m3 stand for. Known to the compiler: the emulation looks there more often than anywhere else.
struct E4m3Values {
  float of[256] = {};

  constexpr E4m3Values() {
    for (int code = 0; code < 256; ++code) {
      const int exponent = code >> 3 & 15, mantissa = code & 7;
      float value = (exponent == 0 ? mantissa : 8 + mantissa) * 0x1p-9f;
      for (int i = 1; i < exponent; ++i) value *= 2.0f;
      if ((code & 127) == 127) value = std::numeric_limits<float>::quiet_NaN();
      of[code] = code & 128 ? -value : value;
    }
  }
};
inline constexpr E4m3Values kE4m3;
UNSEEN inline float e4m3(uint8_t code) { return kE4m3.of[code]; }

// d (+)= rows x columns^T over 32 elements of K, of which each lane of a warp holds two rows of N / 4 columns. columns is
// turned, [k][column], so that the compiler takes several columns at a time; each sum still grows in the order of k.
template <int COLUMNS>
[[gnu::optimize("O3")]] UNSEEN void multiply(const float (&rows)[2][32], const float (&columns)[32][COLUMNS],
                                             float (&sums)[2][COLUMNS]) {
  for (int row = 0; row < 2; ++row) {
    for (int n = 0; n < COLUMNS; ++n) sums[row][n] = 0.0f;
    for (int k = 0; k < 32; ++k)
      for (int n = 0; n < COLUMNS; ++n) sums[row][n] += rows[row][k] * columns[k][n];
  }
}

UNSEEN inline float bf16(uint32_t word, int which) {
  const uint32_t bits = which ? word & 0xFFFF0000u : word << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

}  // namespace antiphon::on_host

// ------------------------------------------------------------------------------------------- CUDA's built-ins

#define threadIdx (::antiphon::on_host::fiber().index)
#define blockIdx (::antiphon::on_host::block->place)
#define cudaGetErrorString(code) "a CUDA error"
#define blockDim (::antiphon::on_host::block->shape)
#define gridDim (::antiphon::on_host::block->grid)

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline uint32_t max(uint32_t a, uint32_t b) { return a > b ? a : b; }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __expf(float value) { return std::exp(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline uint32_t __viaddmin_s16x2_relu(uint32_t a, uint32_t b, uint32_t most) {
  uint32_t result = 0;
  for (int half = 0; half < 2; ++half) {
    const auto part = [half](uint32_t word) { return static_cast<int16_t>(word >> (16 * half)); };
    const int sum = static_cast<int16_t>(part(a) + part(b));
    const int value = sum < part(most) ? sum : part(most);
    result |= static_cast<uint32_t>(value > 0 ? value : 0) << (16 * half);
  }
  return result;
}
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> (8 * (selector >> (4 * i) & 7)) & 0xFF) << (8 * i);
  return result;
}
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
template <typename Value>
inline Value __ldcg(const Value* from) {
  return *from;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline uint32_t atomicAdd(uint32_t* at, uint32_t value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }
inline int atomicAdd(int* at, int value) { return __atomic_fetch_add(at, value, __ATOMIC_RELAXED); }

UNSEEN inline void barrier_wait_all(int id, int threads, bool wait) {
  using namespace antiphon::on_host;
  NamedBarrier& barrier = block->barriers[id];
  const uint32_t before = barrier.generation;
  barrier.meeting.release();
  if (++barrier.arrived == threads) {
    barrier.arrived = 0;
    barrier.over = barrier.meeting;
    barrier.meeting.clear();
    ++barrier.generation;
  }
  if (!wait) return;
  wait_until([&]() UNSEEN { return barrier.generation != before; });
  barrier.over.acquire();
}
inline void __syncthreads() {
  barrier_wait_all(0, static_cast<int>(antiphon::on_host::block->fibers.size()), true);
}

template <typename Value>
inline Value __shfl_sync(uint32_t, Value value, int from) {
  Value all[32];
  antiphon::on_host::exchange(value, all);
  return all[from];
}
template <typename Value>
inline Value __shfl_xor_sync(uint32_t, Value value, int mask) {
  Value all[32];
  antiphon::on_host::exchange(value, all);
  return all[threadIdx.x % 32 ^ mask];
}
template <typename Value>
inline Value __shfl_up_sync(uint32_t, Value value, int step) {
  Value all[32];
  antiphon::on_host::exchange(value, all);
  const int lane = threadIdx.x % 32;
  return all[lane >= step ? lane - step : lane];
}
inline void __syncwarp() {
  int all[32];
  antiphon::on_host::exchange(0, all, true);
}
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  uint32_t all[32];
  antiphon::on_host::exchange(value, all);
  for (int i = 0; i < 32; ++i) value = max(value, all[i]);
  return value;
}
inline int __reduce_min_sync(uint32_t, int value) {
  int all[32];
  antiphon::on_host::exchange(value, all);
  for (int i = 0; i < 32; ++i) value = min(value, all[i]);
  return value;
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  int all[32];
  antiphon::on_host::exchange(value ? 1 : 0, all);
  uint32_t votes = 0;
  for (int i = 0; i < 32; ++i) votes |= static_cast<uint32_t>(all[i]) << i;
  return votes;
}
inline uint32_t __match_any_sync(uint32_t, int value) {
  int all[32];
  antiphon::on_host::exchange(value, all);
  uint32_t peers = 0;
  for (int i = 0; i < 32; ++i) peers |= (all[i] == value ? 1u : 0u) << i;
  return peers;
}

// ------------------------------------------------------------------------- the functions of hopper.cuh

namespace antiphon {

// A place in the block's shared memory, as 32 bits: its distance from the dynamic part.
inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - on_host::dynamic_shared);
}
namespace on_host {
inline uint8_t* shared_pointer(uint32_t address) { return dynamic_shared + static_cast<int32_t>(address); }

// An mbarrier in its eight bytes.
struct Mbarrier {
  int32_t bytes;    // still to come
  uint16_t phases;  // completed
  uint8_t wanted, pending;
};
static_assert(sizeof(Mbarrier) == 8);
inline Mbarrier& mbarrier(uint32_t address) { return *reinterpret_cast<Mbarrier*>(shared_pointer(address)); }
inline void settle(uint32_t at) {
  Mbarrier& barrier = mbarrier(at);
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  races::mbarrier_complete(at, barrier.phases % 2);
  barrier.pending = barrier.wanted;
  ++barrier.phases;
}
inline void arrive(uint32_t at) {
  Mbarrier& barrier = mbarrier(at);
  if (barrier.pending == 0) std::fprintf(stderr, "one arrival too many at an mbarrier\n"), std::abort();
  races::mbarrier_use(&barrier);
  races::mbarrier_arrive(at);
  --barrier.pending;
  settle(at);
}
}  // namespace on_host

inline float clamped_swiglu(float gate, float up) {
  if (gate > 7.0f) gate = 7.0f;
  if (up > 7.0f) up = 7.0f;
  if (up < -7.0f) up = -7.0f;
  return gate / (1.0f + std::exp(-1.702f * gate)) * (up + 1.0f);
}

inline void mbarrier_init(uint32_t at, uint32_t arrivals) {
  const races::Unseen unseen;
  on_host::mbarrier(at) = {0, 0, static_cast<uint8_t>(arrivals), static_cast<uint8_t>(arrivals)};
  races::mbarrier_init(at, &on_host::mbarrier(at));
}
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive(uint32_t at) {
  const races::Unseen unseen;
  on_host::arrive(at);
}
inline void mbarrier_expect(uint32_t at, uint32_t bytes) {
  const races::Unseen unseen;
  on_host::mbarrier(at).bytes += static_cast<int32_t>(bytes);
  on_host::arrive(at);
}
inline void mbarrier_wait(uint32_t at, uint32_t parity) {
  const races::Unseen unseen;
  races::mbarrier_use(&on_host::mbarrier(at));
  on_host::wait_until([=]() UNSEEN { return (on_host::mbarrier(at).phases & 1u) != parity; });
  races::mbarrier_acquire(at, static_cast<int>(parity));
}
[[gnu::noinline]] inline void bulk_copy(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  if (destination % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0 || bytes % 16 != 0)
    std::fprintf(stderr, "a bulk copy is not aligned to 16 bytes\n"), std::abort();
  const auto begun = races::begin_copy();
  on_host::block->copies.push_back([=] {
    uint8_t* target = on_host::shared_pointer(destination);
    races::land_copy(begun.get(), target, source, bytes, barrier);
    std::memcpy(target, source, bytes);
    on_host::mbarrier(barrier).bytes -= static_cast<int32_t>(bytes);
    on_host::settle(barrier);
  });
}
inline void bulk_copy_once(uint32_t destination, const void* source, uint32_t bytes, uint32_t barrier) {
  bulk_copy(destination, source, bytes, barrier);
}
inline void prefetch_line(const void*) {}
inline void copy16(uint32_t destination, const void* source) {
  const auto copy = [=] {
    races::read(source, 16);
    races::written(on_host::shared_pointer(destination), 16);
  };
  copy();  // the place must be free from now on
  on_host::fiber().own_copies.push_back([=] {
    copy();
    std::memcpy(on_host::shared_pointer(destination), source, 16);
  });
}
inline void wait_copies() {
  const races::Unseen unseen;
  for (const auto& copy : on_host::fiber().own_copies) copy();
  on_host::fiber().own_copies.clear();
}
inline void fence_async_proxy() {}
inline void fence_async_global() {}
inline uint4 load_fresh(const uint4* from) { return *from; }
inline __nv_bfloat16 load_fresh(const __nv_bfloat16* from) { return *from; }
inline void count_up(int* counter, int by) {
  __threadfence();
  __atomic_fetch_add(counter, by, __ATOMIC_RELAXED);
}
inline void wait_for_count(const int* counter, int count) {
  on_host::wait_until([=] { return __atomic_load_n(counter, __ATOMIC_ACQUIRE) >= count; });
}
inline void barrier_sync(int id, int threads) { barrier_wait_all(id, threads, true); }
inline void barrier_arrive(int id, int threads) { barrier_wait_all(id, threads, false); }
inline void grid_dependency_wait() {}
inline void grid_dependency_trigger() {}

inline void mma_bf16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  struct Operands {
    uint32_t a[4], b[2];
  };
  Operands all[32];
  on_host::exchange(Operands{{a0, a1, a2, a3}, {b0, b1}}, all);
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int upper = i / 2, column = 2 * q + i % 2;
    double sum = 0.0;
    for (int k = 0; k < 16; ++k) {
      const Operands& row = all[g * 4 + k % 8 / 2];
      const Operands& other = all[column * 4 + k % 8 / 2];
      sum += static_cast<double>(on_host::bf16(row.a[upper + k / 8 * 2], k % 2)) * on_host::bf16(other.b[k / 8], k % 2);
    }
    d[i] += static_cast<float>(sum);
  }
}

inline void wgmma_fence() {}
inline void wgmma_commit() { races::commit_products(); }
// At most so many groups of the warp's products are under way.
template <int PENDING>
inline void wgmma_wait() {
  int all[32];
  on_host::exchange(0, all);
  races::wait_products(PENDING);
}
inline void wgmma_wait_all() { wgmma_wait<0>(); }
inline void pin(float&) {}
inline void pin(uint32_t&) {}
inline void multiply_add_in_order(float& sum, const float& value, float factor) {
  sum = std::fma(value, factor, sum);
}

// Wider than the hardware's: address / 16 in the low half.
inline uint64_t wgmma_descriptor(uint32_t address, uint32_t k_stride, uint32_t row_stride) {
  return static_cast<uint64_t>(address >> 4) | (static_cast<uint64_t>(k_stride >> 4) << 32) |
         (static_cast<uint64_t>(row_stride >> 4) << 48);
}

template <int N, int ACCUMULATE>
inline void wgmma_e4m3(float (&d)[N / 8][4], const uint32_t (&a)[4], uint64_t b) {
  struct Operand {
    uint32_t a[4];
  };
  Operand all[32];
  on_host::exchange(Operand{{a[0], a[1], a[2], a[3]}}, all);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const races::Unseen unseen;
  const uint8_t* base = on_host::shared_pointer(static_cast<uint32_t>(b) << 4);
  const size_t k_stride = (b >> 32 & 0xFFFF) * 16, row_stride = (b >> 48) * 16;
  float rows[2][32];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 32; ++k)
      rows[half][k] = on_host::e4m3(
          static_cast<uint8_t>(all[g * 4 + k % 16 / 4].a[half + k / 16 * 2] >> (8 * (k % 4))));
  float columns[32][N / 4], sums[2][N / 4];
  for (int i = 0; i < N / 4; ++i) {
    const int n = i / 2 * 8 + 2 * t + i % 2;
    const uint8_t* column = base + n / 8 * row_stride + n % 8 * 16;
    for (int half = 0; half < 2; ++half) {
      if (g == 0) races::read_by_product(column + half * k_stride, 16);
      for (int k = 0; k < 16; ++k) columns[half * 16 + k][i] = on_host::e4m3(column[half * k_stride + k]);
    }
  }
  on_host::multiply(rows, columns, sums);
  for (int i = 0; i < N / 4; ++i)
    for (int row = 0; row < 2; ++row) {
      float& at = d[i / 2][i % 2 + 2 * row];
      at = (ACCUMULATE ? at : 0.0f) + sums[row][i];
    }
}

template <int COUNT>
inline void give_registers() {}
template <int COUNT>
inline void take_registers() {}

// address / 16, as the hardware has it; the swizzle is undone where the operand is read.
inline uint64_t swizzled_operand(uint32_t address) { return address >> 4; }

// The second operand in shared memory, swizzled; the first in registers.
template <int N>
inline void wgmma_e4m3_registers(float* d, const uint32_t* a, uint64_t b, int accumulate) {
  struct Operand {
    uint32_t a[4];
  };
  Operand all[32];
  on_host::exchange(Operand{{a[0], a[1], a[2], a[3]}}, all);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const races::Unseen unseen;
  const uint32_t address = static_cast<uint32_t>(b) << 4, offset = address % 128;
  const uint8_t* rows = on_host::shared_pointer(address - offset);
  if constexpr (races::kOn) {  // the sums themselves are nothing that the kernels wait for, and take most of the time
    for (int n = lane; n < N; n += 32)
      for (int half = 0; half < 2; ++half)
        races::read_by_product(rows + n * 128 + ((offset / 16 + half) ^ (n % 8)) * 16, 16);
    return;
  }
  float weights[2][32];
  for (int half = 0; half < 2; ++half)
    for (int k = 0; k < 32; ++k)
      weights[half][k] = on_host::e4m3(
          static_cast<uint8_t>(all[g * 4 + k % 16 / 4].a[half + k / 16 * 2] >> (8 * (k % 4))));
  float columns[32][N / 4], sums[2][N / 4];
  for (int i = 0; i < N / 4; ++i) {
    const int n = i / 2 * 8 + 2 * t + i % 2;
    for (int half = 0; half < 2; ++half) {
      const uint8_t* chunk = rows + n * 128 + ((offset / 16 + half) ^ (n % 8)) * 16;
      for (int k = 0; k < 16; ++k) columns[half * 16 + k][i] = on_host::e4m3(chunk[k]);
    }
  }
  on_host::multiply(weights, columns, sums);
  for (int i = 0; i < N / 4; ++i)
    for (int row = 0; row < 2; ++row) {
      float& at = d[i / 2 * 4 + i % 2 + 2 * row];
      at = (accumulate ? at : 0.0f) + sums[row][i];
    }
}

// Both operands in shared memory, swizzled. A warp takes 16 of the 64 rows.
template <int N>
inline void wgmma_e4m3_shared(float* d, uint64_t a, uint64_t b, int accumulate) {
  const races::Unseen unseen;
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto read = [](uint64_t operand, int row, float (&values)[32]) {
    const uint32_t address = static_cast<uint32_t>(operand) << 4, offset = address % 128;
    const uint8_t* rows = on_host::shared_pointer(address - offset);
    for (int half = 0; half < 2; ++half) {
      const uint8_t* chunk = rows + row * 128 + ((offset / 16 + half) ^ (row % 8)) * 16;
      races::read_by_product(chunk, 16);
      for (int k = 0; k < 16; ++k) values[half * 16 + k] = on_host::e4m3(chunk[k]);
    }
  };
  float rows[2][32], column[32];
  for (int half = 0; half < 2; ++half) read(a, warp * 16 + g + 8 * half, rows[half]);
  float columns[32][N / 4], sums[2][N / 4];
  for (int i = 0; i < N / 4; ++i) {
    read(b, i / 2 * 8 + 2 * t + i % 2, column);
    for (int k = 0; k < 32; ++k) columns[k][i] = column[k];
  }
  on_host::multiply(rows, columns, sums);
  for (int i = 0; i < N / 4; ++i)
    for (int row = 0; row < 2; ++row) {
      float& at = d[i / 2 * 4 + i % 2 + 2 * row];
      at = (accumulate ? at : 0.0f) + sums[row][i];
    }
}
inline void wgmma_e4m3_n128(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  wgmma_e4m3_shared<128>(d, a, b, accumulate);
}

inline uint32_t transpose_8x8(uint32_t word) {
  uint32_t all[32];
  on_host::exchange(word, all);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const auto value = [&](int row) { return all[row * 4 + g / 2] >> (16 * (g % 2)) & 0xFFFFu; };
  return value(2 * t) | value(2 * t + 1) << 16;
}

template <typename Kernel>
inline cudaError_t prepare(Kernel, int shared_bytes) {
  return shared_bytes <= static_cast<int>(sizeof on_host::dynamic_shared) ? cudaSuccess : cudaErrorInvalidValue;
}

// As on an H200 with one block per SM.
template <typename Kernel>
inline int resident_blocks(Kernel, int, int) {
  return 132;
}

template <typename... Parameters, typename... Arguments>
inline cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 shape, size_t, cudaStream_t, bool,
                          Arguments... arguments) {
  on_host::run_grid(kernel, grid, shape, static_cast<Parameters>(arguments)...);
  return cudaSuccess;
}

}  // namespace antiphon
