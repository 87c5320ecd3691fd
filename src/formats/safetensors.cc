#include "src/formats/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/half.h"
#include "src/base/text.h"
#include "src/formats/files.h"
#include "src/formats/json.h"

namespace ouzel {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeader = 100'000'000;

// Every element type that the format names. One that it will name later has no row: its tensors are
// listed, their size is taken from the offsets.
struct TypeRow {
  std::string_view name;
  int bits;
  std::optional<DType> dtype;
};
constexpr std::array kTypes = {
    TypeRow{"F32", 32, DType::kF32},     TypeRow{"F64", 64, DType::kF64},
    TypeRow{"BF16", 16, DType::kBF16},   TypeRow{"F16", 16, DType::kF16},
    TypeRow{"I64", 64, DType::kI64},     TypeRow{"I32", 32, DType::kI32},
    TypeRow{"U8", 8, DType::kU8},        TypeRow{"BOOL", 8, std::nullopt},
    TypeRow{"I8", 8, std::nullopt},      TypeRow{"I16", 16, std::nullopt},
    TypeRow{"U16", 16, std::nullopt},    TypeRow{"U32", 32, std::nullopt},
    TypeRow{"U64", 64, std::nullopt},    TypeRow{"C64", 64, std::nullopt},
    TypeRow{"F8_E4M3", 8, std::nullopt}, TypeRow{"F8_E5M2", 8, std::nullopt},
    TypeRow{"F8_E8M0", 8, std::nullopt}, TypeRow{"F6_E2M3", 6, std::nullopt},
    TypeRow{"F6_E3M2", 6, std::nullopt}, TypeRow{"F4", 4, std::nullopt},
};

const TypeRow* find_type(std::string_view name) {
  const auto row = std::find_if(kTypes.begin(), kTypes.end(),
                                [&](const TypeRow& type) { return type.name == name; });
  return row == kTypes.end() ? nullptr : &*row;
}

std::uint64_t little_endian_64(const unsigned char* bytes) {
  std::uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | bytes[i];
  return value;
}

}  // namespace

std::int64_t NamedTensor::size() const {
  std::int64_t n = 1;
  for (std::int64_t extent : shape) n *= extent;
  return n;
}

bool NamedTensor::is_float() const {
  return dtype == DType::kF32 || dtype == DType::kF64 || dtype == DType::kBF16 ||
         dtype == DType::kF16;
}

std::string shape_string(const std::vector<std::int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

struct SafetensorsReader::Impl {
  std::string path;
  int fd = -1;
  std::map<std::string, std::string> metadata;
  std::vector<NamedTensor> tensors;
  std::unordered_map<std::string, std::size_t> index;

  explicit Impl(const std::string& file) : path(file) {}
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    if (fd >= 0) ::close(fd);
  }

  template <class... Args>
  [[noreturn]] void bad(fmt::format_string<Args...> format, Args&&... args) const {
    throw Error(ErrorKind::kBadFile,
                path + ": " + fmt::format(format, std::forward<Args>(args)...));
  }

  void read_at(std::uint64_t offset, std::uint64_t bytes, void* to) const;
  void open();
  void parse_metadata(const Json& value);
  NamedTensor parse_tensor(const std::string& name, const Json& value, std::uint64_t data_begin,
                           std::uint64_t data_bytes) const;
  void check_cover(std::uint64_t data_begin, std::uint64_t data_bytes) const;
  template <class To>
  void read_converted(const NamedTensor& tensor, To* to) const;
};

void SafetensorsReader::Impl::read_at(std::uint64_t offset, std::uint64_t bytes, void* to) const {
  char* at = static_cast<char*>(to);
  while (bytes != 0) {
    const ssize_t got =
        ::pread(fd, at, static_cast<std::size_t>(bytes), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      throw Error(ErrorKind::kIo, fmt::format("cannot read {}: {}", path, std::strerror(errno)));
    }
    if (got == 0) {
      bad("the file ends at byte {}, {} bytes short of what its header promised: it was cut off "
          "while it was being read",
          offset, bytes);
    }
    at += got;
    offset += static_cast<std::uint64_t>(got);
    bytes -= static_cast<std::uint64_t>(got);
  }
}

void SafetensorsReader::Impl::open() {
  // Non-blocking: a named pipe without a writer must not hold us up.
  fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  struct stat info;
  if (fd < 0 || ::fstat(fd, &info) != 0) {
    throw Error(ErrorKind::kIo, fmt::format("cannot open {}: {}", path, std::strerror(errno)));
  }
  if (S_ISDIR(info.st_mode)) bad("a folder, where a safetensors file was expected");
  if (!S_ISREG(info.st_mode)) {
    bad("a pipe or device, where a safetensors file was expected; write it to a file first");
  }
  const auto file_bytes = static_cast<std::uint64_t>(info.st_size);
  if (file_bytes < kLengthBytes) {
    bad("not a safetensors file: {} bytes, and the length of the header alone takes 8", file_bytes);
  }
  unsigned char length[kLengthBytes];
  read_at(0, kLengthBytes, length);
  const std::uint64_t header_bytes = little_endian_64(length);
  if (const std::string_view begin(reinterpret_cast<const char*>(length), kLengthBytes);
      std::ranges::all_of(begin, [](char c) { return (c >= ' ' && c <= '~') || c == '\n'; })) {
    bad("not a safetensors file, but text that begins with '{}'", printable(begin));
  }
  if (header_bytes > kMaxHeader) {
    bad("not a safetensors file: its first 8 bytes announce a header of {} bytes, the limit is {}",
        header_bytes, kMaxHeader);
  }
  if (header_bytes > file_bytes - kLengthBytes) {
    bad("the header should take {} bytes and {} are left: the file was cut off, or is no "
        "safetensors file",
        header_bytes, file_bytes - kLengthBytes);
  }
  std::string text(static_cast<std::size_t>(header_bytes), '\0');
  read_at(kLengthBytes, header_bytes, text.data());
  const Json header = parse_json(text, path);
  if (!header.is_object()) bad("the header is no JSON object");

  const std::uint64_t data_begin = kLengthBytes + header_bytes;
  const std::uint64_t data_bytes = file_bytes - data_begin;
  for (const auto& [name, value] : header.items()) {
    if (name == "__metadata__") {
      parse_metadata(value);
    } else {
      tensors.push_back(parse_tensor(name, value, data_begin, data_bytes));
    }
  }
  std::sort(tensors.begin(), tensors.end(), [](const NamedTensor& a, const NamedTensor& b) {
    return std::tie(a.offset, a.bytes, a.name) < std::tie(b.offset, b.bytes, b.name);
  });
  check_cover(data_begin, data_bytes);
  for (std::size_t i = 0; i < tensors.size(); ++i) index.emplace(tensors[i].name, i);
}

void SafetensorsReader::Impl::parse_metadata(const Json& value) {
  if (value.is_null()) return;
  if (!value.is_object()) bad("__metadata__ is no JSON object");
  for (const auto& [key, entry] : value.items()) {
    if (!entry.is_string()) {
      bad("metadata '{}' is a JSON {}, where only strings are allowed", printable(key),
          entry.type_name());
    }
    metadata.emplace(key, entry.get<std::string>());
  }
}

NamedTensor SafetensorsReader::Impl::parse_tensor(const std::string& name, const Json& value,
                                                  std::uint64_t data_begin,
                                                  std::uint64_t data_bytes) const {
  const std::string shown = printable(name);
  const auto member = [&](const char* key) -> const Json& {
    if (!value.is_object())
      bad("tensor '{}' is a JSON {}, not an object", shown, value.type_name());
    const auto found = value.find(key);
    if (found == value.end()) bad("tensor '{}' has no '{}'", shown, key);
    return *found;
  };
  const Json& type = member("dtype");
  const Json& shape = member("shape");
  const Json& offsets = member("data_offsets");
  if (!type.is_string()) bad("the dtype of tensor '{}' is no string", shown);
  if (!shape.is_array()) bad("the shape of tensor '{}' is no list", shown);
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    bad("the data_offsets of tensor '{}' are not two whole numbers", shown);
  }
  NamedTensor tensor;
  tensor.name = name;
  tensor.type = type.get<std::string>();
  constexpr auto kLargest = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t elements = 1;
  for (const Json& extent : shape) {
    if (!extent.is_number_unsigned()) {
      bad("the shape of tensor '{}' holds {}, where a whole number was expected", shown,
          printable(extent.dump(-1, ' ', true), 40));
    }
    const auto n = extent.get<std::uint64_t>();
    if (n > kLargest || __builtin_mul_overflow(elements, n, &elements) || elements > kLargest) {
      bad("the shape of tensor '{}' holds more elements than there can be", shown);
    }
    tensor.shape.push_back(static_cast<std::int64_t>(n));
  }
  const auto begin = offsets[0].get<std::uint64_t>();
  const auto end = offsets[1].get<std::uint64_t>();
  if (begin > end || end > data_bytes) {
    bad("the data of tensor '{}' should be at bytes {} to {}, the file holds {} bytes of data{}",
        shown, begin, end, data_bytes, begin > end ? "" : ": it was cut off, or is damaged");
  }
  tensor.offset = data_begin + begin;
  tensor.bytes = end - begin;
  if (const TypeRow* row = find_type(tensor.type)) {
    tensor.dtype = row->dtype;
    std::uint64_t bits = 0;
    if (__builtin_mul_overflow(elements, static_cast<std::uint64_t>(row->bits), &bits) ||
        bits % 8 != 0 || bits / 8 != tensor.bytes) {
      bad("tensor '{}' of type {} and shape {} does not fit the {} bytes that its data_offsets "
          "give it",
          shown, tensor.type, shape_string(tensor.shape), tensor.bytes);
    }
  }
  return tensor;
}

void SafetensorsReader::Impl::check_cover(std::uint64_t data_begin,
                                          std::uint64_t data_bytes) const {
  std::uint64_t end = data_begin;
  for (const NamedTensor& tensor : tensors) {
    if (tensor.offset < end) {
      bad("the data of tensor '{}' overlap those of another", printable(tensor.name));
    }
    if (tensor.offset > end) {
      bad("{} bytes before the data of tensor '{}' belong to no tensor", tensor.offset - end,
          printable(tensor.name));
    }
    end += tensor.bytes;
  }
  if (end != data_begin + data_bytes) {
    bad("the last {} bytes belong to no tensor", data_begin + data_bytes - end);
  }
}

template <class To>
void SafetensorsReader::Impl::read_converted(const NamedTensor& tensor, To* to) const {
  const auto convert = [&]<class From>(const From*, auto element) {
    constexpr std::uint64_t kBlock = 8192;
    From block[kBlock];
    const std::uint64_t elements = tensor.bytes / sizeof(From);
    for (std::uint64_t i = 0; i < elements; i += kBlock) {
      const std::uint64_t n = std::min(kBlock, elements - i);
      read_at(tensor.offset + i * sizeof(From), n * sizeof(From), block);
      for (std::uint64_t j = 0; j < n; ++j) to[i + j] = static_cast<To>(element(block[j]));
    }
  };
  if (tensor.dtype == DTypeOf<To>::value) {
    read_at(tensor.offset, tensor.bytes, to);
  } else if (tensor.dtype == DType::kF32) {
    convert(static_cast<const float*>(nullptr), [](float x) { return x; });
  } else if (tensor.dtype == DType::kF64) {
    convert(static_cast<const double*>(nullptr), [](double x) { return x; });
  } else if (tensor.dtype == DType::kBF16) {
    convert(static_cast<const BFloat16*>(nullptr), [](BFloat16 x) { return to_float(x); });
  } else if (tensor.dtype == DType::kF16) {
    convert(static_cast<const Float16*>(nullptr), [](Float16 x) { return to_float(x); });
  } else {
    bad("tensor '{}' is of type {}; F32, F64, BF16 or F16 was expected", printable(tensor.name),
        printable(tensor.type, 40));
  }
}

SafetensorsReader::SafetensorsReader(const std::string& path)
    : impl_(std::make_unique<Impl>(path)) {
  impl_->open();
}
SafetensorsReader::~SafetensorsReader() = default;
SafetensorsReader::SafetensorsReader(SafetensorsReader&&) noexcept = default;
SafetensorsReader& SafetensorsReader::operator=(SafetensorsReader&&) noexcept = default;

const std::string& SafetensorsReader::path() const { return impl_->path; }
const std::map<std::string, std::string>& SafetensorsReader::metadata() const {
  return impl_->metadata;
}
const std::vector<NamedTensor>& SafetensorsReader::tensors() const { return impl_->tensors; }
const NamedTensor* SafetensorsReader::find(const std::string& name) const {
  const auto found = impl_->index.find(name);
  return found == impl_->index.end() ? nullptr : &impl_->tensors[found->second];
}
void SafetensorsReader::read(const NamedTensor& tensor, void* to) const {
  impl_->read_at(tensor.offset, tensor.bytes, to);
}
void SafetensorsReader::read_f32(const NamedTensor& tensor, float* to) const {
  impl_->read_converted(tensor, to);
}
void SafetensorsReader::read_f64(const NamedTensor& tensor, double* to) const {
  impl_->read_converted(tensor, to);
}

namespace {

void check_writable(const TensorToWrite& entry, const std::string& path) {
  const auto refuse = [&](const char* why) {
    throw Error(ErrorKind::kInvalidArgument, fmt::format("cannot write tensor '{}' to {}: {}",
                                                         printable(entry.name), path, why));
  };
  if (entry.name == "__metadata__") refuse("the format keeps this name for itself");
  if (!entry.tensor.present()) refuse("it is absent");
  std::int64_t step = 1;
  for (int i = entry.tensor.rank; i-- > 0;) {
    const auto d = static_cast<std::size_t>(i);
    if (entry.tensor.extent[d] > 1 && entry.tensor.stride[d] != step) refuse("it is not dense");
    step *= entry.tensor.extent[d];
  }
}

}  // namespace

void write_safetensors(AtomicFile& file, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  const std::string& path = file.path();
  std::vector<const TensorToWrite*> order;
  std::set<std::string_view> names;
  for (const TensorToWrite& entry : tensors) {
    check_writable(entry, path);
    if (!names.insert(entry.name).second) {
      throw Error(
          ErrorKind::kInvalidArgument,
          fmt::format("cannot write {}: two tensors named '{}'", path, printable(entry.name)));
    }
    order.push_back(&entry);
  }
  std::stable_sort(order.begin(), order.end(), [](const TensorToWrite* a, const TensorToWrite* b) {
    return size_of(a->tensor.dtype) > size_of(b->tensor.dtype);
  });

  const auto bytes_of = [](const TensorToWrite& entry) {
    return static_cast<std::uint64_t>(entry.tensor.size() * size_of(entry.tensor.dtype));
  };
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t offset = 0;
  for (const TensorToWrite* entry : order) {
    const std::uint64_t end = offset + bytes_of(*entry);
    const auto* extent = entry->tensor.extent.data();
    header[entry->name] = {
        {"dtype", name_of(entry->tensor.dtype)},
        {"shape", std::vector<std::int64_t>(extent, extent + entry->tensor.rank)},
        {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const Json::exception&) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("cannot write {}: a tensor's name or its metadata are not UTF-8", path));
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > kMaxHeader) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("cannot write {}: its header would take {} bytes, the format allows {}",
                            path, text.size(), kMaxHeader));
  }
  unsigned char length[kLengthBytes];
  for (std::size_t i = 0; i < kLengthBytes; ++i) {
    length[i] = static_cast<unsigned char>(static_cast<std::uint64_t>(text.size()) >> 8 * i & 0xff);
  }
  file.write(length, sizeof(length));
  file.write(text);
  for (const TensorToWrite* entry : order) {
    file.write(entry->tensor.data, static_cast<std::size_t>(bytes_of(*entry)));
  }
}

void write_safetensors(const std::string& path, const std::vector<TensorToWrite>& tensors,
                       const std::map<std::string, std::string>& metadata) {
  AtomicFile file(path);
  write_safetensors(file, tensors, metadata);
  file.commit();
}

}  // namespace ouzel
