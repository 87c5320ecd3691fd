// A log decay of -inf, or of so much that its factor is 0 in float32, forgets all that was before,
// even NaN (docs/numerics.md, promise 3): every law that decays before it erases, scan and step,
// forward and backward, from position 0 and where sums are in two parts.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/ops/law.h"
#include "tests/contexts.h"
#include "tests/law_calls.h"
#include "tests/law_cases.h"
#include "tests/slices.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Int kTokens = 70;
constexpr Int kResets[] = {0, 1, 2, 3, 5, 15, 16, 18, 40, 63, 64, 69};
constexpr Int kLong = 2048;  // from here on sums are in two parts

ByName& by_name(Call& call) { return std::get<ByName>(call.arguments); }

const ouzel::Law& law_of(const MatrixCase& c) {
  return **std::ranges::find(matrix_laws(), c.law, [](const ouzel::Law* law) { return law->name; });
}

// The first token whose output knows nothing of what a reset forgets.
Int first_after(const ouzel::Law& law, Int reset) {
  return law.read == ReadKind::kBeforeWrite ? reset + 1 : reset;
}

// Laws whose token forgets by an input: those that erase from the undecayed state carry it on.
std::vector<MatrixCase> cases() {
  std::vector<MatrixCase> list;
  for (const ouzel::Law* law : matrix_laws()) {
    if (law->erase != EraseKind::kNone && !law->erase_decayed) continue;
    const LawInput* decay = law->find(LawRole::kDecay);
    if (decay == nullptr || decay->shape[0] != 'B') continue;
    for (Int size : {3, 24}) {
      MatrixCase c{law->name, kTokens, size, size == 24 ? 40 : size};
      c.heads = size == 24 ? Heads::kMoreQueries : Heads::kEqual;
      c.states = c.optional = true;
      list.push_back(c);
    }
  }
  return list;
}

struct ResetCall {
  Call clean, spoiled;  // in all that is before the reset
};

// All keys of all heads are reset at a token, by its first row.
ResetCall make(const MatrixCase& c, Int reset, double gate, Int position) {
  Call clean = make_call(c, 960);
  const std::string decay = law_of(c).find(LawRole::kDecay)->name;
  const LawInput* gate_of_erase = law_of(c).find(LawRole::kEraseGate);
  const std::string erase = gate_of_erase == nullptr ? "" : gate_of_erase->name;
  const auto numbers = [](const Slot& s, Int b, Int row) {
    const Int size = static_cast<Int>(s.array->data.size()) / (2 * kTokens * s.rows);
    const auto begin = s.array->data.begin() + (b * kTokens * s.rows + row) * size;
    return std::ranges::subrange(begin, begin + size);
  };
  for (const Slot& s : slots(clean)) {
    if (s.name != decay) continue;
    for (Int b = 0; b < 2; ++b) std::ranges::fill(numbers(s, b, reset * s.rows), gate);
  }
  ResetCall calls{clean, clean};
  for (const Slot& s : slots(calls.spoiled)) {
    if (s.role != Role::kToken) continue;
    // What the erase alone reads is dropped with what it reads.
    const Int end = reset * s.rows + (s.name == erase ? 1 : 0);
    for (Int b = 0; b < 2; ++b) {
      for (Int row = 0; row < end; ++row) std::ranges::fill(numbers(s, b, row), kNan);
    }
  }
  Doubles& s = by_name(calls.spoiled).inputs.at("initial_state");
  std::ranges::fill(s.data, kNan);
  calls.spoiled.residue = Residue{s, {}, position};
  return calls;
}

template <class Real>
reference::Array<Real> from_token(const reference::Array<Real>& x, Int begin, Int rows) {
  const auto part = [&](Int b) { return take_tokens(x, b, begin, kTokens - begin, rows); };
  return joined(part(0), part(1));
}

// Outputs from `first` on, gradients from `first_gradient` on.
void expect_tail(const Results<float>& got, const Results<double>& truth, Int first,
                 Int first_gradient, const Bounds& bounds) {
  Comparison comparison;
  if (first < kTokens) {
    comparison.output("o", from_token(array_of(got.outputs, "o"), first, 1),
                      from_token(array_of(truth.outputs, "o"), first, 1));
  }
  comparison.output("final_state", array_of(got.outputs, "final_state"),
                    array_of(truth.outputs, "final_state"));
  for (const Named<float>& x : got.gradients) {
    if (x.role != Role::kToken) continue;
    comparison.gradient(x.name, from_token(x.array, first_gradient, x.rows),
                        from_token(array_of(truth.gradients, x.name), first_gradient, x.rows));
  }
  comparison.expect_within(bounds);
}

double gate_of(Int reset) { return reset % 2 == 0 ? -kInfinity : -88.0; }

TEST(Resets, ForgetEvenNaN) {
  std::vector<Context> list = contexts();
  for (const MatrixCase& c : cases()) {
    for (Int reset : kResets) {
      for (Int position : {Int{0}, kLong}) {
        SCOPED_TRACE(testing::Message()
                     << name_of(c) << " reset " << reset << " position " << position);
        ResetCall calls = make(c, reset, gate_of(reset), position);
        calls.clean.upstream.clear();
        calls.spoiled.upstream.clear();
        const Results<double> truth = run_reference(calls.clean);
        const Int first = first_after(law_of(c), reset);
        for (Context& context : list) {
          const Bounds bounds = bounds_on(context.isa(), kFloat32);
          expect_tail(run(context, calls.spoiled), truth, first, first, bounds);
          expect_tail(run_steps(context, calls.spoiled), truth, first, first, bounds);
        }
      }
    }
  }
}

// What comes after a reset has its gradients, whatever was before.
TEST(Resets, GradientsForgetEvenNaN) {
  std::vector<Context> list = contexts();
  for (const MatrixCase& c : cases()) {
    for (Int reset : {0, 3, 16, 18, 63, 64}) {
      SCOPED_TRACE(testing::Message() << name_of(c) << " reset " << reset);
      ResetCall calls = make(c, reset, gate_of(reset), 0);
      const Results<double> truth = run_reference(calls.clean);
      const Int first = first_after(law_of(c), reset);
      // The key of a token whose own gate of the erase is NaN shares that.
      const Int first_gradient = law_of(c).has(LawRole::kEraseGate) ? reset + 1 : first;
      for (Context& context : list) {
        for (bool saved : {true, false}) {
          calls.spoiled.saved = saved;
          expect_tail(run(context, calls.spoiled), truth, first, first_gradient,
                      bounds_on(context.isa(), kFloat32));
        }
      }
    }
  }
}

// A gate of NaN is no reset: gradients that know of it are not finite.
TEST(Resets, GatesOfNaNReachGradients) {
  std::vector<Context> list = contexts();
  for (const MatrixCase& c : cases()) {
    for (Int token : {3, 66}) {
      SCOPED_TRACE(testing::Message() << name_of(c) << " NaN at " << token);
      Call call = make(c, token, kNan, 0).clean;
      const Results<double> truth = run_reference(call);
      for (Context& context : list) {
        const Results<float> got = run(context, call);
        for (const Named<double>& x : truth.gradients) {
          const Floats& y = array_of(got.gradients, x.name);
          Int hidden = 0;
          for (std::size_t i = 0; i < x.array.data.size(); ++i) {
            if (std::isnan(x.array.data[i]) && std::isfinite(y.data[i])) ++hidden;
          }
          EXPECT_EQ(hidden, 0) << x.name << " on " << name_of(context.isa());
        }
      }
    }
  }
}

}  // namespace
}  // namespace ouzel::test
