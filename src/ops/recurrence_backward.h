// Backward of the recurrence: its buffers, and what the three passes share.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "src/ops/heads_scan.h"
#include "src/ops/key_exponents.h"
#include "src/ops/widened.h"

namespace ouzel {

// Rows of an input of any type, which the passes read as float32, a chunk at a time.
struct ChunkedRows {
  Isa isa = Isa::kPortable;
  AnyRows<const void> rows;
  std::int64_t size = 0;
  float* memory = nullptr;  // of a chunk, if they have 16 bits

  // Rows of which tokens [t, t + tokens) are there, until the next call.
  Rows<const float> operator()(std::int64_t t, std::int64_t tokens) const {
    return wide_rows(isa, rows, t, tokens, size, memory);
  }
  void prefetch(StatePass& pass, std::int64_t t, std::int64_t column, std::int64_t columns) const {
    if (rows.dtype != DType::kF32) return;
    pass.prefetch(static_cast<const float*>(rows.at(t).first) + column, rows.stride, columns);
  }
  explicit operator bool() const { return static_cast<bool>(rows); }
};

// Rows of a gradient of any type, which a pass writes as float32.
struct ChunkedGrads {
  Isa isa = Isa::kPortable;
  AnyRows<void> rows;
  std::int64_t size = 0;
  float* memory = nullptr;

  bool wide() const { return rows.dtype == DType::kF32; }
  Rows<float> operator()(std::int64_t t) const {
    if (wide()) return {static_cast<float*>(rows.first), rows.stride};
    const std::int64_t pitch = padded(size, kSlab);
    return {memory - t * pitch, pitch};
  }
  // Columns of what was written there go where they belong.
  void put(std::int64_t t, std::int64_t tokens, std::int64_t column, std::int64_t columns) const {
    if (wide()) return;
    put_wide_rows(isa, memory + column, padded(size, kSlab), tokens, columns,
                  rows.at(t).from(column));
  }
  void prefetch(StatePass& pass, std::int64_t t, std::int64_t column, std::int64_t columns) const {
    if (!wide()) return;
    pass.prefetch(static_cast<const float*>(rows.at(t).first) + column, rows.stride, columns);
  }
  explicit operator bool() const { return static_cast<bool>(rows); }
};

struct BackwardBuffers {
  // A state of `rows` x `columns`.
  template <class Memory>
  BackwardBuffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape,
                  const RecurrenceInputs& inputs, const RecurrenceOutputGrads& above,
                  const RecurrenceInputGrads& grads, std::int64_t rows, std::int64_t columns)
      : pass(memory, rows, columns),
        q_map(memory, spec.map, shape.map, MapUse::kAdjoint),
        k_map(memory, spec.map, shape.map, MapUse::kAdjoint) {
    const auto wide = [&](const ConstTensor& x, std::int64_t size) {
      return memory.template take<float>(is_narrow(x) ? wide_floats(size) : 0);
    };
    wide_q = wide(inputs.q, shape.keys);
    wide_k = wide(inputs.k, shape.keys);
    wide_v = wide(inputs.v, shape.values);
    wide_do = wide(above.o, shape.values);
    const bool any = is_narrow(grads.q) || is_narrow(grads.k) || is_narrow(grads.v);
    wide_grads =
        memory.template take<float>(any ? wide_floats(std::max(shape.keys, shape.values)) : 0);
    for (float** p : {&read_factor, &write_factor, &den, &denominator_grad}) {
      *p = memory.template take<float>(kChunk);
    }
    for (float** p : {&z, &z_residue}) *p = memory.template take<float>(q_map.pitch());
    gradient_size = kChunk * std::max(q_map.pitch(), padded(columns, kSlab));
    gradient = memory.template take<float>(gradient_size);
    if (!spec.normalize) return;
    value_pitch = padded(shape.values, kSlab);
    values = memory.template take<float>(kChunk * value_pitch);
    common_value = memory.template take<float>(value_pitch);
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
  float* common_value = nullptr;                                  // [value pitch]
  float *q_rows = nullptr, *k_rows = nullptr, *z_rows = nullptr;  // [64][pitch]
  // A chunk of rows that have 16 bits.
  float *wide_q, *wide_k, *wide_v, *wide_do, *wide_grads;
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

// Where a pass back in time over so many tokens begins to count them. The gradient of a final state
// may be far larger than what a token adds to it: a long pass that begins there is in two parts at
// once.
inline std::int64_t first_position(const StateMemory<const float>& final_grad,
                                   std::int64_t length) {
  return final_grad.s != nullptr && length >= kLongSum ? kLongSum : 0;
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
  const Tensor& grad_of(Gradient gradient) const {
    return gradient == Gradient::kQ ? out_.q : gradient == Gradient::kK ? out_.k : out_.v;
  }
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

  // Columns of q and k that these of the features are: maps that mix them come whole.
  std::int64_t keys_of(std::int64_t columns) const {
    return is_elementwise(spec_.map.kind) ? columns : shape_.keys;
  }
  // Rows of v as the gradients of q and k see them: less what values have in common, which is found
  // first (see normalizer_adjoint).
  void find_common_value(std::int64_t n, std::int64_t state, BackwardBuffers& b) const;
  MappedRows values_of(const ChunkedRows& v, std::int64_t t, std::int64_t tokens,
                       BackwardBuffers& b) const;
  template <class Memory>
  BackwardBuffers buffers(Memory& memory, std::int64_t rows, std::int64_t columns) const {
    return BackwardBuffers(memory, spec_, shape_, in_, up_, out_, rows, columns);
  }
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
  bool relative_;  // values are taken less what those of their sequence have in common
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
