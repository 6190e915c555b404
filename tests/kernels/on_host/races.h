// Which accesses of a kernel on the host are ordered by its own barriers (ANTIPHON_RACES), whatever order its threads
// happened to run in; see races.cpp. Without it, nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace antiphon::races {

struct Clock;
struct Copy;

#ifdef ANTIPHON_RACES

constexpr bool kOn = true;

// What threads leave behind that arrive at a barrier, for those that it lets go on.
class Meeting {
 public:
  void clear() { clock_.reset(); }
  void release();
  void acquire() const;

 private:
  std::shared_ptr<Clock> clock_;
};

void begin_launch(int blocks);
// shared: any of the block's shared memory, which is its thread's storage but for `unseen`.
void begin_block(int index, int threads, const void* shared, const void* unseen);
void end_block();
void enter(int thread);
void leave();

// While it lives, what the current thread does is the emulation's, not the kernel's.
struct Unseen {
  Unseen();
  ~Unseen();
};

void mbarrier_init(uint32_t at, const void* place);
void mbarrier_use(const void* place);
void mbarrier_arrive(uint32_t at);
void mbarrier_complete(uint32_t at, int parity);
void mbarrier_acquire(uint32_t at, int parity);

// A bulk copy has what was known to the thread that began it.
std::shared_ptr<Copy> begin_copy();
void land_copy(const Copy* copy, const void* destination, const void* source, size_t bytes, uint32_t barrier);

void written(const void* at, size_t bytes);
void read(const void* at, size_t bytes);
// By products that run on until a wait for them.
void read_by_product(const void* at, size_t bytes);
void commit_products();
void wait_products(int pending);

#else

constexpr bool kOn = false;

struct Meeting {
  void clear() {}
  void release() {}
  void acquire() const {}
};
inline void begin_launch(int) {}
inline void begin_block(int, int, const void*, const void*) {}
inline void end_block() {}
inline void enter(int) {}
inline void leave() {}
struct Unseen {
  Unseen() {}
};
inline void mbarrier_init(uint32_t, const void*) {}
inline void mbarrier_use(const void*) {}
inline void mbarrier_arrive(uint32_t) {}
inline void mbarrier_complete(uint32_t, int) {}
inline void mbarrier_acquire(uint32_t, int) {}
inline std::shared_ptr<Copy> begin_copy() { return nullptr; }
inline void land_copy(const Copy*, const void*, const void*, size_t, uint32_t) {}
inline void written(const void*, size_t) {}
inline void read(const void*, size_t) {}
inline void read_by_product(const void*, size_t) {}
inline void commit_products() {}
inline void wait_products(int) {}

#endif

}  // namespace antiphon::races
