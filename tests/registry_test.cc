// The table of operators: rows that agree with themselves and each other, and calls that are
// refused with a sentence that says what was expected.
#include "src/ops/registry.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/operator_call.h"
#include "tests/registry_calls.h"

namespace ouzel::test {
namespace {

std::vector<std::string> names_of(const std::vector<NamedArray>& results) {
  std::vector<std::string> names;
  for (const NamedArray& result : results) names.push_back(result.name);
  return names;
}

TEST(Registry, RowsAgreeWithThemselvesAndEachOther) {
  std::set<std::string> names;
  std::map<std::string, AttributeKind> kinds;
  for (const OperatorInfo& info : operators()) {
    SCOPED_TRACE(info.name);
    EXPECT_TRUE(names.insert(info.name).second);
    EXPECT_EQ(&find_operator(info.name), &info);
    for (const std::string& alias : info.aliases) {
      EXPECT_TRUE(names.insert(alias).second) << alias;
      EXPECT_EQ(&find_operator(alias), &info);
    }
    EXPECT_FALSE(info.formula.empty());
    EXPECT_FALSE(info.source.empty());
    EXPECT_FALSE(info.outputs.empty());
    EXPECT_FALSE(info.outputs.front().gradient.empty());
    std::set<std::string> tensors;
    for (const auto* list : {&info.inputs, &info.outputs}) {
      for (const TensorInfo& tensor : *list) {
        EXPECT_TRUE(tensors.insert(tensor.name).second) << tensor.name;
        if (tensor.gradient.empty()) continue;
        EXPECT_TRUE(tensors.insert(tensor.gradient).second) << tensor.gradient;
      }
    }
    const Attributes defaults(info, {});  // defaults are values of their kind and choices
    EXPECT_NO_THROW(Attributes(info, defaults.values()));
    for (const AttributeInfo& attribute : info.attributes) {
      EXPECT_FALSE(attribute.meaning.empty()) << attribute.name;
      // One flag of the program serves all operators: a name has one kind.
      EXPECT_EQ(kinds.emplace(attribute.name, attribute.kind).first->second, attribute.kind)
          << attribute.name;
    }
    // Conditions name attributes that exist.
    for (const auto* list : {&info.inputs, &info.outputs}) {
      for (const TensorInfo& tensor : *list) {
        for (std::size_t at = 0; at < tensor.when.size();) {
          const std::size_t end = tensor.when.find_first_of("!=", at);
          EXPECT_NE(info.find_attribute(tensor.when.substr(at, end - at)), nullptr) << tensor.when;
          at = std::min(tensor.when.find(' ', at), tensor.when.size() - 1) + 1;
        }
      }
    }
  }
}

TEST(Registry, UnknownNamesGetTheirNearestRelative) {
  expect_refused({"'retntion'", "did you mean 'retention'?", "linear_attention"},
                 [] { find_operator("retntion"); });
  expect_refused({"'zzz'", "The operators are"}, [] { find_operator("zzz"); });
  const OperatorInfo& info = find_operator("linear_attn");
  EXPECT_EQ(info.name, "linear_attention");
  expect_refused({"linear_attention has no attribute 'normalise'", "did you mean 'normalize'?"},
                 [&] {
                   Attributes(info, {{"normalise", "true"}});
                 });
}

TEST(Registry, NamesOfPublishedModelsFindTheirOperator) {
  const std::pair<const char*, const char*> names[] = {
      {"retnet", "retention"},
      {"RetNet", "retention"},
      {"mamba", "selective_scan"},
      {"mamba2", "mamba2_ssd"},
      {"Mamba-2", "mamba2_ssd"},
      {"deltanet", "delta_rule"},
      {"delta_net", "delta_rule"},
      {"gated_deltanet", "gated_delta_rule"},
      {"Gated DeltaNet", "gated_delta_rule"},
      {"gated_deltaproduct", "gated_delta_product"},
      {"rwkv-4", "rwkv4"},
      {"RWKV-5", "rwkv5"},
      {"rwkv_6", "rwkv6"},
      {"rwkv-7", "rwkv7"},
      {"HGRN-2", "hgrn2"},
      {"GLA", "gla"},
      {"xLSTM", "mlstm"},
      {"Kimi Delta Attention", "kda"},
      {"griffin", "rg_lru"},
      {"transformer", "softmax_attention"},
      {"Lightning Attention", "lightning_attention"},
      {"log-linear", "log_linear_attention"}};
  for (const auto& [name, expected] : names) {
    SCOPED_TRACE(name);
    EXPECT_EQ(find_operator(name).name, expected);
  }
  // Two operators are written so but for their letters: neither is meant for sure.
  expect_refused({"'linearattention'"}, [] { find_operator("linearattention"); });
  expect_refused({"''"}, [] { find_operator(""); });
  expect_refused({"'--'"}, [] { find_operator("--"); });
}

TEST(Registry, AttributesAreCheckedByKind) {
  const OperatorInfo& linear = find_operator("linear_attention");
  const OperatorInfo& softmax = find_operator("softmax_attention");
  const Attributes a(linear, {{"scale", " 0.25 "},
                              {"feature_map", "\"elu1\""},
                              {"normalize", "true"},
                              {"eps", "null"},
                              {"cu_seqlens", "[0, 3,5]"}});
  EXPECT_EQ(a.number("scale"), 0.25);
  EXPECT_EQ(a.text("feature_map"), "elu1");
  EXPECT_TRUE(a.flag("normalize"));
  EXPECT_TRUE(a.flag("causal"));  // its default
  EXPECT_EQ(a.number("eps"), std::nullopt);
  EXPECT_EQ(a.integers("cu_seqlens"), (std::vector<std::int64_t>{0, 3, 5}));
  EXPECT_TRUE(a.hold("normalize=true feature_map!=relu"));
  EXPECT_FALSE(a.hold("normalize=true feature_map!=elu1"));
  EXPECT_TRUE(a.hold("feature_map=relu|elu1"));
  EXPECT_FALSE(a.hold("feature_map!=relu|elu1"));
  EXPECT_EQ(Attributes(softmax, {{"window_size", "7"}}).integer("window_size"), 7);

  const auto refused = [&](const OperatorInfo& info, const char* name, const char* value,
                           const char* part) {
    expect_refused({name, value, part}, [&] { Attributes(info, {{name, value}}); });
  };
  refused(linear, "scale", "big", "a number");
  refused(linear, "scale", "nan", "a number");
  refused(linear, "scale", "1e999", "a number");
  refused(linear, "normalize", "yes", "true or false");
  refused(linear, "feature_map", "zzz", "not one of identity, elu1, relu, relu2, exp, softmax");
  refused(linear, "feature_map", "hedgehogs", "did you mean 'hedgehog'?");
  refused(linear, "cu_seqlens", "[0, 1.5]", "list of whole numbers");
  refused(linear, "cu_seqlens", "[0, 1", "list of whole numbers");
  for (const char* gap : {"0,,5", ",0,5", "0,5,", "[0, 5,]", "[,]", ","}) {
    refused(linear, "cu_seqlens", gap, "list of whole numbers");
  }
  refused(softmax, "window_size", "7.0", "a whole number");
  refused(softmax, "window_size", "99999999999999999999", "a whole number");
}

TEST(Registry, GivesOutputsAndGradientsOfWhatWasGiven) {
  Call call = retention_call();
  EXPECT_EQ(names_of(call.run()), (std::vector<std::string>{"o", "final_state"}));
  call.backward = true;
  call.put("do", {2, 5, 2, 3});
  EXPECT_EQ(names_of(call.run()), (std::vector<std::string>{"o", "final_state", "dq", "dk", "dv"}));
  call.put("initial_state", {2, 2, 4, 3});
  EXPECT_EQ(names_of(call.run()).back(), "dh0");
  call = retention_call();
  call.attributes = {{"form", "parallel"}};
  EXPECT_EQ(names_of(call.run()), (std::vector<std::string>{"o", "weights"}));
}

TEST(Registry, ASumAloneOrAStateAloneIsAStateWithZeros) {
  // With a normaliser, z without S (and the other way round) must mean zeros for the other.
  for (const char* name : {"initial_state", "initial_z"}) {
    Call one{"linear_attention", {{"feature_map", "elu1"}, {"normalize", "true"}}, {}};
    one.backward = true;
    for (const char* input : {"q", "k"}) one.put(input, {1, 5, 2, 4});
    one.put("v", {1, 5, 2, 3});
    one.put("do", {1, 5, 2, 3});
    const std::vector<std::int64_t> s_shape = {1, 2, 4, 3}, z_shape = {1, 2, 4};
    const bool is_s = std::string(name) == "initial_state";
    one.put(name, is_s ? s_shape : z_shape);
    const auto results = one.run();
    const char* other = is_s ? "initial_z" : "initial_state";
    one.tensors.insert_or_assign(other, Array(is_s ? z_shape : s_shape));
    const auto both = one.run();
    std::size_t compared = 0;
    for (const NamedArray& result : results) {
      for (const NamedArray& expected : both) {
        if (result.name != expected.name) continue;
        ++compared;
        EXPECT_EQ(std::memcmp(result.array.memory.data(), expected.array.memory.data(),
                              result.array.memory.bytes()),
                  0)
            << result.name;
      }
    }
    EXPECT_EQ(compared, results.size());
    EXPECT_EQ(both.size(), results.size() + 1);
  }
}

TEST(Registry, LightningDecaysFollowTheirRules) {
  // The published rules against the same call with the decays written out.
  for (const char* slopes : {"linear", "geometric"}) {
    for (std::int64_t layer : {0, 3, 11}) {
      const std::int64_t heads = 6;
      Call ruled{"lightning",
                 {{"layer_idx", std::to_string(layer)}, {"num_layers", "12"}, {"slopes", slopes}},
                 {}};
      for (const char* input : {"q", "k", "v"}) ruled.put(input, {1, 40, heads, 4});
      Call written = {"retention", {}, {}};
      for (const char* input : {"q", "k", "v"}) written.put(input, {1, 40, heads, 4});
      written.put("g_gamma", {heads}, DType::kF64);
      for (std::int64_t h = 0; h < heads; ++h) {
        const double x = static_cast<double>(layer), n = static_cast<double>(heads);
        const double hd = static_cast<double>(h);
        written.tensors["g_gamma"].memory.as<double>()[h] =
            std::string(slopes) == "linear"
                ? -(8 / n) * (1 - x / 12) * hd
                : -std::pow(2.0, -8 * (hd + 1) / n) * (1 - x / 11 + 1e-5);
      }
      const auto a = ruled.run(), b = written.run();
      ASSERT_EQ(a.front().name, "o");
      for (std::int64_t i = 0; i < a.front().array.tensor.size(); ++i) {
        ASSERT_FLOAT_EQ(a.front().array.memory.f32()[i], b.front().array.memory.f32()[i])
            << slopes << " " << layer << " " << i;
      }
    }
  }
}

TEST(Registry, OneGradientFromAboveIsEnough) {
  Call call = retention_call();
  call.backward = true;
  call.put("dht", {2, 2, 4, 3});
  const std::vector<NamedArray> alone = call.run();
  call.tensors.insert_or_assign("do", Array({2, 5, 2, 3}));  // zeros
  const std::vector<NamedArray> beside = call.run();
  ASSERT_EQ(names_of(alone), names_of(beside));
  for (std::size_t i = 0; i < alone.size(); ++i) {
    const Tensor &x = alone[i].array.tensor, &y = beside[i].array.tensor;
    EXPECT_EQ(std::memcmp(x.data, y.data, static_cast<std::size_t>(x.size()) * 4), 0)
        << alone[i].name;
  }
}

TEST(Registry, TensorsAreCheckedByNameTypeAndShape) {
  Call call = retention_call();
  call.tensors.erase("k");
  expect_refused(
      {"retention: tensor 'k' [B, T, HK, K] with B = 2, T = 5, K = 4 as in q is missing"},
      [&] { call.run(); });
  call = retention_call();
  call.put("kk", {1});
  expect_refused({"retention takes no tensor 'kk'", "did you mean 'k'?"}, [&] { call.run(); });
  call = retention_call();
  call.put("do", {2, 5, 2, 3});  // not a backward call
  expect_refused({"takes no tensor 'do'"}, [&] { call.run(); });
  call = retention_call();
  call.backward = true;
  expect_refused({"needs 'do' [B, T, HO, V]", "the gradient of 'o'"}, [&] { call.run(); });
  call = retention_call();
  call.put("k", {2, 5, 2, 7});
  expect_refused({"retention: k has shape [2, 5, 2, 7]; expected [B, T, HK, K]", "K = 4 as in q"},
                 [&] { call.run(); });
  call = retention_call();
  call.put("v", {2, 5, 6});
  expect_refused({"v has shape [2, 5, 6]; expected [B, T, HV, V]"}, [&] { call.run(); });
  call = retention_call();
  call.put("v", {2, 5, 2, 3}, DType::kF64);
  expect_refused({"v is F64 [2, 5, 2, 3]; F32, BF16 or F16 was expected"}, [&] { call.run(); });
  call = retention_call();
  call.put("q", {2, 5, 0, 4});
  expect_refused({"q is empty: its shape [2, 5, 0, 4] has HQ = 0"}, [&] { call.run(); });
  call = retention_call();
  call.put("v", {2, 5, 3, 3});  // 3 value heads, 2 key heads: the operator's own check
  expect_refused({"retention"}, [&] { call.run(); });
  call = retention_call();
  call.attributes = {{"H", "4"}};
  expect_refused({"retention: H says 4 heads and v has 2"}, [&] { call.run(); });
  call = retention_call();
  call.put("initial_state", {3, 2, 4, 3});
  expect_refused({"initial_state", "N = 2"}, [&] { call.run(); });
  call = retention_call();
  call.attributes = {{"cu_seqlens", "[0, 2, 5]"}};
  expect_refused({"cu_seqlens ends at 5 and packs one batch row; the tensors have 2 of 5 tokens"},
                 [&] { call.run(); });
  for (const char* input : {"q", "k", "v"}) call.put(input, {1, 6, 2, 4});
  expect_refused({"cu_seqlens ends at 5", "1 of 6 tokens"}, [&] { call.run(); });
  call.attributes = {{"cu_seqlens", "[0, 6, 2, 6]"}};
  expect_refused({"must not decrease"}, [&] { call.run(); });
}

TEST(Registry, SequencesMayBeEmpty) {
  Call call = retention_call();
  call.backward = true;
  for (const char* name : {"q", "k"}) call.put(name, {2, 0, 2, 4});
  for (const char* name : {"v", "do"}) call.put(name, {2, 0, 2, 3});
  const std::vector<NamedArray> results = call.run();
  ASSERT_EQ(names_of(results), (std::vector<std::string>{"o", "final_state", "dq", "dk", "dv"}));
  EXPECT_EQ(shape_string(results[0].array.tensor), "[2, 0, 2, 3]");
  for (std::int64_t i = 0; i < results[1].array.tensor.size(); ++i) {
    EXPECT_EQ(results[1].array.memory.f32()[i], 0);
  }
}

TEST(Registry, ConditionsRuleTensorsInAndOut) {
  Call call{"linear_attention", {}, {}};
  for (const char* input : {"q", "k"}) call.put(input, {1, 5, 2, 4});
  call.put("v", {1, 5, 2, 3});
  call.put("W1", {6, 4});
  expect_refused({"'W1' is only taken with feature_map=elementwise_product"}, [&] { call.run(); });
  call.attributes = {{"feature_map", "elementwise_product"}};
  expect_refused({"tensor 'W2' [M, K] or [HK, M, K]", "M = 6 as in W1", "is missing"},
                 [&] { call.run(); });
  call.put("W2", {6, 4});
  const auto results = call.run();
  EXPECT_EQ(shape_string(results[1].array.tensor), "[1, 2, 6, 3]");  // six features
  call.attributes["causal"] = "false";
  EXPECT_EQ(names_of(call.run()), std::vector<std::string>{"o"});
  call.put("initial_z", {1, 2, 6});
  expect_refused({"'initial_z' is only taken with"}, [&] { call.run(); });
}

TEST(Registry, HostileShapesGiveAnError) {
  // No element, and results or sequences without end.
  const std::int64_t huge = std::int64_t{1} << 40;
  Call call{"retention", {}, {}};
  call.put("q", {huge, 0, 1, 1});
  call.put("k", {huge, 0, 1, 1});
  call.put("v", {huge, 0, 1, 1});
  expect_refused({"sequences are more than"}, [&] { call.run(); });
  try {
    Array({huge, huge, 4});
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kOutOfMemory);
  }
}

}  // namespace
}  // namespace ouzel::test
