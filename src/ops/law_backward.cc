// The laws of ouzel/laws.h, backward: a task takes the states of one sequence (or, where parameters
// collect gradients, of a few sequences) that share a key or query head, in order.
#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "ouzel/laws.h"
#include "src/base/context_impl.h"
#include "src/base/half.h"
#include "src/kernels/law_rows.h"
#include "src/kernels/recurrence.h"
#include "src/ops/law_adjoint.h"
#include "src/ops/law_call.h"
#include "src/ops/law_source.h"
#include "src/ops/rows_backward.h"

namespace ouzel {
namespace {

using enum LawRole;

// More sets of sums than this only cost memory.
constexpr std::int64_t kMaxSumGroups = 16;

class LawBackward {
 public:
  LawBackward(Context& context, const LawCall& call, const RecurrenceInputs& inputs,
              const void* saved, const RecurrenceOutputGrads& output_grads,
              const RecurrenceInputGrads& input_grads)
      : context_(context),
        call_(call),
        shape_(call.shape()),
        kept_(call.kept_floats() > 0 ? static_cast<const float*>(saved) : nullptr),
        initial_(inputs.initial_state),
        final_grad_(output_grads.final_state),
        initial_grad_(input_grads.initial_state),
        output_grad_(call.output(output_grads.o, "the gradient of o")) {
    for (std::size_t i = 0; i < kLawRoles; ++i) {
      grads_[i] = call.gradient(static_cast<LawRole>(i), input_grads);
    }
    call.check_state(initial_, "the initial state");
    call.check_state(final_grad_, "the gradient of the final state");
    call.check_state(initial_grad_, "the gradient of the initial state");
  }

  void run();

 private:
  bool collects() const {
    return std::any_of(grads_.begin(), grads_.end(),
                       [](const LawTensor& x) { return x.present() && x.is_parameter; });
  }
  LawSums sums(std::int64_t group, std::int64_t state) const {
    if (sums_.bytes() == 0) return {};
    const std::int64_t size = LawSums::size(shape_.keys);
    return {sums_.as<double>() + (group * shape_.value_heads + state) * size, shape_.keys};
  }
  void widen_shared();
  void narrow_shared();
  void run_state(std::int64_t n, std::int64_t state, const LawSums& sums, LawSource& source,
                 LawAdjoint& adjoint, Scratch& scratch) const;
  void add_parameters(std::int64_t groups) const;
  void add_parameter(LawRole role, double* LawSums::*member, std::int64_t groups) const;

  Context& context_;
  const LawCall& call_;
  const RecurrenceShape& shape_;
  const float* kept_;
  const StateView &initial_, &final_grad_, &initial_grad_;
  LawTensor output_grad_;
  LawGradients grads_;
  // 16-bit gradients to which several states add are summed in float32.
  struct Widened {
    LawTensor narrow;
    Buffer memory;
    std::size_t role = 0;
  };
  std::vector<Widened> widened_;
  Buffer sums_;
};

// As dense float32 arrays.
void LawBackward::widen_shared() {
  for (std::size_t i = 0; i < kLawRoles; ++i) {
    LawTensor& x = grads_[i];
    if (!x.present() || !x.is_narrow() || x.is_parameter || x.heads >= shape_.value_heads) continue;
    const std::int64_t rows = shape_.batch * shape_.tokens * x.rows_per_token;
    Widened wide{x, Buffer(static_cast<std::size_t>(rows * x.heads * x.size) * sizeof(float)), i};
    x.data = wide.memory.data();
    x.dtype = DType::kF32;
    x.head_stride = x.size;
    x.row_stride = x.heads * x.size;
    x.batch_stride = shape_.tokens * x.rows_per_token * x.row_stride;
    widened_.push_back(std::move(wide));
  }
}

void LawBackward::narrow_shared() {
  for (const Widened& wide : widened_) {
    const LawTensor &from = grads_[wide.role], &to = wide.narrow;
    const std::int64_t rows = shape_.tokens * to.rows_per_token;
    context_.impl().run(shape_.batch * to.heads, [&](std::int64_t task, Scratch&) {
      const Segment all{task / to.heads, 0, shape_.tokens};
      const std::int64_t head = task % to.heads;
      StoreRowsArgs a;
      a.from = static_cast<const float*>(from.at(all, 0, head, false));
      a.pitch = from.row_stride;
      a.rows = rows;
      a.size = to.size;
      a.to = to.at(all, 0, head, false);
      a.dtype = to.dtype;
      a.stride = to.row_stride;
      store_rows(context_.isa(), a);
    });
  }
}

void LawBackward::run_state(std::int64_t n, std::int64_t state, const LawSums& sums,
                            LawSource& source, LawAdjoint& adjoint, Scratch& scratch) const {
  source.bind(context_.isa(), n, state, const_cast<float*>(kept_));  // only read
  adjoint.bind(context_.isa(), n, state, sums);
  const std::size_t mark = scratch.mark();
  StateMemory<const float> final_grad = readable(state_memory(final_grad_, n, state));
  final_grad.residue = nullptr;
  rows_backward(context_.isa(), call_.kind(), source, adjoint,
                readable(state_memory(initial_, n, state)), position_of(initial_, n), final_grad,
                state_memory(initial_grad_, n, state), scratch);
  scratch.rewind(mark);
}

void LawBackward::run() {
  if (shape_.is_empty(initial_grad_)) return;
  widen_shared();
  const bool collects = this->collects();
  const std::int64_t groups =
      collects ? std::min(shape_.sequences, kMaxSumGroups) : shape_.sequences;
  if (collects) {
    sums_ = Buffer::zeros(
        static_cast<std::size_t>(groups * shape_.value_heads * LawSums::size(shape_.keys)) *
        sizeof(double));
  }
  // States that share a query or key head add to the same gradients: they are one task's.
  const std::int64_t head_groups =
      std::gcd(std::min(shape_.query_heads, shape_.value_heads), shape_.key_heads);
  const std::int64_t states = shape_.value_heads / head_groups;
  std::int64_t longest = 0;
  for (std::int64_t n = 0; n < shape_.sequences; ++n) {
    longest = std::max(longest, shape_.segment(n).length);
  }
  const LawTensor no_output;
  ScratchCounter counter;
  LawSource(counter, call_, no_output, shape_.values);
  LawAdjoint(counter, call_, output_grad_, grads_);
  context_.impl().reserve(counter.bytes() +
                          rows_backward_scratch(call_.kind(), longest, kept_ != nullptr));
  const std::int64_t tasks = groups * head_groups;
  context_.impl().run(tasks + gap_tasks(shape_), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks) {
      for (const LawTensor& x : grads_) zero_gaps(shape_, task - tasks, x);
      return;
    }
    const std::int64_t group = task / head_groups, heads = task % head_groups;
    LawSource source(scratch, call_, no_output, shape_.values);
    LawAdjoint adjoint(scratch, call_, output_grad_, grads_);
    for (std::int64_t n = group * shape_.sequences / groups;
         n < (group + 1) * shape_.sequences / groups; ++n) {
      for (std::int64_t state = heads * states; state < (heads + 1) * states; ++state) {
        run_state(n, state, sums(group, state), source, adjoint, scratch);
      }
    }
    finish_streams();
  });
  if (collects) add_parameters(groups);
  narrow_shared();
}

void LawBackward::add_parameters(std::int64_t groups) const {
  if (grads_[static_cast<std::size_t>(kDecay)].is_parameter) {
    add_parameter(kDecay, &LawSums::decay, groups);
  }
  add_parameter(kBonus, &LawSums::bonus, groups);
  add_parameter(kRate, &LawSums::rate, groups);
  add_parameter(kSkip, &LawSums::skip, groups);
}

void LawBackward::add_parameter(LawRole role, double* LawSums::*member, std::int64_t groups) const {
  const LawTensor& x = grads_[static_cast<std::size_t>(role)];
  if (!x.present()) return;
  for (std::int64_t head = 0; head < x.heads; ++head) {
    void* row = x.at({}, 0, head, false);
    for (std::int64_t i = 0; i < x.size; ++i) {
      double sum = 0;
      for (std::int64_t group = 0; group < groups; ++group) {
        sum += (sums(group, head).*member)[i];
      }
      const auto add = [&](auto* element, auto rounded) {
        const double before = static_cast<double>(to_float(element[i]));
        element[i] = rounded(static_cast<float>(before + sum));
      };
      if (x.dtype == DType::kBF16) {
        add(static_cast<BFloat16*>(row), to_bf16);
      } else if (x.dtype == DType::kF16) {
        add(static_cast<Float16*>(row), to_f16);
      } else {
        float& y = static_cast<float*>(row)[i];
        y = static_cast<float>(static_cast<double>(y) + sum);
      }
    }
  }
}

}  // namespace

void MatrixLaw::backward(Context& context, const LawOptions& options,
                         const RecurrenceInputs& inputs, const void* saved,
                         const RecurrenceOutputGrads& output_grads,
                         const RecurrenceInputGrads& input_grads) const {
  const LawCall call(*law_, options, inputs);
  LawBackward(context, call, inputs, saved, output_grads, input_grads).run();
}

}  // namespace ouzel
