// How blocks exchange the states of their parts of a row: in 64-bit words, which are written and read whole, so that no
// flag has to guard them. A word that has not been written has all bits set.
#pragma once

#include "device/barrier.cuh"
#include "device/memory.cuh"
#include "device/reduce.cuh"

namespace jax_softmax::device {

inline constexpr uint64_t kUnpublished = ~0ull;

template <class State>
inline constexpr int kStateWords = static_cast<int>(sizeof(State)) / 8;
// The place of the sum's first number among a state's.
template <class State>
inline constexpr int kSumBegin = static_cast<int>((sizeof(State) - sizeof(State::sum)) / sizeof(float));

__device__ __forceinline__ uint64_t word_of(float high, float low) {
  const uint64_t bits = static_cast<uint64_t>(__float_as_uint(high)) << 32 | __float_as_uint(low);
  return bits == kUnpublished ? bits - 1 : bits;
}
__device__ __forceinline__ float high_of(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word >> 32)); }
__device__ __forceinline__ float low_of(uint64_t word) { return __uint_as_float(static_cast<uint32_t>(word)); }

// A state's numbers in the order of its members, two in a word. The gap that an aligned sum leaves behind the pivot is
// 0.
template <class State>
__device__ __forceinline__ void to_words(uint64_t (&words)[kStateWords<State>], const State& state) {
  float numbers[2 * kStateWords<State>] = {state.pivot};
  memcpy(numbers + kSumBegin<State>, &state.sum, sizeof(state.sum));
#pragma unroll
  for (int w = 0; w < kStateWords<State>; ++w) words[w] = word_of(numbers[2 * w], numbers[2 * w + 1]);
}
template <class State>
__device__ __forceinline__ State from_words(const uint64_t (&words)[kStateWords<State>]) {
  float numbers[2 * kStateWords<State>];
#pragma unroll
  for (int w = 0; w < kStateWords<State>; ++w) {
    numbers[2 * w] = high_of(words[w]);
    numbers[2 * w + 1] = low_of(words[w]);
  }
  State state;
  state.pivot = numbers[0];
  memcpy(&state.sum, numbers + kSumBegin<State>, sizeof(state.sum));
  return state;
}

// The states of a row's parts in device memory.
template <class State>
struct WordsInMemory {
  static constexpr int kWords = kStateWords<State>;
  uint64_t* row;

  __device__ __forceinline__ void publish(int part, const State& state) const {
    uint64_t words[kWords];
    to_words(words, state);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(row + part * kWords + w), "l"(words[w]) : "memory");
    }
  }
  __device__ __forceinline__ uint64_t read(int index) const {
    uint64_t word;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(row + index) : "memory");
    return word;
  }
};

// The same in the shared memory of each block of a cluster, at the same address in all. A barrier there counts
// arrivals.
template <class State>
struct WordsInCluster {
  static constexpr int kWords = kStateWords<State>;
  uint64_t* row;
  uint64_t* barrier;

  __device__ __forceinline__ void publish(int part, const State& state, int block) const {
#if __CUDA_ARCH__ >= 900
    uint64_t words[kWords];
    to_words(words, state);
#pragma unroll
    for (int w = 0; w < kWords; ++w) send_word(row + part * kWords + w, words[w], block, barrier);
#endif
  }
  __device__ __forceinline__ uint64_t read(int index) const { return row[index]; }
  __device__ __forceinline__ State state(int part) const {
    uint64_t words[kWords];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = row[part * kWords + w];
    return from_words<State>(words);
  }
};

// Reads the states of 32 n kTogether parts at once, until all are published, and combines them with the lane's state, n
// at a time. All lanes take part: those without a part read the last one's.
template <class Op, int n, int kTogether, class Words>
__device__ __forceinline__ StateOf<Op> await_parts(StateOf<Op> state, const Words& words, int begin, int parts) {
  constexpr int kWords = Words::kWords;
  const int first = begin + static_cast<int>(threadIdx.x % 32);
  uint64_t bits[kTogether * n][kWords];
  bool missing;
  do {
    missing = false;
#pragma unroll
    for (int i = 0; i < kTogether * n; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) bits[i][w] = words.read(min(first + i * 32, parts - 1) * kWords + w);
    }
#pragma unroll
    for (int i = 0; i < kTogether * n; ++i) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) missing |= bits[i][w] == kUnpublished;
    }
  } while (__any_sync(kFullWarp, missing));
#pragma unroll
  for (int g = 0; g < kTogether; ++g) {
    StateOf<Op> part[n];
#pragma unroll
    for (int i = 0; i < n; ++i) {
      part[i] = first + (g * n + i) * 32 < parts ? from_words<StateOf<Op>>(bits[g * n + i])
                                                 : identity<Op, typename Op::Policy>();
    }
    state = combine_parts<Op>(state, part);
  }
  return state;
}

// The state of a row, once those of its parts are all published: the same bits in every warp, for words in any memory,
// and for every kTogether.
template <class Op, int kParts, int kTogether = 1, class Words>
__device__ __forceinline__ StateOf<Op> await_row(const Words& words) {
  StateOf<Op> state = identity<Op, typename Op::Policy>();
  constexpr int n = kParts <= 32 ? 1 : kParts <= 64 ? 2 : 4, kBatches = kParts <= 256 ? 1 : kTogether;
  for (int begin = 0; begin < kParts; begin += 32 * n * kBatches) {
    state = await_parts<Op, n, kBatches>(state, words, begin, kParts);
  }
  return combine_over_lanes<Op, 32>(state);
}

// Marks n words as not yet written, and sets the ticket counter after them to 0.
__device__ __forceinline__ void clear_words(uint64_t* words, int64_t n) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i <= n) words[i] = i < n ? kUnpublished : 0;
}

}  // namespace jax_softmax::device
