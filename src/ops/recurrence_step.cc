// One token of N sequences, in the caller's states: S_t = e^g S_{t-1} + phi(k) v^T, o = scale S_t^T
// phi(q). States that carry a residue are summed in two parts from position 2048 on, as in the
// scan.
#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/ops/recurrence_pass.h"

namespace ouzel {
namespace {

struct StepBuffers {
  template <class Memory>
  StepBuffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape)
      : pitch(padded(shape.features, kSlab)) {
    const std::int64_t queries = shape.outputs_per_state();
    q = memory.template take<float>(queries * pitch);
    k = memory.template take<float>(pitch);
    other = memory.template take<float>(pitch);
    z_residue = memory.template take<float>(pitch);
    factor = memory.template take<float>(queries);
    z = memory.template take<float>(spec.normalize ? pitch : 0);
  }
  std::int64_t pitch;
  float *q, *k, *other, *z_residue, *factor, *z;
};

struct Step {
  const RecurrenceSpec& spec;
  const RecurrenceShape& shape;
  View<const float, 4> q, k, v;
  const StateView& state;
  View<float, 4> o;
  Isa isa;

  // phi(x) into a padded row.
  void map(const float* x, const FeatureMapWeights& weights, std::int64_t head, float* other,
           float* out, std::int64_t pitch) const {
    PackArgs p;
    p.rows = x;
    p.tokens = 1;
    p.size = shape.features;
    p.out = out;
    p.token_pitch = pitch;
    if (is_learned(spec.map)) {
      const HeadWeights w = head_weights(weights, head);
      std::fill(out, out + pitch, 0.0f);
      std::fill(other, other + pitch, 0.0f);
      matrix_vector(isa, shape.features, shape.keys, w.w1, w.w1_row, x, w.b1, out);
      matrix_vector(isa, shape.features, shape.keys, w.w2, w.w2_row, x, w.b2, other);
      multiply(isa, pitch, out, other, out);
      return;
    }
    p.map = element_map(spec.map);
    pack_dense(isa, p);
  }

  void run(std::int64_t n, std::int64_t head, StepBuffers& b) const {
    const SequenceState& s = state.sequences[static_cast<std::size_t>(n)];
    const std::int64_t queries = shape.outputs_per_state();
    map(k(n, 0, shape.key_of(head)), key_weights(spec.map), shape.key_of(head), b.other, b.k,
        b.pitch);
    for (std::int64_t r = 0; r < queries; ++r) {
      const std::int64_t query_head = shape.query_of(head * queries + r);
      map(q(n, 0, query_head), spec.map.q, query_head, b.other, b.q + r * b.pitch, b.pitch);
      b.factor[r] = static_cast<float>(spec.scale);
    }
    if (spec.normalize) normalize(s, head, queries, b);

    StepArgs a;
    a.keys = shape.features;
    a.values = shape.values;
    a.s = s.s + head * state.head_stride;
    a.key_stride = state.key_stride;
    const double log_decay = log_decay_of(spec, head);
    a.decay = static_cast<float>(std::exp(log_decay));
    a.decay_minus_1 = static_cast<float>(std::expm1(log_decay));
    if (s.s_residue != nullptr && s.position >= kLongSum && log_decay > kSlowDecay) {
      a.s_residue = s.s_residue + head * state.head_stride;
    }
    a.k = b.k;
    a.v = v(n, 0, head);
    a.queries = queries;
    a.q = b.q;
    a.q_stride = b.pitch;
    a.factor = b.factor;
    a.o = o(n, 0, head * queries);
    a.o_stride = o.stride[2];
    recurrence_step(isa, a);
  }

  void normalize(const SequenceState& s, std::int64_t head, std::int64_t queries,
                 StepBuffers& b) const {
    float* z = s.z + head * state.z_head_stride;
    float* residue = s.z_residue != nullptr ? s.z_residue + head * state.z_head_stride : nullptr;
    std::fill(b.z, b.z + b.pitch, 0.0f);
    std::fill(b.z_residue, b.z_residue + b.pitch, 0.0f);
    std::copy_n(z, shape.features, b.z);
    if (residue != nullptr) std::copy_n(residue, shape.features, b.z_residue);
    NormalizerArgs a;
    a.tokens = 1;
    a.blocks = padded(shape.features, kKeyBlock) / kKeyBlock;
    a.k = b.k;
    a.z = b.z;
    a.z_residue = b.z_residue;
    for (std::int64_t r = 0; r < queries; ++r) {
      float den = 0;
      a.mode = r == 0 ? TileMode::kScan : TileMode::kRead;
      a.q = b.q + r * b.pitch;
      a.den = &den;
      normalizer_scan(isa, a);
      const float scale = static_cast<float>(spec.scale);
      b.factor[r] = scale / (scale * den + static_cast<float>(spec.eps));
    }
    std::copy_n(b.z, shape.features, z);
    if (residue != nullptr) std::copy_n(b.z_residue, shape.features, residue);
  }
};

}  // namespace

void recurrence_step(Context& context, const RecurrenceSpec& spec, const ConstTensor& q,
                     const ConstTensor& k, const ConstTensor& v, const StateView& state,
                     const Tensor& o) {
  RecurrenceInputs inputs;
  inputs.q = q;
  inputs.k = k;
  inputs.v = v;
  const RecurrenceShape shape = check_recurrence(spec, inputs);
  check_rows(spec, o, "o", shape, shape.output_heads, shape.values, false);
  const auto refuse = [&spec](const std::string& sentence) {
    throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", spec.law->name, sentence));
  };
  if (shape.tokens != 1) {
    refuse(fmt::format("a step takes one token a sequence, not {}", shape.tokens));
  }
  if (!spec.causal || spec.reverse) refuse("a step is causal and goes forward in time");
  if (!state.present()) refuse("a step needs a state to update");
  check_state(spec, shape, state, "the state");

  const Step step{spec,
                  shape,
                  q.view<const float, 4>(),
                  k.view<const float, 4>(),
                  v.view<const float, 4>(),
                  state,
                  o.view<float, 4>(),
                  context.isa()};
  ScratchCounter counter;
  StepBuffers(counter, spec, shape);
  context.impl().reserve(counter.bytes());
  // A task has at least 256 KiB of state: some 10 microseconds, what waking a thread costs.
  const std::int64_t states = shape.sequences * shape.value_heads;
  const std::int64_t bytes = shape.features * shape.values * 4;
  const std::int64_t per_task = std::clamp<std::int64_t>((256 << 10) / bytes, 1, states + 1);
  const std::int64_t tasks = (states + per_task - 1) / per_task;
  context.impl().run(tasks, [&](std::int64_t task, Scratch& scratch) {
    StepBuffers buffers(scratch, spec, shape);
    const std::int64_t end = std::min(states, (task + 1) * per_task);
    for (std::int64_t i = task * per_task; i < end; ++i) {
      step.run(i / shape.value_heads, i % shape.value_heads, buffers);
    }
  });
  for (SequenceState& s : state.sequences) ++s.position;
}

}  // namespace ouzel
