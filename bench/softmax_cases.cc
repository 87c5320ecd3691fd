// Softmax attention over the FMA peak: useful operations are 2 T T H d forward (half of the matrix
// is masked) and 7 T T H d forward and backward, which recomputes the scores.
#include <fmt/format.h>

#include <vector>

#include "bench/case.h"
#include "bench/measure.h"
#include "ouzel/context.h"
#include "ouzel/softmax_attention.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kTokens = 4096, kHeads = 2;

Row softmax(std::int64_t d, bool backward, const CaseOptions& options) {
  const auto random = [&](std::uint64_t seed) { return Data(seed, {1, kTokens, kHeads, d}); };
  const auto empty = [&] { return Data::empty({1, kTokens, kHeads, d}); };
  const Data q = random(1), k = random(2), v = random(3), d_o = random(4);
  const Data o = empty(), dq = empty(), dk = empty(), dv = empty();
  std::vector<double> lse(kTokens * kHeads);
  const Tensor lse_view(lse.data(), DType::kF64, {1, kTokens, kHeads});
  Context context = options.context(1);
  const SoftmaxAttentionOptions causal;
  const SoftmaxAttentionInputs inputs{.q = q.tensor(), .k = k.tensor(), .v = v.tensor()};
  SoftmaxAttentionOutputs outputs{.o = o.tensor()};
  if (backward) outputs.lse = lse_view;

  const double flops = (backward ? 7.0 : 2.0) * static_cast<double>(kTokens * kTokens * kHeads * d);
  Row row{.op = "softmax_attention",
          .pass = backward ? "forward_backward" : "forward",
          .variant = "causal",
          .B = 1,
          .H = kHeads,
          .T = kTokens,
          .K = d,
          .V = d,
          .clock = backward ? "a forward call and a backward call" : "one call"};
  row = with_efficiency(row, context, flops, options.runs, [&] {
    softmax_attention(context, causal, inputs, outputs);
    if (backward) {
      softmax_attention_backward(context, causal, inputs, o.tensor(), lse_view, d_o.tensor(),
                                 dq.tensor(), dk.tensor(), dv.tensor());
    }
  });
  o.consume("softmax_attention");
  if (backward) {
    for (const Data* gradient : {&dq, &dk, &dv}) gradient->consume("softmax_attention_backward");
  }
  return row;
}

}  // namespace

void add_softmax_cases(std::vector<Case>& cases) {
  for (const std::int64_t d : {64, 128}) {
    for (const bool backward : {false, true}) {
      cases.push_back(
          {fmt::format("softmax_attention/{}/{}", backward ? "forward_backward" : "forward", d),
           [=](const CaseOptions& options) {
             return std::vector<Row>{softmax(d, backward, options)};
           }});
    }
  }
}

}  // namespace ouzel::bench
