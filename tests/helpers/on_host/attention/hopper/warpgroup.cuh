// csrc/attention/hopper/warpgroup.cuh for the host. Copies are made when they begin, and products when they are waited
// for: until then their sums are NaN, and what they read may change. If copies are `late`, products are made at once.
#pragma once

#include <map>

#include "attention/warp.cuh"

namespace emulator {

struct PhaseBarrier {
  int arrivals, missing, bytes, phase;
  std::vector<std::function<void()>> copies;  // under way
};
inline std::map<uint32_t, PhaseBarrier> phase_barriers;

inline PhaseBarrier& phase_barrier(uint32_t address) {
  const auto found = phase_barriers.find(address);
  if (found == phase_barriers.end()) abort();
  return found->second;
}
inline void wait_at(const PhaseBarrier& barrier) {
  own().waits = true;
  own().waits_at = &barrier;
  yield();
}
inline void wake(const PhaseBarrier& barrier) {
  for (Fiber& fiber : fibers) {
    if (fiber.waits && fiber.waits_at == &barrier) fiber.waits = false;
  }
}
inline void count(PhaseBarrier& barrier, int arrivals, int bytes) {
  barrier.missing -= arrivals;
  barrier.bytes -= bytes;
  if (barrier.missing < 0) abort();
  if (barrier.missing > 0 || barrier.bytes > 0) return;
  ++barrier.phase;
  barrier.missing = barrier.arrivals;
  wake(barrier);
}
inline void begin(PhaseBarrier& barrier, std::function<void()> copy) {
  if (!late) return copy();
  barrier.copies.push_back(std::move(copy));
  wake(barrier);
}

// A named barrier of two warpgroups: of one that waits, and one that does not.
inline std::map<int, PhaseBarrier> named_barriers;
inline PhaseBarrier& named_barrier(int id) {
  return named_barriers.emplace(id, PhaseBarrier{256, 256, 0, 0, {}}).first->second;
}

// What a product of a warpgroup has of one warp: it is done when the last of its lanes comes.
struct Product {
  float* sums;
  int columns;
  std::function<void()> add;
};
struct Group {
  std::vector<Product> begun;
  std::map<float*, std::vector<float>> sums;  // before
};
struct Products {
  bool fenced, committed;
  std::vector<Group> groups = std::vector<Group>(1);  // the last one is still growing
};
inline std::map<unsigned, Products> products;  // of threads

inline const bool cleared = [] {
  at_begin.push_back([] { phase_barriers.clear(), products.clear(), named_barriers.clear(); });
  return true;
}();

// As tests/helpers/attention_on_host.py packs it.
struct TensorMap {
  const char* array;
  uint64_t extents[5];
  uint32_t box[5];
};
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void copy_box(uint32_t to, const TensorMap& map, const std::vector<int>& first) {
  const uint32_t bytes = 2 * map.box[0];
  if (to % 1024 != 0 || bytes != 128) abort();
  uint32_t index[5] = {};
  for (bool more = true; more; to += bytes) {
    int64_t row = 0;
    bool exists = true;
    for (int d = 4; d > 0; --d) {
      const int64_t at = first[d] + static_cast<int64_t>(index[d]);
      exists &= at >= 0 && at < static_cast<int64_t>(map.extents[d]);
      row = row * static_cast<int64_t>(map.extents[d]) + at;
    }
    for (uint32_t c = 0; c < bytes; c += 16) {
      const int64_t feature = first[0] + c / 2;
      if (to + c + 16 > shared_bytes) abort();
      if (exists && feature < static_cast<int64_t>(map.extents[0])) {
        const char* const from = map.array + 2 * (row * static_cast<int64_t>(map.extents[0]) + feature);
        check_read(from, 16);
        memcpy(shared + swizzled(to + c), from, 16);
      } else {
        memset(shared + swizzled(to + c), 0, 16);
      }
    }
    more = false;
    for (int d = 1; d < 5 && !more; ++d) {
      more = ++index[d] < map.box[d];
      if (!more) index[d] = 0;
    }
  }
}

// Element (row, column) of a matrix: columns are contiguous.
struct Matrix {
  uint32_t first, panel, rows;
  explicit Matrix(uint64_t descriptor)
      : first((descriptor & 0x3fff) << 4),
        panel((descriptor >> 16 & 0x3fff) << 4),
        rows((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 49 != 1 << 13) abort();  // the swizzle, and no offset of its pattern
  }
  uint16_t at(uint32_t row, uint32_t column) const {
    uint32_t address = first + row / 8 * rows + row % 8 * 128 + column / 64 * panel + column % 64 * 2;
    if (address + 2 > shared_bytes) abort();
    uint16_t bits;
    memcpy(&bits, shared + swizzled(address), 2);
    return bits;
  }
};

// c += a b, of a warp: x(row, k) and y(k, column).
template <class X, class Y>
void add_product(Warp& w, int columns, bool begins, const X& x, const Y& y) {
  std::vector<float> a(16 * 16), b(16 * columns);
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 16; ++row) a[16 * row + k] = x(row, k);
    for (int column = 0; column < columns; ++column) b[16 * column + k] = y(k, column);
  }
  for (int l = 0; l < 32; ++l) {
    float* const c = static_cast<float*>(const_cast<void*>(w.operands[l][0]));
    for (int i = 0; i < columns / 2; ++i) {
      const float* const of_row = &a[16 * (l / 4 + i / 2 % 2 * 8)];
      const float* const of_column = &b[16 * (i / 4 * 8 + 2 * (l % 4) + i % 2)];
      double sum = begins ? 0 : c[i];
      for (int k = 0; k < 16; ++k) sum += static_cast<double>(of_row[k]) * of_column[k];
      c[i] = static_cast<float>(sum);
    }
  }
}
inline void begin_product(float* sums, int columns, std::function<void()> add) {
  Products& own = products[threadIdx.x];
  if (!own.fenced) abort();
  own.committed = false;
  if (late) return add();
  Group& group = own.groups.back();
  if (group.sums.find(sums) == group.sums.end()) {
    group.sums[sums].assign(sums, sums + columns / 2);
    for (int i = 0; i < columns / 2; ++i) sums[i] = NAN;
  }
  group.begun.push_back({sums, columns, std::move(add)});
}

}  // namespace emulator

namespace jax_softmax::device {

inline int own_warpgroup() { return threadIdx.x / 128; }
template <int n>
void take_registers() {}
template <int n>
void give_registers() {}

inline void take_turn(int warpgroup) {
  emulator::PhaseBarrier& barrier = emulator::named_barrier(warpgroup);
  const int phase = barrier.phase;
  emulator::count(barrier, 1, 0);
  while (barrier.phase == phase) emulator::wait_at(barrier);
}
inline void give_turn(int warpgroup) { emulator::count(emulator::named_barrier(warpgroup), 1, 0); }

inline void init_barrier(Address barrier, int arrivals) {
  if (barrier % 8 != 0) abort();
  emulator::phase_barriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}
inline void publish_barriers() {}
// Whoever waited for the last arrival is faster than who arrived.
inline void arrive_for_warp(Address address) {
  emulator::together([](emulator::Warp&) {});
  if (lane() != 0) return;
  emulator::PhaseBarrier& barrier = emulator::phase_barrier(address);
  const int phase = barrier.phase;
  emulator::count(barrier, 1, 0);
  emulator::others_first = barrier.phase > phase;
  if (emulator::others_first) emulator::yield();
}
inline void arrive_and_expect(Address barrier, int bytes) {
  emulator::count(emulator::phase_barrier(barrier), 1, -bytes);
}
inline void arrive_after_copies(Address address) {
  emulator::PhaseBarrier& barrier = emulator::phase_barrier(address);
  auto& groups = emulator::own().groups;
  emulator::begin(barrier, [&barrier, copies = groups.back()] {
    for (const emulator::Copy& copy : copies) emulator::make(copy);
    emulator::count(barrier, 1, 0);
  });
  groups.back().clear();
}
inline void wait(Address address, int parity) {
  emulator::PhaseBarrier& barrier = emulator::phase_barrier(address);
  while (barrier.phase % 2 == parity) {
    const auto copies = std::move(barrier.copies);
    barrier.copies.clear();
    for (const auto& copy : copies) copy();
    if (!copies.empty()) continue;
    emulator::wait_at(barrier);
  }
}

inline void begin_copy_of_box(Address to, const attention::TensorMap& map, const int (&at)[attention::kMapDims],
                              Address address) {
  emulator::TensorMap own;
  memcpy(&own, &map, sizeof own);
  emulator::PhaseBarrier& barrier = emulator::phase_barrier(address);
  emulator::begin(barrier, [=, &barrier, at = std::vector<int>(at, at + attention::kMapDims)] {
    emulator::copy_box(to, own, at);
    int bytes = 2;
    for (const uint32_t extent : own.box) bytes *= static_cast<int>(extent);
    emulator::count(barrier, 0, bytes);
  });
}

inline void fence_products() { emulator::products[threadIdx.x].fenced = true; }
inline void commit_products() {
  emulator::Products& own = emulator::products[threadIdx.x];
  own.fenced = false;
  own.committed = true;
  own.groups.emplace_back();
}
template <int later = 0, int n>
void wait_for_products(float (&)[n][4]) {
  emulator::Products& own = emulator::products[threadIdx.x];
  if (!own.committed) abort();
  while (own.groups.size() > later + 1) {
    const emulator::Group group = std::move(own.groups.front());
    own.groups.erase(own.groups.begin());
    for (const auto& [sums, before] : group.sums) std::copy(before.begin(), before.end(), sums);
    for (const emulator::Product& product : group.begun) product.add();
  }
}

template <class T, int columns>
struct WarpgroupProduct {
  static void add_rows(float (&c)[columns / 8][4], uint64_t a, uint64_t b, int begins) {
    emulator::begin_product(c[0], columns, [c = c[0], a, b, begins] {
      emulator::own_warp().operands[lane()][0] = c;
      const uint32_t first = threadIdx.x / 32 % 4 * 16;
      emulator::together([=](emulator::Warp& w) {
        const emulator::Matrix x(a), y(b);
        emulator::add_product(
            w, columns, begins, [&](int row, int k) { return wide_of<T>(x.at(first + row, k)); },
            [&](int k, int column) { return wide_of<T>(y.at(column, k)); });
      });
    });
  }
  static void add_columns(float (&c)[columns / 8][4], const uint32_t (&a)[4], uint64_t b) {
    emulator::begin_product(c[0], columns, [c = c[0], a = &a[0], b] {
      emulator::own_warp().operands[lane()][0] = c;
      emulator::own_warp().operands[lane()][1] = a;
      emulator::together([b](emulator::Warp& w) {
        const emulator::Matrix y(b);
        const auto x = [&](int row, int k) {
          const int l = row % 8 * 4 + k % 8 / 2, word = row / 8 + k / 8 * 2;
          const uint32_t bits = static_cast<const uint32_t*>(w.operands[l][1])[word];
          return wide_of<T>(static_cast<uint16_t>(bits >> 16 * (k % 2)));
        };
        emulator::add_product(w, columns, false, x, [&](int k, int column) { return wide_of<T>(y.at(k, column)); });
      });
    });
  }
};

}  // namespace jax_softmax::device
