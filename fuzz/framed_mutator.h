// A mutator for files that begin with the length of their header (safetensors): mutates as
// libFuzzer does, then mends the length nine times out of ten, without which hardly an input would
// pass the first check.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

inline std::size_t mutate_framed(std::uint8_t* data, std::size_t size, std::size_t max_size,
                                 unsigned seed) {
  constexpr std::size_t kFrame = 8;
  size = LLVMFuzzerMutate(data, size, max_size);
  if (size < kFrame || seed % 10 == 0) return size;
  // The header ends with the last brace.
  const std::uint8_t* const end = data + size;
  const std::uint8_t* last = end;
  while (last != data + kFrame && last[-1] != '}') --last;
  const std::uint64_t length =
      last == data + kFrame ? 0 : static_cast<std::uint64_t>(last - data) - kFrame;
  std::memcpy(data, &length, kFrame);
  return size;
}
