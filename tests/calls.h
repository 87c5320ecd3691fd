// One call of any operator: the arguments of its reference and the upstream gradients. It can be
// run by the operator (in float32) or by the reference (in float64); both give the same named
// tensors. Names are those of the golden files: o, final_state, z, dq, dh0, dweight, ...
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/recurrence.h"
#include "src/ops/reference/recurrence.h"
#include "src/ops/reference/short_conv.h"
#include "src/ops/reference/softmax_attention.h"
#include "tests/compare.h"

namespace ouzel::test {

using Floats = reference::Array<float>;
using Doubles = reference::Array<double>;

using Recurrence = reference::RecurrenceArguments<double>;
using Attention = reference::SoftmaxAttentionArguments<double>;
using Conv = reference::ShortConvArguments<double>;

// What a recurrence's states carry beside S and z: what these lost to rounding, and how many tokens
// they have seen.
struct Residue {
  Doubles s, z;  // absent: zeros
  std::int64_t position = 0;
};

struct Call {
  // A recurrence with a decay is a call of `retention`, one without of `linear_attention`.
  std::variant<Recurrence, Attention, Conv> arguments;
  Doubles d_o, d_s, d_z;           // upstream gradients; absent ones are not given
  std::optional<Residue> residue;  // of a recurrence: states have residues, which are outputs too
  Form form = Form::kAuto;
  bool strided = false;  // token tensors with gaps between their rows
  bool saved = true;     // the backward pass of a recurrence reads what the forward pass saved
};

// What the leading axes of a tensor count.
enum class Role {
  kToken,      // [B, T, ...]
  kKeyToken,   // [B, T, ...] of the keys where those are other tokens than the queries
  kSequence,   // [N, ...]
  kParameter,  // anything: shared by all sequences
  kWeights,    // [B, H, T, T]
};

// An array of a call, to be changed in place; absent arrays have no slot.
struct Slot {
  std::string name;
  Role role;
  Doubles* array;
};
std::vector<Slot> slots(Call& call);

template <class Real>
struct Named {
  std::string name;
  Role role;
  reference::Array<Real> array;
};
template <class Real>
struct Results {
  std::vector<Named<Real>> outputs, gradients;
};

// Forward, then backward if `d_o` is given.
Results<float> run(Context& context, const Call& call);
Results<double> run_reference(const Call& call);
// The operator's step form, one token at a time for whole batch rows: outputs only.
Results<float> run_steps(Context& context, const Call& call);

Segments& segments_of(Call& call);

// Equal shapes and bits.
bool same_bits(const Floats& a, const Floats& b);

// All results of a call against those of its reference.
template <class Real>
void expect_within(const Results<Real>& got, const Results<double>& truth, const Bounds& bounds,
                   double gradient_floor = kFloor) {
  Comparison comparison;
  ASSERT_EQ(got.outputs.size(), truth.outputs.size());
  ASSERT_EQ(got.gradients.size(), truth.gradients.size());
  for (std::size_t i = 0; i < truth.outputs.size(); ++i) {
    comparison.output(truth.outputs[i].name, got.outputs[i].array, truth.outputs[i].array);
  }
  for (std::size_t i = 0; i < truth.gradients.size(); ++i) {
    comparison.gradient(truth.gradients[i].name, got.gradients[i].array, truth.gradients[i].array);
  }
  comparison.expect_within(bounds, gradient_floor);
}

}  // namespace ouzel::test
