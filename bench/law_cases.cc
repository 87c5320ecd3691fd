// Every law with gates or an erase over the FMA peak: forward, backward and, against an in-place
// scale of the same state, one token. Useful operations: docs/performance.md.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/case.h"
#include "bench/measure.h"
#include "ouzel/context.h"
#include "ouzel/laws.h"
#include "src/kernels/law_rows.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kTokens = 2048, kHeads = 16;

enum class Gates { kMild, kHarsh, kStrong };

struct Input {
  const char* name;
  ConstTensor RecurrenceInputs::*value;
  Tensor RecurrenceInputGrads::*gradient;
};
constexpr Input kInputs[] = {
    {"q", &RecurrenceInputs::q, &RecurrenceInputGrads::q},
    {"k", &RecurrenceInputs::k, &RecurrenceInputGrads::k},
    {"v", &RecurrenceInputs::v, &RecurrenceInputGrads::v},
    {"g", &RecurrenceInputs::g, &RecurrenceInputGrads::g},
    {"beta", &RecurrenceInputs::beta, &RecurrenceInputGrads::beta},
    {"a", &RecurrenceInputs::a, &RecurrenceInputGrads::a},
    {"b", &RecurrenceInputs::b, &RecurrenceInputGrads::b},
    {"p", &RecurrenceInputs::p, &RecurrenceInputGrads::p},
    {"w", &RecurrenceInputs::w, &RecurrenceInputGrads::w},
    {"u", &RecurrenceInputs::u, &RecurrenceInputGrads::u},
    {"dt", &RecurrenceInputs::dt, &RecurrenceInputGrads::dt},
    {"A", &RecurrenceInputs::A, &RecurrenceInputGrads::A},
    {"D", &RecurrenceInputs::D, &RecurrenceInputGrads::D},
};

// What a law takes beside q, k and v, and its useful operations in units of K V.
struct LawCase {
  const MatrixLaw* law;
  std::vector<std::pair<std::string, std::string>> inputs;  // name, last axes of [B, T, H, ...]
  double forward, backward;
};
std::vector<LawCase> laws() {
  return {
      {&simple_gla, {{"g", ""}}, 4, 12},
      {&mamba2_ssd, {{"dt", ""}, {"A", "head"}, {"D", "head"}}, 4, 12},
      {&gla, {{"g", "K"}}, 4, 12},
      {&hgrn2, {{"g", "K"}}, 4, 12},
      {&rwkv5, {{"g", "head K"}, {"u", "head K"}}, 4, 12},
      {&rwkv6, {{"g", "K"}, {"u", "head K"}}, 4, 12},
      {&delta_rule, {{"beta", ""}}, 6, 14},
      {&gated_delta_rule, {{"g", ""}, {"beta", ""}}, 6, 16},
      {&kda, {{"g", "K"}, {"beta", ""}}, 6, 16},
      {&gdn2, {{"g", "K"}, {"b", "K"}, {"w", "V"}}, 6, 16},
      {&comba, {{"p", "K"}, {"g", ""}, {"beta", ""}}, 6, 16},
      {&iplr, {{"a", "K"}, {"b", "K"}}, 8, 20},
      {&dplr, {{"a", "K"}, {"b", "K"}, {"g", "K"}}, 8, 22},
      {&rwkv7, {{"a", "K"}, {"b", "K"}, {"g", "K"}}, 8, 22},
  };
}

std::vector<std::int64_t> shape_of(const std::string& axes, std::int64_t tokens, std::int64_t d) {
  if (axes == "head") return {kHeads};
  if (axes == "head K") return {kHeads, d};
  if (axes.empty()) return {1, tokens, kHeads};
  return {1, tokens, kHeads, d};
}

void for_each(const Data& data, const std::function<float(float)>& map) {
  std::transform(data.data(), data.data() + data.size(), data.data(), map);
}

// Rows of length 1: what keeps an erase contractive.
void normalize_rows(const Data& data, std::int64_t d) {
  for (float* row = data.data(); row < data.data() + data.size(); row += d) {
    double square = 0;
    for (std::int64_t i = 0; i < d; ++i) square += static_cast<double>(row[i]) * row[i];
    const auto factor = static_cast<float>(1 / std::sqrt(square));
    std::transform(row, row + d, row, [&](float x) { return factor * x; });
  }
}

// Standard normal numbers into what an input of this name means.
void shape_values(const std::string& name, Gates gates, const Data& data, std::int64_t d) {
  const auto sigmoid = [](float x) { return 1 / (1 + std::exp(-x)); };
  if (name == "g" && gates == Gates::kStrong) {
    for_each(data, [](float) { return -20.0f; });
  } else if (name == "g" && gates == Gates::kHarsh) {
    // Decays of 0 for 2 %, 1e-7 for 28 %.
    for_each(data, [&](float x) {
      if (x < -2.054f) return -std::numeric_limits<float>::infinity();
      return x < -0.524f ? -16.1f : std::log(sigmoid(x)) / 16;
    });
  } else if (name == "g") {
    for_each(data, [&](float x) { return std::log(sigmoid(x)) / 16; });
  } else if (name == "beta" || name == "w" || name == "dt") {
    for_each(data, sigmoid);
  } else if (name == "A") {
    for_each(data, [&](float x) { return -sigmoid(x); });
  } else if (name == "a") {
    normalize_rows(data, d);
    for_each(data, [](float x) { return -x; });
  } else if (name == "b" || name == "p") {
    normalize_rows(data, d);
  }
}

class Problem {
 public:
  Problem(const LawCase& law, std::int64_t tokens, std::int64_t d, Gates gates)
      : o_(Data::empty({1, tokens, kHeads, d})) {
    add("q", "K", tokens, d, gates);
    if (law.law != &hgrn2) add("k", "K", tokens, d, gates);  // its key is 1 - e^g
    add("v", "V", tokens, d, gates);
    for (const auto& [name, axes] : law.inputs) add(name, axes, tokens, d, gates);
    if (law.forward > 4) normalize_rows(data_.at("k"), d);
    if (data_.contains("a")) {
      // dplr and rwkv7 erase along one key: a = -kk, b = kk times a gate.
      const Data &a = data_.at("a"), &b = data_.at("b");
      std::transform(a.data(), a.data() + a.size(), b.data(), [](float x) { return -0.6f * x; });
    }
    outputs.o = o_.tensor();
  }

  RecurrenceInputs inputs;
  RecurrenceOutputs outputs;
  const Data& o() const { return o_; }

  // Memory for the gradients of all inputs.
  RecurrenceInputGrads gradients() {
    RecurrenceInputGrads grads;
    for (const Input& input : kInputs) {
      const auto found = data_.find(input.name);
      if (found == data_.end()) continue;
      const Tensor like = found->second.tensor();
      const auto [entry, made] = gradients_.emplace(
          input.name, Data::empty({like.extent.begin(), like.extent.begin() + like.rank}));
      std::fill_n(entry->second.data(), entry->second.size(), 0.0f);  // parameters are added to
      grads.*input.gradient = entry->second.tensor();
    }
    return grads;
  }
  void consume(const char* what) const {
    for (const auto& [name, data] : gradients_) data.consume(what);
  }

 private:
  void add(const std::string& name, const std::string& axes, std::int64_t tokens, std::int64_t d,
           Gates gates) {
    const auto entry = data_.emplace(name, Data(data_.size() + 1, shape_of(axes, tokens, d))).first;
    shape_values(name, gates, entry->second, d);
    for (const Input& input : kInputs) {
      if (name == input.name) inputs.*input.value = entry->second.tensor();
    }
  }

  std::map<std::string, Data> data_, gradients_;
  Data o_;
};

Row row_of(const LawCase& law, const char* pass, std::string variant, std::int64_t tokens,
           std::int64_t d, const char* clock) {
  return {.op = law.law->name(),
          .pass = pass,
          .variant = std::move(variant),
          .B = 1,
          .H = kHeads,
          .T = tokens,
          .K = d,
          .V = d,
          .clock = clock};
}

double flops(double factor, std::int64_t d) {
  return factor * static_cast<double>(kTokens * kHeads * d * d);
}

Row forward(const LawCase& law, std::int64_t d, Gates gates, const char* variant,
            const CaseOptions& bench) {
  Problem p(law, kTokens, d, gates);
  Context context = bench.context(1);
  Row row = with_efficiency(row_of(law, "forward", variant, kTokens, d,
                                   "one call, from the strided arrays to the strided arrays"),
                            context, flops(law.forward, d), bench.runs,
                            [&] { (*law.law)(context, {}, p.inputs, p.outputs); });
  p.o().consume(law.law->name());
  return row;
}

Row backward(const LawCase& law, std::int64_t d, Gates gates, const char* variant,
             const CaseOptions& bench) {
  Problem p(law, kTokens, d, gates);
  const Data d_o(99, {1, kTokens, kHeads, d});
  const RecurrenceInputGrads grads = p.gradients();
  Context context = bench.context(1);
  const Buffer saved(law.law->saved_bytes({}, p.inputs));
  p.outputs.saved = saved.data();
  (*law.law)(context, {}, p.inputs, p.outputs);
  Row row =
      row_of(law, "backward", variant, kTokens, d,
             "the gradients of all inputs of one call; the forward call before it is outside");
  if (saved.bytes() != 0) {
    row.bytes_token = static_cast<double>(saved.bytes()) / static_cast<double>(kTokens * kHeads);
  }
  row = with_efficiency(row, context, flops(law.backward, d), bench.runs, [&] {
    law.law->backward(context, {}, p.inputs, saved.data(), {.o = d_o.tensor()}, grads);
  });
  p.consume(law.law->name());
  return row;
}

// A token beside S = 0.999 S, of both parts of S where the position asks for two.
Row step(const LawCase& law, std::int64_t d, bool two_parts, const CaseOptions& bench) {
  constexpr int kSteps = 100;  // of one measurement: one takes tens of microseconds
  Problem p(law, 1, d, Gates::kMild);
  const std::int64_t rows = kHeads * d * (two_parts ? 2 : 1);
  const Data s(7, {rows, d});
  const std::vector<float> factors(static_cast<std::size_t>(rows), 0.999f);
  std::vector<SequenceState> storage;
  StateView state = state_view(View<float, 4>(s.data(), {1, kHeads, d, d}), {}, storage);
  if (two_parts) {
    std::fill_n(s.data() + s.size() / 2, s.size() / 2, 0.0f);
    storage[0].s_residue = s.data() + s.size() / 2;
    storage[0].position = 1'000'000;
  }
  Context context = bench.context(1);
  Row row = with_ratio(
      row_of(law, "step",
             two_parts ? "an in-place scale of its state's two parts over it"
                       : "an in-place scale of its state over it",
             1, d,
             "100 tokens of one sequence; ratio: the time of S = 0.999 S over that of a token"),
      bench.runs,
      [&] {
        for (int i = 0; i < kSteps; ++i) {
          law.law->step(context, {}, p.inputs, state, p.outputs.o);
        }
      },
      [&] {
        for (int i = 0; i < kSteps; ++i) {
          scale_rows(context.isa(), rows, d, factors.data(), s.data());
        }
      });
  p.o().consume(law.law->name());
  return row;
}

}  // namespace

void add_law_cases(std::vector<Case>& cases) {
  const auto add = [&](std::string name, std::int64_t d, auto&& measure) {
    cases.push_back({fmt::format("{}/{}", name, d), [=](const CaseOptions& options) {
                       return std::vector<Row>{measure(options)};
                     }});
  };
  for (const LawCase& law : laws()) {
    const std::string name = law.law->name();
    const bool gated = std::any_of(law.inputs.begin(), law.inputs.end(),
                                   [](const auto& input) { return input.first == "g"; });
    for (const std::int64_t d : {64, 128}) {
      add(name + "/forward", d, [=](const CaseOptions& bench) {
        return forward(law, d, Gates::kMild, "mild gates", bench);
      });
      add(name + "/backward", d, [=](const CaseOptions& bench) {
        return backward(law, d, Gates::kMild, "mild gates", bench);
      });
      add(name + "/step", d, [=](const CaseOptions& bench) { return step(law, d, false, bench); });
      add(name + "/step_two_parts", d,
          [=](const CaseOptions& bench) { return step(law, d, true, bench); });
      if (!gated) continue;
      add(name + "/harsh_forward", d, [=](const CaseOptions& bench) {
        return forward(law, d, Gates::kHarsh, "2 % of decays 0, 28 % 1e-7", bench);
      });
      add(name + "/strong_forward", d, [=](const CaseOptions& bench) {
        return forward(law, d, Gates::kStrong, "all gates -20", bench);
      });
      add(name + "/harsh_backward", d, [=](const CaseOptions& bench) {
        return backward(law, d, Gates::kHarsh, "2 % of decays 0, 28 % 1e-7", bench);
      });
    }
  }
}

}  // namespace ouzel::bench
