// Happens-before of CUDA kernels on the host. The compiler reports every load and store (-fsanitize=thread, whose
// runtime this file stands in for), the emulation every barrier. Each thread has a vector clock; each 16 bytes of
// shared memory, and of the tensors of a launch, keep who read and wrote them since they were last written, and when.
//
// What orders memory: barriers of the block, __syncwarp, mbarriers phase by phase, and atomics with their fences.
// Shuffles, votes and products order nothing. Bulk copies are actors of their own, one for each mbarrier, and so are
// the products of a warp, whose reads end at its wait, and the atomics of a block: who has seen one is behind it, though
// not behind what came before it without a fence.
#include "races.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace antiphon::races {

constexpr int kMbarriers = 63, kAtomics = 1024 + 32 + kMbarriers, kMaxActors = kAtomics + 1;  // of a block
constexpr size_t kGranule = 16;

using Times = std::vector<uint32_t>;

// Up to when an actor knows of each other one: of its own block, and of all blocks.
struct Clock {
  Times own = Times(kMaxActors);
  std::shared_ptr<const Times> blocks;

  void join(const Clock& other) {
    for (int i = 0; i < kMaxActors; ++i) own[i] = std::max(own[i], other.own[i]);
    join(other.blocks);
  }
  void join(const std::shared_ptr<const Times>& other) {
    if (!other || blocks == other) return;
    if (!blocks) {
      blocks = other;
      return;
    }
    size_t i = 0;
    while (i < other->size() && (*other)[i] <= (*blocks)[i]) ++i;
    if (i == other->size()) return;
    auto both = std::make_shared<Times>(*blocks);
    for (; i < both->size(); ++i) (*both)[i] = std::max((*both)[i], (*other)[i]);
    blocks = both;
  }
};

struct Access {
  uintptr_t place;  // in the code
  uint32_t time;
  uint16_t block, actor, bytes;  // of the granule, a bit each
  bool write, atomic;
};
using Granule = std::vector<Access>;

struct Range {
  uintptr_t begin, end;
  std::vector<Granule> granules;
  Range(uintptr_t begin, uintptr_t end)
      : begin(begin), end(end), granules(end / kGranule - begin / kGranule + 1) {}
  bool holds(uintptr_t at) const { return at >= begin && at < end; }
};

struct Thread {
  Clock clock;
  std::shared_ptr<const Clock> fenced;    // what it knew at its last fence: what its atomics release
  std::shared_ptr<const Times> observed;  // what its atomics saw: acquired by its next fence
  uint32_t products = 0;                  // groups committed
  int unseen = 0;
  std::map<std::pair<uintptr_t, bool>, std::shared_ptr<const Times>> seen;  // in atomics, and whether acquired
  std::vector<uintptr_t> calls;
};

struct Mbarrier {
  int actor;
  uint32_t time = 1;  // of the copies of the phase under way
  Meeting arriving, done[2];
  uint32_t landed[2] = {};
};

struct Copy {
  Clock known;
  uintptr_t place;
};

struct Block {
  int index;
  std::deque<Thread> threads;
  Range shared;
  uintptr_t unseen;
  std::unordered_map<uint32_t, Mbarrier> mbarriers;
  int current = -1;
  uint32_t atomics = 0;
  Thread& thread() { return threads[current]; }
};

// Of the launch, for all blocks.
std::mutex mutex;
std::mutex atomics_in_turn;  // what an atomic sees and what is known of it must be of one moment: blocks run at once
std::vector<Range> tensors;
std::map<uintptr_t, std::shared_ptr<const Times>> atomics;
int block_count = 0;
std::set<std::pair<uintptr_t, uintptr_t>> reported;
std::string report;

thread_local Block* block = nullptr;

bool ordered(const Access& earlier, const Access& now, const Clock& known) {
  if (earlier.block == now.block)
    return earlier.time <= known.own[earlier.actor] || (earlier.actor == now.actor && earlier.time == now.time);
  return known.blocks && earlier.time <= (*known.blocks)[earlier.block * kMaxActors + earlier.actor];
}

std::string describe(const Access& access) {
  const int threads = static_cast<int>(block->threads.size()), warps = (threads + 31) / 32;
  std::string who = "a bulk copy";
  if (access.actor == kAtomics) {
    who = "a thread";
  } else if (access.actor < threads) {
    who = "thread " + std::to_string(access.actor);
  } else if (access.actor < threads + warps) {
    who = "products of warp " + std::to_string(access.actor - threads);
  }
  Dl_info library = {};
  dladdr(reinterpret_cast<void*>(access.place), &library);
  char offset[32];
  std::snprintf(offset, sizeof offset, "0x%zx", access.place - reinterpret_cast<uintptr_t>(library.dli_fbase) - 1);
  return std::string(access.atomic ? "atomic " : "") + (access.write ? "write" : "read") + " by " + who + " of block " +
         std::to_string(access.block) + " @" + offset;
}

void check(Granule& granule, const Access& now, const Clock& known) {
  size_t kept = 0;
  for (Access& earlier : granule) {
    if ((earlier.bytes & now.bytes) != 0) {
      const bool in_order = ordered(earlier, now, known);
      if (!in_order && (earlier.write || now.write) && !(earlier.atomic && now.atomic) &&
          reported.size() < 20 && reported.insert({earlier.place, now.place}).second)
        report += describe(now) + " and earlier " + describe(earlier) + "\n";
      // What is ordered behind this access is ordered behind what this one is ordered behind.
      const bool alike = now.atomic ? earlier.atomic && (now.write || !earlier.write) : now.write || !earlier.write;
      if (alike && (in_order || (now.write && !now.atomic))) earlier.bytes &= ~now.bytes;
    }
    if (earlier.bytes != 0) granule[kept++] = earlier;
  }
  granule.resize(kept);
  granule.push_back(now);
}

void check(Range& range, uintptr_t at, size_t bytes, Access now, const Clock& known) {
  for (uintptr_t end = at + bytes; at < end;) {
    const size_t offset = at % kGranule, count = std::min<size_t>(kGranule - offset, end - at);
    now.bytes = static_cast<uint16_t>(((1u << count) - 1) << offset);
    check(range.granules[at / kGranule - range.begin / kGranule], now, known);
    at += count;
  }
}

void access(uintptr_t at, size_t bytes, const Access& now, const Clock& known) {
  if (block->shared.holds(at)) {
    if (at != block->unseen) check(block->shared, at, bytes, now, known);
    return;
  }
  for (Range& tensor : tensors) {
    if (!tensor.holds(at)) continue;
    const std::lock_guard lock(mutex);
    check(tensor, at, bytes, now, known);
    return;
  }
}

bool watched(uintptr_t at) {
  return block->shared.holds(at) ||
         std::any_of(tensors.begin(), tensors.end(), [at](const Range& tensor) { return tensor.holds(at); });
}

// An access of the current thread, from the code behind `place`.
void access(const void* at, size_t bytes, bool write, bool atomic, uintptr_t place) {
  if (block == nullptr || block->current < 0) return;
  const Thread& thread = block->thread();
  const auto actor = static_cast<uint16_t>(block->current);
  access(reinterpret_cast<uintptr_t>(at), bytes,
         {place, thread.clock.own[actor], static_cast<uint16_t>(block->index), actor, 0, write, atomic}, thread.clock);
}

// Where the kernel called the function of the emulation that is running.
uintptr_t calling() { return block->thread().calls.empty() ? 0 : block->thread().calls.back(); }

void Meeting::release() {
  if (!clock_) clock_ = std::make_shared<Clock>();
  Clock& mine = block->thread().clock;
  clock_->join(mine);
  ++mine.own[block->current];
}
void Meeting::acquire() const {
  if (clock_) block->thread().clock.join(*clock_);
}

void begin_launch(int blocks) {
  for (Range& tensor : tensors) tensor = Range(tensor.begin, tensor.end);
  atomics.clear();
  block_count = blocks;
}

void begin_block(int index, int threads, const void* shared, const void* unseen) {
  struct Storage {
    uintptr_t inside, begin = 0, end = 0;
  } storage{reinterpret_cast<uintptr_t>(shared)};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* found) {
        auto& storage = *static_cast<Storage*>(found);
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          if (info->dlpi_phdr[i].p_type != PT_TLS || info->dlpi_tls_data == nullptr) continue;
          const auto begin = reinterpret_cast<uintptr_t>(info->dlpi_tls_data), end = begin + info->dlpi_phdr[i].p_memsz;
          if (storage.inside >= begin && storage.inside < end) storage.begin = begin, storage.end = end;
        }
        return 0;
      },
      &storage);
  block = new Block{index, std::deque<Thread>(threads), Range(storage.begin, storage.end),
                    reinterpret_cast<uintptr_t>(unseen), {}};
  for (int i = 0; i < threads; ++i) block->threads[i].clock.own[i] = 1;
}
void end_block() {
  delete block;
  block = nullptr;
}
void enter(int thread) { block->current = thread; }
void leave() { block->current = -1; }

Unseen::Unseen() { ++block->thread().unseen; }
Unseen::~Unseen() { --block->thread().unseen; }

void mbarrier_init(uint32_t at, const void* place) {
  access(place, 8, true, false, calling());
  const auto threads = static_cast<int>(block->threads.size());
  Mbarrier fresh = {};
  fresh.actor = threads + (threads + 31) / 32 + static_cast<int>(block->mbarriers.size());
  if (fresh.actor >= kMaxActors) std::fprintf(stderr, "too many mbarriers\n"), std::abort();
  block->mbarriers.insert_or_assign(at, fresh);
}
void mbarrier_use(const void* place) { access(place, 8, false, true, calling()); }
void mbarrier_arrive(uint32_t at) { block->mbarriers.at(at).arriving.release(); }
void mbarrier_complete(uint32_t at, int parity) {
  Mbarrier& barrier = block->mbarriers.at(at);
  barrier.done[parity] = barrier.arriving;
  barrier.arriving.clear();
  barrier.landed[parity] = barrier.time++;
}
void mbarrier_acquire(uint32_t at, int parity) {
  const Mbarrier& barrier = block->mbarriers.at(at);
  barrier.done[parity].acquire();
  uint32_t& known = block->thread().clock.own[barrier.actor];
  known = std::max(known, barrier.landed[parity]);
}


std::shared_ptr<Copy> begin_copy() {
  Thread& thread = block->thread();
  auto copy = std::make_shared<Copy>(Copy{thread.clock, calling()});
  ++thread.clock.own[block->current];
  return copy;
}
void land_copy(const Copy* copy, const void* destination, const void* source, size_t bytes, uint32_t barrier) {
  const Mbarrier& at = block->mbarriers.at(barrier);
  Access each = {copy->place, at.time, static_cast<uint16_t>(block->index), static_cast<uint16_t>(at.actor),
                 0,           false,   false};
  access(reinterpret_cast<uintptr_t>(source), bytes, each, copy->known);
  each.write = true;
  access(reinterpret_cast<uintptr_t>(destination), bytes, each, copy->known);
}

void written(const void* at, size_t bytes) { access(at, bytes, true, false, calling()); }
void read(const void* at, size_t bytes) { access(at, bytes, false, false, calling()); }

int products_of_warp() { return static_cast<int>(block->threads.size()) + block->current / 32; }
void read_by_product(const void* at, size_t bytes) {
  const Thread& thread = block->thread();
  access(reinterpret_cast<uintptr_t>(at), bytes,
         {calling(), thread.products + 1, static_cast<uint16_t>(block->index),
          static_cast<uint16_t>(products_of_warp()), 0, false, false},
         thread.clock);
}
void commit_products() { ++block->thread().products; }
void wait_products(int pending) {
  Thread& thread = block->thread();
  uint32_t& done = thread.clock.own[products_of_warp()];
  if (thread.products >= static_cast<uint32_t>(pending)) done = std::max(done, thread.products - pending);
}

// ------------------------------------------------------------------------------------- atomics and fences

constexpr bool acquires(int order) { return order != __ATOMIC_RELAXED && order != __ATOMIC_RELEASE; }
constexpr bool releases(int order) { return order >= __ATOMIC_RELEASE; }

void learn(Clock& clock, const std::shared_ptr<const Times>& times) {
  clock.join(times);
  const uint32_t* mine = clock.blocks->data() + block->index * kMaxActors;
  for (int i = 0; i < kMaxActors; ++i) clock.own[i] = std::max(clock.own[i], mine[i]);
}

void fence(int order) {
  if (block == nullptr || block->current < 0) return;
  Thread& thread = block->thread();
  if (acquires(order) && thread.observed) learn(thread.clock, thread.observed);
  if (!releases(order)) return;
  thread.fenced = std::make_shared<Clock>(thread.clock);
  ++thread.clock.own[block->current];
}

void atomic_access(const volatile void* at, size_t bytes, bool reads, bool writes, int order) {
  const auto address = reinterpret_cast<uintptr_t>(at);
  if (block == nullptr || block->current < 0 || !watched(address)) return;
  Thread& thread = block->thread();
  uint32_t& own_time = thread.clock.own[block->current];
  Access now = {calling(), own_time, static_cast<uint16_t>(block->index), static_cast<uint16_t>(block->current),
                0,         false,    true};
  if (writes) {
    now.write = true;
    now.actor = kAtomics;
    now.time = thread.clock.own[kAtomics] = ++block->atomics;
  }
  access(address, bytes, now, thread.clock);
  const std::lock_guard lock(mutex);
  auto& left = atomics[address];
  auto& seen = thread.seen[{address, acquires(order)}];
  if (reads && left && seen != left) {
    seen = left;
    Clock observed;
    observed.blocks = thread.observed;
    observed.join(left);
    thread.observed = observed.blocks;
    if (acquires(order)) {
      learn(thread.clock, left);
    } else {
      auto only = std::make_shared<Times>(left->size());
      for (size_t i = kAtomics; i < only->size(); i += kMaxActors) (*only)[i] = (*left)[i];
      learn(thread.clock, only);
    }
  }
  if (!writes) return;
  auto times = reads && left ? std::make_shared<Times>(*left)
                             : std::make_shared<Times>(static_cast<size_t>(block_count) * kMaxActors);
  const auto leave = [&](const Times& more, size_t first) {
    for (size_t i = 0; i < more.size(); ++i) (*times)[first + i] = std::max((*times)[first + i], more[i]);
  };
  const size_t mine = static_cast<size_t>(block->index) * kMaxActors;
  const auto leave_all = [&](const Clock& known) {
    if (known.blocks) leave(*known.blocks, 0);
    leave(known.own, mine);
  };
  if (releases(order)) {
    leave_all(thread.clock);
    ++own_time;
  } else if (thread.fenced) {
    leave_all(*thread.fenced);
  }
  (*times)[mine + kAtomics] = now.time;
  left = times;
}

// ------------------------------------------------------------------------------ what the compiler calls

void plain(const void* at, size_t bytes, bool write, uintptr_t place) {
  if (block == nullptr || block->current < 0 || block->thread().unseen > 0) return;
  const auto distance = reinterpret_cast<uintptr_t>(at) - reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
  if (distance < 4096) return;  // of the thread's own stack
  access(at, bytes, write, false, place);
}

}  // namespace antiphon::races

#define PLACE reinterpret_cast<uintptr_t>(__builtin_return_address(0))
#define ACCESSES(bytes)                                                                                              \
  void __tsan_read##bytes(void* at) { antiphon::races::plain(at, bytes, false, PLACE); }                             \
  void __tsan_write##bytes(void* at) { antiphon::races::plain(at, bytes, true, PLACE); }                             \
  void __tsan_unaligned_read##bytes(void* at) { antiphon::races::plain(at, bytes, false, PLACE); }                   \
  void __tsan_unaligned_write##bytes(void* at) { antiphon::races::plain(at, bytes, true, PLACE); }
#define IN_TURN const std::lock_guard in_turn(antiphon::races::atomics_in_turn)
#define ATOMICS(bits)                                                                                                \
  uint##bits##_t __tsan_atomic##bits##_load(const volatile uint##bits##_t* at, int order) {                          \
    IN_TURN;                                                                                                         \
    antiphon::races::atomic_access(at, bits / 8, true, false, order);                                                \
    return __atomic_load_n(at, __ATOMIC_SEQ_CST);                                                                    \
  }                                                                                                                  \
  void __tsan_atomic##bits##_store(volatile uint##bits##_t* at, uint##bits##_t value, int order) {                   \
    IN_TURN;                                                                                                         \
    antiphon::races::atomic_access(at, bits / 8, false, true, order);                                                \
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);                                                                   \
  }                                                                                                                  \
  uint##bits##_t __tsan_atomic##bits##_fetch_add(volatile uint##bits##_t* at, uint##bits##_t value, int order) {     \
    IN_TURN;                                                                                                         \
    antiphon::races::atomic_access(at, bits / 8, true, true, order);                                                 \
    return __atomic_fetch_add(at, value, __ATOMIC_SEQ_CST);                                                          \
  }

extern "C" {

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
ATOMICS(8)
ATOMICS(32)
void __tsan_read_range(void* at, size_t bytes) { antiphon::races::plain(at, bytes, false, PLACE); }
void __tsan_write_range(void* at, size_t bytes) { antiphon::races::plain(at, bytes, true, PLACE); }
void __tsan_atomic_thread_fence(int order) {
  antiphon::races::fence(order);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_init() {}
void __tsan_func_entry(void* place) {
  using antiphon::races::block;
  if (block != nullptr && block->current >= 0) block->thread().calls.push_back(reinterpret_cast<uintptr_t>(place));
}
void __tsan_func_exit() {
  using antiphon::races::block;
  if (block != nullptr && block->current >= 0 && !block->thread().calls.empty()) block->thread().calls.pop_back();
}

// The memory of a tensor that the next launches are given.
void antiphon_races_watch(const void* begin, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  antiphon::races::tensors.emplace_back(at, at + bytes);
}
// What was found since the last call, a line each, with places in the library; forgets all tensors.
const char* antiphon_races_found() {
  using namespace antiphon::races;
  static std::string found;
  found.swap(report);
  report.clear();
  reported.clear();
  tensors.clear();
  return found.c_str();
}
}
