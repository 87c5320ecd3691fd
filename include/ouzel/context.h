// Context: what a call runs with: threads, instruction set, scratch memory, callbacks. Passed
// explicitly; the library has no global settings and never prints. A context serves one thread at a
// time; several contexts may be used at once.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ouzel/export.h"

namespace ouzel {

enum class Isa { kPortable, kAvx2, kAvx512 };

// The sets that this machine runs, best first.
OUZEL_EXPORT std::vector<Isa> supported_isas();
OUZEL_EXPORT const char* name_of(Isa isa);  // "portable", "avx2", "avx512"
// Throws Error(kInvalidArgument) for an unknown name or one that this machine lacks.
OUZEL_EXPORT Isa isa_from_name(const std::string& name);
// The set to use when nothing is said: OUZEL_ISA if set, else the best one. Throws as
// isa_from_name.
OUZEL_EXPORT Isa default_isa();
// OUZEL_THREADS if set, else the processors that affinity and the control group's quota allow.
OUZEL_EXPORT int default_threads();

struct ContextOptions {
  int threads = 0;  // 0: default_threads()
  Isa isa = default_isa();
  // Asked on the calling thread, at least once in a call that computes anything and every few
  // milliseconds; true ends the call with Error(kCancelled).
  // Outputs are then unspecified; states that were passed in are untouched unless the output state
  // is the same memory.
  std::function<bool()> cancelled = {};
  // Fills scratch memory with NaN before each use, so that reading what was never written shows.
  bool poison_scratch = false;
};

class OUZEL_EXPORT Context {
 public:
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(Context&&) noexcept;
  Context& operator=(Context&&) noexcept;

  int threads() const;
  Isa isa() const;
  // Bytes of scratch held now (it grows to the largest call and stays).
  std::size_t scratch_bytes() const;

  class OUZEL_HIDDEN Impl;  // src/base/context_impl.h
  Impl& impl() const { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace ouzel
