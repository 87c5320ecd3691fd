// Every operator of the table, in its variants, through the one call of the C ABI: outputs and
// gradients are the bits that the table gives.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <list>
#include <string>
#include <variant>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/c.h"
#include "tests/by_name.h"
#include "tests/c_api.h"
#include "tests/table_calls.h"

namespace ouzel::test {
namespace {

// A call as a program in C writes it.
class CCall {
 public:
  CCall(const TableCase& c, const Call& call) : op_(c.op) {
    for (const auto& [name, value] : c.attributes) {
      attributes_.insert(attributes_.end(), {name.c_str(), value.c_str()});
    }
    attributes_.push_back(nullptr);
    const OperatorInfo& info = info_of(c);
    for (const auto& [name, array] : std::get<ByName>(call.arguments).inputs) {
      const auto input = std::ranges::find(info.inputs, name, &TensorInfo::name);
      add_input(name, array, input->dtype == DType::kF64);
    }
    for (const auto& [name, array] : call.upstream) add_input(name, array, false);
  }

  // In memory as large as the library says.
  void want(const std::string& name) {
    ouzel_tensor result{};
    result.size = sizeof(result);
    result.name = name.c_str();
    results_.push_back(result);
  }
  ouzel_status infer() {
    const ouzel_call given = call();
    const ouzel_status status = ouzel_infer_results(&given);
    for (ouzel_tensor& result : results_) {
      std::size_t size = 1;
      for (int i = 0; i < result.rank; ++i) size *= static_cast<std::size_t>(result.shape[i]);
      floats_.emplace_back(size, -1.0f);
      result.data = floats_.back().data();
    }
    return status;
  }
  ouzel_status run(ouzel_context* context) {
    const ouzel_call given = call();
    return ouzel_run(context, &given);
  }
  const std::vector<ouzel_tensor>& results() const { return results_; }

 private:
  void add_input(const std::string& name, const Doubles& array, bool wide) {
    ouzel_tensor input{};
    input.size = sizeof(input);
    input.name = name.c_str();
    input.dtype = wide ? OUZEL_F64 : OUZEL_F32;
    input.rank = static_cast<std::int32_t>(array.shape.size());
    std::copy(array.shape.begin(), array.shape.end(), input.shape);
    if (wide) {
      input.data = doubles_.emplace_back(array.data).data();
    } else {
      input.data = floats_.emplace_back(array.data.begin(), array.data.end()).data();
    }
    inputs_.push_back(input);
  }
  ouzel_call call() {
    return {sizeof(ouzel_call), op_.c_str(),     attributes_.data(), inputs_.data(),
            inputs_.size(),     results_.data(), results_.size()};
  }

  std::string op_;
  std::vector<const char*> attributes_;
  std::list<std::vector<float>> floats_;
  std::list<std::vector<double>> doubles_;
  std::vector<ouzel_tensor> inputs_, results_;
};

TEST(CApiOperators, AllGiveTheBitsOfTheTable) {
  const ContextHandle context;
  Context own;
  std::vector<std::string> ran;
  for (const TableCase& c : table_cases()) {
    SCOPED_TRACE(name_of(c));
    const Call call = make_call(c, table_sizes(c, 5), 11);
    const Results<float> expected = run_by_table(own, call);
    CCall given(c, call);
    std::vector<const Named<float>*> wanted;
    for (const auto* list : {&expected.outputs, &expected.gradients}) {
      for (const Named<float>& array : *list) wanted.push_back(&array);
    }
    for (const Named<float>* array : wanted) given.want(array->name);
    ASSERT_EQ(given.infer(), OUZEL_OK) << ouzel_last_error();
    ASSERT_EQ(given.run(context.handle), OUZEL_OK) << ouzel_last_error();
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      const ouzel_tensor& got = given.results()[i];
      const Floats& want = wanted[i]->array;
      SCOPED_TRACE(got.name);
      ASSERT_EQ(got.dtype, OUZEL_F32);
      ASSERT_EQ(std::vector<std::int64_t>(got.shape, got.shape + got.rank), want.shape);
      EXPECT_EQ(std::memcmp(got.data, want.data.data(), want.data.size() * sizeof(float)), 0);
    }
    if (!expected.gradients.empty()) ran.push_back(c.op);
  }
  for (std::size_t i = 0; i < ouzel_operator_count(); ++i) {
    EXPECT_NE(std::ranges::count(ran, ouzel_operator_name(i)), 0) << ouzel_operator_name(i);
  }
}

}  // namespace
}  // namespace ouzel::test
