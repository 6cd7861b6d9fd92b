// csrc/attention/warp.cuh for the host: what warps and blocks do together, as PTX defines it, one thread after another.
//
// A thread is a fiber, which runs until it needs others. A warp runs as far as it can before another one does, and
// takes turns in which is first, so that a missing barrier shows. Copies are made when they begin or, if `late`, when
// they are waited for, so that a missing wait shows.
#pragma once

#include <ucontext.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "attention/geometry.h"
#include "device/functions.cuh"

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulator {

struct Index {
  unsigned x;
};
inline Index threadIdx, blockIdx, gridDim;
inline bool late;
struct Array {
  const char *begin, *end;
};
inline std::vector<Array> arrays;             // what a kernel may read
alignas(1024) inline char shared[227 << 10];  // of the largest chips
inline size_t shared_bytes;                   // that a block has of it

struct Copy {
  char* to;
  const void* from;  // null: zeros
  int bytes;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  bool waits, done;
  std::vector<std::vector<Copy>> groups;  // the last one is still growing
  const void* waits_at;                   // a barrier of hopper/warpgroup.cuh
};
struct Warp {
  int arrived;
  unsigned generation;
  uint32_t given[32][12], made[32][4];
  const void* operands[32][2];
};
inline std::vector<Fiber> fibers;
inline std::vector<Warp> warps;
inline int at_barrier;
inline unsigned barriers;
inline ucontext_t scheduler;

inline Fiber& own() { return fibers[threadIdx.x]; }
inline Warp& own_warp() { return warps[threadIdx.x / 32]; }
inline void yield() { swapcontext(&own().context, &scheduler); }

// The last lane that comes does it for all.
template <class F>
void together(const F& work) {
  Warp& warp = own_warp();
  const unsigned generation = warp.generation;
  if (++warp.arrived == 32) {
    work(warp);
    warp.arrived = 0;
    ++warp.generation;
    return;
  }
  while (warp.generation == generation) yield();
}

inline void check_read(const void* from, int bytes) {
  const char* const begin = static_cast<const char*>(from);
  for (const Array& array : arrays) {
    if (array.begin <= begin && begin + bytes <= array.end) return;
  }
  abort();
}
inline void make(const Copy& copy) {
  copy.from ? memcpy(copy.to, copy.from, copy.bytes) : memset(copy.to, 0, copy.bytes);
}

inline void (*body)();
inline void begin() {
  body();
  own().done = true;
  yield();
}

inline bool others_first;  // whether this warp waits until others have run as far as they can

inline bool runs(const Fiber& fiber) { return !fiber.done && !fiber.waits; }
inline std::vector<std::function<void()>> at_begin;  // of a block

inline void run_block(unsigned block, int threads) {
  memset(shared, 0xff, shared_bytes);  // NaN, until it is written
  fibers = std::vector<Fiber>(threads);
  warps = std::vector<Warp>(threads / 32);
  at_barrier = 0;
  blockIdx.x = block;
  for (const auto& clear : at_begin) clear();
  for (Fiber& fiber : fibers) {
    fiber.stack = std::make_unique<char[]>(1 << 17);
    fiber.groups.emplace_back();
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = 1 << 17;
    makecontext(&fiber.context, begin, 0);
  }
  for (int done = 0; done < threads;) {
    done = 0;
    bool any_ran = false;
    for (int w = 0; w < threads / 32; ++w) {
      const int warp = barriers % 2 ? threads / 32 - 1 - w : w;
      others_first = false;
      for (bool ran = true; ran;) {
        ran = false;
        for (int t = 32 * warp; t < 32 * warp + 32 && !others_first; ++t) {
          if (!runs(fibers[t])) continue;
          threadIdx.x = t;
          swapcontext(&scheduler, &fibers[t].context);
          any_ran = ran = true;
        }
        ran &= !others_first;
      }
    }
    for (const Fiber& fiber : fibers) done += fiber.done;
    if (!any_ran) abort();  // all wait
  }
}

}  // namespace emulator

namespace jax_softmax::device {

using emulator::blockIdx;
using emulator::gridDim;
using emulator::threadIdx;
using Address = uint32_t;

inline constexpr float kInfinity = INFINITY;

inline int min(int a, int b) { return a < b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline Address shared_memory() { return 0; }
inline int lane() { return threadIdx.x % 32; }
inline void barrier() {
  emulator::Fiber& fiber = emulator::own();
  fiber.waits = true;
  if (++emulator::at_barrier == static_cast<int>(emulator::fibers.size())) {
    for (emulator::Fiber& other : emulator::fibers) other.waits = false;
    emulator::at_barrier = 0;
    ++emulator::barriers;
  }
  emulator::yield();
}
inline float shuffle_xor(float x, int mask) {
  const int l = lane();
  emulator::Warp& warp = emulator::own_warp();
  warp.given[l][0] = __float_as_uint(x);
  emulator::together([mask](emulator::Warp& w) {
    for (int k = 0; k < 32; ++k) w.made[k][0] = w.given[k ^ mask][0];
  });
  return __uint_as_float(warp.made[l][0]);
}
inline bool any_of_warp(bool x) {
  emulator::Warp& warp = emulator::own_warp();
  warp.given[lane()][0] = x;
  emulator::together([](emulator::Warp& w) {
    bool any = false;
    for (int k = 0; k < 32; ++k) any |= w.given[k][0] != 0;
    for (int k = 0; k < 32; ++k) w.made[k][0] = any;
  });
  return warp.made[lane()][0] != 0;
}
inline float exp2_of(float x) { return exp2f(x); }
inline float log2_of(float x) { return log2f(x); }
inline float coarse_tanh(float x) { return tanhf(x) * (1 + 0x1p-12f); }

template <int bytes>
void begin_copy(Address to, const void* from, bool exists) {
  if (to % bytes != 0 || to + bytes > emulator::shared_bytes) abort();
  if (exists && reinterpret_cast<uintptr_t>(from) % bytes != 0) abort();
  if (exists) emulator::check_read(from, bytes);
  const emulator::Copy copy{emulator::shared + to, exists ? from : nullptr, bytes};
  if (emulator::late) emulator::own().groups.back().push_back(copy);
  if (!emulator::late) emulator::make(copy);
}
inline void commit_copies() { emulator::own().groups.emplace_back(); }
template <int n>
void wait_for_all_but_last() {
  auto& groups = emulator::own().groups;
  for (size_t g = 0; g + 1 + n < groups.size(); ++g) {
    for (const emulator::Copy& copy : groups[g]) emulator::make(copy);
    groups[g].clear();
  }
}
template <int words>
void read_shared(float (&to)[words], Address from) {
  if (from % (4 * words) != 0 || from + 4 * words > emulator::shared_bytes) abort();
  memcpy(to, emulator::shared + from, 4 * words);
}

inline void write_shared(Address to, const float (&from)[4]) {
  if (to % 16 != 0 || to + 16 > emulator::shared_bytes) abort();
  memcpy(emulator::shared + to, from, 16);
}

inline void load_rows(uint32_t (&to)[4], Address row, bool transposed) {
  if (row % 16 != 0 || row + 16 > emulator::shared_bytes) abort();
  const int l = lane();
  emulator::Warp& warp = emulator::own_warp();
  warp.given[l][0] = row;
  emulator::together([transposed](emulator::Warp& w) {
    for (int k = 0; k < 32; ++k) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint16_t pair[2];
        for (int half = 0; half < 2; ++half) {
          const int r = transposed ? 2 * (k % 4) + half : k / 4, c = transposed ? k / 4 : 2 * (k % 4) + half;
          memcpy(&pair[half], emulator::shared + w.given[8 * matrix + r][0] + 2 * c, 2);
        }
        memcpy(&w.made[k][matrix], pair, 4);
      }
    }
  });
  memcpy(to, warp.made[l], 16);
}
inline void load_matrices(uint32_t (&to)[4], Address row) { load_rows(to, row, false); }
inline void load_transposed(uint32_t (&to)[4], Address row) { load_rows(to, row, true); }

// Of 16 x 8 and 8 x 8 numbers, which have been rounded: lower bits would not count.
inline void multiply_add_tf32(emulator::Warp& w) {
  double x[16][8], y[8][8];
  const auto of = [&](int k, int word) {
    if ((w.given[k][word] & 0x1fffu) != 0) abort();
    return __uint_as_float(w.given[k][word]);
  };
  for (int k = 0; k < 32; ++k) {
    x[k / 4][k % 4] = of(k, 0);
    x[k / 4 + 8][k % 4] = of(k, 1);
    x[k / 4][k % 4 + 4] = of(k, 2);
    x[k / 4 + 8][k % 4 + 4] = of(k, 3);
    y[k % 4][k / 4] = of(k, 4);
    y[k % 4 + 4][k / 4] = of(k, 5);
  }
  for (int k = 0; k < 32; ++k) {
    for (int e = 0; e < 4; ++e) {
      double sum = __uint_as_float(w.given[k][6 + e]);
      for (int d = 0; d < 8; ++d) sum += x[k / 4 + e / 2 * 8][d] * y[d][2 * (k % 4) + e % 2];
      w.made[k][e] = __float_as_uint(static_cast<float>(sum));
    }
  }
}

template <class T>
float wide_of(uint16_t bits) {
  if constexpr (sizeof(T) == 2) return Bits<T>::widen(bits);
  return 0;
}

template <class T>
void multiply_add(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int l = lane();
  emulator::Warp& warp = emulator::own_warp();
  memcpy(warp.given[l], a, 16);
  warp.given[l][4] = b0;
  warp.given[l][5] = b1;
  memcpy(warp.given[l] + 6, c, 16);
  emulator::together([](emulator::Warp& w) {
    if constexpr (sizeof(T) == 4) return multiply_add_tf32(w);
    float x[16][16], y[16][8];
    const auto of = [&](int k, int word, int half) {
      return wide_of<T>(static_cast<uint16_t>(w.given[k][word] >> 16 * half));
    };
    for (int k = 0; k < 32; ++k) {
      for (int half = 0; half < 2; ++half) {
        const int group = k / 4, pair = 2 * (k % 4) + half;
        x[group][pair] = of(k, 0, half);
        x[group + 8][pair] = of(k, 1, half);
        x[group][pair + 8] = of(k, 2, half);
        x[group + 8][pair + 8] = of(k, 3, half);
        y[pair][group] = of(k, 4, half);
        y[pair + 8][group] = of(k, 5, half);
      }
    }
    for (int k = 0; k < 32; ++k) {
      for (int e = 0; e < 4; ++e) {
        double sum = __uint_as_float(w.given[k][6 + e]);
        for (int d = 0; d < 16; ++d) sum += static_cast<double>(x[k / 4 + e / 2 * 8][d]) * y[d][2 * (k % 4) + e % 2];
        w.made[k][e] = __float_as_uint(static_cast<float>(sum));
      }
    }
  });
  memcpy(c, warp.made[l], 16);
}

inline uint32_t rounded_to_tf32(float x) { return x == x ? (__float_as_uint(x) + 0x1000u) & ~0x1fffu : 0x7fffe000u; }

template <class T>
auto narrowed(float low, float high) {
  if constexpr (sizeof(T) == 4) {
    return static_cast<uint64_t>(__float_as_uint(high)) << 32 | __float_as_uint(low);
  } else {
    return static_cast<uint32_t>(Pair<T>::narrow(low, high));
  }
}

inline uint16_t saturated_to_int8(int low, int high) {
  const auto byte = [](int x) { return static_cast<uint8_t>(x < -128 ? -128 : x > 127 ? 127 : x); };
  return byte(low) | byte(high) << 8;
}

struct Int32 {
  int bits;
};
struct Bool {
  uint8_t bits;
};
template <class T>
float widened(const T& x) {
  return Bits<T>::widen(x.bits);
}
inline float widened(float x) { return x; }
inline int widened(Int32 x) { return x.bits; }
inline bool widened(Bool x) { return x.bits != 0; }
template <class T>
auto read_global(const T* from) {
  emulator::check_read(from, sizeof(T));
  return widened(*from);
}
template <class T>
auto read_shared_as(Address from) {
  if (from % sizeof(T) != 0 || from + sizeof(T) > emulator::shared_bytes) abort();
  return widened(*reinterpret_cast<const T*>(emulator::shared + from));
}

template <class T>
auto read_one_of_two(Address from, int which) {
  if (from % (2 * sizeof(T)) != 0) abort();
  return read_shared_as<T>(from + which * sizeof(T));
}

}  // namespace jax_softmax::device
