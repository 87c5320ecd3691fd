// Our tile GEMM at the shapes of a small language model, over OpenBLAS in the same run.
#include <fmt/format.h>

#include <utility>

#include "bench/case.h"
#include "bench/measure.h"
#include "bench/openblas.h"
#include "ouzel/context.h"
#include "src/kernels/peak.h"
#include "src/ops/matmul.h"

namespace ouzel::bench {
namespace {

enum class GemmForm { kForward, kInputGradient, kWeightGradient };

// x [m, k], w [n, k], y [m, n].
std::vector<Row> gemm(GemmForm form, std::int64_t m, std::int64_t n, std::int64_t k,
                      const CaseOptions& options) {
  const Data x(1, {m, k}), w(2, {n, k}, 0.05), y(3, {m, n});
  const auto view = [](const Data& d) { return d.tensor().view<float, 2>(); };
  Context context = options.context(1);
  PackedMatrix packed;
  packed.pack(context, view(w));

  Row row{.op = "gemm", .B = 1, .H = 1, .T = m, .K = k, .V = n};
  std::function<void()> ours, theirs;
  const Data* result = nullptr;
  const OpenBlas* blas = OpenBlas::get();
  if (blas != nullptr) blas->set_threads(1);
  switch (form) {
    case GemmForm::kForward:
      row.pass = "forward";
      row.variant = "y = x W^T";
      row.clock = "one call; W was packed before (once per optimiser step)";
      result = &y;
      ours = [&] { linear(context, view(x), packed, view(y)); };
      theirs = [&] {
        blas->sgemm(Transpose::kNo, Transpose::kYes, m, n, k, x.data(), w.data(), 0, y.data());
      };
      break;
    case GemmForm::kInputGradient:
      row.pass = "backward";
      row.variant = "dx = dy W";
      row.clock = "one call, W packed within";
      result = &x;
      ours = [&] { linear_backward_input(context, view(y), view(w), view(x)); };
      theirs = [&] {
        blas->sgemm(Transpose::kNo, Transpose::kNo, m, k, n, y.data(), w.data(), 0, x.data());
      };
      break;
    case GemmForm::kWeightGradient:
      row.pass = "backward";
      row.variant = "dW += dy^T x";
      row.clock = "one call, all packing within";
      result = &w;
      ours = [&] { linear_backward_weight(context, view(y), view(x), view(w)); };
      theirs = [&] {
        blas->sgemm(Transpose::kYes, Transpose::kNo, n, k, m, y.data(), x.data(), 1, w.data());
      };
      break;
  }
  const double flops = 2.0 * static_cast<double>(m * n * k);
  Row efficiency = with_efficiency(row, context, flops, options.runs, ours);
  result->consume("gemm");
  if (blas == nullptr) {
    efficiency.variant += "; OpenBLAS is not installed: no ratio";
    return {efficiency};
  }
  row.variant += ", over OpenBLAS " + blas->core();
  row.clock += "; ratio: OpenBLAS's time over ours";
  return {std::move(efficiency), with_ratio(row, options.runs, ours, theirs)};
}

// What the machine's own products of bfloat16 numbers would give a matrix form of the laws.
std::vector<Row> bf16_dots(const CaseOptions& options) {
  if (!has_bf16_dot() || options.isa != Isa::kAvx512) return {};
  constexpr std::int64_t kRounds = 400'000;
  const Row row{
      .op = "bf16_dot",
      .variant = "peak over the FMA peak",
      .dtype = "bf16",
      .clock = "as many useful operations in registers; ratio: the FMAs' time over theirs"};
  return {with_ratio(
      row, options.runs, [] { bf16_dot_burst(kRounds); },
      [] { fma_burst(Isa::kAvx512, 2 * kRounds); })};
}

}  // namespace

void add_gemm_cases(std::vector<Case>& cases) {
  cases.push_back({"bf16_dot", bf16_dots});
  struct Shape {
    std::int64_t m, n, k;
  };
  for (const Shape s : {Shape{4096, 384, 384}, Shape{4096, 384, 1536}, Shape{4096, 1536, 384}}) {
    const std::string shape = fmt::format("{}x{}x{}", s.m, s.n, s.k);
    const auto add = [&](const char* name, GemmForm form) {
      cases.push_back({fmt::format("gemm/{}/{}", name, shape), [=](const CaseOptions& options) {
                         return gemm(form, s.m, s.n, s.k, options);
                       }});
    };
    add("forward", GemmForm::kForward);
    add("backward_input", GemmForm::kInputGradient);
    add("backward_weight", GemmForm::kWeightGradient);
  }
}

}  // namespace ouzel::bench
