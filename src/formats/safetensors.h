// safetensors files: named tensors and a string-to-string map of metadata. Files are data: every
// length, offset and count is checked before use, and damage is an Error(kBadFile) that names the file,
// the tensor and what was wrong.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ouzel/tensor.h"

namespace ouzel {

struct NamedTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // of its first byte in the file
  std::uint64_t bytes = 0;
};

// An open file. Data are read on demand with pread into memory of the caller, never mapped: a file that
// shrinks while open gives an error, not a crash.
class SafetensorsReader {
 public:
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  const std::string& path() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::vector<NamedTensor>& tensors() const;           // in order of their offsets
  const NamedTensor* find(const std::string& name) const;    // null: not there
  // The raw bytes.
  void read(const NamedTensor& tensor, void* to) const;
  // Converted to float32 from F32, F64, BF16 or F16; other types are an Error(kBadFile).
  void read_f32(const NamedTensor& tensor, float* to) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Tensors to write, dense row-major, in this order (8-byte types should come first; data begin at a
// multiple of 8).
struct TensorToWrite {
  std::string name;
  ConstTensor tensor;  // must be dense
};

// Writes a file atomically: a temporary beside it, fsync, rename. Throws Error(kIo) and leaves what was
// there before.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace ouzel
