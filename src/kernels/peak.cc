// Peak by inline assembly: a compiler may not keep 12 accumulators in registers, this does. Latency
// 4 times 2 ports needs 8 independent chains; 12 leave room for the loop.
#include "src/kernels/peak.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

namespace ouzel {
namespace {

constexpr int kAccumulators = 12;
constexpr std::int64_t kBurst = 400'000;  // rounds: 0.9 ms at two instructions a cycle of 2.6 GHz

double sum(const float* lanes, int count) {
  double total = 0;
  for (int i = 0; i < count; ++i) total += lanes[i];
  return total;
}

#if defined(__x86_64__)
// REG is ymm or zmm; register 12 holds ones. The clobbered xmm names stand for the whole registers.
#define OUZEL_FMA(REG, I) "vfmadd231ps %%" REG "12, %%" REG "12, %%" REG I "\n\t"
#define OUZEL_ZERO(I) "vxorps %%xmm" I ", %%xmm" I ", %%xmm" I "\n\t"
#define OUZEL_STORE(REG, I, BYTES) "vmovups %%" REG I ", " I "*" BYTES "(%[out])\n\t"
#define OUZEL_EACH(X) \
  X("0") X("1") X("2") X("3") X("4") X("5") X("6") X("7") X("8") X("9") X("10") X("11")
#define OUZEL_BURST(NAME, REG, BYTES, LANES)                                        \
  std::int64_t NAME(std::int64_t iterations) {                                      \
    const float one = 1;                                                            \
    float out[kAccumulators * LANES] = {};                                          \
    asm volatile(OUZEL_EACH(OUZEL_ZERO)                                           \
                 "vbroadcastss %[one], %%" REG "12\n"                             \
                 "1:\n\t" OUZEL_EACH(NAME##_FMA)                                  \
                 "dec %[n]\n\t"                                                   \
                 "jnz 1b\n\t" OUZEL_EACH(NAME##_STORE) "vzeroupper"               \
                 : [n] "+r"(iterations)                                           \
                 : [one] "m"(one), [out] "r"(out)                                 \
                 : "memory", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", \
                   "xmm8", "xmm9", "xmm10", "xmm11", "xmm12"); \
    return static_cast<std::int64_t>(sum(out, kAccumulators * LANES));              \
  }
#define avx2_burst_FMA(I) OUZEL_FMA("ymm", I)
#define avx2_burst_STORE(I) OUZEL_STORE("ymm", I, "32")
#define avx512_burst_FMA(I) OUZEL_FMA("zmm", I)
#define avx512_burst_STORE(I) OUZEL_STORE("zmm", I, "64")

// A float of 1 is the pair of bfloat16 numbers 0 and 1.
#define bf16_dots_FMA(I) "vdpbf16ps %%zmm12, %%zmm12, %%zmm" I "\n\t"
#define bf16_dots_STORE(I) OUZEL_STORE("zmm", I, "64")

OUZEL_BURST(avx2_burst, "ymm", "32", 8)
OUZEL_BURST(avx512_burst, "zmm", "64", 16)
OUZEL_BURST(bf16_dots, "zmm", "64", 16)
#endif

using Vector4 = float __attribute__((vector_size(16)));

template <std::size_t... I>
std::int64_t portable_burst(std::int64_t iterations, std::index_sequence<I...>) {
  volatile float opaque = 1;  // a multiplication by a known 1 would be removed
  const float x = opaque;
  const Vector4 one = {x, x, x, x};
  Vector4 acc[kAccumulators] = {};
  for (std::int64_t n = 0; n < iterations; ++n) ((acc[I] = acc[I] * one + one), ...);
  double total = 0;
  for (const Vector4& a : acc) total += static_cast<double>(a[0]) + a[1] + a[2] + a[3];
  return static_cast<std::int64_t>(total);
}

}  // namespace

std::int64_t fma_burst(Isa isa, std::int64_t iterations) {
  switch (isa) {
#if defined(__x86_64__)
    case Isa::kAvx512:
      return avx512_burst(iterations);
    case Isa::kAvx2:
      return avx2_burst(iterations);
#endif
    default:
      return portable_burst(iterations, std::make_index_sequence<kAccumulators>());
  }
}

bool has_bf16_dot() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

std::int64_t bf16_dot_burst([[maybe_unused]] std::int64_t iterations) {
#if defined(__x86_64__)
  return bf16_dots(iterations);
#else
  return 0;
#endif
}

double fma_peak_flops(Isa isa) {
  double best = 0;
  for (int burst = 0; burst < 5; ++burst) {
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t count = fma_burst(isa, kBurst);
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    best = std::max(best, 2.0 * static_cast<double>(count) / seconds.count());
  }
  return best;
}

}  // namespace ouzel
