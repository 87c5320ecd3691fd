// Counts the allocations of a test program: replaces operator new, so it belongs in one file of it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace ouzel::test {
inline std::atomic<std::int64_t> allocations{0};
}

// Not inlined: the compiler would see malloc and free where it expects new and delete.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++ouzel::test::allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  ++ouzel::test::allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }
