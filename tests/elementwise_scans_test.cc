// The elementwise scans: against their references over many shapes, and their promises: bits that
// depend on neither threads nor company, sequences cut anywhere, steps, padding, resets, long sums.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include <gtest/gtest.h>

#include "ouzel/hgrn.h"
#include "ouzel/rg_lru.h"
#include "ouzel/rwkv4.h"
#include "ouzel/selective_scan.h"
#include "tests/contexts.h"
#include "tests/count_allocations.h"
#include "tests/calls.h"
#include "tests/errors.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();
const char* const kOps[] = {"hgrn", "rg_lru", "rwkv4", "selective_scan"};

// Gates of all kinds: none, weak, mild, strong, resets.
void draw_gates(Random& random, Doubles& g) {
  const double kinds[] = {0, -1e-5, -0.3, -1, -3, -20, -1000, -kInf};
  for (double& x : g.data) {
    const std::int64_t kind = random.integer(0, 15);
    x = kind < 8 ? static_cast<double>(static_cast<float>(kinds[kind])) : random.uniform(-2, 0);
  }
}

struct Shape {
  std::int64_t batch = 1, tokens = 1, channels = 1, width = 4;
  bool states = false, extras = false;  // extras: z, D, dt_bias and a softplus
  std::vector<std::int64_t> cu_seqlens = {};
};

Call make_call(const std::string& op, const Shape& s, std::uint64_t seed) {
  Random random(seed);
  ByName call{op, {}, {}, Segments::whole(s.batch, s.tokens)};
  if (!s.cu_seqlens.empty()) call.segments = Segments::packed(s.cu_seqlens);
  const std::int64_t n = call.segments.count();
  const std::vector<std::int64_t> rows{s.batch, s.tokens, s.channels};
  const auto draw = [&](const std::string& name, std::vector<std::int64_t> shape, double lo = -1,
                        double hi = 1) -> Doubles& {
    return call.inputs[name] = random_array<double>(random, std::move(shape), lo, hi);
  };
  std::vector<std::int64_t> state{n, s.channels};
  if (op == "hgrn") {
    draw("x", rows);
    draw_gates(random, draw("g", rows));
  } else if (op == "rg_lru") {
    for (const char* name : {"x", "r", "i"}) draw(name, rows, -3, 3);
    draw("a_param", {s.channels}, -8, 1);
    if (s.extras) call.attributes["first_multiplier_one"] = "true";
  } else if (op == "rwkv4") {
    draw("k", rows, -4, 4);
    draw("v", rows);
    draw("w", {s.channels}, -6, 1);
    draw("u", {s.channels}, -2, 2);
    state = {n, 3, 1, s.channels};
  } else {
    draw("x", rows);
    draw("dt", rows, s.extras ? -3 : 0, 1);
    draw("A", {s.channels, s.width}, -4, 0);
    for (const char* name : {"B", "C"}) draw(name, {s.batch, s.tokens, s.width});
    if (s.extras) {
      call.attributes["dt_softplus"] = "true";
      draw("D", {s.channels});
      draw("z", rows, -3, 3);
      draw("dt_bias", {s.channels});
    }
    state.push_back(s.width);
  }
  reference::Tensors<double> upstream{{"do", random_array<double>(random, rows)}};
  if (s.states) {
    upstream["dht"] = random_array<double>(random, state);
    // rwkv4's beta is a sum of weights.
    draw("initial_state", state, op == "rwkv4" ? 0.1 : -1);
  }
  return Call{std::move(call), std::move(upstream)};
}

TEST(ElementwiseScans, AgreeWithTheirReferences) {
  std::vector<Context> list = contexts();
  std::uint64_t seed = 0;
  for (const char* op : kOps) {
    for (std::int64_t tokens : {0, 1, 2, 17, 64, 65, 130}) {
      for (std::int64_t channels : {1, 15, 16, 33, 140}) {
        const Shape shape{
            2, tokens, channels, tokens == 17 ? 16 : 3, ++seed % 2 == 0, seed % 3 == 0};
        const Call call = make_call(op, shape, seed);
        const Results<double> truth = run_reference(call);
        for (Context& context : list) {
          SCOPED_TRACE(testing::Message() << op << " " << name_of(context.isa()) << " T " << tokens
                                          << " D " << channels << " seed " << seed);
          expect_within(run(context, call), truth, bounds_on(context.isa(), kFloat32));
        }
      }
    }
  }
}

// More channels than a task takes, packed, with an empty sequence and one of a single token.
TEST(ElementwiseScans, AgreeWithTheirReferencesInManyBlocksAndSequences) {
  std::vector<Context> list = contexts();
  for (const char* op : kOps) {
    const Call call = make_call(op, {1, 90, 530, 2, true, true, {0, 0, 17, 18, 90}}, 7);
    const Results<double> truth = run_reference(call);
    for (Context& context : list) {
      SCOPED_TRACE(testing::Message() << op << " " << name_of(context.isa()));
      expect_within(run(context, call), truth, bounds_on(context.isa(), kFloat32));
    }
  }
}

TEST(ElementwiseScans, ThreadsChangeNoBit) {
  for (const char* op : kOps) {
    SCOPED_TRACE(op);
    expect_threads_change_no_bit(make_call(op, {3, 100, 600, 4, true, true}, 3));
  }
}

// A float32 tensor with memory of its own.
struct Owned {
  Floats array;
  Owned() = default;
  explicit Owned(const Doubles& from) : array(from.shape) {
    std::copy(from.data.begin(), from.data.end(), array.data.begin());
  }
  Owned(std::vector<std::int64_t> shape, float value) : array(std::move(shape)) {
    std::fill(array.data.begin(), array.data.end(), value);
  }
  Tensor tensor() {
    Tensor t;
    if (!array.present()) return t;
    t.data = array.data.data();
    t.rank = static_cast<int>(array.rank());
    std::int64_t step = 1;
    for (std::size_t i = array.rank(); i-- > 0;) {
      t.extent[i] = array.shape[i];
      t.stride[i] = step;
      step *= array.shape[i];
    }
    return t;
  }
  // Tokens [begin, end) of [B, T, D].
  Tensor tokens(std::int64_t begin, std::int64_t end) {
    Tensor t = tensor();
    if (!t.present()) return t;
    t.data = array.data.data() + begin * t.stride[1];
    t.extent[1] = end - begin;
    return t;
  }
};

// One call's operands for the C++ interface, which the table does not show all of.
class Operands {
 public:
  Operands(std::string op, const Shape& shape, std::uint64_t seed) : op_(std::move(op)) {
    const Call call = make_call(op_, shape, seed);
    for (const auto& [name, array] : std::get<ByName>(call.arguments).inputs) {
      in_[name] = Owned(array);
    }
    o = Owned({shape.batch, shape.tokens, shape.channels}, kNaN);
    state = in_["initial_state"];
    residue = Owned(state.array.shape, 0);
  }
  Owned& operator[](const std::string& name) { return in_[name]; }

  // Tokens [begin, end), from `state` to `state`. Options as make_call's with extras.
  void forward(Context& context, std::int64_t begin, std::int64_t end,
               const Segments* segments = nullptr) {
    const auto in = [&](const char* name) { return in_[name].tokens(begin, end); };
    const Tensor out = o.tokens(begin, end), s = state.tensor(), r = residue.tensor();
    if (op_ == "hgrn") {
      hgrn(context, {in("x"), in("g"), s, r, segments}, {out, s, r});
    } else if (op_ == "rg_lru") {
      rg_lru(context, {}, {in("x"), in("r"), in("i"), in_["a_param"].tensor(), s, r, segments},
             {out, s, r});
    } else if (op_ == "rwkv4") {
      rwkv4(context, {in("k"), in("v"), in_["w"].tensor(), in_["u"].tensor(), s, r, segments},
            {out, s, r});
    } else {
      selective_scan(context, {true}, selective(begin, end, segments), {out, s, r});
    }
  }
  void step(Context& context, std::int64_t t) {
    const auto in = [&](const char* name) { return in_[name].tokens(t, t + 1); };
    const Tensor out = o.tokens(t, t + 1), s = state.tensor(), r = residue.tensor();
    if (op_ == "hgrn") {
      hgrn_step(context, in("x"), in("g"), s, r, out);
    } else if (op_ == "rg_lru") {
      rg_lru_step(context, {}, in("x"), in("r"), in("i"), in_["a_param"].tensor(), s, r, out);
    } else if (op_ == "rwkv4") {
      rwkv4_step(context, in("k"), in("v"), in_["w"].tensor(), in_["u"].tensor(), s, r, out);
    } else {
      selective_scan_step(context, {true}, selective(t, t + 1, nullptr), s, r, out);
    }
  }

  Owned o, state, residue;

 private:
  SelectiveScanInputs selective(std::int64_t begin, std::int64_t end, const Segments* segments) {
    const auto in = [&](const char* name) { return in_[name].tokens(begin, end); };
    return {in("x"),        in("dt"),          in_["A"].tensor(), in("B"),
            in("C"),        in_["D"].tensor(), in("z"),           in_["dt_bias"].tensor(),
            state.tensor(), residue.tensor(),  segments};
  }

  std::string op_;
  std::map<std::string, Owned> in_;
};

TEST(ElementwiseScans, CutsAndStepsAreTheUnbrokenSequenceBitForBit) {
  const std::int64_t tokens = 70;
  for (Context& context : contexts()) {
    for (const char* op : kOps) {
      SCOPED_TRACE(testing::Message() << op << " " << name_of(context.isa()));
      const Operands start(op, {2, tokens, 21, 3, true, true}, 4);
      Operands whole = start;
      whole.forward(context, 0, tokens);
      for (std::int64_t cut : {0, 1, 5, 64, 70}) {
        Operands parts = start;
        parts.forward(context, 0, cut);
        parts.forward(context, cut, tokens);
        EXPECT_TRUE(same_bits(parts.o.array, whole.o.array)) << cut;
        EXPECT_TRUE(same_bits(parts.state.array, whole.state.array)) << cut;
      }
      Operands steps = start;
      for (std::int64_t t = 0; t < tokens; ++t) steps.step(context, t);
      EXPECT_TRUE(same_bits(steps.o.array, whole.o.array));
      EXPECT_TRUE(same_bits(steps.state.array, whole.state.array));
      EXPECT_TRUE(same_bits(steps.residue.array, whole.residue.array));
    }
  }
}

TEST(ElementwiseScans, StepsAllocateNothing) {
  Context context({.threads = 2, .poison_scratch = true});
  for (const char* op : kOps) {
    SCOPED_TRACE(op);
    Operands call(op, {2, 12, 40, 3, true, true}, 5);
    call.step(context, 0);
    const std::int64_t before = allocations;
    EXPECT_GT(before, 0);
    for (std::int64_t t = 1; t < 12; ++t) {
      call.step(context, t);
    }
    EXPECT_EQ(allocations, before);
  }
}

TEST(ElementwiseScans, PaddingIsNeverReadAndItsOutputsAreZero) {
  Segments segments;
  segments.list = {{0, 2, 20}, {1, 0, 1}, {1, 5, 0}, {1, 9, 13}};
  for (Context& context : contexts()) {
    for (const char* op : kOps) {
      SCOPED_TRACE(testing::Message() << op << " " << name_of(context.isa()));
      Shape shape{2, 24, 18, 3, true, true};
      Operands call(op, shape, 6);
      // States of four sequences, those of the first call twice over.
      for (Owned* owned : {&call.state, &call.residue}) {
        const Floats once = owned->array;
        owned->array.shape[0] = 4;
        owned->array.data.insert(owned->array.data.end(), once.data.begin(), once.data.end());
      }
      const Operands clean = call;
      for (const char* name : {"x", "g", "r", "i", "k", "v", "dt", "B", "C", "z"}) {
        Floats& array = call[name].array;
        if (!array.present()) continue;
        for (std::int64_t b = 0; b < 2; ++b) {
          for (std::int64_t t = 0; t < 24; ++t) {
            const bool inside = b == 0 ? t >= 2 && t < 22 : t == 0 || (t >= 9 && t < 22);
            for (std::int64_t c = 0; c < array.extent(2) && !inside; ++c) array(b, t, c) = kNaN;
          }
        }
      }
      call.forward(context, 0, 24, &segments);
      for (std::size_t n = 0; n < segments.list.size(); ++n) {
        const Segment& s = segments.list[n];
        Operands alone = clean;
        for (auto [owned, full] :
             {std::pair{&alone.state, &clean.state}, std::pair{&alone.residue, &clean.residue}}) {
          const std::size_t size = full->array.data.size() / 4;
          std::copy_n(full->array.data.begin() + static_cast<std::ptrdiff_t>(n * size), size,
                      owned->array.data.begin());
        }
        Segments one;
        one.list = {s, {1, 24, 0}, {1, 24, 0}, {1, 24, 0}};
        alone.forward(context, 0, 24, &one);
        for (std::int64_t b = 0; b < 2; ++b) {
          for (std::int64_t t = 0; t < 24; ++t) {
            const bool own = b == s.batch && t >= s.begin && t < s.begin + s.length;
            for (std::int64_t c = 0; c < 18; ++c) {
              const float x = alone.o.array(b, t, c);
              ASSERT_EQ(own ? call.o.array(b, t, c) : 0, x) << b << " " << t << " " << c;
            }
          }
        }
      }
    }
  }
}

// An output of a token is what it is whatever comes later, and NaN stays in its channel.
TEST(ElementwiseScans, LaterTokensAndOtherChannelsDoNotMatter) {
  for (Context& context : contexts()) {
    for (const char* op : kOps) {
      SCOPED_TRACE(testing::Message() << op << " " << name_of(context.isa()));
      Operands first(op, {1, 40, 35, 3, true, true}, 8), second = first;
      const char* name = std::string(op) == "rwkv4" ? "v" : "x";
      second[name].array(0, 25, 7) = kNaN;
      first.forward(context, 0, 40);
      second.forward(context, 0, 40);
      for (std::int64_t t = 0; t < 40; ++t) {
        for (std::int64_t c = 0; c < 35; ++c) {
          if (c == 7 && t == 25) {
            EXPECT_TRUE(std::isnan(second.o.array(0, t, c)));
          } else if (c != 7 || t < 25) {
            EXPECT_EQ(first.o.array(0, t, c), second.o.array(0, t, c)) << t << " " << c;
          }
        }
      }
    }
  }
}

TEST(ElementwiseScans, ResetsDropEvenNaN) {
  for (Context& context : contexts()) {
    Operands call("hgrn", {1, 3, 20, 0, true}, 9);
    call["x"].array(0, 0, 4) = kNaN;
    for (std::int64_t c = 0; c < 20; ++c) {
      call["g"].array(0, 1, c) = -std::numeric_limits<float>::infinity();
    }
    call.forward(context, 0, 3);
    for (std::int64_t c = 0; c < 20; ++c) {
      EXPECT_EQ(call.o.array(0, 1, c), call["x"].array(0, 1, c));
      EXPECT_FALSE(std::isnan(call.o.array(0, 2, c)));
    }
  }
}

// Equal inputs under weak decays for 200,000 tokens: a plain sum in float32 would be off by 1e-3.
TEST(ElementwiseScans, LongSumsKeepTheirDigits) {
  const std::int64_t tokens = 200'000;
  for (Context& context : contexts()) {
    const float g = -1e-6f;
    Owned x({1, tokens, 1}, 0.7f), gates({1, tokens, 1}, g), o({1, tokens, 1}, kNaN);
    hgrn(context, {x.tensor(), gates.tensor()}, {o.tensor(), {}, {}});
    double h = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      h += std::expm1(static_cast<double>(g)) * h + static_cast<double>(0.7f);
    }
    EXPECT_NEAR(static_cast<double>(o.array(0, tokens - 1, 0)) / h, 1, 1e-6);
    Owned dx({1, tokens, 1}, kNaN), dg({1, tokens, 1}, kNaN);
    hgrn_backward(context, {x.tensor(), gates.tensor()}, o.tensor(), x.tensor(), {}, dx.tensor(),
                  dg.tensor(), {});
    EXPECT_NEAR(static_cast<double>(dx.array(0, 0, 0)) / h, 1, 1e-6);
  }
}

TEST(ElementwiseScans, RefuseWhatTheyCannotTake) {
  Context context({.threads = 1});
  Owned x({2, 3, 4}, 1), g({2, 3, 4}, 1e-7f), wrong({2, 3, 5}, 0), o({2, 3, 4}, 0);
  Owned state({3, 4}, 0);
  hgrn(context, {x.tensor(), g.tensor()}, {o.tensor(), {}, {}});  // counts as 0
  EXPECT_EQ(o.array(0, 1, 0), 2);
  g.array(1, 2, 3) = 2e-6f;
  expect_refused("g holds 2e-06; log decays should be at most 0", [&] {
    hgrn(context, {x.tensor(), g.tensor()}, {o.tensor(), {}, {}});
  });
  expect_refused("hgrn: g should be F32, BF16 or F16 [2, 3, 4], not F32 [2, 3, 5]", [&] {
    hgrn(context, {x.tensor(), wrong.tensor()}, {o.tensor(), {}, {}});
  });
  expect_refused("hgrn: g must be given", [&] { hgrn(context, {x.tensor(), {}}, {o.tensor()}); });
  expect_refused("initial_state should be F32 [2, 4]", [&] {
    hgrn(context, {x.tensor(), g.tensor(), state.tensor()}, {o.tensor(), {}, {}});
  });
  expect_refused("one token of each sequence", [&] {
    hgrn_step(context, x.tensor(), g.tensor(), state.tensor(), {}, o.tensor());
  });
  Segments outside;
  outside.list = {{0, 2, 2}};
  expect_refused("segment 0", [&] {
    hgrn(context, {x.tensor(), g.tensor(), {}, {}, &outside}, {o.tensor(), {}, {}});
  });
  Owned a({4, 2}, 1), b({2, 3, 2}, 1);
  expect_refused("dt A holds 1", [&] {
    selective_scan(context, {}, {x.tensor(), x.tensor(), a.tensor(), b.tensor(), b.tensor()},
                   {o.tensor(), {}, {}});
  });
}

}  // namespace
}  // namespace ouzel::test
