// The passes of backward (recurrence_backward_passes.cc) where rows are packed as they come and a
// head's gradient comes of a single output: several heads a task, like forward.
#include "src/ops/heads_scan.h"
#include "src/ops/recurrence_backward.h"

namespace ouzel {

bool Backward::in_heads(Gradient gradient) const {
  if (!plain_ || !spec_.causal || !have_one_type(in_) || up_.o.dtype != in_.v.dtype) return false;
  switch (gradient) {
    case Gradient::kQ:
      return out_.q.present() && shape_.outputs_per_query() == 1 &&
             StatePass::packs_ahead(shape_.values, shape_.features);
    case Gradient::kK:
      return out_.k.present() && shape_.states_per_key() * shape_.outputs_per_state() == 1 &&
             StatePass::packs_ahead(shape_.values, shape_.features);
    case Gradient::kV:
      return out_.v.present() && shape_.outputs_per_state() == 1 &&
             StatePass::packs_ahead(shape_.features, shape_.values);
  }
  return false;
}

HeadsTasks Backward::heads_tasks(Gradient gradient) const {
  const bool values = gradient == Gradient::kV;
  const std::int64_t heads = values                     ? shape_.value_heads
                             : gradient == Gradient::kQ ? shape_.query_heads
                                                        : shape_.key_heads;
  const Tensor& out = grad_of(gradient);
  const bool side_by_side = shape_.query_heads == shape_.value_heads &&
                            shape_.key_heads == shape_.value_heads && is_side_by_side(in_.q) &&
                            is_side_by_side(in_.k) && is_side_by_side(in_.v) &&
                            is_side_by_side(up_.o) && is_side_by_side(out);
  return {shape_,
          heads,
          values ? shape_.features : shape_.values,
          values ? shape_.values : shape_.features,
          side_by_side,
          true,
          context_};
}

std::size_t Backward::heads_scratch(Gradient gradient, const HeadsTasks& tasks) const {
  ScratchCounter counter;
  HeadsScan(counter, context_, gradient == Gradient::kV ? shape_.features : shape_.values,
            tasks.width(), tasks.most_heads(), grad_of(gradient).dtype, false);
  counter.take<Fold>(tasks.most_heads());
  return counter.bytes();
}

void Backward::heads_pass(Gradient gradient, const HeadsTask& task, Scratch& scratch) const {
  const bool query = gradient == Gradient::kQ, value = gradient == Gradient::kV;
  const bool backwards = query == spec_.reverse;
  const Segment segment = shape_.segment(task.n);
  HeadsScan scan(scratch, context_, value ? shape_.features : shape_.values, task.columns,
                 task.heads, grad_of(gradient).dtype, false);
  Fold* folds = scratch.take<Fold>(task.heads);
  const std::int64_t first = task.first;  // of the heads of the gradient: an output's, too
  const std::int64_t first_state = query ? shape_.state_of(first) : first;
  const auto q = any_rows_of(in_.q, segment, shape_.query_of(first), backwards);
  const auto k = any_rows_of(in_.k, segment, shape_.key_of(first_state), backwards);
  const auto v = any_rows_of(in_.v, segment, first_state, backwards);
  const auto dout = any_rows_of(up_.o, segment, first, backwards);
  const Tensor& out = grad_of(gradient);
  HeadsScanArgs args;
  args.read = query ? dout : value ? k : v;
  args.write = query ? v : value ? q : dout;
  args.values = (query ? k : value ? dout : q).from(task.column);
  args.out = any_rows_of(out, segment, first, backwards).from(task.column);
  args.read_scale = query ? scale_ : read_scale_;
  args.write_scale = query ? 1 : write_scale_;
  args.stream = is_streamed(count_of(out), args.out, task.columns);
  args.length = segment.length;
  for (std::int64_t h = 0; h < task.heads; ++h) {
    const std::int64_t state = first_state + h;
    folds[h] = Fold(log_decay_of(spec_, state), !query);
    ScannedHead& head = scan.head(h);
    head = {};
    head.fold = folds + h;
    const StateView& initial = query ? in_.initial_state : up_.final_state;
    head.initial = memory_of<const float>(initial, task.n, state, !value).at_column(task.column);
    if (!query) head.position = first_position(head.initial, segment.length);
    if (query && initial.present()) {
      const SequenceState& from = initial.sequences[static_cast<std::size_t>(task.n)];
      head.position = from.position;
      if (from.s_residue != nullptr) {
        head.initial.residue = from.s_residue + (head.initial.s - from.s);
      }
    }
    if (value) {
      head.final =
          memory_of<float>(out_.initial_state, task.n, state, false).at_column(task.column);
    }
  }
  scan.run(args);
}

}  // namespace ouzel
