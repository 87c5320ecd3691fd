// Sums over long sequences stay accurate: equal or nearly equal inputs, which a plain float32 sum
// loses (8e-2 after 10 million equal tokens), within the bound for any input at any length. With
// OUZEL_FULL=1 over 2 million tokens.
#include <cmath>
#include <cstdlib>

#include <gtest/gtest.h>

#include "tests/cases.h"
#include "tests/compare.h"
#include "tests/law_cases.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

class LongSums : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(, LongSums, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(LongSums, StayWithinTheBoundForAnyInput) {
  const std::int64_t tokens = std::getenv("OUZEL_FULL") != nullptr ? 2'000'000 : 40'000;
  Context context({.threads = 2, .isa = GetParam(), .poison_scratch = true});
  for (Law law : {Law::kIdentity, Law::kElu1Normalized, Law::kDecays}) {
    for (Data data : {Data::kNarrowPositive, Data::kConstant}) {
      for (bool reverse : {false, true}) {
        LawCase c{law, tokens, 6, 5};
        c.heads = Heads::kOne;
        c.states = true;
        c.data = data;
        if (!exists(c)) continue;
        Call call = make_call(c, 41);
        auto& a = std::get<Recurrence>(call.arguments);
        a.reverse = reverse;
        // The slowest decay that the sums must bear, and none.
        if (law == Law::kDecays) a.log_decay = {data == Data::kConstant ? 0.0 : -0x1p-12};
        SCOPED_TRACE(testing::Message() << name_of(c) << (reverse ? " reverse" : ""));
        expect_within(run(context, call), run_reference(call), bounds_on(GetParam(), kAnyInput),
                      is_flat(c) ? kQuotientFloor : kFloor);
      }
    }
  }
}

// What a token adds to the gradient of a state is less than half of the last digit of what came
// from the final state: lost altogether in a plain sum, 1e-4 after 2,048 tokens.
template <class Case>
void expect_small_additions(Isa isa, Case c) {
  c.tokens = 6000;
  c.layout = Layout::kAlone;
  c.data = Data::kNarrowPositive;
  c.states = true;
  Call call = make_call(c, 43);
  for (double& x : call.upstream["do"].data) x *= 5e-8 * std::sqrt(static_cast<double>(c.keys));
  for (double& x : call.upstream["dht"].data) x += 0.2;  // above 1
  SCOPED_TRACE(name_of(c));
  Context context({.threads = 2, .isa = isa, .poison_scratch = true});
  expect_within(run(context, call), run_reference(call), bounds_on(isa, kAnyInput));
}

TEST_P(LongSums, GradientsOfFinalStatesAreAddedTo) {
  for (std::int64_t size : {6, 64}) {  // heads one by one, and side by side
    expect_small_additions(GetParam(), LawCase{Law::kIdentity, 0, size, size});
  }
  for (const char* law : {"gla", "simple_gla", "gated_delta_rule"}) {
    MatrixCase c{law, 0, 6, 5};
    c.gates = Gates::kNone;
    expect_small_additions(GetParam(), c);
  }
}

}  // namespace
}  // namespace ouzel::test
