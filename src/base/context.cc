#include "ouzel/context.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <utility>

#include <fmt/format.h>
#include <hwy/targets.h>

#include "ouzel/error.h"
#include "src/base/caches.h"
#include "src/base/context_impl.h"
#include "src/base/text.h"

namespace ouzel {

std::vector<Isa> supported_isas() {
  const auto targets = static_cast<std::int64_t>(hwy::SupportedTargets());
  std::vector<Isa> list;
#ifndef OUZEL_WITHOUT_AVX512
  if (targets & HWY_AVX3) list.push_back(Isa::kAvx512);
#endif
  if (targets & HWY_AVX2) list.push_back(Isa::kAvx2);
  list.push_back(Isa::kPortable);
  return list;
}

const char* name_of(Isa isa) {
  switch (isa) {
    case Isa::kAvx512:
      return "avx512";
    case Isa::kAvx2:
      return "avx2";
    case Isa::kPortable:
      return "portable";
  }
  return "unknown";
}

namespace {

// `given` says where the name comes from, `remedy` what else to do.
Isa find_isa(const std::string& name, const char* given, const char* remedy) {
  std::vector<std::string> names;
  for (Isa isa : supported_isas()) {
    if (name == name_of(isa)) return isa;
    names.emplace_back(name_of(isa));
  }
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}'{}' is not one of the instruction sets that this machine runs: {}{}",
                          given, printable(name), joined(names), remedy));
}

}  // namespace

Isa isa_from_name(const std::string& name) { return find_isa(name, "", ""); }

Isa default_isa() {
  const char* name = std::getenv("OUZEL_ISA");
  return name != nullptr && *name != '\0'
             ? find_isa(name, "OUZEL_ISA=", "; unset it to use the best")
             : supported_isas().front();
}

int default_threads() {
  if (const char* text = std::getenv("OUZEL_THREADS"); text != nullptr && *text != '\0') {
    char* end = nullptr;
    const long n = std::strtol(text, &end, 10);
    if (*end != '\0' || n < 1 || n > 1024) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("OUZEL_THREADS='{}' is not a number from 1 to 1024", text));
    }
    return static_cast<int>(n);
  }
  cpu_set_t set;
  int threads = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : 1;
  // cgroup v2: "quota period" in microseconds, or "max period".
  std::ifstream quota("/sys/fs/cgroup/cpu.max");
  std::string limit;
  double period = 0;
  if (quota >> limit >> period && limit != "max" && period > 0) {
    const double cores = std::strtod(limit.c_str(), nullptr) / period;
    threads = std::min(threads, std::max(1, static_cast<int>(std::lround(cores))));
  }
  return std::max(1, threads);
}

Context::Context(ContextOptions options) {
  if (options.threads < 0 || options.threads > 1024) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a context takes 1 to 1024 threads (0: all that are free), not {}",
                            options.threads));
  }
  const std::vector<Isa> have = supported_isas();
  if (std::find(have.begin(), have.end(), options.isa) == have.end()) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("this machine does not run the instruction set {}", name_of(options.isa)));
  }
  if (options.threads == 0) options.threads = default_threads();
  impl_ = std::make_unique<Impl>(std::move(options));
}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

int Context::threads() const { return impl_->options().threads; }
Isa Context::isa() const { return impl_->options().isa; }
std::size_t Context::scratch_bytes() const { return impl_->scratch_bytes(); }

Context::Impl::Impl(ContextOptions options)
    : options_(std::move(options)),
      pool_(options_.threads),
      small_second_level_cache_(is_small_second_level(cache_bytes(2))),
      scratch_(static_cast<std::size_t>(options_.threads)) {}

void Context::Impl::reserve(std::size_t bytes_per_worker) {
  pool_.check_idle();
  for (Scratch& s : scratch_) {
    if (s.memory_.bytes() < bytes_per_worker) {
      s.memory_ = Buffer();  // free first: the peak is the larger of the two, not the sum
      s.memory_ = Buffer(bytes_per_worker);
    }
  }
}

Scratch& Context::Impl::begin_task(int worker) {
  Scratch& s = scratch_[static_cast<std::size_t>(worker)];
  s.used_ = 0;
  if (options_.poison_scratch && s.memory_.bytes() != 0) {
    std::memset(s.memory_.data(), 0xff, s.memory_.bytes());  // 0xffffffff is a NaN
  }
  return s;
}

void* Context::Impl::shared_bytes(std::size_t bytes) {
  pool_.check_idle();
  if (shared_.bytes() < bytes) {
    shared_ = Buffer();
    shared_ = Buffer(bytes);
  }
  if (options_.poison_scratch && bytes != 0) std::memset(shared_.data(), 0xff, bytes);
  return shared_.data();
}

std::size_t Context::Impl::scratch_bytes() const {
  std::size_t total = shared_.bytes();
  for (const Scratch& s : scratch_) total += s.memory_.bytes();
  return total;
}

void* Scratch::take_bytes(std::size_t bytes) {
  const std::size_t begin = used_;
  used_ += rounded(bytes);
  if (used_ > memory_.bytes()) {
    throw Error(ErrorKind::kOutOfMemory,
                fmt::format("an operator took {} bytes of scratch and had reserved {}", used_,
                            memory_.bytes()));
  }
  return static_cast<char*>(memory_.data()) + begin;
}

}  // namespace ouzel
