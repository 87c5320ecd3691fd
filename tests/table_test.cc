// What holds of every row of the table of operators: no input and no attribute is ignored, numbers
// out of their range are refused, calls without tokens return at once.
#include <chrono>
#include <cmath>
#include <cstring>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/ouzel.h"
#include "src/ops/operator_call.h"
#include "tests/by_name.h"
#include "tests/table_calls.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr Int kTokens = 20;

bool same(const Results<float>& a, const Results<float>& b) {
  const auto all = [](const auto& x, const auto& y) {
    return std::ranges::equal(x, y, [](const Named<float>& p, const Named<float>& q) {
      return same_bits(p.array, q.array);
    });
  };
  return all(a.outputs, b.outputs) && all(a.gradients, b.gradients);
}

bool is_finite(const Results<float>& r) {
  for (const auto* list : {&r.outputs, &r.gradients}) {
    for (const Named<float>& x : *list) {
      for (float y : x.array.data) {
        if (!std::isfinite(y)) return false;
      }
    }
  }
  return true;
}

TEST(Table, EveryInputChangesAResult) {
  Context context({.threads = 2, .poison_scratch = true});
  std::uint64_t seed = 0;
  for (const TableCase& c : table_cases()) {
    Call call = make_call(c, table_sizes(c, kTokens), ++seed);
    const Results<float> before = run_by_table(context, call);
    ASSERT_TRUE(is_finite(before)) << name_of(c);
    for (std::size_t i = 0; i < slots(call).size(); ++i) {
      Call changed = call;
      const Slot slot = slots(changed)[i];
      for (double& x : slot.array->data) x *= 0.75;
      EXPECT_FALSE(same(run_by_table(context, changed), before)) << name_of(c) << ": " << slot.name;
    }
  }
}

// Attributes without effect say so.
bool has_no_effect(const std::string& op, const std::string& attribute) {
  static const std::set<std::string> kChecks = {"H", "chunk_size"};
  return kChecks.contains(attribute) || (op == "rfa_gate" && attribute == "scale");
}

TEST(Table, EveryNumberAndFlagChangesAResult) {
  Context context({.threads = 2, .poison_scratch = true});
  std::set<std::string> open, effective;
  std::uint64_t seed = 0;
  for (const TableCase& c : table_cases()) {
    const Call call = make_call(c, table_sizes(c, kTokens), ++seed);
    const Results<float> before = run_by_table(context, call);
    for (const AttributeInfo& info : info_of(c).attributes) {
      const std::string name = info_of(c).name + " " + info.name;
      std::vector<std::string> values;
      if (info.kind == AttributeKind::kFlag) values = {"true", "false"};
      if (info.kind == AttributeKind::kInteger) values = {"1", "3", "70"};
      if (info.kind == AttributeKind::kNumber) values = {"0.125", "2"};
      if (values.empty() || has_no_effect(info_of(c).name, info.name)) continue;
      open.insert(name);
      for (const std::string& value : values) {
        Call changed = call;
        std::get<ByName>(changed.arguments).attributes[info.name] = value;
        try {
          if (!same(run_by_table(context, changed), before)) effective.insert(name);
        } catch (const Error&) {  // with these tensors it has no meaning
          if (info.kind == AttributeKind::kInteger || info.kind == AttributeKind::kFlag) {
            effective.insert(name);
          }
        }
      }
    }
  }
  for (const std::string& name : open) EXPECT_TRUE(effective.contains(name)) << name;
}

bool is_quotient(const TableCase& c) {
  return c.op == "cosformer" || Attributes(info_of(c), c.attributes).flag("normalize");
}

// A number that the range allows gives numbers; any other is refused with a sentence that names it.
TEST(Table, NumbersOutOfRangeAreRefused) {
  Context context({.threads = 2, .poison_scratch = true});
  std::uint64_t seed = 0;
  for (const TableCase& c : table_cases()) {
    const Call call = make_call(c, table_sizes(c, kTokens), ++seed);
    for (const AttributeInfo& info : info_of(c).attributes) {
      std::vector<std::string> values;
      if (info.kind == AttributeKind::kInteger) {
        values = {"-9223372036854775808", "-1", "0", "9223372036854775807", "9223372036854775808"};
      } else if (info.kind == AttributeKind::kNumber) {
        values = {"nan", "inf", "-inf", "-1e300", "-1", "0", "1e-30", "1e15", "1e300"};
      }
      for (const std::string& value : values) {
        SCOPED_TRACE(testing::Message() << name_of(c) << ": " << info.name << " is " << value);
        Call changed = call;
        std::get<ByName>(changed.arguments).attributes[info.name] = value;
        try {
          const bool finite = is_finite(run_by_table(context, changed));
          // 0 / 0 where all weights are 0 and nothing is added to them.
          EXPECT_TRUE(finite || (value == "0" && is_quotient(c)));
        } catch (const Error& e) {
          EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
          EXPECT_NE(std::string(e.what()).find(info.name), std::string::npos) << e.what();
        }
      }
    }
  }
}

// Beside small tensors no whole number that an attribute may be takes long or much memory: it is
// computed, or refused for tensors that do not go with it.
TEST(Table, LargestNumbersTakeNeitherTimeNorMemory) {
  std::uint64_t seed = 0;
  int computed = 0;
  for (const TableCase& c : table_cases()) {
    Call call = make_call(c, table_sizes(c, kTokens), ++seed);
    auto& a = std::get<ByName>(call.arguments);
    // States have the extents that such a number may change.
    for (const TensorInfo& input : info_of(c).inputs) {
      if (input.is_state()) a.inputs.erase(input.name);
    }
    for (const TensorInfo& output : info_of(c).outputs) {
      if (output.is_state()) call.upstream.erase(output.gradient);
    }
    for (const AttributeInfo& info : info_of(c).attributes) {
      if (info.kind != AttributeKind::kInteger) continue;
      const std::string most = std::isfinite(info.range.most)
                                   ? fmt::format("{:.0f}", info.range.most)
                                   : "9223372036854775807";
      for (const std::string& value : {most, std::string("1048576")}) {
        SCOPED_TRACE(testing::Message() << name_of(c) << ": " << info.name << " is " << value);
        Call changed = call;
        std::get<ByName>(changed.arguments).attributes[info.name] = value;
        Context context({.threads = 1});
        const auto start = std::chrono::steady_clock::now();
        try {
          run_by_table(context, changed);
          ++computed;
        } catch (const Error& e) {
          EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument) << e.what();
        }
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        EXPECT_LT(elapsed.count(), 2.0);
        EXPECT_LT(context.scratch_bytes(), std::size_t{64} << 20);
      }
    }
  }
  EXPECT_GT(computed, 0);
}

TEST(Table, OptionsOutOfRangeAreRefusedWithoutTheTable) {
  Context context({.threads = 1});
  std::vector<float> memory(1024);
  const auto tensor = [&](std::initializer_list<Int> shape) {
    return Tensor(memory.data(), DType::kF32, shape);
  };
  const Tensor rows = tensor({1, 2, 1, 3}), numbers = tensor({1, 2, 1}),
               channels = tensor({1, 2, 3});
  const auto refused = [](const std::string& part, auto&& call) {
    try {
      call();
      ADD_FAILURE() << "accepted: " << part;
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
    }
  };
  for (double bad : {-1.0, 1e300, -HUGE_VAL, HUGE_VAL, std::nan("")}) {
    refused("c should be a finite number of at least 0", [&] {
      rg_lru(context, {.c = bad},
             {.x = channels, .r = channels, .i = channels, .a_param = tensor({3})},
             {.o = channels});
    });
    refused("eps should be a finite number of at least 0", [&] {
      ttt_linear(context, {.eps = bad},
                 {.q = rows,
                  .k = rows,
                  .v = rows,
                  .w = tensor({1, 3}),
                  .b = tensor({1, 3}),
                  .eta = numbers},
                 {.o = rows});
    });
    refused("l2norm_eps should be a finite number of at least 0", [&] {
      gated_oja_rule(context, {.l2norm_eps = bad},
                     {.q = rows, .k = rows, .v = rows, .beta = numbers}, rows, {});
    });
    refused("the bandwidth should be", [&] {
      nadaraya_watson(context, {.bandwidth = bad},
                      {.x = tensor({2, 3}), .y = tensor({2, 3}), .queries = tensor({1, 3})},
                      tensor({1, 3}));
    });
    if (bad == -1.0) continue;
    refused("scale should be a finite number", [&] {
      mlstm(context, {.scale = bad}, {.q = rows, .k = rows, .v = rows, .i = numbers, .f = numbers},
            {.o = rows});
    });
    refused("scale should be a finite number", [&] {
      gsa(context, {.scale = bad}, {.q = rows, .k = rows, .v = rows, .s = rows, .g = rows},
          {.o = rows});
    });
    refused("scale should be a finite number", [&] {
      log_linear_attention(
          context, {.scale = bad},
          {.q = rows, .k = rows, .v = rows, .g = numbers, .level_scales = tensor({1, 2, 1, 3})},
          rows);
    });
  }
}

TEST(Table, CallsWithoutTokensReturnAtOnce) {
  Context context({.threads = 2});
  constexpr Int kMany = Int{1} << 31;
  std::vector<float> numbers(1 << 10, -0.5f);
  for (const TableCase& c : table_cases()) {
    const OperatorInfo& info = info_of(c);
    // Its points are no tokens; heads of ONNX's rows are part of other extents.
    if (info.name == "nadaraya_watson" || info.source.starts_with("ONNX")) continue;
    SCOPED_TRACE(name_of(c));
    Letters sizes = table_sizes(c, 0);
    for (const char* letter : {"HQ", "HK", "HV", "HO", "H", "D", "U"}) sizes[letter] = kMany;
    const Attributes attributes(info, c.attributes);
    std::map<std::string, ConstTensor> tensors;
    // All rows are the same memory.
    const auto add = [&](const std::string& name, const TensorInfo& tensor) {
      if (name.empty() || !attributes.hold(tensor.when) || tensor.is_state()) return;
      if (std::ranges::count(c.without, name) != 0) return;
      ConstTensor x;
      x.data = numbers.data();
      const std::vector<Int> shape = shape_of(tensor, sizes);
      x.rank = static_cast<int>(shape.size());
      for (std::size_t i = 0; i < shape.size(); ++i) {
        x.extent[i] = shape[i];
        x.stride[i] = i + 1 == shape.size() ? 1 : 0;
      }
      tensors[name] = x;
    };
    for (const TensorInfo& input : info.inputs) add(input.name, input);
    for (const TensorInfo& output : info.outputs) add(output.gradient, output);
    const auto start = std::chrono::steady_clock::now();
    OperatorCall call(info, attributes, tensors, true);
    call.run(context);
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    EXPECT_LT(elapsed.count(), 1.0);
  }
}

}  // namespace
}  // namespace ouzel::test
