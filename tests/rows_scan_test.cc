// The engine's forward pass against a loop in float64, in every kind that it has: scan and steps,
// parts, resets, long sums.
#include "src/ops/rows_scan.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>

#include <gtest/gtest.h>

#include "tests/rows_scan_case.h"

namespace ouzel::test {
namespace {

class RowsScan : public testing::TestWithParam<Isa> {
 protected:
  Context context() const { return Context({.isa = GetParam(), .poison_scratch = true}); }
};
INSTANTIATE_TEST_SUITE_P(, RowsScan, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(RowsScan, AgreesWithTheLoop) {
  Context context = this->context();
  std::uint64_t seed = 1;
  for (const Case& c : cases()) {
    const Problem p = make_problem(c.kind, c.tokens, c.gates, c.state, seed++);
    SCOPED_TRACE(name_of(p, c.gates));
    const Truth truth = truth_of(p);
    expect_close(scan(context, p), truth, bounds_on(GetParam(), kFloat32));
    expect_close(steps(context, p), truth, bounds_on(GetParam(), kFloat32));
  }
}

TEST_P(RowsScan, IsTheSameInParts) {
  Context context = this->context();
  std::uint64_t seed = 1000;
  for (const Case& c : cases()) {
    const Problem p = make_problem(c.kind, c.tokens, c.gates, c.state, seed++);
    SCOPED_TRACE(name_of(p, c.gates));
    const Result whole = scan(context, p);
    Result slabs = empty_result(p);
    scan(context, p, 0, p.tokens, 32, slabs);
    EXPECT_TRUE(same_bits(whole.o, slabs.o));
    EXPECT_TRUE(same_bits(whole.final, slabs.final));
    for (std::int64_t split : {16, 64}) {
      if (p.tokens <= split) continue;
      Result parts = empty_result(p);
      scan(context, p, 0, split, p.kind.values, parts);
      scan(context, p, split, p.tokens - split, p.kind.values, parts);
      EXPECT_TRUE(same_bits(whole.o, parts.o));
      EXPECT_TRUE(same_bits(whole.final, parts.final));
    }
  }
}

TEST_P(RowsScan, DependsOnThePastOnly) {
  Context context = this->context();
  std::uint64_t seed = 2000;
  for (const Case& c : cases()) {
    if (c.tokens < 2) continue;
    const Problem p = make_problem(c.kind, c.tokens, c.gates, c.state, seed++);
    SCOPED_TRACE(name_of(p, c.gates));
    const Result before = scan(context, p);
    Random random(seed);
    for (int attempt = 0; attempt < 3; ++attempt) {
      const std::int64_t from = random.integer(1, p.tokens - 1);
      Problem changed = p;
      const auto change = [&](Array<float>& x, std::int64_t row, bool gate) {
        if (!x.present()) return;
        const auto begin = static_cast<std::size_t>(row * x.shape.back());
        for (std::size_t i = begin; i < x.data.size(); ++i) {
          x.data[i] = gate ? -random.uniform(0, 60) : attempt == 0 ? kNaN : random.uniform(-9, 9);
        }
      };
      const std::int64_t row = from * p.kind.rows_per_token;
      for (std::int64_t r = 0; r < p.kind.queries; ++r) {
        for (std::int64_t t = from; t < p.tokens; ++t) changed.q(r, t, 0) = kNaN;
      }
      for (Array<float>* x : {&changed.k, &changed.v, &changed.e, &changed.b, &changed.c}) {
        change(*x, row, false);
      }
      for (Array<float>* x : {&changed.g, &changed.gv}) change(*x, row, true);
      if (attempt == 2 && changed.g.present()) changed.g(row, 0) = -kInfinity;
      const Result after = scan(context, changed);
      for (std::int64_t r = 0; r < p.kind.queries; ++r) {
        EXPECT_EQ(std::memcmp(&before.o(r, 0, 0), &after.o(r, 0, 0),
                              static_cast<std::size_t>(from * p.kind.values) * sizeof(float)),
                  0)
            << "tokens from " << from << " on changed an output before them";
      }
    }
  }
}

// A decay of exactly 0 drops what was before, even where that is not a number.
TEST_P(RowsScan, ResetsDropNaN) {
  Context context = this->context();
  for (EraseKind erase : {EraseKind::kNone, EraseKind::kCollinear, EraseKind::kGeneral}) {
    for (const char* decay : {"scalar", "per key", "per value"}) {
      const std::string name = decay;
      RowsKind kind;
      kind.keys = 20;
      kind.values = 40;
      kind.erase = erase;
      kind.decay = name != "per value";
      kind.decay_per_key = name == "per key";
      kind.value_decay = name == "per value";
      for (std::int64_t reset : {0, 1, 2, 3, 5, 63, 64, 70}) {
        Problem p = make_problem(kind, 80, Gates::kMild, true, 7);
        SCOPED_TRACE(name_of(p, Gates::kMild) + " reset at " + std::to_string(reset));
        for (float& x : p.initial.data) x = kNaN;
        const Array<float>& g = kind.decay ? p.g : p.gv;
        for (std::int64_t i = 0; i < g.extent(1); ++i) {
          (kind.decay ? p.g : p.gv)(reset, i) = -kInfinity;
        }
        const Truth truth = truth_of(p);
        ASSERT_TRUE(std::isfinite(truth.final(0, 0)));
        expect_close(scan(context, p), truth, bounds_on(GetParam(), kFloat32));
        expect_close(steps(context, p), truth, bounds_on(GetParam(), kFloat32));
      }
    }
  }
}

// Equal or nearly equal positive numbers, which a plain float32 sum loses.
TEST_P(RowsScan, KeepsLongSumsExact) {
  Context context = this->context();
  const std::int64_t tokens = GetParam() == Isa::kPortable ? 10'000 : 40'000;
  for (const char* decay : {"none", "scalar", "per key", "per value", "both"}) {
    for (bool bonus : {false, true}) {
      const std::string name = decay;
      RowsKind kind;
      kind.keys = 5;
      kind.values = 3;
      kind.decay = name != "none" && name != "per value";
      kind.decay_per_key = name == "per key" || name == "both";
      kind.value_decay = name == "per value" || name == "both";
      kind.bonus = bonus;
      SCOPED_TRACE(name + (bonus ? " bonus" : ""));
      Problem p = make_problem(kind, tokens, Gates::kZero, false, 11);
      Random random(12);
      for (Array<float>* x : {&p.q, &p.k, &p.v}) {
        for (float& y : x->data) y = 0.33f + random.uniform(-1e-3, 1e-3);
      }
      for (Array<float>* x : {&p.g, &p.gv}) {
        for (std::size_t i = 0; i < x->data.size(); ++i) x->data[i] = i % 4 == 3 ? -1e-3f : -1e-6f;
      }
      const Truth truth = truth_of(p);
      expect_close(scan(context, p), truth, bounds_on(GetParam(), kAnyInput));
      expect_close(steps(context, p), truth, bounds_on(GetParam(), kAnyInput));
    }
  }
}

}  // namespace
}  // namespace ouzel::test
