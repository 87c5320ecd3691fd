#include "tests/law_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "src/ops/law.h"
#include "src/ops/registry.h"
#include "tests/case_parts.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr const char* kGateNames[] = {"none", "weak",  "mild",  "strong",
                                      "kill", "reset", "mixed", "harsh"};
constexpr std::size_t kGates = 8;

const ouzel::Law& law_of(const MatrixCase& c) {
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->name == c.law) return *law;
  }
  throw std::invalid_argument("no law " + c.law);
}

Doubles draw_gates(Random& random, Gates gates, const std::vector<Int>& shape) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto draw_one = [&]() -> double {
    const double mild = -0.01 - 0.49 * static_cast<double>(random.uniform(0, 1));
    switch (gates) {
      case Gates::kNone:
        return 0;
      case Gates::kWeak:
        return -1e-5;
      case Gates::kMild:
        return mild;
      case Gates::kStrong:
        return -20;
      case Gates::kKill:
        return -1000;
      case Gates::kReset:
        return -kInfinity;
      case Gates::kMixed: {
        const double all[] = {-1e-4, -0.01, -1, -3, -20};
        return all[random.bits() % 5];
      }
      case Gates::kHarsh: {
        const double all[] = {0, -20, -1000, -kInfinity, mild, mild, mild, mild};
        return all[random.bits() % 8];
      }
    }
    return 0;
  };
  Doubles x(shape);
  for (double& g : x.data) g = static_cast<double>(static_cast<float>(draw_one()));
  return x;
}

// Rows of the last axis, divided by their length.
Doubles unit_rows(Doubles x) {
  const auto size = static_cast<std::size_t>(x.shape.back());
  for (std::size_t r = 0; r < x.data.size(); r += size) {
    double sum = 0;
    for (std::size_t i = 0; i < size; ++i) sum += x.data[r + i] * x.data[r + i];
    for (std::size_t i = 0; i < size; ++i) {
      x.data[r + i] = static_cast<double>(static_cast<float>(x.data[r + i] / std::sqrt(sum)));
    }
  }
  return x;
}

// `x` times `factor`, each number off by up to `spread` of the size of a unit row's.
Doubles near(Random& random, const Doubles& x, double factor, double spread) {
  Doubles y = x;
  for (double& z : y.data) {
    const double off = spread / std::sqrt(static_cast<double>(x.shape.back()));
    z = static_cast<double>(static_cast<float>(factor * z + random.uniform(-off, off)));
  }
  return y;
}

// An input. Erases must not make the state grow: their keys have unit length, the other vectors of
// a rank-1 erase are near them, strengths are below 1.
Doubles draw_input(Random& random, const MatrixCase& c, const LawInput& input,
                   std::vector<Int> shape, const ByName& call) {
  const ouzel::Law& law = law_of(c);
  const auto earlier = [&](LawRole role) { return call.inputs.at(law.find(role)->name); };
  switch (input.role) {
    case LawRole::kQuery:
    case LawRole::kValue:
      return draw(random, c.data, std::move(shape));
    case LawRole::kKey:
      if (law.erase != EraseKind::kCollinear || c.l2norm) {
        return draw(random, c.data, std::move(shape));
      }
      return unit_rows(draw(random, c.data, std::move(shape)));
    case LawRole::kDecay:
    case LawRole::kValueDecay:
    case LawRole::kRate:
      return draw_gates(random, c.gates, shape);
    case LawRole::kStep:
      return random_array<double>(random, std::move(shape), 0.1, 1);
    case LawRole::kStrength:
      return random_array<double>(random, std::move(shape), 0.05, 0.95);
    case LawRole::kEraseKey:
      if (law.erase == EraseKind::kCollinear) return near(random, earlier(LawRole::kKey), 1, 0.1);
      return unit_rows(draw(random, c.data, std::move(shape)));
    case LawRole::kEraseWrite:
      return near(random, earlier(LawRole::kEraseKey), -0.6, 0.05);
    case LawRole::kEraseGate:
      return random_array<double>(random, std::move(shape), 0.3, 0.7);
    case LawRole::kWriteGate:
      return random_array<double>(random, std::move(shape), 0.05, 0.95);
    case LawRole::kBonus:
    case LawRole::kSkip:
      return random_array<double>(random, std::move(shape));
  }
  return {};
}

// The extents of a law's shape: the richer of two alternatives if `optional`.
std::vector<Int> shape_of(const std::string& letters, const std::map<std::string, Int>& extents,
                          bool optional) {
  const std::size_t bar = letters.find('|');
  std::string rest = bar == std::string::npos ? letters
                     : optional               ? letters.substr(bar + 1)
                                              : letters.substr(0, bar);
  std::vector<Int> shape;
  while (!rest.empty()) {
    const std::size_t space = std::min(rest.find(' '), rest.size());
    shape.push_back(extents.at(rest.substr(0, space)));
    rest.erase(0, space + 1);
  }
  return shape;
}

MatrixCase matrix_case(const Row& r) {
  return {matrix_laws()[r[0]]->name,
          kTokens[r[1]],
          kSizes[r[3]],
          kSizes[r[4]],
          static_cast<Layout>(r[5]),
          static_cast<Heads>(r[6]),
          r[7] == 1,
          static_cast<Gates>(r[2]),
          static_cast<Data>(r[8]),
          r[9] == 1,
          r[10] == 1,
          r[11] == 1};
}
std::vector<std::size_t> matrix_choices() {
  return {matrix_laws().size(),
          kTokens.size(),
          kGates,
          kSizes.size(),
          kSizes.size(),
          3,
          5,
          2,
          3,
          2,
          2,
          2};
}

}  // namespace

std::string name_of(const MatrixCase& c) {
  return fmt::format("{} T {} K {} V {} {} heads {}{} gates {} {}{}{}{}", c.law, c.tokens, c.keys,
                     c.values, name(kLayoutNames, c.layout), name(kHeadNames, c.heads),
                     c.reverse ? " reverse" : "", name(kGateNames, c.gates),
                     name(kDataNames, c.data), c.states ? " states" : "",
                     c.optional ? " optional" : "", c.l2norm ? " l2norm" : "");
}

bool exists(const MatrixCase& c) {
  const ouzel::Law& law = law_of(c);
  const bool gated = law.has(LawRole::kDecay) || law.has(LawRole::kRate);
  if (!gated && c.gates != Gates::kNone) return false;
  return !c.l2norm || find_operator(c.law).find_attribute("use_qk_l2norm") != nullptr;
}

// The gradient of a rate is a sum over all tokens: a single number may be what cancels.
bool has_gradients(const MatrixCase& c) {
  return !(law_of(c).has(LawRole::kRate) && c.heads == Heads::kOne);
}

// The gradient of a direction where a row has none (one number), or points the same way as all;
// that of an erase's strength where it erases just what it writes.
bool is_flat(const MatrixCase& c) {
  const bool constant = c.data == Data::kConstant;
  return (c.l2norm && (c.keys == 1 || constant)) ||
         (law_of(c).erase != EraseKind::kNone && constant);
}

// After some equal tokens an erase finds just what it writes, unless that has decayed meanwhile:
// the terms of its strength's gradient, V products of values and V of what is read, cancel.
bool is_rounding(const MatrixCase& c, const std::string& gradient) {
  const LawInput* strength = law_of(c).find(LawRole::kStrength);
  return law_of(c).erase != EraseKind::kNone && strength != nullptr &&
         gradient == std::string("d") + strength->name && c.data == Data::kConstant &&
         c.tokens >= 1000 && (c.gates == Gates::kNone || c.gates == Gates::kWeak);
}

Call make_call(const MatrixCase& c, std::uint64_t seed) {
  Random random(seed);
  const ouzel::Law& law = law_of(c);
  const HeadCounts heads = head_counts(c.heads);
  const Arrangement at = arrange(c.layout, c.tokens);
  const Int rows = law.many_rows() ? 2 + static_cast<Int>(seed % 2) : 1;
  const std::map<std::string, Int> extents = {
      {"B", at.batch}, {"T", at.tokens}, {"TN", at.tokens * rows}, {"HQ", heads.q}, {"HK", heads.k},
      {"HV", heads.v}, {"K", c.keys},    {"V", c.values}};
  ByName a;
  a.op = c.law;
  a.segments = at.segments;
  if (c.reverse) a.attributes["reverse"] = "true";
  if (c.l2norm) a.attributes["use_qk_l2norm"] = "true";
  if (law.many_rows()) a.attributes["num_householder"] = std::to_string(rows);
  for (const LawInput& input : law.inputs) {
    if (input.name == nullptr || (input.optional && !c.optional)) continue;
    a.inputs[input.name] =
        draw_input(random, c, input, shape_of(input.shape, extents, c.optional), a);
  }
  Call call;
  const std::vector<Int> state{a.segments.count(), heads.v, c.keys, c.values};
  if (c.states) {
    a.inputs["initial_state"] = random_array<double>(random, state);
    call.upstream["dht"] = draw(random, c.data, state);
  }
  call.upstream["do"] =
      draw(random, c.data, {at.batch, at.tokens, std::max(heads.q, heads.v), c.values});
  const Segments segments = a.segments;
  call.arguments = std::move(a);
  for (const Slot& slot : slots(call)) {
    if (slot.role == Role::kToken) poison_padding(*slot.array, segments, slot.rows);
  }
  return call;
}

std::vector<MatrixCase> matrix_cases() { return cover(matrix_choices(), matrix_case); }
std::vector<MatrixCase> all_matrix_cases() {
  return product<MatrixCase>(matrix_choices(), 3, matrix_case);
}

std::vector<MatrixCase> matrix_samples(Int tokens) {
  std::vector<MatrixCase> cases;
  std::size_t next = 0;
  for (const ouzel::Law* law : matrix_laws()) {
    MatrixCase c{law->name, tokens, 24, 40};
    c.heads = static_cast<Heads>(next % 5);
    c.gates = next % 2 == 0 ? Gates::kMixed : Gates::kHarsh;
    c.states = true;
    c.optional = next % 3 != 0;
    c.l2norm = next % 2 == 1;
    if (!exists(c)) c.l2norm = false;
    if (!exists(c)) c.gates = Gates::kNone;
    cases.push_back(c);
    ++next;
  }
  // Laws of one decay a token whose rows are whole pieces are scanned several heads at once.
  for (const char* law : {"simple_gla", "mamba2_ssd"}) {
    for (const Gates gates : {Gates::kMixed, Gates::kHarsh}) {
      MatrixCase c{law, tokens, 32, 32};
      c.gates = gates;
      c.states = true;
      c.optional = gates == Gates::kHarsh;
      cases.push_back(c);
    }
  }
  return cases;
}

}  // namespace ouzel::test
