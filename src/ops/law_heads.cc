#include "src/ops/law_heads.h"

#include <algorithm>
#include <initializer_list>
#include <new>

#include "src/ops/heads_scan.h"
#include "src/ops/law_source.h"

namespace ouzel {
namespace {

using enum LawRole;

bool is_side_by_side(const LawTensor& x) { return x.heads == 1 || x.head_stride == x.size; }

AnyRows<void> rows_of(const LawCall& call, const LawTensor& x, std::int64_t n, std::int64_t head,
                      std::int64_t column = 0) {
  const Segment segment = call.segment(n);
  if (segment.length == 0) return {};
  return {x.at(segment, 0, head, call.reverse(), 0, column), x.token_stride(call.reverse()),
          x.dtype};
}

bool have_one_type(const std::initializer_list<LawTensor>& tensors) {
  return std::ranges::all_of(tensors, [&](const LawTensor& x) {
    return x.present() && x.dtype == tensors.begin()->dtype;
  });
}

// The gates of some heads of a task.
class LawGates : public HeadGates {
 public:
  template <class Memory>
  LawGates(Memory& memory, const LawCall& call, std::int64_t heads) : call_(call), heads_(heads) {
    sources_ = memory.template take<LawSource>(heads);
    for (std::int64_t h = 0; h < heads; ++h) {
      LawSource source(memory, call, no_output_, call.kind().values);
      if (sources_ != nullptr) new (sources_ + h) LawSource(source);
    }
  }

  void bind(Isa isa, const HeadsTask& task, float* kept) {
    task_ = task;
    isa_ = isa;
    for (std::int64_t h = 0; h < heads_; ++h) sources_[h].bind(isa, task.n, task.first + h, kept);
  }
  void load(std::int64_t head, std::int64_t first, std::int64_t tokens, float* log_decay,
            float* strength) override {
    LawRows rows;
    rows.tokens = tokens;
    rows.g = log_decay;
    sources_[head].pack_decays(first, 0, 0, rows);
    if (!call_.in(kStep).present()) return;
    const Segment segment = call_.segment(task_.n);
    LawTensorRows{isa_, call_.in(kStep), segment, task_.first + head, call_.reverse(), 1}.load(
        first, tokens, 0, 1, 1, strength, 1);
  }
  float* kept(std::int64_t head, std::int64_t first) override {
    return sources_[head].kept(first, task_.column);
  }

 private:
  const LawCall& call_;
  LawTensor no_output_;
  std::int64_t heads_;
  LawSource* sources_;
  HeadsTask task_;
  Isa isa_ = Isa::kPortable;
};

// What a task needs.
struct Buffers {
  template <class Memory>
  Buffers(Memory& memory, const Context& context, const LawCall& call, const LawTensor& o,
          std::int64_t columns, std::int64_t heads)
      : scan(memory, context, call.kind().keys, columns, heads, o.dtype, false, true),
        gates(memory, call, heads) {}
  HeadsScan scan;
  LawGates gates;
};

void run(const LawCall& call, const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs,
         const LawTensor& o, const HeadsTask& task, Isa isa, Buffers& b) {
  b.gates.bind(isa, task, call.kept_floats() > 0 ? static_cast<float*>(outputs.saved) : nullptr);
  const RecurrenceShape& shape = call.shape();
  HeadsScanArgs args;
  args.read = rows_of(call, call.in(kQuery), task.n, shape.query_of(task.first));
  args.write = rows_of(call, call.in(kKey), task.n, shape.key_of(task.first));
  args.values = rows_of(call, call.in(kValue), task.n, task.first, task.column);
  args.out = rows_of(call, o, task.n, task.first, task.column);
  args.read_scale = call.scale();
  args.gates = &b.gates;
  args.stream = call.streams(o);
  args.length = call.segment(task.n).length;
  for (std::int64_t h = 0; h < task.heads; ++h) {
    const std::int64_t state = task.first + h;
    ScannedHead& head = b.scan.head(h);
    head = {};
    head.initial =
        readable(state_memory(inputs.initial_state, task.n, state)).at_column(task.column);
    head.position = position_of(inputs.initial_state, task.n);
    head.final = state_memory(outputs.final_state, task.n, state).at_column(task.column);
    if (const LawTensor& skip = call.in(kSkip); skip.present()) {
      const Segment segment = call.segment(task.n);
      LawTensorRows{isa, skip, segment, state, false, 1}.load(0, 1, 0, 1, 1, &head.skip, 1);
    }
  }
  b.scan.run(args);
}

}  // namespace

bool law_scans_heads(const LawCall& call, const LawTensor& o) {
  const RowsKind& kind = call.kind();
  return kind.decay && !kind.decay_per_key && !kind.value_decay && kind.erase == EraseKind::kNone &&
         !kind.bonus && kind.rows_per_token == 1 && kind.queries == 1 && !call.l2norm() &&
         have_one_type({call.in(kQuery), call.in(kKey), call.in(kValue)}) && o.present() &&
         !call.in(kStrength).present() && !call.in(kWriteGate).present() &&
         StatePass::packs_ahead(kind.keys, kind.values);
}

void law_heads_scan(Context& context, const LawCall& call, const RecurrenceInputs& inputs,
                    const RecurrenceOutputs& outputs, const LawTensor& o) {
  const RecurrenceShape& shape = call.shape();
  const LawTensor &q = call.in(kQuery), &k = call.in(kKey), &v = call.in(kValue);
  const bool side_by_side = q.heads == v.heads && k.heads == v.heads && is_side_by_side(q) &&
                            is_side_by_side(k) && is_side_by_side(v) && is_side_by_side(o);
  const HeadsTasks tasks(shape, shape.value_heads, shape.keys, shape.values, side_by_side, true,
                         context);
  ScratchCounter counter;
  const Buffers largest(counter, context, call, o, tasks.width(), tasks.most_heads());
  context.impl().reserve(counter.bytes());
  context.impl().run(tasks.count() + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks.count()) return zero_gaps(shape, task - tasks.count(), o);
    const HeadsTask heads = tasks[task];
    Buffers b(scratch, context, call, o, heads.columns, heads.heads);
    run(call, inputs, outputs, o, heads, context.isa(), b);
  });
}

}  // namespace ouzel
