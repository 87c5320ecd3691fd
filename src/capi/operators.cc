// Operators of the table through one C call.
#include <algorithm>
#include <cstdlib>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/feature_map.h"
#include "src/base/text.h"
#include "src/capi/handles.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry.h"

namespace ouzel::capi {
namespace {

static_assert(static_cast<int>(DType::kF32) == OUZEL_F32 &&
              static_cast<int>(DType::kF64) == OUZEL_F64 &&
              static_cast<int>(DType::kBF16) == OUZEL_BF16 &&
              static_cast<int>(DType::kF16) == OUZEL_F16);

// Element i of a caller's array, whose elements are as large as its version's struct.
const ouzel_tensor& tensor_at(const ouzel_tensor* tensors, std::size_t i) {
  return *reinterpret_cast<const ouzel_tensor*>(reinterpret_cast<const char*>(tensors) +
                                                i * tensors->size);
}
ouzel_tensor& tensor_at(ouzel_tensor* tensors, std::size_t i) {
  return const_cast<ouzel_tensor&>(tensor_at(const_cast<const ouzel_tensor*>(tensors), i));
}

[[noreturn]] void refuse(const ouzel_tensor& tensor, const std::string& why) {
  throw Error(ErrorKind::kInvalidArgument, "tensor '" + printable(tensor.name) + "' " + why);
}

std::vector<ouzel_tensor> tensors_of(const ouzel_tensor* tensors, std::size_t count,
                                     const char* what) {
  std::vector<ouzel_tensor> list;
  for (std::size_t i = 0; i < count; ++i) {
    const ouzel_tensor& given = tensor_at(&required(tensors, what), i);
    const ouzel_tensor tensor = versioned(given, "ouzel_tensor");
    required(tensor.name, "ouzel_tensor.name");
    if (given.size != tensors->size) {
      refuse(tensor, "has another size than the first of its array");
    }
    for (const ouzel_tensor& before : list) {
      if (std::string_view(before.name) == tensor.name) refuse(tensor, "is given twice");
    }
    list.push_back(tensor);
  }
  return list;
}

Tensor view_of(const ouzel_tensor& given) {
  if (given.rank < 0 || given.rank > kMaxRank || given.dtype < OUZEL_F32 ||
      given.dtype > OUZEL_F16) {
    refuse(given, "has rank " + std::to_string(given.rank) + " and dtype " +
                      std::to_string(given.dtype) + "; a rank from 0 to " +
                      std::to_string(kMaxRank) + " and a dtype from " + std::to_string(OUZEL_F32) +
                      " to " + std::to_string(OUZEL_F16) + " were expected");
  }
  Tensor view;
  view.data = given.data;
  view.dtype = static_cast<DType>(given.dtype);
  view.rank = given.rank;
  const auto rank = static_cast<std::size_t>(given.rank);
  const bool dense =
      std::all_of(given.strides, given.strides + rank, [](std::int64_t s) { return s == 0; });
  // Neither sizes nor distances in bytes may wrap, not even those of tensors without elements.
  const std::int64_t most = INT64_MAX / size_of(view.dtype);
  std::int64_t step = 1, far = 0;
  for (std::size_t i = rank; i-- > 0;) {
    const std::int64_t extent = given.shape[i];
    view.extent[i] = extent;
    view.stride[i] = dense ? step : given.strides[i];
    std::int64_t distance = 0;
    if (extent < 0 || __builtin_mul_overflow(step, std::max<std::int64_t>(extent, 1), &step) ||
        step > most) {
      refuse(given, "has an extent of " + std::to_string(extent) +
                        "; extents must not be negative, nor a tensor larger than 2^63 bytes");
    }
    if (view.stride[i] == INT64_MIN ||
        __builtin_mul_overflow(std::abs(view.stride[i]), std::max<std::int64_t>(extent - 1, 0),
                               &distance) ||
        __builtin_add_overflow(far, distance, &far) || far > most) {
      refuse(given, "has a stride of " + std::to_string(view.stride[i]) + ", which with " +
                        std::to_string(extent) + " rows leads beyond 2^63 bytes");
    }
  }
  if (given.data == nullptr && view.size() != 0) {
    refuse(given, "has elements, and its data is NULL");
  }
  return view;
}

// An ouzel_call, checked and ready to run.
class CheckedCall {
 public:
  explicit CheckedCall(const ouzel_call* given)
      : call_(versioned(required(given, "ouzel_call"), "ouzel_call")),
        info_(find_operator(&required(call_.op, "ouzel_call.op"))),
        attributes_(info_, attributes_of(call_.attributes)),
        inputs_(tensors_of(call_.inputs, call_.input_count, "ouzel_call.inputs")),
        wanted_(tensors_of(call_.results, call_.result_count, "ouzel_call.results")),
        operator_call_(info_, attributes_, views_of(inputs_), wants_gradients()) {}

  // Sets what the results are.
  void infer() {
    for (std::size_t i = 0; i < wanted_.size(); ++i) {
      ouzel_tensor& result = tensor_at(call_.results, i);
      const ResultInfo& info = operator_call_.result(result.name);
      result.dtype = static_cast<ouzel_dtype>(info.dtype);
      result.rank = static_cast<std::int32_t>(info.shape.size());
      std::fill_n(result.strides, OUZEL_MAX_RANK, 0);
      std::copy(info.shape.begin(), info.shape.end(), result.shape);
    }
  }

  void run(Context& context) {
    for (const ouzel_tensor& result : wanted_) operator_call_.put(result.name, view_of(result));
    operator_call_.run(context);
  }

 private:
  static std::map<std::string, std::string> attributes_of(const char* const* given) {
    std::map<std::string, std::string> attributes;
    for (; given != nullptr && *given != nullptr; given += 2) {
      const char* const value = &required(given[1], "the value of an attribute");
      if (!attributes.emplace(*given, value).second) {
        throw Error(ErrorKind::kInvalidArgument,
                    fmt::format("attribute '{}' is given twice; give it once", printable(*given)));
      }
    }
    return attributes;
  }

  static std::map<std::string, ConstTensor> views_of(const std::vector<ouzel_tensor>& tensors) {
    std::map<std::string, ConstTensor> views;
    for (const ouzel_tensor& tensor : tensors) {
      views.emplace(tensor.name, view_of(tensor));
    }
    return views;
  }

  // A call has a backward pass if a gradient is wanted, or given from above.
  bool wants_gradients() const {
    const auto named = [](const std::vector<ouzel_tensor>& tensors, const std::string& name) {
      return !name.empty() && std::any_of(tensors.begin(), tensors.end(),
                                          [&](const auto& tensor) { return name == tensor.name; });
    };
    return std::any_of(info_.inputs.begin(), info_.inputs.end(),
                       [&](const auto& input) { return named(wanted_, input.gradient); }) ||
           std::any_of(info_.outputs.begin(), info_.outputs.end(),
                       [&](const auto& output) { return named(inputs_, output.gradient); });
  }

  ouzel_call call_;
  const OperatorInfo& info_;
  Attributes attributes_;
  std::vector<ouzel_tensor> inputs_, wanted_;
  OperatorCall operator_call_;
};

}  // namespace
}  // namespace ouzel::capi

using namespace ouzel::capi;

size_t ouzel_operator_count(void) { return ouzel::operators().size(); }

const char* ouzel_operator_name(size_t index) {
  const auto table = ouzel::operators();
  return index < table.size() ? table[index].name.c_str() : nullptr;
}

ouzel_status ouzel_infer_results(const ouzel_call* call) {
  return guarded([&] { CheckedCall(call).infer(); });
}

ouzel_status ouzel_run(ouzel_context* context, const ouzel_call* call) {
  return guarded([&] { CheckedCall(call).run(required(context, "the context").context); });
}

ouzel_status ouzel_draw_orthogonal_projection(uint64_t seed, int32_t norms, int64_t rows,
                                              int64_t keys, float* w) {
  return guarded([&] {
    if (norms != OUZEL_NORMS_CHI && norms != OUZEL_NORMS_SQRT) {
      throw ouzel::Error(
          ouzel::ErrorKind::kInvalidArgument,
          fmt::format("norms {} is neither OUZEL_NORMS_CHI nor OUZEL_NORMS_SQRT", norms));
    }
    ouzel::draw_orthogonal_projection(
        seed,
        norms == OUZEL_NORMS_CHI ? ouzel::ProjectionNorms::kChi : ouzel::ProjectionNorms::kSqrt,
        ouzel::View<float, 2>(&required(w, "the memory of the projection"), {rows, keys}));
  });
}
