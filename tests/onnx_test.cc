// ONNX's nodes: forward against the published cases where the shared data are present; forward and
// backward against the operators that they stand for.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/registry.h"
#include "tests/compare.h"
#include "tests/golden.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using Arrays = std::map<std::string, Floats>;
using Given = std::map<std::string, std::string>;

ConstTensor view(const Floats& a) {
  ConstTensor t;
  t.data = a.data.data();
  t.rank = static_cast<int>(a.rank());
  std::int64_t step = 1;
  for (std::size_t i = a.rank(); i-- > 0;) {
    t.extent[i] = a.shape[i];
    t.stride[i] = step;
    step *= a.shape[i];
  }
  return t;
}

Arrays run(const std::string& op, const Given& attributes, const Arrays& inputs, bool backward) {
  const OperatorInfo& info = find_operator(op);
  std::map<std::string, ConstTensor> tensors;
  for (const auto& [name, array] : inputs) tensors[name] = view(array);
  Context context({.threads = 2, .poison_scratch = true});
  Arrays results;
  for (const NamedArray& r :
       run_operator(context, info, Attributes(info, attributes), tensors, backward)) {
    const Tensor& t = r.array.tensor;
    Floats array(std::vector<std::int64_t>(t.extent.begin(), t.extent.begin() + t.rank));
    std::copy_n(static_cast<const float*>(t.data), array.data.size(), array.data.begin());
    results[r.name] = std::move(array);
  }
  return results;
}

// The same numbers in another shape.
Floats reshaped(Floats a, std::vector<std::int64_t> shape) {
  a.shape = std::move(shape);
  return a;
}
// The last two of three axes exchanged.
Floats transposed(const Floats& a) {
  Floats b({a.extent(0), a.extent(2), a.extent(1)});
  for (std::int64_t n = 0; n < a.extent(0); ++n) {
    for (std::int64_t i = 0; i < a.extent(1); ++i) {
      for (std::int64_t j = 0; j < a.extent(2); ++j) b(n, j, i) = a(n, i, j);
    }
  }
  return b;
}

constexpr std::int64_t B = 2, T = 66, HQ = 4, H = 2, K = 6, V = 5;

struct Rule {
  const char *rule, *op;
  bool decays, per_key, erases;
};
constexpr Rule kRules[] = {
    {"linear", "linear_attention", false, false, false},
    {"gated", "simple_gla", true, false, false},
    {"gated", "gla", true, true, false},
    {"delta", "delta_rule", false, false, true},
    {"gated_delta", "gated_delta_rule", true, false, true},
    {"gated_delta", "kda", true, true, true},
};

TEST(Onnx, LinearAttentionIsTheLawOnPackedHeads) {
  for (const Rule& rule : kRules) {
    SCOPED_TRACE(rule.op);
    Random random(5);
    const auto array = [&](std::vector<std::int64_t> shape, double lo, double hi) {
      return random_array<float>(random, std::move(shape), lo, hi);
    };
    Arrays law = {
        {"q", array({B, T, HQ, K}, -1, 1)},  {"k", array({B, T, H, K}, -0.6, 0.6)},
        {"v", array({B, T, H, V}, -1, 1)},   {"initial_state", array({B, H, K, V}, -1, 1)},
        {"do", array({B, T, HQ, V}, -1, 1)}, {"dht", array({B, H, K, V}, -1, 1)}};
    Arrays node = {{"query", reshaped(law["q"], {B, T, HQ * K})},
                   {"key", reshaped(law["k"], {B, T, H * K})},
                   {"value", reshaped(law["v"], {B, T, H * V})},
                   {"past_state", law["initial_state"]},
                   {"doutput", reshaped(law["do"], {B, T, HQ * V})},
                   {"dpresent_state", law["dht"]}};
    if (rule.decays) {
      law["g"] = rule.per_key ? array({B, T, H, K}, -1, 0) : array({B, T, H}, -1, 0);
      node["decay"] = rule.per_key ? reshaped(law["g"], {B, T, H * K}) : law["g"];
    }
    if (rule.erases) node["beta"] = law["beta"] = array({B, T, H}, 0, 1);
    const Given heads = {{"q_num_heads", "4"}, {"kv_num_heads", "2"}, {"update_rule", rule.rule}};
    Arrays got = run("LinearAttention", heads, node, true);
    const Arrays want = run(rule.op, {}, law, true);
    for (const auto& [name, of] : Given{{"output", "o"},
                                        {"present_state", "final_state"},
                                        {"dquery", "dq"},
                                        {"dkey", "dk"},
                                        {"dvalue", "dv"},
                                        {"ddecay", "dg"},
                                        {"dbeta", "dbeta"},
                                        {"dpast_state", "dh0"}}) {
      ASSERT_EQ(got.contains(name), want.contains(of)) << name;
      if (want.contains(of)) {
        EXPECT_EQ(got[name].data, want.at(of).data) << name;
      }
    }
    if (!rule.erases) continue;
    // One strength for all heads.
    node["beta"] = array({B, T, 1}, 0, 1);
    for (std::int64_t i = 0; i < B * T * H; ++i) {
      law["beta"].data[static_cast<std::size_t>(i)] =
          node["beta"].data[static_cast<std::size_t>(i / H)];
    }
    got = run("LinearAttention", heads, node, true);
    const Arrays shared = run(rule.op, {}, law, true);
    EXPECT_EQ(got["output"].data, shared.at("o").data);
    for (std::int64_t i = 0; i < B * T; ++i) {
      const auto at = static_cast<std::size_t>(i);
      EXPECT_EQ(got["dbeta"].data[at],
                shared.at("dbeta").data[2 * at] + shared.at("dbeta").data[2 * at + 1]);
    }
  }
}

TEST(Onnx, CausalConvWithStateIsTheConvolutionOfExchangedAxes) {
  constexpr std::int64_t D = 3;
  for (std::int64_t width : {1, 4}) {
    for (std::int64_t tokens : {2, 9}) {
      SCOPED_TRACE(testing::Message() << width << " " << tokens);
      Random random(6);
      const Floats x = random_array<float>(random, {B, D, tokens});
      const Floats past = random_array<float>(random, {B, D, width - 1});
      const Floats d_y = random_array<float>(random, {B, D, tokens});
      const Floats d_present = random_array<float>(random, {B, D, width - 1});
      const Floats weight = random_array<float>(random, {D, 1, width});
      const Floats bias = random_array<float>(random, {D});
      const auto window = [&](const Floats& state) {
        Floats w({B, D, width});
        for (std::int64_t i = 0; i < B * D; ++i) {
          std::copy_n(state.data.begin() + i * (width - 1), width - 1,
                      w.data.begin() + i * width + 1);
        }
        return w;
      };
      const Arrays got = run("CausalConvWithState", {{"activation", "swish"}},
                             {{"input", x},
                              {"weight", weight},
                              {"bias", bias},
                              {"past_state", past},
                              {"doutput", d_y},
                              {"dpresent_state", d_present}},
                             true);
      const Arrays want = run("short_conv", {{"activation", "silu"}},
                              {{"x", transposed(x)},
                               {"weight", weight},
                               {"bias", bias},
                               {"initial_state", window(past)},
                               {"do", transposed(d_y)},
                               {"dht", window(d_present)}},
                              true);
      EXPECT_EQ(got.at("output").data, transposed(want.at("o")).data);
      EXPECT_EQ(window(got.at("present_state")).data, [&] {
        Floats w = want.at("final_state");
        for (std::int64_t i = 0; i < B * D; ++i) {
          w.data[static_cast<std::size_t>(i * width)] = 0;
        }
        return w.data;
      }());
      EXPECT_EQ(got.at("dinput").data, transposed(want.at("dx")).data);
      EXPECT_EQ(got.at("dweight").data, want.at("dweight").data);
      EXPECT_EQ(got.at("dbias").data, want.at("dbias").data);
      Floats d_past = want.at("dh0");
      for (std::int64_t i = 0; i < B * D; ++i) {
        for (std::int64_t j = 0; j < width - 1; ++j) {
          EXPECT_EQ(got.at("dpast_state").data[static_cast<std::size_t>(i * (width - 1) + j)],
                    d_past.data[static_cast<std::size_t>(i * width + 1 + j)]);
        }
      }
    }
  }
}

TEST(Onnx, RefusesWhatTheStandardForbids) {
  const auto message = [](const Given& attributes, const Arrays& inputs) -> std::string {
    try {
      run("LinearAttention", attributes, inputs, false);
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  const Floats row({1, 3, 8}), per_head({1, 3, 2});
  const Arrays linear = {{"query", row}, {"key", row}, {"value", row}};
  Given heads = {{"q_num_heads", "2"}, {"kv_num_heads", "2"}, {"update_rule", "linear"}};
  EXPECT_EQ(message(heads, linear), "");
  EXPECT_NE(message({{"update_rule", "linear"}}, linear).find("q_num_heads must be given"),
            std::string::npos);
  Arrays more = linear;
  more["decay"] = per_head;
  EXPECT_NE(message(heads, more).find("'decay' is only taken with"), std::string::npos);
  heads["update_rule"] = "gated";
  EXPECT_NE(message(heads, linear).find("'decay'"), std::string::npos);
  more["decay"] = Floats({1, 3, 3});
  EXPECT_EQ(message(heads, more), "LinearAttention: the last axis of decay must be 2 or 8, not 3");
  heads["update_rule"] = "linear";
  heads["q_num_heads"] = "3";
  EXPECT_NE(message(heads, linear).find("multiple of kv_num_heads"), std::string::npos);
  heads["q_num_heads"] = heads["kv_num_heads"] = "3";
  EXPECT_NE(message(heads, linear).find("must be a multiple of its 3 heads"), std::string::npos);
  heads["q_num_heads"] = heads["kv_num_heads"] = "2";
  more = linear;
  more["past_state"] = Floats({1, 2, 3, 4});
  EXPECT_EQ(message(heads, more), "LinearAttention: past_state has K = 3; query makes it 4");
}

TEST(Onnx, PublishedCases) {
  const char* given = std::getenv("OUZEL_SHARED");
  const std::string shared =
      given != nullptr && *given != '\0' ? given : OUZEL_SOURCE_DIR "/../shared";
  if (!std::filesystem::exists(shared)) GTEST_SKIP() << "skipped: no shared data";
  const std::vector<std::string> paths = golden_files(shared + "/golden/onnx");
  ASSERT_GE(paths.size(), 27u);
  for (const std::string& path : paths) {
    SCOPED_TRACE(path);
    const GoldenFile f = load_golden(path);
    const OperatorInfo& info = find_operator(f.op());
    Given attributes;
    for (const AttributeInfo& attribute : info.attributes) {
      if (!f.attributes.contains(attribute.name)) continue;
      const Json& value = f.attributes.at(attribute.name);
      attributes[attribute.name] = value.is_string() ? value.get<std::string>() : value.dump();
    }
    Arrays inputs;
    for (const TensorInfo& input : info.inputs) {
      if (!f.tensors.contains(input.name)) continue;
      const reference::Array<double>& from = f.tensors.at(input.name);
      Floats& to = inputs[input.name] = Floats(from.shape);
      std::copy(from.data.begin(), from.data.end(), to.data.begin());
    }
    Comparison comparison;
    for (const auto& [name, array] : run(f.op(), attributes, inputs, false)) {
      comparison.output(name, array, f.tensors.at(name));
    }
    const bool half = f.attribute<std::string>("dtype", "") == "float16";
    comparison.expect_within(half ? kHalf : kFloat32);
  }
}

}  // namespace
}  // namespace ouzel::test
