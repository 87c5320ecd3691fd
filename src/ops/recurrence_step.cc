// One token of N sequences, in the caller's states: S_t = e^g S_{t-1} + phi(k) v^T, o = scale S_t^T
// phi(q). States that carry a residue are summed in two parts from position 2048 on, as in the
// scan.
#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/ops/key_exponents.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/widened.h"

namespace ouzel {
namespace {

struct StepBuffers {
  template <class Memory>
  StepBuffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape)
      : q_map(memory, spec.map, shape.map, MapUse::kStep),
        k_map(memory, spec.map, shape.map, MapUse::kStep),
        pitch(padded(shape.features, kSlab)) {
    const std::int64_t queries = shape.outputs_per_state();
    q = memory.template take<float>(queries * pitch);
    k = memory.template take<float>(pitch);
    z_residue = memory.template take<float>(pitch);
    factor = memory.template take<float>(queries);
    z = memory.template take<float>(spec.normalize ? pitch : 0);
  }
  HeadMap q_map, k_map;
  std::int64_t pitch;
  float *q, *k, *z_residue, *factor, *z;
};

struct Step {
  const RecurrenceSpec& spec;
  const RecurrenceShape& shape;
  View<const float, 4> q, k, v;
  const StateView& state;
  View<float, 4> o;
  Isa isa;

  void run(std::int64_t n, std::int64_t head, StepBuffers& b) const {
    const SequenceState& s = state.sequences[static_cast<std::size_t>(n)];
    const std::int64_t queries = shape.outputs_per_state(), key_head = shape.key_of(head);
    const bool running = info_of(spec.map.kind).running_maximum;
    MapPath path = path_of(state, n, 1, false);
    const Rows<const float> key{k(n, 0, key_head), 0};
    b.k_map.bind(isa, key_weights(spec.map), key_head, path);
    float exponent = 0;
    if (running && s.exponent != nullptr) {
      exponent = raise_exponent(n, head, *b.k_map.own_exponents(key, 0, 1));
    }
    if (running) path.exponent = {&exponent, 0};
    b.k_map.follow(path);
    b.k_map.dense(key, 0, 1, b.k);
    path.exponent = {};
    for (std::int64_t r = 0; r < queries; ++r) {
      const std::int64_t query_head = shape.query_of(head * queries + r);
      b.q_map.bind(isa, spec.map.q, query_head, path);
      b.q_map.dense({q(n, 0, query_head), 0}, 0, 1, b.q + r * b.pitch);
      b.factor[r] = running ? *b.q_map.exponents() + exponent : 0;
    }
    if (spec.normalize) {
      normalize(s, head, queries, b);
    } else {
      for (std::int64_t r = 0; r < queries; ++r) {
        b.factor[r] = static_cast<float>(spec.scale) * output_factor(spec, 0, b.factor[r]);
      }
    }

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

  // The exponent of the state from a key of exponent `own` on; the state is brought to it.
  float raise_exponent(std::int64_t n, std::int64_t head, float own) const {
    const SequenceState& s = state.sequences[static_cast<std::size_t>(n)];
    float& exponent = s.exponent[head];
    const bool is_new = s.position == 0 && is_zero_state(state, n, head);
    if (!is_new && own <= exponent + kExponentHeadroom) return exponent;
    const float factor = power_of_two(exponent - own);
    exponent = own;
    if (is_new) return own;
    for (std::int64_t f = 0; f < shape.features; ++f) {
      for (float* x : {s.s, s.s_residue}) {
        if (x == nullptr) continue;
        float* row = x + head * state.head_stride + f * state.key_stride;
        for (std::int64_t j = 0; j < shape.values; ++j) row[j] *= factor;
      }
      for (float* z : {s.z, s.z_residue}) {
        if (z != nullptr) z[head * state.z_head_stride + f] *= factor;
      }
    }
    return own;
  }

  // From factors that are exponents yet.
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
      b.factor[r] = scale * output_factor(spec, scale * den, b.factor[r]);
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
  check_rows(spec, o, "o", shape, shape.tokens, shape.output_heads, shape.values, false);
  const auto refuse = [&spec](const std::string& sentence) {
    throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", spec.law->name, sentence));
  };
  if (shape.tokens != 1) {
    refuse(fmt::format("a step takes one token a sequence, not {}", shape.tokens));
  }
  if (!spec.causal || spec.reverse) refuse("a step is causal and goes forward in time");
  if (!state.present()) refuse("a step needs a state to update");
  check_state(spec, shape, state, "the state");
  check_positions(spec, shape, state);
  if (has_narrow(inputs, o)) {
    Widened widened(context);
    const RecurrenceInputs wide = widened.in(inputs);
    recurrence_step(context, spec, wide.q, wide.k, wide.v, state, widened.out(o));
    return widened.finish();
  }

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
