#include "src/formats/files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const char* action, const std::string& path, int error) {
  throw Error(ErrorKind::kIo, fmt::format("cannot {} {}: {}", action, path, std::strerror(error)));
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// A rename is on disk when its folder is. Some file systems cannot sync a folder (EINVAL): then the
// rename is as durable as they make it.
void sync_folder_of(const std::string& path) {
  const fs::path parent = fs::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  const Descriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0) return;  // a folder that may be written but not read
  if (::fsync(fd.get()) != 0 && errno != EINVAL) fail("sync the folder of", path, errno);
}

}  // namespace

std::string read_file(const std::string& path, std::uint64_t limit) {
  const Descriptor fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info;
  if (fd.get() < 0 || ::fstat(fd.get(), &info) != 0) fail("open", path, errno);
  if (S_ISDIR(info.st_mode)) fail("read", path, EISDIR);
  constexpr std::size_t kStep = 1 << 16;
  std::string content;
  std::size_t used = 0;
  // The size is a hint only: files under /proc say 0, and a file may grow while it is read.
  const std::uint64_t hint = S_ISREG(info.st_mode) ? static_cast<std::uint64_t>(info.st_size) : 0;
  content.resize(static_cast<std::size_t>(std::min(hint, limit)) + 1);
  while (true) {
    if (used == content.size()) content.resize(content.size() + std::max(kStep, used / 2));
    const ssize_t got = ::read(fd.get(), content.data() + used, content.size() - used);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail("read", path, errno);
    if (got == 0) break;
    used += static_cast<std::size_t>(got);
    if (used > limit) {
      throw Error(ErrorKind::kBadFile,
                  fmt::format("{} is larger than the {} bytes that are read from such a file", path,
                              limit));
    }
  }
  content.resize(used);
  return content;
}

AtomicFile::AtomicFile(const std::string& path) : path_(path) {
  struct stat info;
  const bool exists = ::stat(path.c_str(), &info) == 0;
  if (exists && !S_ISREG(info.st_mode)) {
    fd_ = ::open(path.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd_ < 0) fail("write", path, errno);
    return;
  }
  path_ = target_of(path);
  static std::atomic<unsigned> serial{0};
  do {
    temporary_ = fmt::format("{}.{}-{}.tmp", path_, ::getpid(), serial.fetch_add(1));
    fd_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  } while (fd_ < 0 && errno == EEXIST);
  if (fd_ < 0) fail("write", path, errno);
  // Another owner's file may refuse this; its permissions are then those of a new file.
  if (exists) static_cast<void>(::fchmod(fd_, info.st_mode & 07777) == 0);
}

AtomicFile::~AtomicFile() {
  if (fd_ >= 0) ::close(fd_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(const void* data, std::size_t bytes) {
  const char* from = static_cast<const char*>(data);
  while (bytes != 0) {
    const ssize_t put = ::write(fd_, from, bytes);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("write", path_, errno);
    from += put;
    bytes -= static_cast<std::size_t>(put);
  }
}

void AtomicFile::finish() {
  if (fd_ < 0) return;
  if (!temporary_.empty() && ::fsync(fd_) != 0) fail("write", path_, errno);
  if (::close(std::exchange(fd_, -1)) != 0) fail("write", path_, errno);
}

void AtomicFile::remove_old() {
  if (temporary_.empty()) return;
  if (::unlink(path_.c_str()) != 0 && errno != ENOENT) fail("replace", path_, errno);
  sync_folder_of(path_);
}

void AtomicFile::commit() {
  finish();
  if (temporary_.empty()) return;
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) fail("write", path_, errno);
  temporary_.clear();
  sync_folder_of(path_);
}

void write_file(const std::string& path, std::string_view content) {
  AtomicFile file(path);
  file.write(content);
  file.commit();
}

std::string target_of(const std::string& path) {
  constexpr int kMostLinks = 40;  // as Linux follows
  std::error_code error;
  fs::path target = path;
  for (int link = 0; fs::is_symlink(fs::symlink_status(target, error)); ++link) {
    if (link == kMostLinks) fail("follow", path, ELOOP);
    fs::path next = fs::read_symlink(target, error);
    if (error) fail("follow", path, error.value());
    target = next.is_absolute() ? next : target.parent_path() / next;
  }
  // Of the folders before the last name.
  if (error == std::errc::too_many_symbolic_link_levels) fail("follow", path, ELOOP);
  return target.string();
}

void remove_temporaries(const std::string& path) {
  const fs::path target(target_of(path)), parent = target.parent_path();
  const std::string prefix = target.filename().string() + ".";
  constexpr std::string_view kSuffix = ".tmp";
  std::error_code error;
  fs::directory_iterator entry(parent.empty() ? "." : parent, error), end;
  for (; entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::string_view middle = name;
    if (!middle.starts_with(prefix) || !middle.ends_with(kSuffix) ||
        middle.size() < prefix.size() + kSuffix.size()) {
      continue;
    }
    middle.remove_prefix(prefix.size());
    middle.remove_suffix(kSuffix.size());  // "PROCESS-SERIAL"
    if (middle.empty() || middle.find_first_not_of("0123456789-") != std::string_view::npos)
      continue;
    std::error_code kept;
    fs::remove(entry->path(), kept);  // what cannot be removed does no harm
  }
}

bool is_there(const std::string& path) {
  std::error_code error;
  return fs::status(path, error).type() != fs::file_type::not_found;
}

void make_folder(const std::string& path) {
  std::error_code error;
  fs::create_directories(is_there(path) ? path : target_of(path), error);
  if (error || !fs::is_directory(path, error)) {
    throw Error(ErrorKind::kIo,
                fmt::format("cannot make the folder {}: {}", path,
                            error ? error.message() : "a file of that name is in the way"));
  }
}

FolderLock::FolderLock(const std::string& path)
    : fd_(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0 || ::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  ::close(fd_);
  throw Error(ErrorKind::kIo,
              fmt::format("{}: another run is writing to this folder; let it end, or take another "
                          "folder",
                          path));
}

FolderLock::~FolderLock() {
  if (fd_ >= 0) ::close(fd_);
}

}  // namespace ouzel
