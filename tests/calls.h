// One call of any operator: the arguments of its reference and the upstream gradients. It can be
// run by the operator (in float32) or by the reference (in float64); both give the same named
// tensors. Names are those of the golden files: o, final_state, z, dq, dh0, dweight, ...
//
// A new row of the table of operators is called ByName and needs no code here but its reference.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/recurrence.h"
#include "src/ops/reference/laws.h"
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

// A row of the table of operators.
struct ByName {
  std::string op;
  std::map<std::string, std::string> attributes;
  reference::Tensors<double> inputs;
  Segments segments;
};

// What a recurrence's states carry beside S and z: what these lost to rounding, and how many tokens
// they have seen.
struct Residue {
  Doubles s, z;  // absent: zeros
  std::int64_t position = 0;
};

struct Call {
  // A recurrence with a decay is a call of `retention`, one without of `linear_attention`.
  std::variant<Recurrence, Attention, Conv, ByName> arguments;
  reference::Tensors<double> upstream;  // do, dht, ...; none: forward only
  std::optional<Residue> residue;  // of a recurrence: states have residues, which are outputs too
  Form form = Form::kAuto;
  bool strided = false;  // token tensors with gaps between their rows
  bool saved = true;     // the backward pass of a recurrence reads what the forward pass saved

  bool backward() const { return !upstream.empty(); }
  Doubles up(const std::string& name) const {  // absent if not given
    const auto found = upstream.find(name);
    return found == upstream.end() ? Doubles() : found->second;
  }
};

// What the leading axes of a tensor count.
enum class Role {
  kToken,      // [B, T, ...]
  kKeyToken,   // [B, T, ...] of the keys where those are other tokens than the queries
  kSequence,   // [N, ...]
  kParameter,  // anything: shared by all sequences
  kWeights,    // [B, H, T, T]
};

// An array of a call, to be changed in place; absent arrays have no slot. A token has `rows` rows.
struct Slot {
  std::string name;
  Role role;
  Doubles* array;
  std::int64_t rows = 1;
};
std::vector<Slot> slots(Call& call);

template <class Real>
struct Named {
  std::string name;
  Role role;
  reference::Array<Real> array;
  std::int64_t rows = 1;
};
template <class Real>
struct Results {
  std::vector<Named<Real>> outputs, gradients;
};

// The array of a name; a failure if there is none.
template <class Real>
const reference::Array<Real>& array_of(const std::vector<Named<Real>>& list,
                                       const std::string& name) {
  static const reference::Array<Real> absent;
  for (const Named<Real>& x : list) {
    if (x.name == name) return x.array;
  }
  ADD_FAILURE() << "there is no " << name;
  return absent;
}

// Forward, then backward if there are upstream gradients.
Results<float> run(Context& context, const Call& call);
Results<double> run_reference(const Call& call);
// The operator's step form, one token at a time for whole batch rows: outputs only.
Results<float> run_steps(Context& context, const Call& call);

Segments& segments_of(Call& call);

// Equal shapes and bits.
bool same_bits(const Floats& a, const Floats& b);
void expect_same(const Results<float>& a, const Results<float>& b);
// On every instruction set: for any number of threads, with a small second-level cache or a large
// one, whatever scratch held before.
void expect_threads_change_no_bit(const Call& call);

// All results of a call against those of its reference.
template <class Real>
void expect_within(const Results<Real>& got, const Results<double>& truth, const Bounds& bounds,
                   double gradient_floor = kFloor) {
  Comparison comparison;
  ASSERT_EQ(got.outputs.size(), truth.outputs.size());
  ASSERT_EQ(got.gradients.size(), truth.gradients.size());
  for (const Named<double>& x : truth.outputs) {
    comparison.output(x.name, array_of(got.outputs, x.name), x.array);
  }
  for (const Named<double>& x : truth.gradients) {
    comparison.gradient(x.name, array_of(got.gradients, x.name), x.array);
  }
  comparison.expect_within(bounds, gradient_floor);
}

}  // namespace ouzel::test
