// Compiled kernels in a folder, shared by all processes that can reach it.
//
// An entry is a file: a line with its key, length and hash, and the kernel. Writers write a file of another name and
// rename it, so that nobody reads half an entry. Failures (no folder, read-only, full, a lost race) are misses, or
// entries that are not kept, and never errors.
//
// Entries are code that will run. So only those count that no other user can have written: the folder and the file
// belong to the user, and neither group nor others may write to them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace jax_softmax::jit {

// A 128-bit hash of texts, for names and checks of entries; nothing here is a secret.
// FNV-1a of 128 bits: http://www.isthe.com/chongo/tech/comp/fnv/
class Hash {
 public:
  Hash& add(std::string_view text) {
    for (const unsigned char c : text) state_ = (state_ ^ c) * kPrime;
    // What was added ends here: "ab", "c" is not "a", "bc".
    for (uint64_t n = text.size(), i = 0; i < 8; ++i, n >>= 8) state_ = (state_ ^ (n & 255)) * kPrime;
    return *this;
  }

  // 32 hexadecimal digits.
  std::string hex() const {
    std::string text;
    for (int shift = 124; shift >= 0; shift -= 4) text += "0123456789abcdef"[static_cast<int>(state_ >> shift) & 15];
    return text;
  }

 private:
  static constexpr unsigned __int128 kPrime = (static_cast<unsigned __int128>(1) << 88) + 0x13b;
  unsigned __int128 state_ = (static_cast<unsigned __int128>(0x6c62272e07bb0142) << 64) + 0x62b821756295c58d;
};

class Cache {
 public:
  // An empty folder keeps nothing.
  Cache(std::string folder, int64_t most_bytes) : folder_(std::move(folder)), most_bytes_(most_bytes) {}

  const std::string& folder() const { return folder_; }

  // The entry of this key; empty if there is none that is whole.
  std::string read(const std::string& key) const;

  // Keeps an entry, and says whether that was possible.
  bool write(const std::string& key, const std::string& binary) const;

  // Removes the least recently read entries beyond `most_bytes`, and unfinished files of writers that have ended.
  void prune() const;

  struct Contents {
    int64_t entries = 0, bytes = 0;
    std::string unsafe;  // why the folder, or an entry in it, does not count; empty if all do
  };
  Contents contents() const;

 private:
  std::string folder_;
  int64_t most_bytes_;
};

}  // namespace jax_softmax::jit
