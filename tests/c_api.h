// What the tests of the C ABI share: handles that give themselves back, a call, a model.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/c.h"
#include "ouzel/context.h"
#include "ouzel/model.h"
#include "tests/temp_folder.h"

namespace ouzel::test {

struct ContextHandle {
  explicit ContextHandle(const ouzel_context_options* options = nullptr) {
    EXPECT_EQ(ouzel_context_create(options, &handle), OUZEL_OK) << ouzel_last_error();
  }
  ~ContextHandle() { ouzel_context_destroy(handle); }
  ContextHandle(const ContextHandle&) = delete;
  ContextHandle& operator=(const ContextHandle&) = delete;
  ouzel_context* handle = nullptr;
};

inline ouzel_tensor named(const char* name, std::vector<float>& data,
                          const std::vector<std::int64_t>& shape) {
  ouzel_tensor tensor{};
  tensor.size = sizeof(tensor);
  tensor.name = name;
  tensor.data = data.data();
  tensor.rank = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape);
  return tensor;
}

inline std::vector<float> pattern(std::size_t n, double phase) {
  std::vector<float> values(n);
  for (std::size_t i = 0; i < n; ++i) {
    values[i] = static_cast<float>(std::sin(0.7 * static_cast<double>(i) + phase));
  }
  return values;
}

// A call of retention, B1 T6 H2 K4 V3.
struct RetentionCall {
  std::vector<float> q = pattern(48, 0), k = pattern(48, 1), v = pattern(36, 2),
                     d_o = pattern(36, 3), o = std::vector<float>(36), s = std::vector<float>(24),
                     d_v = std::vector<float>(36);
  std::vector<ouzel_tensor> inputs = {named("q", q, {1, 6, 2, 4}), named("k", k, {1, 6, 2, 4}),
                                      named("v", v, {1, 6, 2, 3})};
  std::vector<ouzel_tensor> results = {named("o", o, {1, 6, 2, 3})};
  std::vector<const char*> attributes = {nullptr};
  std::size_t call_size = sizeof(ouzel_call);

  ouzel_call call() {
    return {call_size,     "retention",    attributes.data(), inputs.data(),
            inputs.size(), results.data(), results.size()};
  }
  ouzel_status run(ouzel_context* context) {
    const ouzel_call given = call();
    return ouzel_run(context, &given);
  }
};

inline void expect_failure(ouzel_status status, ouzel_status expected, const char* part) {
  EXPECT_EQ(status, expected) << ouzel_last_error();
  EXPECT_NE(std::string(ouzel_last_error()).find(part), std::string::npos) << ouzel_last_error();
}

// A model of bytes in a folder of its own.
struct ModelHandle {
  explicit ModelHandle(ouzel_context* context) {
    ModelConfig config = ModelConfig::defaults("retnet");
    config.hidden_size = 32;
    config.num_hidden_layers = 2;
    config.intermediate_size = 32;
    config.mixer.num_heads = 2;
    config.attn = {{{1}, MixerConfig::defaults(MixerKind::kSoftmaxAttention)}};
    config.initializer_range = 0.3;
    Context own;
    Model(own, config, 7).save(folder);
    EXPECT_EQ(ouzel_model_load(context, folder.c_str(), &handle), OUZEL_OK) << ouzel_last_error();
  }
  ~ModelHandle() { ouzel_model_destroy(handle); }
  ModelHandle(const ModelHandle&) = delete;
  ModelHandle& operator=(const ModelHandle&) = delete;
  const TempFolder temporary;
  const std::string folder = temporary.path();
  ouzel_model* handle = nullptr;
};

}  // namespace ouzel::test
