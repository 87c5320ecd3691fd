// Backward of the recurrence: its buffers, and what the three passes share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "src/ops/heads_scan.h"
#include "src/ops/key_exponents.h"

namespace ouzel {

struct BackwardBuffers {
  // A state of `rows` x `columns`.
  template <class Memory>
  BackwardBuffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape,
                  std::int64_t rows, std::int64_t columns)
      : pass(memory, rows, columns),
        q_map(memory, spec.map, shape.map, MapUse::kAdjoint),
        k_map(memory, spec.map, shape.map, MapUse::kAdjoint) {
    for (float** p : {&read_factor, &write_factor, &den, &denominator_grad}) {
      *p = memory.template take<float>(kChunk);
    }
    for (float** p : {&z, &z_residue}) *p = memory.template take<float>(q_map.pitch());
    gradient_size = kChunk * std::max(q_map.pitch(), padded(columns, kSlab));
    gradient = memory.template take<float>(gradient_size);
    if (!spec.normalize) return;
    value_pitch = padded(shape.values, kSlab);
    values = memory.template take<float>(kChunk * value_pitch);
    value_dots = memory.template take<float>(kChunk);
    for (float** p : {&q_rows, &k_rows, &z_rows}) {
      *p = memory.template take<float>(kChunk * q_map.pitch());
    }
  }
  StatePass pass;
  HeadMap q_map, k_map;
  float *read_factor, *write_factor, *den, *denominator_grad, *z, *z_residue;
  std::int64_t gradient_size;
  float* gradient;  // [64][pitch], of columns of the state
  std::int64_t value_pitch = 0;
  float *values = nullptr, *value_dots = nullptr;                 // [64][value pitch], [64]
  float *q_rows = nullptr, *k_rows = nullptr, *z_rows = nullptr;  // [64][pitch]
};

// Gradients of one sequence's state among the caller's, or nothing.
template <class T>
StateMemory<T> memory_of(const StateView& view, std::int64_t n, std::int64_t state,
                         bool transposed) {
  if (!view.present()) return {};
  StateMemory<T> memory;
  memory.s = view.sequences[static_cast<std::size_t>(n)].s + state * view.head_stride;
  memory.row = transposed ? 1 : view.key_stride;
  memory.column = transposed ? view.key_stride : 1;
  return memory;
}

inline std::int64_t count_of(const Tensor& x) {
  std::int64_t count = 1;
  for (int i = 0; i < x.rank; ++i) count *= x.extent[static_cast<std::size_t>(i)];
  return count;
}

class Backward {
 public:
  Backward(Context& context, const RecurrenceSpec& spec, const RecurrenceShape& shape,
           const RecurrenceInputs& inputs, const RecurrenceOutputGrads& output_grads,
           const RecurrenceInputGrads& input_grads, const FeatureMapGrads* map_grads)
      : context_(context),
        spec_(spec),
        shape_(shape),
        in_(inputs),
        up_(output_grads),
        out_(input_grads),
        map_grads_(info_of(spec.map.kind).trained ? map_grads : nullptr),
        factors_(spec.normalize || info_of(spec.map.kind).running_maximum),
        relative_(spec.normalize && !inputs.initial_state.present() &&
                  !output_grads.final_state.present()),
        isa_(context.isa()),
        // The sequences of a batch share a few sets of sums of parameter gradients.
        sequence_groups_(map_grads_ != nullptr ? std::min<std::int64_t>(shape.sequences, 16)
                                               : shape.sequences),
        scale_(static_cast<float>(spec.scale)),
        write_scale_(scale_),
        read_scale_(1),
        plain_(spec.map.kind == FeatureMapKind::kIdentity && !spec.normalize) {
    if (!output_grads.final_state.present() && !input_grads.initial_state.present()) {
      std::swap(write_scale_, read_scale_);
    }
  }

  void run();

 private:
  enum class Gradient { kQ, kK, kV };
  // Whether a pass goes over several heads at once.
  bool in_heads(Gradient gradient) const;
  HeadsTasks heads_tasks(Gradient gradient) const;
  std::size_t heads_scratch(Gradient gradient, const HeadsTasks& tasks) const;
  void heads_pass(Gradient gradient, const HeadsTask& task, Scratch& scratch) const;

  void query_pass(std::int64_t n, std::int64_t query_head, std::int64_t column,
                  std::int64_t columns, double* sums, BackwardBuffers& b);
  void key_pass(std::int64_t n, std::int64_t key_head, std::int64_t column, std::int64_t columns,
                double* sums, BackwardBuffers& b);
  void value_pass(std::int64_t n, std::int64_t state, std::int64_t column, std::int64_t columns,
                  BackwardBuffers& b);
  void normalizer_adjoint(std::int64_t tokens, const TokenValues& inverse,
                          const TokenValues& denominator_grad, std::int64_t t, const float* own,
                          float exponent, BackwardBuffers& b);

  // Rows of v as the gradients of q and k see them: see normalizer_adjoint.
  MappedRows values_of(const Rows<const float>& v, std::int64_t t, std::int64_t tokens,
                       const float* first, BackwardBuffers& b) const;
  // Multiplies the state and z.
  void rescale(float factor, BackwardBuffers& b) const;
  // Exponents of keys for a pass back in time; G is a multiple of 2 to minus them. Without
  // causality one for all.
  TokenValues exponents_back_in_time(std::int64_t n, std::int64_t state) const;
  float last_exponent(std::int64_t n, std::int64_t state) const {
    return exponents_ ? exponents_.final(n, state)[0] : 0;
  }
  float first_exponent(std::int64_t n, std::int64_t state) const;
  // What brings the gradient of a final state to the exponent of the last key.
  float final_grad_factor(std::int64_t n, std::int64_t state) const;

  // r, the factor of an output row, (which = 0) and d(den) (1) of a sequence and output head.
  TokenValues token_values(std::int64_t which, const Segment& s, std::int64_t output,
                           bool backwards) const {
    if (!factors_) return {};
    float* row = per_token_.f32() +
                 ((which * shape_.batch + s.batch) * shape_.output_heads + output) * shape_.tokens +
                 s.begin;
    return backwards ? TokenValues{row + s.length - 1, -1} : TokenValues{row, 1};
  }
  double* weight_sums(std::int64_t group, std::int64_t head, bool key) const;
  void add_weight_grads(const FeatureMapWeightGrads& grads, bool from_q, bool from_k);

  Context& context_;
  const RecurrenceSpec& spec_;
  const RecurrenceShape& shape_;
  const RecurrenceInputs& in_;
  const RecurrenceOutputGrads& up_;
  const RecurrenceInputGrads& out_;
  const FeatureMapGrads* map_grads_;
  bool factors_;   // output rows have factors of their own
  bool relative_;  // values are taken less the first of their sequence
  KeyExponents exponents_;
  Isa isa_;
  std::int64_t sequence_groups_;
  float scale_;
  // The scale stands on the rows that are written into the state; or, where no gradient of a state
  // comes in or goes out, on those that are read out of it: then packing is plain copying.
  float write_scale_, read_scale_;
  bool plain_;  // the gradients of phi(q) and phi(k) are those of q and k
  Buffer per_token_, sums_;
};

}  // namespace ouzel
