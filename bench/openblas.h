// OpenBLAS as a comparator, opened at run time: nothing of Ouzel links to it.
#pragma once

#include <cstdint>
#include <string>

namespace ouzel::bench {

enum class Transpose { kNo, kYes };

class OpenBlas {
 public:
  // The library, opened at the first call; null where it is not installed. It gets its best kernels
  // for this machine's instruction set: its own detection takes processors younger than itself (and
  // some virtual machines) for one without AVX, a fifth of the speed.
  static const OpenBlas* get();

  // "SkylakeX", ...: the kernels that it has chosen.
  std::string core() const { return core_(); }
  void set_threads(int threads) const { set_threads_(threads); }
  // c [m, n] = a b + beta c, row-major; a is [m, k] (or [k, m], transposed), b is [k, n] (or [n,
  // k]).
  void sgemm(Transpose ta, Transpose tb, std::int64_t m, std::int64_t n, std::int64_t k,
             const float* a, const float* b, float beta, float* c) const;
  // x [m, n] := l^-1 x (or its transpose's), row-major; l [m, m] is lower triangular with a
  // diagonal of ones, which is not read.
  void solve_unit_lower(Transpose tl, std::int64_t m, std::int64_t n, const float* l,
                        float* x) const;

 private:
  OpenBlas();
  using Sgemm = void (*)(int order, int ta, int tb, int m, int n, int k, float alpha,
                         const float* a, int lda, const float* b, int ldb, float beta, float* c,
                         int ldc);
  using Strsm = void (*)(int order, int side, int uplo, int trans, int diag, int m, int n,
                         float alpha, const float* a, int lda, float* b, int ldb);
  Sgemm sgemm_ = nullptr;
  Strsm strsm_ = nullptr;
  void (*set_threads_)(int) = nullptr;
  char* (*core_)() = nullptr;
};

}  // namespace ouzel::bench
