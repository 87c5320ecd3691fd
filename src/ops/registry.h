// The table of operators: what each is called, takes, gives and means, and one function that runs
// any of them on named tensors. Tests, benchmarks and the program read it; a new law is a new row.
//
// Names of tensors and attributes are those of the project's golden files: inputs q, k, v, ...;
// outputs o, final_state, ...; gradients "d" + input. Attributes are text, as a file's metadata or
// a command line give them: "true", "0.25", "[0, 17, 52]"; "null" is the same as not given.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"

namespace ouzel {

class Attributes;
class OperatorCall;  // src/ops/operator_call.h

// The value of a letter of shapes; none: no tensor before has it.
using KnownExtent = std::function<std::optional<std::int64_t>(std::string_view letter)>;

// What a letter of shapes means; empty for one that no shape has.
std::string meaning_of_letter(std::string_view letter);

enum class AttributeKind { kFlag, kInteger, kNumber, kText, kIntegers };

// What a number may be: from `least` to `most`, but not `above` itself.
struct NumberRange {
  double least = -std::numeric_limits<double>::infinity();
  double most = std::numeric_limits<double>::infinity();
  double above = -std::numeric_limits<double>::infinity();
};

struct AttributeInfo {
  std::string name;
  AttributeKind kind;
  std::string meaning;
  std::string fallback;              // its value where it is not given; empty: `meaning` says
  std::vector<std::string> choices;  // of a text; empty: any
  NumberRange range = {};            // of a number, which float32 must hold, or a whole number

  // What may be given: "a number of at least 0", "one of linear, geometric".
  std::string domain() const;
};

// A tensor that an operator takes or gives.
struct TensorInfo {
  std::string name;
  // Letters of its extents, "B T HQ K", alternatives separated by "|". A letter means one number
  // throughout a call; those of tokens begin with T; a digit is that extent.
  std::string shape;
  // Of an input: what its gradient is called; of an output: the gradient that comes from above.
  // Empty: there is none.
  std::string gradient;
  bool optional = false;
  // What must hold of the attributes for the tensor to be there: "normalize=true form!=parallel",
  // alternatives of a value separated by "|".
  std::string when;
  DType dtype = DType::kF32;
  std::string gradient_when = {};  // what must hold for an input to have its gradient
  // It and its gradient may be bfloat16 or float16, each its own type. Other 16-bit tensors are
  // converted around the call.
  bool takes_half = false;

  bool is_state() const { return shape.starts_with("N "); }  // a row for each sequence
};

// Useful floating-point operations per token and number of the state; 0: no recurrent state.
struct OperatorCost {
  double forward = 0, backward = 0;
};

struct OperatorInfo {
  std::string name;  // as in C++
  std::vector<std::string> aliases;
  std::string formula;
  std::string source;
  std::vector<TensorInfo> inputs;
  std::vector<TensorInfo> outputs;
  std::vector<AttributeInfo> attributes;
  void (*run)(OperatorCall& call);  // forward, and backward if call.backward()
  OperatorCost cost = {};
  // Sets the extents that follow from attributes or from others, once all inputs have been seen;
  // null: there are none.
  void (*set_extents)(OperatorCall& call) = nullptr;
  // The letter F, from those of the inputs before it; null: K.
  std::int64_t (*features)(const Attributes& attributes, const KnownExtent& known) = nullptr;

  const AttributeInfo* find_attribute(std::string_view attribute) const;  // null: it has none such
  std::vector<std::string> attribute_names() const;
};

std::span<const OperatorInfo> operators();
// By name, alias, or the name of a published model that is built on it ("RetNet", "rwkv-7"). Throws
// Error(kInvalidArgument) that names the nearest relative.
const OperatorInfo& find_operator(const std::string& name);

// The attributes of one call, checked against the table, with its defaults filled in.
class Attributes {
 public:
  // `info` must outlive them. Throws Error(kInvalidArgument) for a name that the operator does not
  // have or a value that is not of the attribute's kind.
  Attributes(const OperatorInfo& info, const std::map<std::string, std::string>& given);

  std::map<std::string, std::string> values() const;  // in plain form
  bool flag(std::string_view name) const { return text(name) == "true"; }
  std::optional<std::int64_t> integer(std::string_view name) const;
  std::optional<double> number(std::string_view name) const;
  // "": it was not given and has no default.
  const std::string& text(std::string_view name) const;
  std::optional<std::vector<std::int64_t>> integers(std::string_view name) const;
  bool hold(std::string_view conditions) const;  // see TensorInfo::when

 private:
  const OperatorInfo& info_;
  std::map<std::string, std::string, std::less<>> given_;
};

// A dense tensor with memory of its own, zeros at first.
struct Array {
  Array() = default;
  Array(const std::vector<std::int64_t>& shape, DType dtype = DType::kF32);
  // For what is written as a whole.
  static Array unset(const std::vector<std::int64_t>& shape, DType dtype = DType::kF32);

  Buffer memory;
  Tensor tensor;
};

struct NamedArray {
  std::string name;
  bool is_gradient = false;
  Array array;
};

// What a call gives: an output, or the gradient of an input.
struct ResultInfo {
  std::string name;
  bool is_gradient = false;
  bool is_weight = false;  // or the gradient of one: it has no rows of tokens or sequences
  bool is_state = false;   // or the gradient of one: it has a row for each sequence
  DType dtype = DType::kF32;
  std::vector<std::int64_t> shape;
  bool takes_half = false;  // its memory may be bfloat16 or float16 (see TensorInfo)
};

// Runs an operator. `tensors`: its inputs and, with `backward`, the gradients of its outputs (one
// at least; others are zero where absent). Of the table's types; bfloat16 and float16 in place of
// float32, and float32 in place of float64, are converted, and rows without unit last stride are
// copied first. `segments` says which rows are sequences where `cu_seqlens` cannot. Returns, as
// float32, the outputs and, with `backward`, the gradients of all inputs that were given, in the
// table's order. Throws Error(kInvalidArgument) naming the tensor, what was expected and what was
// found. To give the memory of results: src/ops/operator_call.h.
std::vector<NamedArray> run_operator(Context& context, const OperatorInfo& info,
                                     const Attributes& attributes,
                                     const std::map<std::string, ConstTensor>& tensors,
                                     bool backward, const Segments* segments = nullptr);

}  // namespace ouzel
