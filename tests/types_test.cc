// Tensors of 16 bits, in every row of the table: a call gives what float32 arrays of the same
// values give, rounded once, bit for bit, wherever its kernels convert.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/half.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/operator_call.h"
#include "tests/table_calls.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;
using Arrays = std::map<std::string, ouzel::Array>;

std::vector<Int> shape_vector(const ConstTensor& x) {
  return {x.extent.begin(), x.extent.begin() + x.rank};
}

ouzel::Array converted(Context& context, const ConstTensor& x, DType dtype) {
  ouzel::Array y(shape_vector(x), dtype);
  copy_tensor(context, x, y.tensor);
  return y;
}

// Inputs and upstream gradients of a call in float64.
std::map<std::string, const Doubles*> tensors_of(const Call& call) {
  std::map<std::string, const Doubles*> tensors;
  for (const auto& [name, x] : std::get<ByName>(call.arguments).inputs) tensors[name] = &x;
  for (const auto& [name, x] : call.upstream) tensors[name] = &x;
  return tensors;
}

Arrays results(Context& context, const TableCase& c, const Arrays& tensors, bool backward,
               const std::map<std::string, DType>& types) {
  const Attributes attributes(info_of(c), c.attributes);
  std::map<std::string, ConstTensor> views;
  for (const auto& [name, array] : tensors) views[name] = array.tensor;
  OperatorCall call(info_of(c), attributes, views, backward);
  Arrays memory;
  for (const ResultInfo& result : call.results()) {
    const auto type = types.find(result.name);
    const DType dtype = type == types.end() ? result.dtype : type->second;
    memory[result.name] = ouzel::Array(result.shape, dtype);
    call.put(result.name, memory[result.name].tensor);
  }
  call.run(context);
  return memory;
}

double distance(Context& context, const ouzel::Array& got, const ouzel::Array& want) {
  const ouzel::Array a = converted(context, got.tensor, DType::kF32);
  const ouzel::Array b = converted(context, want.tensor, DType::kF32);
  double error = 0, size = 0;
  for (Int i = 0; i < a.tensor.size(); ++i) {
    const double x = a.memory.f32()[i], y = b.memory.f32()[i];
    error = std::max(error, std::abs(x - y));
    size = std::max(size, std::abs(y));
  }
  return error / size;
}

// `turns`: the types that tensors take in turn.
void expect_rounded(const TableCase& c, const Letters& sizes, const std::vector<DType>& turns) {
  Context context({.threads = 2, .poison_scratch = true});
  const Call call = make_call(c, sizes, 7);
  const auto is_wide = [&](const std::string& name) {  // float64, which is not of this matter
    const auto& inputs = info_of(c).inputs;
    return std::ranges::any_of(
        inputs, [&](const TensorInfo& x) { return x.name == name && x.dtype == DType::kF64; });
  };
  Arrays narrow, wide;
  std::size_t turn = 0;
  for (const auto& [name, x] : tensors_of(call)) {
    Tensor given;
    given.data = const_cast<double*>(x->data.data());
    given.dtype = DType::kF64;
    given.rank = static_cast<int>(x->rank());
    Int step = 1;
    for (std::size_t i = x->rank(); i-- > 0; step *= x->shape[i]) {
      given.extent[i] = x->shape[i];
      given.stride[i] = step;
    }
    const DType dtype = is_wide(name) ? DType::kF64 : turns[turn++ % turns.size()];
    narrow[name] = converted(context, given, dtype);
    wide[name] = converted(context, narrow[name].tensor, is_wide(name) ? DType::kF64 : DType::kF32);
  }
  const bool backward = !call.upstream.empty();
  const Arrays got = results(context, c, narrow, backward, {});
  std::map<std::string, DType> f32;
  for (const auto& [name, array] : got) f32[name] = DType::kF32;
  for (const auto& [name, exact] : results(context, c, wide, backward, f32)) {
    const ouzel::Array& own = got.at(name);
    const ouzel::Array want = converted(context, exact.tensor, own.tensor.dtype);
    const bool same = std::memcmp(own.memory.data(), want.memory.data(), want.memory.bytes()) == 0;
    if (turns.size() > 1) {
      const double rounding = want.tensor.dtype == DType::kBF16  ? 0x1p-8
                              : want.tensor.dtype == DType::kF16 ? 0x1p-11
                                                                 : 1e-6;
      EXPECT_TRUE(same || distance(context, own, want) <= 2 * rounding)
          << name_of(c) << ", K = " << sizes.at("K") << ": " << name;
    } else {
      EXPECT_TRUE(same) << name_of(c) << ", K = " << sizes.at("K") << ": " << name;
    }
  }
}

TEST(Types, SixteenBitTensorsGiveWhatTheirValuesGive) {
  const std::vector<std::vector<DType>> turns = {
      {DType::kBF16}, {DType::kF16}, {DType::kBF16, DType::kF32, DType::kF16}};
  for (const TableCase& c : table_cases()) {
    for (const std::vector<DType>& types : turns) {
      expect_rounded(c, table_sizes(c, 21), types);
      // Whole vectors, more than a chunk.
      expect_rounded(c, table_sizes(c, 70, 32, 32), types);
    }
  }
}

// More channels than go through scratch together, and more tokens: 2,100 and 150.
TEST(Types, SixteenBitRowsOfManyChannels) {
  const std::vector<std::vector<DType>> turns = {
      {DType::kBF16}, {DType::kF16}, {DType::kBF16, DType::kF32, DType::kF16}};
  const std::vector<std::string> names = {"short_conv", "hgrn", "rg_lru", "rwkv4"};
  for (const TableCase& c : table_cases()) {
    if (std::ranges::find(names, c.op) == names.end()) continue;
    for (const std::vector<DType>& types : turns) {
      Letters sizes = table_sizes(c, 150);
      sizes["D"] = 2100;
      expect_rounded(c, sizes, types);
    }
  }
}

}  // namespace
}  // namespace ouzel::test
