#include "jit/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <ctime>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace jax_softmax::jit {

namespace {

constexpr const char kEntry[] = ".kernel";
constexpr const char kUnfinished[] = ".unfinished";

std::string header(const std::string& key, const std::string& binary) {
  return "jax_softmax kernel 1 " + key + " " + std::to_string(binary.size()) + " " + Hash().add(binary).hex() + "\n";
}

// What the system has opened, until the end of its scope.
class Open {
 public:
  explicit Open(int descriptor) : descriptor_(descriptor) {}
  Open(Open&& other) : descriptor_(std::exchange(other.descriptor_, -1)) {}
  ~Open() { close(); }

  explicit operator bool() const { return descriptor_ >= 0; }
  int get() const { return descriptor_; }
  bool close() { return descriptor_ < 0 || ::close(std::exchange(descriptor_, -1)) == 0; }

 private:
  int descriptor_;
};

// Why somebody else can have written this; empty if nobody can.
std::string why_unsafe(const std::string& path, const struct stat& facts) {
  if (!S_ISREG(facts.st_mode) && !S_ISDIR(facts.st_mode)) return path + " is no regular file";
  if (facts.st_uid != geteuid()) {
    return path + " belongs to user " + std::to_string(facts.st_uid) + ", not to " + std::to_string(geteuid());
  }
  if (facts.st_mode & (S_IWGRP | S_IWOTH)) {
    char mode[8];
    std::snprintf(mode, sizeof(mode), "%03o", static_cast<unsigned>(facts.st_mode & 07777));
    return "group or others may write to " + path + " (mode " + mode + ")";
  }
  return "";
}

// The folder, if it exists and is safe. It is opened and then checked, so that its path may be a symbolic link. Whoever
// may write to a folder above can only lead the path to another folder of the user's own (what that means is in
// SECURITY.md).
Open open_folder(const std::string& path, std::string* unsafe = nullptr) {
  Open folder(::open(path.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));  // also what the user may not read
  struct stat facts;
  if (!folder || fstat(folder.get(), &facts) != 0) return Open(-1);
  const std::string reason = why_unsafe(path, facts);
  if (unsafe) *unsafe = reason;
  return reason.empty() ? std::move(folder) : Open(-1);
}

// Makes the folder and those above that are missing, for the user alone.
void make_folders(const std::string& path) {
  for (size_t end = path.find('/', 1);; end = path.find('/', end + 1)) {
    ::mkdir(path.substr(0, end).c_str(), 0700);
    if (end == std::string::npos) return;
  }
}

bool write_all(int file, const std::string& bytes) {
  for (size_t done = 0; done < bytes.size();) {
    const ssize_t n = ::write(file, bytes.data() + done, bytes.size() - done);
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

std::string read_all(int file) {
  std::string bytes;
  char part[1 << 16];
  for (ssize_t n; (n = ::read(file, part, sizeof(part))) > 0;) bytes.append(part, static_cast<size_t>(n));
  return bytes;
}

struct File {
  std::string name;
  struct stat facts;
};

// The folder's files whose names end like this; other files are not the cache's.
std::vector<File> files(const Open& folder, std::string_view ending) {
  std::vector<File> found;
  DIR* const listing = fdopendir(::openat(folder.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!listing) return found;
  while (const dirent* item = readdir(listing)) {
    File file{item->d_name, {}};
    const size_t size = file.name.size();
    if (size < ending.size() || file.name.compare(size - ending.size(), ending.size(), ending) != 0) continue;
    // Another process may remove it meanwhile.
    if (fstatat(folder.get(), item->d_name, &file.facts, AT_SYMLINK_NOFOLLOW) == 0) found.push_back(std::move(file));
  }
  closedir(listing);
  return found;
}

}  // namespace

std::string Cache::read(const std::string& key) const {
  const Open folder = open_folder(folder_);
  if (!folder) return "";
  // Who opens a pipe would wait for a writer.
  const Open file(::openat(folder.get(), (key + kEntry).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  struct stat facts;
  if (!file || fstat(file.get(), &facts) != 0 || !why_unsafe(key, facts).empty()) return "";
  const std::string bytes = read_all(file.get());
  const size_t line = bytes.find('\n') + 1;
  std::string binary = bytes.substr(line);
  if (bytes.substr(0, line) != header(key, binary)) return "";
  futimens(file.get(), nullptr);  // it is in use: see prune()
  return binary;
}

bool Cache::write(const std::string& key, const std::string& binary) const {
  make_folders(folder_);
  const Open folder = open_folder(folder_);
  if (!folder) return false;
  static std::atomic<int64_t> written{0};
  const std::string unfinished = key + "-" + std::to_string(getpid()) + "-" + std::to_string(written++) + kUnfinished;
  Open file(::openat(folder.get(), unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  if (!file) return false;
  const bool whole = write_all(file.get(), header(key, binary)) && write_all(file.get(), binary);
  if (file.close() && whole &&
      ::renameat(folder.get(), unfinished.c_str(), folder.get(), (key + kEntry).c_str()) == 0) {
    return true;
  }
  ::unlinkat(folder.get(), unfinished.c_str(), 0);
  return false;
}

void Cache::prune() const {
  const Open folder = open_folder(folder_);
  if (!folder) return;
  const time_t old = time(nullptr) - 3600;
  for (const File& file : files(folder, kUnfinished)) {
    if (file.facts.st_mtime < old) ::unlinkat(folder.get(), file.name.c_str(), 0);
  }
  std::vector<File> entries = files(folder, kEntry);
  const auto used = [](const File& file) { return std::tie(file.facts.st_mtim.tv_sec, file.facts.st_mtim.tv_nsec); };
  std::sort(entries.begin(), entries.end(), [&](const File& a, const File& b) { return used(a) > used(b); });
  int64_t bytes = 0;
  for (const File& file : entries) {
    bytes += file.facts.st_size;
    if (bytes > most_bytes_) ::unlinkat(folder.get(), file.name.c_str(), 0);
  }
}

Cache::Contents Cache::contents() const {
  Contents contents;
  const Open folder = open_folder(folder_, &contents.unsafe);
  if (!folder) return contents;
  for (const File& file : files(folder, kEntry)) {
    if (std::string reason = why_unsafe(folder_ + "/" + file.name, file.facts); !reason.empty()) {
      contents.unsafe = std::move(reason);
      continue;
    }
    ++contents.entries;
    contents.bytes += file.facts.st_size;
  }
  return contents;
}

}  // namespace jax_softmax::jit
