#include "jit/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "jit/hash.h"

namespace jax_softmax::jit {

namespace fs = std::filesystem;

namespace {

constexpr const char kEntry[] = ".kernel";
constexpr const char kUnfinished[] = ".unfinished";

std::string header(const std::string& key, const std::string& binary) {
  return "jax_softmax kernel 1 " + key + " " + std::to_string(binary.size()) + " " + Hash().add(binary).hex() + "\n";
}

bool write_all(int file, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(file, bytes.data() + done, bytes.size() - done);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

struct File {
  fs::path path;
  fs::file_time_type used;
  int64_t bytes;
};

// The folder's files whose names end like this; whatever else lies there is not ours.
std::vector<File> files(const std::string& folder, const char* ending) {
  std::vector<File> found;
  std::error_code failed;
  fs::directory_iterator file(folder, failed);
  for (; !failed && file != fs::directory_iterator(); file.increment(failed)) {
    if (file->path().extension() != ending) continue;
    std::error_code gone;  // another process may remove it meanwhile
    const auto used = file->last_write_time(gone);
    const auto bytes = gone ? 0 : file->file_size(gone);
    if (!gone) found.push_back({file->path(), used, static_cast<int64_t>(bytes)});
  }
  return found;
}

}  // namespace

std::string Cache::read(const std::string& key) const {
  if (folder_.empty()) return "";
  const std::string path = folder_ + "/" + key + kEntry;
  std::ifstream file(path, std::ios::binary);
  std::string line;
  if (!std::getline(file, line)) return "";
  std::string binary(std::istreambuf_iterator<char>(file), {});
  if (line + "\n" != header(key, binary)) return "";
  utimensat(AT_FDCWD, path.c_str(), nullptr, 0);  // it is in use: see prune()
  return binary;
}

bool Cache::write(const std::string& key, const std::string& binary) const {
  if (folder_.empty()) return false;
  std::error_code failed;
  fs::create_directories(folder_, failed);
  std::string unfinished = folder_ + "/" + key + "-XXXXXX" + kUnfinished;
  const int file = mkstemps(unfinished.data(), sizeof(kUnfinished) - 1);
  if (file < 0) return false;
  const bool whole = write_all(file, header(key, binary)) && write_all(file, binary);
  if (::close(file) == 0 && whole && ::rename(unfinished.c_str(), (folder_ + "/" + key + kEntry).c_str()) == 0) {
    return true;
  }
  ::unlink(unfinished.c_str());
  return false;
}

void Cache::prune() const {
  std::error_code failed;
  const auto old = fs::file_time_type::clock::now() - std::chrono::hours(1);
  for (const File& file : files(folder_, kUnfinished)) {
    if (file.used < old) fs::remove(file.path, failed);
  }
  std::vector<File> entries = files(folder_, kEntry);
  std::sort(entries.begin(), entries.end(), [](const File& a, const File& b) { return a.used > b.used; });
  int64_t bytes = 0;
  for (const File& file : entries) {
    bytes += file.bytes;
    if (bytes > most_bytes_) fs::remove(file.path, failed);
  }
}

Cache::Size Cache::size() const {
  Size size;
  for (const File& file : files(folder_, kEntry)) {
    ++size.entries;
    size.bytes += file.bytes;
  }
  return size;
}

}  // namespace jax_softmax::jit
