// Every operator against its reference: forward and backward, over a pairwise cover of the corners,
// on every instruction set, with poisoned scratch. With OUZEL_FULL=1 (the ctest label `full`) over
// the cross product.
#include <cstdlib>
#include <string>

#include <gtest/gtest.h>

#include "tests/cases.h"
#include "tests/compare.h"
#include "tests/contexts.h"
#include "tests/law_cases.h"

namespace ouzel::test {
namespace {

bool full() { return std::getenv("OUZEL_FULL") != nullptr; }

const Bounds& bounds_of(const LawCase& c) {
  return c.data == Data::kZeroMean ? kFloat32 : kAnyInput;
}
const Bounds& bounds_of(const AttentionCase& c) {
  return c.data == Data::kZeroMean ? kFloat32 : kAnyInput;
}
const Bounds& bounds_of(const MatrixCase& c) {
  return c.data == Data::kZeroMean ? kFloat32 : kAnyInput;
}
const Bounds& bounds_of(const ConvCase&) { return kFloat32; }

template <class Case>
bool is_rounding(const Case&, const std::string&) {
  return false;
}

template <class Case, class Real>
Results<Real> without_rounding(const Case& c, Results<Real> results) {
  std::erase_if(results.gradients, [&](const Named<Real>& x) { return is_rounding(c, x.name); });
  return results;
}

template <class Case>
void expect_reference(const std::vector<Case>& cases) {
  std::vector<Context> list = contexts();
  std::uint64_t seed = 100;
  for (const Case& c : cases) {
    Call call = make_call(c, ++seed);
    if (!has_gradients(c)) call.upstream.clear();
    const Results<double> truth = without_rounding(c, run_reference(call));
    for (Context& context : list) {
      SCOPED_TRACE(testing::Message()
                   << name_of(context.isa()) << " " << name_of(c) << " seed " << seed);
      expect_within(without_rounding(c, run(context, call)), truth,
                    bounds_on(context.isa(), bounds_of(c)), is_flat(c) ? kQuotientFloor : kFloor);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(Operators, RecurrenceAgreesWithItsReference) {
  const auto cases = full() ? all_recurrence_cases() : recurrence_cases();
  ASSERT_GE(cases.size(), 88u);
  expect_reference(cases);
}

TEST(Operators, LawsAgreeWithTheirReferences) {
  const auto cases = full() ? all_matrix_cases() : matrix_cases();
  ASSERT_GE(cases.size(), 165u);
  expect_reference(cases);
}

TEST(Operators, SoftmaxAttentionAgreesWithItsReference) {
  const auto cases = full() ? all_attention_cases() : attention_cases();
  ASSERT_GE(cases.size(), 88u);
  expect_reference(cases);
}

TEST(Operators, ShortConvAgreesWithItsReference) {
  const auto cases = conv_cases();
  ASSERT_GE(cases.size(), 88u);
  expect_reference(cases);
}

}  // namespace
}  // namespace ouzel::test
