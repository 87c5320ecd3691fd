// The laws of ouzel/laws.h, forward and step: checks, tasks, threads. Backward is in
// law_backward.cc, the quadratic form in law_parallel.cc.
#include <algorithm>
#include <array>
#include <optional>

#include <fmt/format.h>

#include "ouzel/laws.h"
#include "src/base/context_impl.h"
#include "src/ops/law_call.h"
#include "src/ops/law_heads.h"
#include "src/ops/law_parallel.h"
#include "src/ops/law_source.h"
#include "src/ops/rows_scan.h"

namespace ouzel {
namespace {

bool share_memory(const StateView& a, const StateView& b) {
  return a.present() && b.present() &&
         std::equal(a.sequences.begin(), a.sequences.end(), b.sequences.begin(), b.sequences.end(),
                    [](const auto& x, const auto& y) { return x.s == y.s; });
}

// Heads that a task takes side by side: rows of neighbours, up to a page of 4 KiB in one piece,
// come from memory at up to twice the speed of a single head's; their states must stay in the
// second-level cache, and every thread should have two tasks. Heads never meet, so this changes
// nothing but the time.
constexpr std::int64_t kMostHeads = 16;
std::int64_t heads_of_task(const RecurrenceShape& shape, const ColumnGroups& groups, int threads) {
  if (groups.count() > 1) return 1;
  const std::int64_t most = std::min(
      {kMostHeads, 1024 / shape.keys, (std::int64_t{512} << 10) / (4 * shape.keys * shape.values)});
  const std::int64_t states = shape.sequences * shape.value_heads;
  const std::int64_t fair = threads == 1 ? states : states / (2 * threads);
  return std::clamp<std::int64_t>(std::min(most, fair), 1, shape.value_heads);
}

// What pack_decays fills.
template <class Memory>
struct DecayBuffers {
  DecayBuffers(Memory& memory, const LawCall& call)
      : source(memory, call, no_output, call.kind().values),
        rows(take_rows(memory, call.kind(), std::min(call.shape().tokens, kChunk),
                       call.kind().values)) {}
  LawTensor no_output;
  LawSource source;
  LawRows rows;
};

// Before states are written over: finds decays above 0 while they are still whole.
void check_decays(Context& context, const LawCall& call, std::int64_t states_per_task) {
  if (!call.kind().decay && !call.kind().value_decay) return;
  const RecurrenceShape& shape = call.shape();
  ScratchCounter counter;
  DecayBuffers<ScratchCounter>(counter, call);
  context.impl().reserve(counter.bytes());
  const std::int64_t states = shape.sequences * shape.value_heads;
  const std::int64_t tasks = (states + states_per_task - 1) / states_per_task;
  context.impl().run(tasks, [&](std::int64_t task, Scratch& scratch) {
    DecayBuffers<Scratch> b(scratch, call);
    const std::int64_t end = std::min(states, (task + 1) * states_per_task);
    for (std::int64_t i = task * states_per_task; i < end; ++i) {
      b.source.bind(context.isa(), i / shape.value_heads, i % shape.value_heads);
      for (std::int64_t t = 0; t < b.source.tokens(); t += kChunk) {
        check_cancelled();
        b.rows.tokens = std::min(b.source.tokens() - t, kChunk);
        b.source.pack_decays(t, 0, call.kind().values, b.rows);
      }
    }
  });
}

// The forward pass of any law, but for the positions of final states.
void law_rows_scan(Context& context, const LawCall& call, const RecurrenceInputs& inputs,
                   const RecurrenceOutputs& outputs, const LawTensor& o) {
  const RecurrenceShape& shape = call.shape();
  const std::int64_t states = shape.sequences * shape.value_heads;
  const ColumnGroups groups(shape.values, states, true, context.threads());
  const std::int64_t side_by_side = heads_of_task(shape, groups, context.threads());
  const std::int64_t head_groups = (shape.value_heads + side_by_side - 1) / side_by_side;
  ScratchCounter counter;
  for (std::int64_t i = 0; i < side_by_side; ++i) LawSource(counter, call, o, groups.width);
  context.impl().reserve(counter.bytes() +
                         rows_scan_scratch(call.kind(), groups.width, side_by_side));
  const std::int64_t tasks = shape.sequences * head_groups * groups.count();
  context.impl().run(tasks + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks) {
      zero_gaps(shape, task - tasks, o);
      return;
    }
    const std::int64_t group = task % groups.count(), rest = task / groups.count();
    const std::int64_t n = rest / head_groups, first = rest % head_groups * side_by_side;
    const std::int64_t count = std::min(shape.value_heads - first, side_by_side);
    float* kept = call.kept_floats() > 0 ? static_cast<float*>(outputs.saved) : nullptr;
    std::array<std::optional<LawSource>, kMostHeads> sources;
    std::array<ScanHead, kMostHeads> heads;
    for (std::int64_t i = 0; i < count; ++i) {
      const auto at = static_cast<std::size_t>(i);
      LawSource& source = sources[at].emplace(scratch, call, o, groups.width);
      source.bind(context.isa(), n, first + i, kept);
      heads[at] = {&source, readable(state_memory(inputs.initial_state, n, first + i)),
                   state_memory(outputs.final_state, n, first + i)};
    }
    rows_scan(context.isa(), call.kind(), {heads.data(), static_cast<std::size_t>(count)},
              groups.begin(group), groups.size(group), position_of(inputs.initial_state, n),
              scratch);
  });
}

}  // namespace

const char* MatrixLaw::name() const { return law_->name; }
const char* MatrixLaw::formula() const { return law_->formula; }

void MatrixLaw::operator()(Context& context, const LawOptions& options,
                           const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs) const {
  const LawCall call(*law_, options, inputs);
  const LawTensor o = call.output(outputs.o, "o");
  if (call.shape().is_empty(outputs.final_state)) return;
  if (options.form == Form::kParallel) {
    law_parallel(context, call, inputs, outputs, o);
    return;
  }
  if (outputs.weights.present()) {
    call.refuse(
        "the weights are formed by the parallel form only; ask for it, or leave the weights out");
  }
  call.check_state(inputs.initial_state, "the initial state");
  call.check_state(outputs.final_state, "the final state");
  if (share_memory(inputs.initial_state, outputs.final_state)) check_decays(context, call, 1);

  law_scans_heads(call, o) ? law_heads_scan(context, call, inputs, outputs, o)
                           : law_rows_scan(context, call, inputs, outputs, o);
  if (!outputs.final_state.present()) return;
  for (std::int64_t n = 0; n < call.shape().sequences; ++n) {
    outputs.final_state.sequences[static_cast<std::size_t>(n)].position =
        position_of(inputs.initial_state, n) + call.segment(n).length;
  }
}

namespace {

template <class Memory>
struct StepBuffers {
  StepBuffers(Memory& memory, const LawCall& call, const LawTensor& o)
      : source(memory, call, o, call.kind().values),
        rows(take_rows(memory, call.kind(), 1, call.kind().values)),
        scratch(memory.template take<float>(rows_step_floats(call.kind()))) {}
  LawSource source;
  LawRows rows;
  float* scratch;
};

}  // namespace

void MatrixLaw::step(Context& context, const LawOptions& options, const RecurrenceInputs& inputs,
                     const StateView& state, const Tensor& output) const {
  const LawCall call(*law_, options, inputs);
  const LawTensor o = call.output(output, "o");
  const RecurrenceShape& shape = call.shape();
  if (shape.tokens != 1) {
    call.refuse(fmt::format("a step takes one token a sequence, not {}", shape.tokens));
  }
  if (options.reverse || options.form == Form::kParallel || shape.segments != nullptr) {
    call.refuse("a step goes forward in time, without segments and the parallel form");
  }
  if (inputs.initial_state.present()) {
    call.refuse("a step updates its state; leave the initial state of the inputs out");
  }
  if (!state.present()) call.refuse("a step needs a state to update");
  call.check_state(state, "the state");
  // A task has at least 256 KiB of state: some 10 microseconds, what waking a thread costs.
  const std::int64_t states = shape.sequences * shape.value_heads;
  const std::int64_t bytes = shape.keys * shape.values * 4;
  const std::int64_t per_task = std::clamp<std::int64_t>((256 << 10) / bytes, 1, states + 1);
  const std::int64_t tasks = (states + per_task - 1) / per_task;
  check_decays(context, call, per_task);
  ScratchCounter counter;
  StepBuffers<ScratchCounter>(counter, call, o);
  context.impl().reserve(counter.bytes());
  context.impl().run(tasks, [&](std::int64_t task, Scratch& scratch) {
    StepBuffers<Scratch> b(scratch, call, o);
    const std::int64_t end = std::min(states, (task + 1) * per_task);
    for (std::int64_t i = task * per_task; i < end; ++i) {
      const std::int64_t n = i / shape.value_heads, head = i % shape.value_heads;
      b.source.bind(context.isa(), n, head);
      b.source.pack(0, 0, shape.values, b.rows);
      std::int64_t stride = 0;
      float* out = b.source.output(0, 0, 0, stride);
      const std::int64_t next =
          call.kind().queries > 1 ? b.source.output(1, 0, 0, stride) - out : 0;
      rows_step(context.isa(), call.kind(), b.rows, state_memory(state, n, head),
                position_of(state, n), out, next, b.scratch);
      b.source.finish(0, 1, 0, shape.values);
    }
  });
  for (SequenceState& s : state.sequences) ++s.position;
}

std::size_t MatrixLaw::saved_bytes(const LawOptions& options,
                                   const RecurrenceInputs& inputs) const {
  const LawCall call(*law_, options, inputs);
  return static_cast<std::size_t>(call.kept_floats()) * sizeof(float);
}

}  // namespace ouzel
