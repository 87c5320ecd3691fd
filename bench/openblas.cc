#include "bench/openblas.h"

#include <dlfcn.h>

#include <cstdlib>

#include "ouzel/context.h"

namespace ouzel::bench {
namespace {

// cblas.h
constexpr int kRowMajor = 101, kNoTrans = 111, kTrans = 112, kLower = 122, kUnit = 132, kLeft = 141;

int narrow(std::int64_t n) { return static_cast<int>(n); }

}  // namespace

const OpenBlas* OpenBlas::get() {
  static const OpenBlas library;
  return library.sgemm_ && library.strsm_ && library.set_threads_ && library.core_ ? &library
                                                                                   : nullptr;
}

OpenBlas::OpenBlas() {
  // Settings of the user stay.
  switch (supported_isas().front()) {
    case Isa::kAvx512:
      setenv("OPENBLAS_CORETYPE", "SkylakeX", 0);
      break;
    case Isa::kAvx2:
      setenv("OPENBLAS_CORETYPE", "Haswell", 0);
      break;
    case Isa::kPortable:
      break;
  }
  // Its idle workers spin for 2^n cycles before they sleep, by default 2^26, about 30 ms, on a core
  // that the other side of the comparison needs; 2^4 is the least.
  setenv("OPENBLAS_THREAD_TIMEOUT", "4", 0);
  void* handle = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) return;
  sgemm_ = reinterpret_cast<Sgemm>(dlsym(handle, "cblas_sgemm"));
  strsm_ = reinterpret_cast<Strsm>(dlsym(handle, "cblas_strsm"));
  set_threads_ = reinterpret_cast<void (*)(int)>(dlsym(handle, "openblas_set_num_threads"));
  core_ = reinterpret_cast<char* (*)()>(dlsym(handle, "openblas_get_corename"));
}

void OpenBlas::sgemm(Transpose ta, Transpose tb, std::int64_t m, std::int64_t n, std::int64_t k,
                     const float* a, const float* b, float beta, float* c) const {
  const bool at = ta == Transpose::kYes, bt = tb == Transpose::kYes;
  sgemm_(kRowMajor, at ? kTrans : kNoTrans, bt ? kTrans : kNoTrans, narrow(m), narrow(n), narrow(k),
         1.0f, a, narrow(at ? m : k), b, narrow(bt ? k : n), beta, c, narrow(n));
}

void OpenBlas::solve_unit_lower(Transpose tl, std::int64_t m, std::int64_t n, const float* l,
                                float* x) const {
  strsm_(kRowMajor, kLeft, kLower, tl == Transpose::kYes ? kTrans : kNoTrans, kUnit, narrow(m),
         narrow(n), 1.0f, l, narrow(m), x, narrow(n));
}

}  // namespace ouzel::bench
