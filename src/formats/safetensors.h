// safetensors files: named tensors and a string-to-string map of metadata. Files are data: every
// length, offset and count is checked before use, and damage is an Error(kBadFile) that names the
// file, the tensor and what was wrong.
//
// As the format demands: a header of at most 100 MB of JSON in UTF-8, no key twice, metadata of
// strings only, tensors that cover the rest of the file without overlap, hole or trailing bytes.
// Where writers differ harmlessly the reader is liberal: white space around the header, any order
// of tensors and of their members, members that the format does not know, `"__metadata__": null`,
// data that are not aligned, and element types that this library does not compute with: those are
// listed and can be read raw, not converted.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ouzel/tensor.h"
#include "src/formats/files.h"

namespace ouzel {

struct NamedTensor {
  std::string name;
  std::string type;            // as the file spells it: "F32", "I16", "F8_E4M3"
  std::optional<DType> dtype;  // none: a type that this library does not compute with
  std::vector<std::int64_t> shape;
  std::uint64_t offset = 0;  // of its first byte in the file
  std::uint64_t bytes = 0;

  std::int64_t size() const;  // elements
  bool is_float() const;      // of a type that can be converted: F32, F64, BF16, F16
};

// "[2, 19, 2, 8]", for messages.
std::string shape_string(const std::vector<std::int64_t>& shape);

// An open file. Data are read on demand with pread into memory of the caller, never mapped: a file
// that shrinks while open gives an error, not a crash. Reading is safe from several threads at
// once.
class SafetensorsReader {
 public:
  // Throws Error(kIo) if the file cannot be opened, Error(kBadFile) if it is no safetensors file.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(SafetensorsReader&&) noexcept;
  SafetensorsReader& operator=(SafetensorsReader&&) noexcept;

  const std::string& path() const;
  const std::map<std::string, std::string>& metadata() const;
  const std::vector<NamedTensor>& tensors() const;         // in order of their offsets
  const NamedTensor* find(const std::string& name) const;  // null: not there
  // The raw bytes.
  void read(const NamedTensor& tensor, void* to) const;
  // Converted to float32 from F32, F64, BF16 or F16; other types are an Error(kBadFile).
  void read_f32(const NamedTensor& tensor, float* to) const;
  // Converted to float64 from the same types.
  void read_f64(const NamedTensor& tensor, double* to) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Tensors to write, dense row-major.
struct TensorToWrite {
  std::string name;
  ConstTensor tensor;
};

// Writes a file atomically: a temporary beside it, fsync, rename. Throws Error(kIo) and leaves what
// was there before. Tensors stand in the given order, wider types first, so that all data are
// aligned.
void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata);
// The same into a file that the caller commits.
void write_safetensors(AtomicFile& file, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata);

}  // namespace ouzel
