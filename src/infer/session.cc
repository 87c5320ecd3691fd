// Layout, little-endian: magic, version; the sampling options; position; recent tokens in as many
// slots as the window has; waiting tokens in kChunk slots; texts and stop texts, each with its
// length before it.
#include "src/infer/session.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/infer/bytes_model.h"

namespace ouzel {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::uint32_t kMagic = 0x5353'5a4f;  // "OZSS"
constexpr std::uint32_t kVersion = 1;

class Writer {
 public:
  template <class T>
    requires std::is_arithmetic_v<T>
  void put(T value) {
    append(&value, sizeof(value));
  }
  void put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    append(text.data(), text.size());
  }
  void put(const std::vector<std::int32_t>& tokens, std::int64_t slots) {
    put(static_cast<std::uint32_t>(tokens.size()));
    append(tokens.data(), tokens.size() * sizeof(std::int32_t));
    bytes_.resize(bytes_.size() +
                  (static_cast<std::size_t>(slots) - tokens.size()) * sizeof(std::int32_t));
  }
  std::vector<std::uint8_t> take() { return std::move(bytes_); }

 private:
  void append(const void* data, std::size_t size) {
    const auto* from = static_cast<const std::uint8_t*>(data);
    bytes_.insert(bytes_.end(), from, from + size);
  }
  std::vector<std::uint8_t> bytes_;
};

[[noreturn]] void damaged(const std::string& how) {
  throw Error(ErrorKind::kBadFile, "the state's sampler is damaged: " + how);
}

class Reader {
 public:
  explicit Reader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

  template <class T>
    requires std::is_arithmetic_v<T>
  void get(T& value) {
    std::memcpy(&value, take(sizeof(value)), sizeof(value));
  }
  void get(std::string& text) {
    std::uint32_t size = 0;
    get(size);
    text.assign(reinterpret_cast<const char*>(take(size)), size);
  }
  void get(std::vector<std::int32_t>& tokens, std::int64_t slots) {
    std::uint32_t size = 0;
    get(size);
    const auto* from = take(static_cast<std::size_t>(slots) * sizeof(std::int32_t));
    if (size > slots) damaged(fmt::format("{} tokens in room for {}", size, slots));
    tokens.resize(size);
    if (size != 0) std::memcpy(tokens.data(), from, size * sizeof(std::int32_t));
    for (std::int32_t token : tokens) {
      if (token < 0 || token >= kBytes) damaged(fmt::format("{} is no token", token));
    }
  }
  std::size_t left() const { return bytes_.size(); }

 private:
  const std::uint8_t* take(std::size_t size) {
    if (size > bytes_.size()) damaged("it ends early");
    const std::uint8_t* from = bytes_.data();
    bytes_ = bytes_.subspan(size);
    return from;
  }
  std::span<const std::uint8_t> bytes_;
};

}  // namespace

std::vector<std::uint8_t> Session::encode() const {
  Writer writer;
  writer.put(kMagic);
  writer.put(kVersion);
  writer.put(options.temperature);
  writer.put(options.top_k);
  writer.put(options.top_p);
  writer.put(options.min_p);
  writer.put(options.repetition_penalty);
  writer.put(options.repetition_window);
  writer.put(options.seed);
  writer.put(position);
  writer.put(recent, options.repetition_window);
  writer.put(waiting, Generator::kChunk);
  writer.put(certain);
  writer.put(held);
  writer.put(static_cast<std::uint32_t>(options.stop.size()));
  for (const std::string& stop : options.stop) writer.put(stop);
  return writer.take();
}

Session Session::decode(std::span<const std::uint8_t> bytes, std::int64_t position) {
  Session s;
  s.position = position;
  if (bytes.empty()) return s;
  Reader reader(bytes);
  std::uint32_t magic = 0, version = 0, stops = 0;
  reader.get(magic);
  reader.get(version);
  if (magic != kMagic) damaged("it is of another kind");
  if (version != kVersion) {
    damaged(
        fmt::format("its format is version {}, this program knows version {}", version, kVersion));
  }
  reader.get(s.options.temperature);
  reader.get(s.options.top_k);
  reader.get(s.options.top_p);
  reader.get(s.options.min_p);
  reader.get(s.options.repetition_penalty);
  reader.get(s.options.repetition_window);
  reader.get(s.options.seed);
  reader.get(s.position);
  try {
    s.options.check();
  } catch (const Error& e) {
    damaged(e.what());
  }
  reader.get(s.recent, s.options.repetition_window);
  reader.get(s.waiting, Generator::kChunk);
  reader.get(s.certain);
  reader.get(s.held);
  reader.get(stops);
  for (std::uint32_t i = 0; i < stops; ++i) reader.get(s.options.stop.emplace_back());
  if (reader.left() != 0) damaged(fmt::format("{} bytes follow its end", reader.left()));
  try {
    s.options.check();  // the stop texts
  } catch (const Error& e) {
    damaged(e.what());
  }
  const auto waiting = static_cast<std::int64_t>(s.waiting.size());
  if (s.position != position + waiting ||
      waiting > Generator::kChunk - position % Generator::kChunk) {
    damaged(fmt::format("it is of position {} with {} tokens waiting, the state of position {}",
                        s.position, waiting, position));
  }
  return s;
}

}  // namespace ouzel
