// A law that the library does not have, added as docs/add-a-law.md says: one row.
//
//     P_t = Diag(exp(g_t)) S_{t-1};  S_t = P_t + k_t (beta_t (v_t - P_t^T (b_t * k_t)))^T
//     o_t = S_t^T (scale q_t)
//
// KDA whose erase forgets some keys less than others: kda's strength with gdn2's erase gate.
#include <cmath>

#include <gtest/gtest.h>

#include "tests/compare.h"
#include "tests/law_case.h"

namespace ouzel::test {
namespace {

using enum LawRole;
using In = RecurrenceInputs;
using Grad = RecurrenceInputGrads;

constexpr Law kSelectiveKda = {
    .name = "selective_kda",
    .decay = DecayKind::kPerKey,
    .erase = EraseKind::kCollinear,
    .defaults = "scale K^-0.5",
    .formula =
        "P_t = Diag(exp(g_t)) S_{t-1}; S_t = P_t + k_t (beta_t (v_t - P_t^T (b_t * "
        "k_t)))^T; o_t = S_t^T (scale q_t)",
    .source = "docs/add-a-law.md",
    .inputs = {LawInput{kQuery, "q", "B T HQ K", &In::q, &Grad::q},
               {kKey, "k", "B T HK K", &In::k, &Grad::k},
               {kValue, "v", "B T HV V", &In::v, &Grad::v},
               {kDecay, "g", "B T HV K", &In::g, &Grad::g},
               {kEraseGate, "b", "B T HV K", &In::b, &Grad::b},
               {kStrength, "beta", "B T HV", &In::beta, &Grad::beta}},
};
constexpr MatrixLaw selective_kda(kSelectiveKda);

using Arrays = reference::Tensors<double>;

// Token by token, in float64, for equal numbers of heads. Returns o and the final state.
Arrays reference_of(const LawCase& c, const Arrays& x) {
  const LawSizes& n = c.sizes;
  const double scale = 1 / std::sqrt(static_cast<double>(n.keys));
  Arrays y;
  y["o"] = reference::Array<double>({n.batch, n.tokens, n.value_heads, n.values});
  y["final_state"] = x.at("initial_state");
  reference::Array<double>& s = y["final_state"];
  for (std::int64_t b = 0; b < n.batch; ++b) {
    for (std::int64_t t = 0; t < n.tokens; ++t) {
      for (std::int64_t h = 0; h < n.value_heads; ++h) {
        for (std::int64_t j = 0; j < n.values; ++j) {
          double erased = 0;
          for (std::int64_t i = 0; i < n.keys; ++i) {
            s(b, h, i, j) *= std::exp(x.at("g")(b, t, h, i));
            erased += s(b, h, i, j) * x.at("b")(b, t, h, i) * x.at("k")(b, t, h, i);
          }
          const double written = x.at("beta")(b, t, h) * (x.at("v")(b, t, h, j) - erased);
          for (std::int64_t i = 0; i < n.keys; ++i) {
            s(b, h, i, j) += x.at("k")(b, t, h, i) * written;
            y["o"](b, t, h, j) += s(b, h, i, j) * scale * x.at("q")(b, t, h, i);
          }
        }
      }
    }
  }
  return y;
}

double dot(const reference::Array<double>& a, const reference::Array<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.data.size(); ++i) sum += a.data[i] * b.data[i];
  return sum;
}

class AddALaw : public testing::Test {
 protected:
  AddALaw() : c_(kSelectiveKda, {2, 70, 3, 3, 3, 12, 20}), x_(c_.arguments().inputs) {}
  Context context_{{.threads = 2, .poison_scratch = true}};
  LawCase c_;
  Arrays x_;
};

TEST_F(AddALaw, ForwardIsTheFormula) {
  c_.forward(context_);
  const Arrays truth = reference_of(c_, x_);
  Comparison comparison;
  comparison.output("o", c_.o.array<float>(), truth.at("o"));
  comparison.output("final_state", c_.state(c_.final), truth.at("final_state"));
  comparison.expect_within(kFloat32);
}

TEST_F(AddALaw, BackwardIsItsDerivative) {
  c_.backward(context_);
  const auto loss = [&](const Arrays& x) {
    const Arrays y = reference_of(c_, x);
    return dot(y.at("o"), c_.d_o.array<double>()) + dot(y.at("final_state"), c_.state(c_.d_final));
  };
  // Of each input along a random direction; -20 and 0 among the decays are moved too.
  Random random(3);
  for (auto& [name, array] : x_) {
    const reference::Array<double> direction = random_array<double>(random, array.shape);
    const reference::Array<double> before = array;
    const auto moved = [&](double by) {
      for (std::size_t i = 0; i < array.data.size(); ++i) {
        array.data[i] = before.data[i] + by * direction.data[i];
      }
      return loss(x_);
    };
    constexpr double kStep = 1e-5;
    const double slope = (moved(kStep) - moved(-kStep)) / (2 * kStep);
    array = before;
    const reference::Array<double> gradient =
        name == "initial_state" ? c_.state(c_.d_initial) : c_.grads.at(name).array<double>();
    const double size = std::sqrt(dot(gradient, gradient) * dot(direction, direction) /
                                  static_cast<double>(direction.data.size()));
    EXPECT_NEAR(dot(gradient, direction), slope, kFloat32.gradient * size) << name;
    EXPECT_GT(size, 0) << name;
  }
}

TEST_F(AddALaw, StepsAreTheFormula) {
  std::vector<SequenceState> storage;
  const StateView state = c_.view(c_.initial, storage);
  for (std::int64_t t = 0; t < c_.sizes.tokens; ++t) {
    selective_kda.step(context_, c_.options, c_.token(t), state, c_.o.token(t));
  }
  const Arrays truth = reference_of(c_, x_);
  Comparison comparison;
  comparison.output("o", c_.o.array<float>(), truth.at("o"));
  comparison.output("state", c_.state(c_.initial), truth.at("final_state"));
  comparison.expect_within(kFloat32);
}

}  // namespace
}  // namespace ouzel::test
