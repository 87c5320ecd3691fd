// One operator, called directly: linear attention over a sequence in two halves. The state carries
// the first half's sums into the second, so the result is that of the whole.
#include <cmath>
#include <cstdint>
#include <iostream>
#include <vector>

#include <ouzel/ouzel.h>

int main() {
  constexpr std::int64_t kTokens = 128, kHeads = 2, kSize = 16;
  std::vector<float> q(kTokens * kHeads * kSize), k(q.size()), v(q.size()), o(q.size());
  for (std::size_t i = 0; i < q.size(); ++i) {
    const double x = static_cast<double>(i);
    q[i] = static_cast<float>(std::sin(x));
    k[i] = static_cast<float>(std::cos(1.3 * x));
    v[i] = static_cast<float>(std::sin(0.7 * x));
  }
  const auto rows = [](std::vector<float>& x, std::int64_t begin, std::int64_t length) {
    return ouzel::View<float, 4>(x.data() + begin * kHeads * kSize, {1, length, kHeads, kSize});
  };

  ouzel::Context context;
  ouzel::LinearAttentionOptions options;
  options.feature_map.kind = ouzel::FeatureMapKind::kElu1;
  options.normalize = true;

  ouzel::linear_attention(
      context, options,
      {.q = rows(q, 0, kTokens), .k = rows(k, 0, kTokens), .v = rows(v, 0, kTokens)},
      {.o = rows(o, 0, kTokens)});

  std::vector<float> s(kHeads * kSize * kSize), z(kHeads * kSize), halves(o.size());
  std::vector<ouzel::SequenceState> storage;
  const ouzel::StateView state =
      ouzel::state_view(ouzel::View<float, 4>(s.data(), {1, kHeads, kSize, kSize}),
                        ouzel::View<float, 3>(z.data(), {1, kHeads, kSize}), storage);
  for (const std::int64_t begin : {std::int64_t{0}, kTokens / 2}) {
    const std::int64_t half = kTokens / 2;
    ouzel::linear_attention(context, options,
                            {.q = rows(q, begin, half),
                             .k = rows(k, begin, half),
                             .v = rows(v, begin, half),
                             .initial_state = state},
                            {.o = rows(halves, begin, half), .final_state = state});
  }

  std::cout << "o of the last token, first head: " << o[o.size() - kHeads * kSize] << '\n'
            << "the same from two halves:        " << halves[o.size() - kHeads * kSize] << '\n';
  return o == halves ? 0 : 1;  // the split is a multiple of 64 tokens: the same bits
}
