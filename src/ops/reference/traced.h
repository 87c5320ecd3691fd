// What references by name are written with: traced arrays, and the functions that several share.
#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "src/ops/reference/autodiff.h"
#include "src/ops/reference/named.h"

namespace ouzel::reference {

using Int = std::int64_t;
using Vars = Array<Var>;

// Absent if there is none of this name.
inline const Vars& find(const Tensors<Var>& tensors, const std::string& name) {
  static const Vars absent;
  const auto found = tensors.find(name);
  return found == tensors.end() ? absent : found->second;
}

inline bool flag(const Setting& setting, const std::string& name) {
  const auto found = setting.numbers.find(name);
  return found != setting.numbers.end() && found->second != 0;
}
inline std::string text(const Setting& setting, const std::string& name) {
  const auto found = setting.texts.find(name);
  return found == setting.texts.end() ? "" : found->second;
}

// `scale`, or size^-0.5 where it is not set.
inline Var default_scale(const Setting& setting, Int size) {
  const auto found = setting.numbers.find("scale");
  return found != setting.numbers.end() ? found->second : 1 / std::sqrt(static_cast<double>(size));
}

inline Var sigmoid(const Var& x) { return Var(1) / (Var(1) + exp(-x)); }
inline Var silu(const Var& x) { return x * sigmoid(x); }
inline Var maximum(const Var& a, const Var& b) { return a < b ? b : a; }
// log(1 + e^x)
inline Var softplus(const Var& x) { return x.value > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }
inline Var log_sigmoid(const Var& x) { return -softplus(-x); }
// log(e^a + e^b); one of them may be -inf.
inline Var log_add(const Var& a, const Var& b) {
  if (std::isinf(a.value)) return b;
  if (std::isinf(b.value)) return a;
  return a < b ? b + log1p(exp(a - b)) : a + log1p(exp(b - a));
}
inline std::vector<Var> softmax(std::vector<Var> x) {
  double top = x.empty() ? 0 : x[0].value;
  for (const Var& v : x) top = std::max(top, v.value);
  Var sum = 0;
  for (Var& v : x) sum += v = exp(v - Var(top));
  for (Var& v : x) v = v / sum;
  return x;
}

}  // namespace ouzel::reference
