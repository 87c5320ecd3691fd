// Calls of rows of the table, with tensors of given shapes.
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/ops/registry.h"

namespace ouzel::test {

using Given = std::map<std::string, std::string>;

inline void expect_refused(const std::vector<std::string>& parts,
                           const std::function<void()>& action) {
  try {
    action();
    FAIL() << "accepted; expected: " << parts.front();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument) << e.what();
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what() << "\n" << part;
    }
  }
}

// A call with tensors of given shapes, filled with a fixed pattern.
struct Call {
  std::string op;
  Given attributes;
  std::map<std::string, Array> tensors;
  bool backward = false;

  void put(const std::string& name, const std::vector<std::int64_t>& shape,
           DType dtype = DType::kF32) {
    Array array(shape, dtype);
    if (dtype == DType::kF32) {
      for (std::int64_t i = 0; i < array.tensor.size(); ++i) {
        array.memory.f32()[i] = static_cast<float>(std::sin(0.7 * static_cast<double>(i) + 0.1));
      }
    }
    tensors.insert_or_assign(name, std::move(array));
  }
  std::vector<NamedArray> run() const {
    Context context({.threads = 2, .poison_scratch = true});
    const OperatorInfo& info = find_operator(op);
    std::map<std::string, ConstTensor> views;
    for (const auto& [name, array] : tensors) views[name] = array.tensor;
    return run_operator(context, info, Attributes(info, attributes), views, backward);
  }
};

inline Call retention_call() {
  Call call{"retention", {}, {}};
  call.put("q", {2, 5, 2, 4});
  call.put("k", {2, 5, 2, 4});
  call.put("v", {2, 5, 2, 3});
  return call;
}

}  // namespace ouzel::test
