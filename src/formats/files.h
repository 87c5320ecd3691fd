// Whole files: reading with a size limit, and writing so that nothing is ever half-written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ouzel {

// The whole file, or all that a pipe gives. Throws Error(kIo) if it cannot be read, Error(kBadFile)
// if it is larger than `limit`.
std::string read_file(const std::string& path, std::uint64_t limit = UINT64_C(1) << 40);

// A file that appears under its name only when `commit` is called: write to a temporary beside it,
// fsync, rename, fsync the folder. Without commit (an exception, a full disk) the temporary is
// removed and what was there before stays. A link is followed, also one to what is not there yet;
// permissions of a file that is replaced are kept. A device or pipe (/dev/null, /dev/stdout) is
// written to directly. Failures throw Error(kIo).
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  void write(const void* data, std::size_t bytes);
  void write(std::string_view text) { write(text.data(), text.size()); }
  // Brings all that was written to the disk: commit, which calls it, then has only names to change.
  void finish();
  // Removes the file that commit would replace, for good: to be called between files of which a
  // reader must never see one old and one new.
  void remove_old();
  void commit();

  // As errors name it.
  const std::string& path() const { return path_; }

 private:
  std::string path_, temporary_;  // no temporary: written directly
  int fd_ = -1;
};

void write_file(const std::string& path, std::string_view content);  // atomic

// `path`, or what it links to in the end, which need not be there. Throws Error(kIo) for links in a
// circle.
std::string target_of(const std::string& path);

// Removes the temporaries that writers of `path` left when they were killed. The caller knows that
// nobody writes to it now (FolderLock).
void remove_temporaries(const std::string& path);

// What may not be looked at (no permission, links in a circle) counts as there: opening it says so.
bool is_there(const std::string& path);

// Makes a folder and its parents. Throws Error(kIo).
void make_folder(const std::string& path);

// Holds a folder against other holders, in this process or another, for as long as it lives; the
// lock ends with the process, however that ends. Throws Error(kIo) if the folder is held. File
// systems without locks give none.
class FolderLock {
 public:
  explicit FolderLock(const std::string& path);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_ = -1;
};

}  // namespace ouzel
