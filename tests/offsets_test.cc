// Arrays whose elements lie more than 2^31 elements apart: offsets are 64-bit everywhere. The
// memory is reserved, not used: only the pages of the rows are touched.
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/ops/operator_call.h"
#include "tests/by_name.h"
#include "tests/table_calls.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr Int kTokens = 70;

class Reserved {
 public:
  explicit Reserved(Int floats) : bytes_(static_cast<std::size_t>(floats) * sizeof(float)) {
    void* at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at != MAP_FAILED) data_ = static_cast<float*>(at);
  }
  ~Reserved() {
    if (data_ != nullptr) munmap(data_, bytes_);
  }
  Reserved(const Reserved&) = delete;
  float* data() const { return data_; }

 private:
  std::size_t bytes_;
  float* data_ = nullptr;
};

// Far apart: 2^25 elements between rows (2.3e9 over 70 tokens), or 2^31 + 2^20 between batch rows.
struct Spacing {
  Int batch, row;
};
constexpr Spacing kSpacings[] = {{Int{1} << 24, Int{1} << 25},
                                 {(Int{1} << 31) + (Int{1} << 20), 4096}};

// Hands out tensors: those with rows of tokens far apart, others dense.
class FarTensors {
 public:
  explicit FarTensors(const Spacing& spacing)
      : spacing_(spacing), far_(2 * kTokens * spacing.row + 2 * spacing.batch), dense_(1 << 20) {}
  bool fits() const { return far_.data() != nullptr; }

  Tensor take(const std::vector<Int>& shape, bool has_rows) {
    Tensor x;
    x.rank = static_cast<int>(shape.size());
    Int step = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      x.extent[i] = shape[i];
      x.stride[i] = step;
      if (i >= 2 || !has_rows) step *= shape[i];
    }
    Int& next = has_rows ? next_far_ : next_dense_;
    x.data = (has_rows ? far_.data() : dense_.data()) + next;
    next += step;
    if (has_rows) {
      x.stride[0] = spacing_.batch;
      x.stride[1] = spacing_.row;
    }
    return x;
  }

 private:
  Spacing spacing_;
  Reserved far_;
  std::vector<float> dense_;
  Int next_far_ = 0, next_dense_ = 0;
};

// Visits the elements of a tensor in order.
template <class Visit>
void for_each(const Tensor& x, const Visit& visit) {
  std::array<Int, kMaxRank> index{};
  const auto rank = static_cast<std::size_t>(x.rank);
  for (Int n = x.size(), i = 0; i < n; ++i) {
    Int at = 0;
    for (std::size_t d = 0; d < rank; ++d) at += index[d] * x.stride[d];
    visit(i, static_cast<float*>(x.data)[at]);
    for (std::size_t d = rank; d-- > 0 && ++index[d] == x.extent[d];) index[d] = 0;
  }
}

// All operators, forward and backward: the same bits as in dense memory.
TEST(Offsets, BeyondTwoToThe31ChangeNothing) {
  Context context({.threads = 2, .poison_scratch = true});
  std::uint64_t seed = 0;
  for (const TableCase& c : table_cases()) {
    const Call call = make_call(c, table_sizes(c, kTokens), ++seed);
    const auto& arguments = std::get<ByName>(call.arguments);
    const Results<float> dense = run_by_table(context, call);
    const OperatorInfo& info = info_of(c);
    const Attributes attributes(info, c.attributes);
    for (const Spacing& spacing : kSpacings) {
      SCOPED_TRACE(testing::Message() << name_of(c) << " rows " << spacing.row << " apart");
      FarTensors memory(spacing);
      if (!memory.fits()) GTEST_SKIP() << "no address space of this size";
      std::map<std::string, ConstTensor> tensors;
      const auto add = [&](const std::string& name, const std::string& shape, const Doubles& x) {
        const Tensor tensor = memory.take(x.shape, shape.starts_with("B T"));
        for_each(tensor, [&](Int i, float& to) {
          to = static_cast<float>(x.data[static_cast<std::size_t>(i)]);
        });
        tensors[name] = tensor;
      };
      std::map<std::string, std::string> shapes;  // of results
      for (const TensorInfo& input : info.inputs) {
        shapes[input.gradient] = input.shape;
        const auto found = arguments.inputs.find(input.name);
        if (found != arguments.inputs.end()) add(input.name, input.shape, found->second);
      }
      for (const TensorInfo& output : info.outputs) {
        shapes[output.name] = output.shape;
        const auto found = call.upstream.find(output.gradient);
        if (found != call.upstream.end()) add(output.gradient, output.shape, found->second);
      }
      OperatorCall far(info, attributes, tensors, true);
      std::map<std::string, Tensor> results;
      for (const ResultInfo& result : far.results()) {
        const Tensor tensor = memory.take(result.shape, shapes[result.name].starts_with("B T"));
        far.put(result.name, results[result.name] = tensor);
      }
      far.run(context);
      for (const auto* list : {&dense.outputs, &dense.gradients}) {
        for (const Named<float>& x : *list) {
          Int different = 0;
          for_each(results.at(x.name), [&](Int i, float& y) {
            const float& wanted = x.array.data[static_cast<std::size_t>(i)];
            different += std::memcmp(&wanted, &y, sizeof(float)) != 0;
          });
          // Rows that are not evenly spaced are summed batch row by batch row.
          if (c.op == "rms_norm" && x.name == "dweight") continue;
          EXPECT_EQ(different, 0) << x.name;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ouzel::test
