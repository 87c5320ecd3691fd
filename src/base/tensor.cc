#include "ouzel/tensor.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/dense_tensor.h"

namespace ouzel {

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
      return 8;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
    case DType::kU8:
      return 1;
  }
  return 0;
}

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "F32";
    case DType::kF64:
      return "F64";
    case DType::kBF16:
      return "BF16";
    case DType::kF16:
      return "F16";
    case DType::kI64:
      return "I64";
    case DType::kI32:
      return "I32";
    case DType::kU8:
      return "U8";
  }
  return "unknown";
}

std::string shape_string(const ConstTensor& tensor) {
  if (!tensor.present()) return "missing";
  std::string text = "[";
  for (int i = 0; i < tensor.rank; ++i) {
    text += (i ? ", " : "") + std::to_string(tensor.extent[static_cast<std::size_t>(i)]);
  }
  return text + "]";
}

std::string described(const ConstTensor& tensor) {
  return (tensor.present() ? std::string(name_of(tensor.dtype)) + " " : "") + shape_string(tensor);
}

namespace {

// From this size on a buffer begins on a huge page and asks for such pages: passes over columns of
// wide matrices touch a page per row, more than a processor can translate from its caches.
constexpr std::size_t kLarge = std::size_t{4} << 20;
constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

Buffer::Buffer(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  const std::size_t alignment = bytes >= kLarge ? kHugePage : 64;
  if (bytes <= SIZE_MAX - alignment) {
    data_ = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  }
  if (data_ == nullptr) {
    throw Error(ErrorKind::kOutOfMemory, fmt::format("cannot allocate {} bytes", bytes));
  }
#ifdef MADV_HUGEPAGE
  // Whole pages only: a huge page at the end would hold memory that nobody asked for. Where the
  // system refuses, pages stay small.
  if (bytes >= kLarge) madvise(data_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

Buffer Buffer::zeros(std::size_t bytes) {
  Buffer buffer(bytes);
  if (bytes != 0) std::memset(buffer.data_, 0, bytes);
  return buffer;
}

Buffer::~Buffer() { std::free(data_); }

Buffer::Buffer(Buffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

}  // namespace ouzel
