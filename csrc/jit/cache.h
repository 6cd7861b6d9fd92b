// Compiled kernels in a folder, shared by all processes that can reach it.
//
// An entry is one file with a line of text that says whose and how long it is, and the kernel. Writers write a file of
// another name and rename it, so that readers and other writers never see half of one. Whatever goes wrong (no folder,
// read-only, full, a lost race) makes a miss or an entry that is not kept, never an error.
//
// Entries are code that will run, so only those count that nobody else can have written: of a folder that the user owns
// and neither group nor others may write to, and files that are like this as well.
#pragma once

#include <cstdint>
#include <string>

namespace jax_softmax::jit {

class Cache {
 public:
  // An empty folder keeps nothing.
  Cache(std::string folder, int64_t most_bytes) : folder_(std::move(folder)), most_bytes_(most_bytes) {}

  const std::string& folder() const { return folder_; }

  // The entry of this key; empty if there is none that is whole.
  std::string read(const std::string& key) const;

  // Keeps an entry, and says whether that was possible.
  bool write(const std::string& key, const std::string& binary) const;

  // Removes the entries that were longest not read until they are no more than `most_bytes`, and what writers that
  // ended early left.
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
