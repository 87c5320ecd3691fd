// A folder of its own for a test: other tests run at the same time, and so may another build's.
#pragma once

#include <stdlib.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <system_error>

namespace ouzel::test {

// Made empty, removed with all it holds at the end.
class TempFolder {
 public:
  TempFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "ouzel-test-XXXXXX").string();
    if (::mkdtemp(path.data()) == nullptr) {
      throw std::system_error(errno, std::generic_category(), "cannot make the folder " + path);
    }
    path_ = path;
  }
  ~TempFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempFolder(const TempFolder&) = delete;
  TempFolder& operator=(const TempFolder&) = delete;

  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

}  // namespace ouzel::test
