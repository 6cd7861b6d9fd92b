// A 128-bit hash of texts, for names and checks of cache entries; nothing here is a secret.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace jax_softmax::jit {

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

}  // namespace jax_softmax::jit
