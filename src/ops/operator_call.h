// One call of an operator of the table. Who calls: makes it (everything is checked), puts memory to
// the results that are wanted, runs it. The row that it runs sees tensors by name, attributes,
// sizes.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"
#include "src/ops/registry.h"

namespace ouzel {

// "" if a tensor of the table may be given in this type, else the types it may be given in.
std::string wanted_type(const TensorInfo& info, DType dtype);

class OperatorCall {
 public:
  // --- for who calls
  // `info` and `attributes` must outlive the call, as must the memory of `tensors`: see
  // run_operator. Throws Error(kInvalidArgument).
  OperatorCall(const OperatorInfo& info, const Attributes& attributes,
               const std::map<std::string, ConstTensor>& tensors, bool backward,
               const Segments* segments = nullptr);
  OperatorCall(const OperatorCall&) = delete;
  OperatorCall& operator=(const OperatorCall&) = delete;

  // All that the call can give, in the table's order. The first output has the type of the first
  // input, a gradient that of its input, others are float32.
  const std::vector<ResultInfo>& results() const { return results_; }
  // One of them. Throws Error(kInvalidArgument), naming the nearest, if there is none such.
  const ResultInfo& result(const std::string& name) const;
  // Where a result goes; those without memory are not wanted. float32, bfloat16 or float16, any
  // strides; written straight if float32 with unit last stride. Memory must not overlap any other
  // tensor's of the call, except that a final state may be its initial state. Throws
  // Error(kInvalidArgument).
  void put(const std::string& name, const Tensor& memory);
  // Puts each final state to the memory of its initial state, which must be given, writable and
  // float32. Throws Error(kInvalidArgument).
  void update_states();
  // What a forward call leaves in `saved`, if its operator does, spares the backward call of the
  // same inputs a part of its work.
  void share(Buffer& saved) { saved_ = &saved; }
  // Once. Where all results are empty, nothing is computed, nor checked beyond what the table says.
  void run(Context& context);

  // --- for the row, while it runs
  const std::string& name() const { return info_.name; }
  Context& context() const { return *context_; }
  const Attributes& attributes() const { return attributes_; }
  bool backward() const { return backward_; }
  // False for a backward call whose caller wants gradients alone: forward need not be computed.
  bool wants_outputs() const { return !backward_ || outputs_wanted_; }
  // Of share; null: nothing is.
  Buffer* saved() const { return saved_; }
  // One token of each sequence, from states to states: what the step form of an operator is for.
  bool steps() const;
  // Makes the final states equal to the initial ones, for a step to update.
  void begin_states() const;
  // Given, or from `cu_seqlens`; null: every batch row is a sequence.
  const Segments* segments() const { return segments_ ? &*segments_ : nullptr; }

  // By name, with the table's type (or a 16-bit one, where the row says that it takes them) and
  // unit last stride; absent where the call has none: an optional input that was not given, the
  // gradient of such an input or of a forward call, an output that the attributes rule out, a
  // result that is not wanted (the first output always is).
  ConstTensor in(std::string_view name) const;
  Tensor out(std::string_view name) const;
  // The value of a letter of the table, after all inputs have been seen.
  std::int64_t extent(std::string_view letter) const { return known_extent(letter).value(); }
  // None: no tensor that has been seen has it.
  std::optional<std::int64_t> known_extent(std::string_view letter) const;
  // Of OperatorInfo::set_extents. Throws Error(kInvalidArgument) if a tensor has another; `from`:
  // what says so.
  void set_extent(const std::string& letter, std::int64_t value, const std::string& from);

 private:
  struct Taken {
    std::string_view name;  // of the table
    ConstTensor tensor;
    DType dtype = DType::kF32;  // as the row takes it
  };
  struct Extent {
    std::string letter;
    std::int64_t value = 0;
    std::string from;  // the tensor that fixed it
  };
  struct Placed {
    std::string_view name;  // of results_
    Tensor memory;
  };

  void check_names(const std::map<std::string, ConstTensor>& tensors) const;
  void check_name(const std::string& name) const;
  void check_packing();
  void take(const TensorInfo& info, const std::string& name, const ConstTensor& tensor);
  [[noreturn]] void refuse_shape(const TensorInfo& info, const std::string& name,
                                 const ConstTensor& tensor);
  std::optional<std::int64_t> resolve(std::string_view letter);
  const Extent* find_extent(std::string_view letter) const;
  bool fits(std::string_view letters, const ConstTensor& tensor, const std::string& name);
  std::string expected(const TensorInfo& info);
  std::vector<std::int64_t> shape_of(const TensorInfo& info);
  void list_results();
  // The initial states of the call and, in the same order, the final ones.
  std::vector<std::pair<const TensorInfo*, const TensorInfo*>> states() const;
  void check_apart(const Tensor& memory, const std::string& name) const;
  void check_overlaps() const;

  Context* context_ = nullptr;
  const OperatorInfo& info_;
  const Attributes& attributes_;
  bool backward_;
  bool outputs_wanted_ = false;
  Buffer* saved_ = nullptr;
  std::optional<Segments> segments_;
  // A few each, looked up by name: calls of one token spend most of their time here.
  std::vector<Extent> extents_;
  std::vector<Taken> in_;  // inputs and gradients from above
  std::vector<ResultInfo> results_;
  Array no_gradient_;        // zeros for the first output where only others have one
  std::vector<Placed> out_;  // outputs and gradients of inputs
};

}  // namespace ouzel
