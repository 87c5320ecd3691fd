// Calls of the table with tensors of any strides and types, and results in memory of the caller.
#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/ops/copy_tensor.h"
#include "src/ops/operator_call.h"
#include "tests/registry_calls.h"

namespace ouzel::test {
namespace {

// A tensor in memory of its own, of any strides and type.
struct LaidOut {
  std::vector<char> memory;
  Tensor tensor;
};

// A copy of `tensor` as `dtype`, each axis reversed in memory and `gap` elements apart.
LaidOut laid_out(const ConstTensor& tensor, DType dtype, std::int64_t gap) {
  LaidOut out;
  out.tensor.rank = tensor.rank;
  out.tensor.dtype = dtype;
  out.tensor.extent = tensor.extent;
  std::int64_t step = gap, first = 0;
  for (int i = 0; i < tensor.rank; ++i) {  // the last axis is the farthest apart
    const auto axis = static_cast<std::size_t>(i);
    out.tensor.stride[axis] = -step;
    first += step * std::max<std::int64_t>(tensor.extent[axis] - 1, 0);
    step *= std::max<std::int64_t>(tensor.extent[axis], 1);
  }
  const auto bytes = static_cast<std::size_t>(size_of(dtype));
  out.memory.assign((static_cast<std::size_t>(step) + 1) * bytes + 1, '\x7f');
  out.tensor.data = out.memory.data() + 1 + first * size_of(dtype);  // no alignment either
  Context context({.threads = 1});
  copy_tensor(context, tensor, out.tensor);
  return out;
}

std::vector<std::int64_t> shape_vector(const ConstTensor& tensor) {
  return {tensor.extent.begin(), tensor.extent.begin() + tensor.rank};
}

// A dense float32 copy.
Array dense(const ConstTensor& tensor) {
  Array copy(shape_vector(tensor));
  Context context({.threads = 1});
  copy_tensor(context, tensor, copy.tensor);
  return copy;
}

Call learned_call() {
  Call call{"linear_attention", {{"feature_map", "elementwise_product"}, {"normalize", "true"}}};
  call.backward = true;
  call.put("q", {2, 70, 2, 4});
  call.put("k", {2, 70, 2, 4});
  call.put("v", {2, 70, 2, 3});
  call.put("W1", {6, 4});
  call.put("b1", {6});
  call.put("W2", {6, 4});
  call.put("initial_state", {2, 2, 6, 3});
  call.put("do", {2, 70, 2, 3});
  return call;
}

TEST(RegistryMemory, AnyStridesAndMemoryOfTheCallerGiveTheSame) {
  const Call call = learned_call();
  const OperatorInfo& info = find_operator(call.op);
  const Attributes attributes(info, call.attributes);
  const std::vector<NamedArray> expected = call.run();
  std::map<std::string, LaidOut> memory;
  std::map<std::string, ConstTensor> tensors;
  for (const auto& [name, array] : call.tensors) {
    memory[name] = laid_out(array.tensor, DType::kF32, 2);
    tensors[name] = memory[name].tensor;
  }
  OperatorCall strided(info, attributes, tensors, true);
  ASSERT_EQ(strided.results().size(), expected.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_EQ(strided.results()[i].name, expected[i].name);
    LaidOut& out = memory[expected[i].name] = laid_out(expected[i].array.tensor, DType::kF32, 3);
    std::fill(out.memory.begin(), out.memory.end(), '\x7f');
    strided.put(expected[i].name, out.tensor);
  }
  Context context({.threads = 2, .poison_scratch = true});
  strided.run(context);
  for (const NamedArray& result : expected) {
    const Array got = dense(memory[result.name].tensor);
    EXPECT_EQ(std::memcmp(got.memory.data(), result.array.memory.data(), got.memory.bytes()), 0)
        << result.name;
  }
}

TEST(RegistryMemory, ResultsWithoutMemoryAreNotWantedAndStraightOnesKeepTheirSurroundings) {
  const Call call = learned_call();
  const OperatorInfo& info = find_operator(call.op);
  const Attributes attributes(info, call.attributes);
  std::map<std::string, ConstTensor> tensors;
  for (const auto& [name, array] : call.tensors) tensors[name] = array.tensor;
  std::map<std::string, std::vector<float>> expected;
  for (const NamedArray& result : call.run()) {
    expected[result.name].assign(result.array.memory.f32(),
                                 result.array.memory.f32() + result.array.tensor.size());
  }
  // o in rows of two values more; dv and dW1 dense; the weight's memory is assigned, not added to.
  std::vector<float> o(2 * 70 * 2 * 5, 7), dv(2 * 70 * 2 * 3), d_w1(6 * 4, 7);
  OperatorCall some(info, attributes, tensors, true);
  some.put("o", View<float, 4>(o.data(), {2, 70, 2, 3}, {70 * 2 * 5, 2 * 5, 5, 1}));
  some.put("dv", View<float, 4>(dv.data(), {2, 70, 2, 3}));
  some.put("dW1", View<float, 2>(d_w1.data(), {6, 4}));
  Context context({.threads = 2});
  some.run(context);
  EXPECT_EQ(dv, expected["dv"]);
  EXPECT_EQ(d_w1, expected["dW1"]);
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_EQ(o[i], i % 5 < 3 ? expected["o"][i / 5 * 3 + i % 5] : 7) << i;
  }
}

// Takes 16-bit rows as they are; linear_attention has them converted around its call.
TEST(RegistryMemory, MemoryOfResultsIsChecked) {
  const Call call = retention_call();
  const OperatorInfo& info = find_operator(call.op);
  const Attributes attributes(info, {});
  std::map<std::string, ConstTensor> tensors;
  for (const auto& [name, array] : call.tensors) tensors[name] = array.tensor;
  OperatorCall checked(info, attributes, tensors, false);
  std::vector<float> o(2 * 5 * 2 * 3);
  std::vector<double> wide(o.size());
  expect_refused({"this call of retention does not give 'dq'", "It gives o, final_state"}, [&] {
    checked.put("dq", View<float, 4>(o.data(), {2, 5, 2, 3}));
  });
  expect_refused({"memory for o is F32 [2, 5, 3, 2]; F32, BF16 or F16 [2, 5, 2, 3] was expected"},
                 [&] {
                   checked.put("o", View<float, 4>(o.data(), {2, 5, 3, 2}));
                 });
  expect_refused({"memory for o is F64"}, [&] {
    checked.put("o", View<double, 4>(wide.data(), {2, 5, 2, 3}));
  });
  expect_refused({"memory for o has stride 0 along axis 0"}, [&] {
    checked.put("o", View<float, 4>(o.data(), {2, 5, 2, 3}, {0, 6, 3, 1}));
  });
}

}  // namespace
}  // namespace ouzel::test
