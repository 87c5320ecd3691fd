// Operators that are exact rather than fast (slot memories, gated memories with a normaliser,
// learners, averages): against their references over shapes drawn from their rows of the table, and
// their promises: bits that depend on neither threads nor company, later tokens, steps, errors.
#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/ouzel.h"
#include "src/ops/registry.h"
#include "tests/by_name.h"
#include "tests/contexts.h"
#include "tests/count_allocations.h"
#include "tests/errors.h"
#include "tests/operand.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
const char* const kOps[] = {"abc",          "efficient_attention",  "gated_oja_rule", "gsa",
                            "lambda_layer", "log_linear_attention", "mlstm",          "rfa_gate",
                            "ttt_linear"};

using Sizes = std::map<std::string, std::int64_t>;

std::vector<std::int64_t> shape_of(const TensorInfo& info, const Sizes& sizes) {
  std::vector<std::int64_t> shape;
  std::string letter;
  for (char c : info.shape.substr(0, info.shape.find('|')) + " ") {
    if (c != ' ') {
      letter += c;
      continue;
    }
    shape.push_back(sizes.at(letter));
    letter.clear();
  }
  return shape;
}

// Ranges that keep denominators away from 0 and memories bounded.
Doubles draw(Random& random, const std::string& op, const std::string& name,
             std::vector<std::int64_t> shape) {
  std::pair<double, double> range{-1, 1};
  if (name == "gate" || name == "beta") range = {0, 1};
  if (name == "eta") range = {0, 0.1};
  if (name == "W") range = {-0.3, 0.3};
  if (name == "sigma") range = {0.5, 1.5};
  if (name == "f") range = {0, 4};
  if (op == "mlstm" && name == "i") range = {-2, 2};
  if (op == "rfa_gate" && name.starts_with("initial")) range = {0.1, 0.2};
  Doubles x = random_array<double>(random, std::move(shape), range.first, range.second);
  if (name == "g" || name == "gv") {
    const double kinds[] = {0, -1e-5, -3, -20, -1000, -std::numeric_limits<double>::infinity()};
    for (double& g : x.data) {
      const std::int64_t kind = random.integer(0, 23);
      g = kind < 6 ? static_cast<double>(static_cast<float>(kinds[kind])) : random.uniform(-1, 0);
    }
  }
  return x;
}

struct Options {
  bool states = false;
  std::vector<std::int64_t> cu_seqlens = {};
  std::map<std::string, std::string> attributes = {};
};

Call make_call(const std::string& op, Sizes sizes, const Options& options, std::uint64_t seed) {
  Random random(seed);
  const OperatorInfo& info = find_operator(op);
  ByName a{op, options.attributes, {}, Segments::whole(sizes["B"], sizes["T"])};
  if (!options.cu_seqlens.empty()) a.segments = Segments::packed(options.cu_seqlens);
  sizes["N"] = a.segments.count();
  sizes["TQ"] = sizes["TK"] = sizes["T"];
  const Attributes attributes(info, a.attributes);
  for (const TensorInfo& input : info.inputs) {
    const bool state = input.shape.starts_with("N ");
    if (!attributes.hold(input.when) || (state && !options.states)) continue;
    a.inputs[input.name] = draw(random, op, input.name, shape_of(input, sizes));
  }
  if (op == "gated_oja_rule") {  // values of unit length
    Doubles& v = a.inputs["v"];
    const std::size_t n = static_cast<std::size_t>(v.extent(3));
    for (std::size_t at = 0; at < v.data.size(); at += n) {
      double square = 0;
      for (std::size_t i = 0; i < n; ++i) square += v.data[at + i] * v.data[at + i];
      for (std::size_t i = 0; i < n; ++i) {
        v.data[at + i] =
            static_cast<double>(static_cast<float>(v.data[at + i] / std::sqrt(square)));
      }
    }
  }
  reference::Tensors<double> upstream;
  for (const TensorInfo& output : info.outputs) {
    const bool state = output.shape.starts_with("N ");
    if (output.gradient.empty() || !attributes.hold(output.when) || (state && !options.states)) {
      continue;
    }
    upstream[output.gradient] = random_array<double>(random, shape_of(output, sizes));
  }
  return {std::move(a), std::move(upstream)};
}

Sizes sizes_of(std::int64_t tokens, std::int64_t keys, std::int64_t values) {
  return {{"B", 2},    {"T", tokens}, {"H", 2}, {"HK", 2}, {"HQ", 4}, {"HV", 4},
          {"K", keys}, {"V", values}, {"M", 5}, {"R", 10}, {"U", 2},  {"L", 8}};
}

// Float64 within: any instruction set is exact to the rounding of its results.
constexpr Bounds kExact{1e-6, 2e-6};

void expect_reference(const Call& call, const std::string& what) {
  const Results<double> truth = run_reference(call);
  for (Context& context : contexts()) {
    SCOPED_TRACE(testing::Message() << what << " " << name_of(context.isa()));
    expect_within(run(context, call), truth, kExact);
  }
}

TEST(Memories, AgreeWithTheirReferences) {
  std::uint64_t seed = 0;
  for (const char* op : kOps) {
    for (std::int64_t tokens : {0, 1, 2, 16, 17, 40}) {
      for (const auto& [keys, values] : {std::pair{1, 3}, {7, 5}, {16, 24}}) {
        const Options options{++seed % 2 == 0};
        expect_reference(make_call(op, sizes_of(tokens, keys, values), options, seed),
                         std::string(op) + " T " + std::to_string(tokens) + " K " +
                             std::to_string(keys) + " seed " + std::to_string(seed));
      }
    }
  }
}

TEST(Memories, AgreeWithTheirReferencesPacked) {
  for (const char* op : kOps) {
    Sizes sizes = sizes_of(35, 6, 4);
    sizes["B"] = 1;
    expect_reference(make_call(op, sizes, {true, {0, 0, 1, 18, 35}}, 3), op);
  }
}

TEST(Memories, AgreeWithTheirReferencesInTheirVariants) {
  const Sizes sizes = sizes_of(23, 6, 4);
  for (const bool states : {false, true}) {
    expect_reference(make_call("efficient_attention", sizes, {states, {}, {{"causal", "true"}}}, 5),
                     "causal");
  }
  expect_reference(
      make_call("efficient_attention", sizes, {false, {}, {{"variant", "scaling"}}}, 6), "scaling");
  expect_reference(make_call("gated_oja_rule", sizes,
                             {true, {}, {{"use_q_l2norm", "true"}, {"use_k_l2norm", "true"}}}, 7),
                   "unit rows");
  for (const char* size : {"1", "4", "16", "64"}) {
    expect_reference(make_call("ttt_linear", sizes, {true, {}, {{"mini_batch_size", size}}}, 8),
                     std::string("mini-batches of ") + size);
  }
}

TEST(Memories, KernelRegressionAgreesWithItsReference) {
  Random random(9);
  for (const auto& [kernel, bandwidth] :
       {std::pair{"gaussian", "0.7"}, {"gaussian", "0.05"}, {"exp_dot", "1"}}) {
    for (const auto& [points, queries] : {std::pair{1, 3}, {40, 35}, {17, 0}}) {
      ByName a{"nadaraya_watson", {{"kernel", kernel}, {"bandwidth", bandwidth}}, {}, {}};
      a.inputs["x"] = random_array<double>(random, {points, 3});
      a.inputs["y"] = random_array<double>(random, {points, 4});
      a.inputs["queries"] = random_array<double>(random, {queries, 3});
      const Doubles up = random_array<double>(random, {queries, 4});
      expect_reference({std::move(a), {{"do", up}}}, kernel);
    }
  }
}

TEST(Memories, ThreadsChangeNoBit) {
  for (const char* op : kOps) {
    SCOPED_TRACE(op);
    expect_threads_change_no_bit(make_call(op, sizes_of(30, 9, 11), {true}, 4));
  }
}

// Rows between sequences hold NaN; results there are 0, and those of the sequences are what they
// are with other numbers there.
TEST(Memories, PaddingIsNeverReadAndItsResultsAreZero) {
  Context context({.threads = 2, .poison_scratch = true});
  Segments segments;
  segments.list = {{0, 2, 15}, {1, 0, 1}, {1, 4, 0}, {1, 6, 18}};
  for (const char* op : kOps) {
    SCOPED_TRACE(op);
    Options options{true};
    options.cu_seqlens = {0, 1, 2, 3, 4};  // four states
    Call call = make_call(op, sizes_of(24, 6, 5), options, 11);
    ByName& a = std::get<ByName>(call.arguments);
    a.segments = segments;
    const Results<float> clean = run(context, call);
    const auto is_inside = [&](std::int64_t b, std::int64_t t) {
      return std::ranges::any_of(segments.list, [&](const Segment& s) {
        return s.batch == b && t >= s.begin && t < s.begin + s.length;
      });
    };
    const auto poison = [&](Doubles& x) {
      const std::size_t row = x.data.size() / 48;
      for (std::size_t at = 0; at < x.data.size(); ++at) {
        const auto token = static_cast<std::int64_t>(at / row);
        if (!is_inside(token / 24, token % 24)) x.data[at] = static_cast<double>(kNaN);
      }
    };
    const OperatorInfo& info = find_operator(op);
    for (const TensorInfo& input : info.inputs) {
      if (input.shape.starts_with("B ") && a.inputs.contains(input.name)) {
        poison(a.inputs[input.name]);
      }
    }
    poison(call.upstream["do"]);
    const Results<float> padded = run(context, call);
    const auto compare = [&](const std::vector<Named<float>>& x,
                             const std::vector<Named<float>>& y) {
      ASSERT_EQ(x.size(), y.size());
      for (std::size_t i = 0; i < x.size(); ++i) {
        EXPECT_TRUE(same_bits(x[i].array, y[i].array)) << x[i].name;
        if (x[i].role != Role::kToken) continue;
        const std::size_t row = x[i].array.data.size() / 48;
        for (std::size_t at = 0; at < x[i].array.data.size(); ++at) {
          const auto token = static_cast<std::int64_t>(at / row);
          if (is_inside(token / 24, token % 24)) continue;
          ASSERT_EQ(x[i].array.data[at], 0) << x[i].name;
        }
      }
    };
    compare(padded.outputs, clean.outputs);
    compare(padded.gradients, clean.gradients);
  }
}

// An output of a causal operator is what it is whatever comes later.
TEST(Memories, LaterTokensDoNotMatter) {
  Context context({.threads = 2, .poison_scratch = true});
  for (const std::string op : {"abc", "efficient_attention", "gated_oja_rule", "gsa",
                               "log_linear_attention", "mlstm", "rfa_gate", "ttt_linear"}) {
    Options options{true};
    if (op == "efficient_attention") options.attributes["causal"] = "true";
    Call call = make_call(op, sizes_of(30, 6, 5), options, 12);
    call.upstream.clear();
    const Floats before = run(context, call).outputs.front().array;
    Doubles& v = std::get<ByName>(call.arguments).inputs["v"];
    const std::int64_t row = v.extent(2) * v.extent(3);
    for (std::int64_t i = 0; i < row; ++i) v.data[static_cast<std::size_t>(21 * row + i)] = 100;
    const Floats after = run(context, call).outputs.front().array;
    const std::int64_t out = before.extent(2) * before.extent(3);
    for (std::int64_t i = 0; i < 21 * out; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(before.data[at], after.data[at]) << op;
    }
    EXPECT_NE(before.data[static_cast<std::size_t>(21 * out)],
              after.data[static_cast<std::size_t>(21 * out)])
        << op;
  }
}

// The operands of a call in float32, by name.
class Operands {
 public:
  explicit Operands(const Call& call) {
    for (const auto& [name, array] : std::get<ByName>(call.arguments).inputs) {
      list_[name] = Operand::input(array);
    }
  }
  Tensor operator[](const std::string& name) { return list_.at(name).tensor(); }
  Tensor token(const char* name, std::int64_t t) { return list_.at(name).token(t); }

 private:
  std::map<std::string, Operand> list_;
};

// One token at a time, states in float32 between them: within a few roundings of the whole, and
// nothing allocated.
void expect_steps(
    const std::string& op, const Options& options, const char* last_state,
    const std::function<void(Context&, Operands&, std::int64_t, const Tensor&)>& step) {
  const std::int64_t tokens = 24;
  const Call call = make_call(op, sizes_of(tokens, 6, 5), options, 13);
  for (Context& context : contexts()) {
    SCOPED_TRACE(testing::Message() << op << " " << name_of(context.isa()));
    Call forward = call;
    forward.upstream.clear();
    const Results<float> whole = run(context, forward);
    Operands operands(call);
    const Floats& o = whole.outputs.front().array;
    Operand out = Operand::output(o.shape);
    step(context, operands, 0, out.token(0));
    const std::int64_t before = allocations;
    for (std::int64_t t = 1; t < tokens; ++t) step(context, operands, t, out.token(t));
    EXPECT_EQ(allocations, before);
    Comparison comparison;
    const auto wide = [](const Floats& x) {
      Doubles y(x.shape);
      std::ranges::copy(x.data, y.data.begin());
      return y;
    };
    comparison.output("o", out.floats(), wide(o));
    if (last_state != nullptr) {
      const Floats& state = whole.outputs.at(1).array;
      Floats stepped(state.shape);
      std::copy_n(static_cast<const float*>(operands[last_state].data), stepped.data.size(),
                  stepped.data.begin());
      comparison.output("state", stepped, wide(state));
    }
    comparison.expect_within(kResumed);
  }
}

TEST(Memories, StepsAreTheWholeSequence) {
  expect_steps("gsa", {true}, "hk0",
               [](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 gsa_step(context, {},
                          {.q = x.token("q", t),
                           .k = x.token("k", t),
                           .v = x.token("v", t),
                           .s = x.token("s", t),
                           .g = x.token("g", t)},
                          x["hk0"], x["hv0"], o);
               });
  expect_steps("abc", {true}, "hk0",
               [](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 abc_step(context, {},
                          {.q = x.token("q", t),
                           .k = x.token("k", t),
                           .v = x.token("v", t),
                           .s = x.token("s", t)},
                          x["hk0"], x["hv0"], x["lse0"], o);
               });
  expect_steps("mlstm", {true}, nullptr,
               [](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 mlstm_step(context, {},
                            {.q = x.token("q", t),
                             .k = x.token("k", t),
                             .v = x.token("v", t),
                             .i = x.token("i", t),
                             .f = x.token("f", t)},
                            x["initial_state"], x["initial_z"], x["initial_m"], o);
               });
  expect_steps("rfa_gate", {true}, "initial_state",
               [](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 rfa_gate_step(context,
                               {.q = x.token("q", t),
                                .k = x.token("k", t),
                                .v = x.token("v", t),
                                .gate = x.token("gate", t),
                                .w = x["W"],
                                .sigma = x["sigma"]},
                               x["initial_state"], x["initial_z"], o);
               });
  expect_steps("gated_oja_rule", {true}, "initial_state",
               [](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 gated_oja_rule_step(context, {},
                                     {.q = x.token("q", t),
                                      .k = x.token("k", t),
                                      .v = x.token("v", t),
                                      .beta = x.token("beta", t),
                                      .gv = x.token("gv", t)},
                                     x["initial_state"], o);
               });
  expect_steps("efficient_attention", {true, {}, {{"causal", "true"}}}, "initial_state",
               [](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 efficient_attention_step(context, x.token("q", t), x.token("k", t),
                                          x.token("v", t), x["initial_state"], x["initial_lse"], o);
               });
  // B 2, H 2, 7 states of 6 x 5: the ladder begins empty, whatever is in its memory.
  std::vector<float> ladder(2 * 2 * 7 * 6 * 5, kNaN);
  expect_steps("log_linear_attention", {}, nullptr,
               [&](Context& context, Operands& x, std::int64_t t, const Tensor& o) {
                 const std::int64_t positions[] = {t, t};
                 log_linear_attention_step(context, {},
                                           {.q = x.token("q", t),
                                            .k = x.token("k", t),
                                            .v = x.token("v", t),
                                            .g = x.token("g", t),
                                            .level_scales = x.token("level_scales", t)},
                                           positions,
                                           Tensor(ladder.data(), DType::kF32, {2, 2, 7, 6, 5}), o);
               });
}

TEST(Memories, RefuseWhatTheyCannotTake) {
  Context context({.threads = 1});
  const auto refused = [&](const std::string& op, const std::string& part, const Options& options,
                           const std::function<void(ByName&)>& spoil) {
    Call call = make_call(op, sizes_of(9, 4, 3), options, 14);
    call.upstream.clear();
    spoil(std::get<ByName>(call.arguments));
    expect_refused(part, [&] { run(context, call); });
  };
  const auto set = [](const char* name, double value) {
    return [=](ByName& a) { a.inputs.at(name).data.at(5) = value; };
  };
  const auto drop = [](const char* name) { return [=](ByName& a) { a.inputs.erase(name); }; };
  refused("gsa", "g holds 0.5; log decays should be at most 0", {}, set("g", 0.5));
  refused("gated_oja_rule", "gv holds 0.5", {}, set("gv", 0.5));
  refused("log_linear_attention", "g holds 0.5", {}, set("g", 0.5));
  refused("rfa_gate", "gate holds 1.5; it should be a factor in [0, 1]", {}, set("gate", 1.5));
  refused("mlstm", "give all three or none", {true}, drop("initial_m"));
  refused("abc", "give all three or none", {true}, drop("lse0"));
  refused("rfa_gate", "give both or none", {true}, drop("initial_z"));
  refused("log_linear_attention", "level_scales has 2 levels; 9 tokens need 5", {}, [](ByName& a) {
    a.inputs["level_scales"] = Doubles({2, 9, 2, 2});
  });
  refused("gsa", "q has 3 heads and v has 2", {}, [](ByName& a) {
    a.inputs["q"] = Doubles({2, 9, 3, 4});
  });
  refused("ttt_linear", "mini_batch_size '0' is not a whole number of at least 1", {},
          [](ByName& a) { a.attributes["mini_batch_size"] = "0"; });
  refused("efficient_attention", "the scaling variant", {}, [](ByName& a) {
    a.attributes = {{"variant", "scaling"}, {"causal", "true"}};
  });
}

}  // namespace
}  // namespace ouzel::test
