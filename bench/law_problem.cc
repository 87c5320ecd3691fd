#include "bench/law_problem.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace ouzel::bench {
namespace {

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

std::vector<std::int64_t> shape_of(const std::string& axes, std::int64_t tokens, std::int64_t d) {
  if (axes == "head") return {kLawHeads};
  if (axes == "head K") return {kLawHeads, d};
  if (axes.empty()) return {1, tokens, kLawHeads};
  return {1, tokens, kLawHeads, d};
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

}  // namespace

std::vector<LawCase> law_cases() {
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

LawProblem::LawProblem(const LawCase& law, std::int64_t tokens, std::int64_t d, Gates gates)
    : o_(Data::empty({1, tokens, kLawHeads, d})) {
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

RecurrenceInputGrads LawProblem::gradients() {
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
void LawProblem::consume(const char* what) const {
  for (const auto& [name, data] : gradients_) data.consume(what);
}

void LawProblem::add(const std::string& name, const std::string& axes, std::int64_t tokens,
                     std::int64_t d, Gates gates) {
  const auto entry = data_.emplace(name, Data(data_.size() + 1, shape_of(axes, tokens, d))).first;
  shape_values(name, gates, entry->second, d);
  for (const Input& input : kInputs) {
    if (name == input.name) inputs.*input.value = entry->second.tensor();
  }
}

}  // namespace ouzel::bench
