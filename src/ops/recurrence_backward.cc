// Backward of the recurrence as a whole: its tasks, and the sums of the gradients of parameters.
// The formulas are with the passes (recurrence_backward_passes.cc).
#include "src/ops/recurrence_backward.h"

#include <algorithm>

namespace ouzel {

WeightSums Backward::weight_sums(std::int64_t group, std::int64_t head, bool key) const {
  const std::int64_t heads = shape_.query_heads + shape_.key_heads;
  const std::int64_t slot = group * heads + (key ? shape_.query_heads : 0) + head;
  const std::int64_t size = WeightSums::size(shape_.features, shape_.keys);
  return {sums_.as<double>() + slot * size, shape_.features, shape_.keys};
}

void Backward::add_weight_grads(const FeatureMapWeightGrads& grads, bool from_q, bool from_k) {
  const auto add = [&](const Tensor& d, double* WeightSums::*member, bool is_bias) {
    if (!d.present()) return;
    const std::int64_t columns = is_bias ? 1 : shape_.keys;
    const bool per_head = d.rank == (is_bias ? 2 : 3);
    const std::int64_t heads = per_head ? d.extent[0] : 1;
    context_.impl().run(heads * shape_.features, [&](std::int64_t task, Scratch&) {
      const std::int64_t head = task / shape_.features, f = task % shape_.features;
      const auto last = static_cast<std::size_t>(d.rank - 1);
      float* row = static_cast<float*>(d.data) + (per_head ? head * d.stride[0] : 0) +
                   f * d.stride[is_bias ? last : last - 1];
      for (std::int64_t i = 0; i < columns; ++i) {
        double sum = 0;
        for (std::int64_t g = 0; g < sequence_groups_; ++g) {
          const auto side = [&](bool key, std::int64_t count) {
            for (std::int64_t h = per_head ? head : 0; h < (per_head ? head + 1 : count); ++h) {
              sum += (weight_sums(g, h, key).*member)[f * columns + i];
            }
          };
          if (from_q) side(false, shape_.query_heads);
          if (from_k) side(true, shape_.key_heads);
        }
        row[i] = static_cast<float>(static_cast<double>(row[i]) + sum);
      }
    });
  };
  add(grads.w1, &WeightSums::w1, false);
  add(grads.w2, &WeightSums::w2, false);
  add(grads.b1, &WeightSums::b1, true);
  add(grads.b2, &WeightSums::b2, true);
}

void Backward::run() {
  Context::Impl& impl = context_.impl();
  if (spec_.normalize) {
    per_token_ =
        Buffer(static_cast<std::size_t>(2 * shape_.batch * shape_.output_heads * shape_.tokens) *
               sizeof(float));
  }
  if (map_grads_ != nullptr) {
    sums_ = Buffer::zeros(
        static_cast<std::size_t>(sequence_groups_ * (shape_.query_heads + shape_.key_heads) *
                                 WeightSums::size(shape_.features, shape_.keys)) *
        sizeof(double));
  }
  const bool state_grads = out_.initial_state.present();
  const bool maps = map_grads_ != nullptr;
  const bool queries = out_.q.present() || spec_.normalize || maps;
  const bool keys = out_.k.present() || maps || (spec_.normalize && state_grads);
  const bool values = out_.v.present() || state_grads;
  // The adjoints of the normaliser and of a learned map need whole rows.
  const bool split = !spec_.normalize && !is_learned(spec_.map);
  const std::int64_t groups = sequence_groups_;
  const ColumnGroups query_columns(shape_.features, groups * shape_.query_heads, split);
  const ColumnGroups key_columns(shape_.features, groups * shape_.key_heads, split);
  const ColumnGroups value_columns(shape_.values, shape_.sequences * shape_.value_heads, true);
  const std::int64_t query_tasks =
      queries ? groups * shape_.query_heads * query_columns.count() : 0;
  const std::int64_t key_tasks = keys ? groups * shape_.key_heads * key_columns.count() : 0;
  const std::int64_t value_tasks =
      values ? shape_.sequences * shape_.value_heads * value_columns.count() : 0;
  ScratchCounter transposed, straight;
  BackwardBuffers(transposed, spec_, shape_, shape_.values, shape_.features);
  BackwardBuffers(straight, spec_, shape_, shape_.features, value_columns.width);
  impl.reserve(std::max(transposed.bytes(), straight.bytes()));

  const auto query_task = [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t c = task % query_columns.count();
    const std::int64_t head = task / query_columns.count() % shape_.query_heads;
    const std::int64_t group = task / query_columns.count() / shape_.query_heads;
    const WeightSums sums = maps ? weight_sums(group, head, false) : WeightSums();
    BackwardBuffers b(scratch, spec_, shape_, shape_.values, query_columns.size(c));
    for (std::int64_t n = group * shape_.sequences / groups;
         n < (group + 1) * shape_.sequences / groups; ++n) {
      query_pass(n, head, query_columns.begin(c), query_columns.size(c), maps ? &sums : nullptr, b);
    }
  };
  const auto key_task = [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t c = task % key_columns.count();
    const std::int64_t head = task / key_columns.count() % shape_.key_heads;
    const std::int64_t group = task / key_columns.count() / shape_.key_heads;
    const WeightSums sums = maps ? weight_sums(group, head, true) : WeightSums();
    BackwardBuffers b(scratch, spec_, shape_, shape_.values, key_columns.size(c));
    for (std::int64_t n = group * shape_.sequences / groups;
         n < (group + 1) * shape_.sequences / groups; ++n) {
      key_pass(n, head, key_columns.begin(c), key_columns.size(c), maps ? &sums : nullptr, b);
    }
  };
  const auto value_task = [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t c = task % value_columns.count(), state = task / value_columns.count();
    BackwardBuffers b(scratch, spec_, shape_, shape_.features, value_columns.size(c));
    value_pass(state / shape_.value_heads, state % shape_.value_heads, value_columns.begin(c),
               value_columns.size(c), b);
  };
  const auto rest_task = [&](std::int64_t task, Scratch& scratch) {
    if (task < key_tasks) return key_task(task, scratch);
    task -= key_tasks;
    if (task < value_tasks) return value_task(task, scratch);
    task -= value_tasks;
    for (const Tensor* x : {&out_.q, &out_.k, &out_.v}) zero_gaps(shape_, task, *x);
  };
  const std::int64_t rest = key_tasks + value_tasks + gap_tasks(shape_);
  if (spec_.normalize) {  // the other passes wait for r and d(den)
    impl.run(query_tasks, query_task);
    impl.run(rest, rest_task);
  } else {
    impl.run(query_tasks + rest, [&](std::int64_t task, Scratch& scratch) {
      task < query_tasks ? query_task(task, scratch) : rest_task(task - query_tasks, scratch);
    });
  }
  if (maps) {
    const bool tied = !spec_.map.k.w1.present();
    add_weight_grads(map_grads_->q, true, tied);
    if (!tied) add_weight_grads(map_grads_->k, false, true);
  }
}

void recurrence_backward(Context& context, const RecurrenceSpec& spec,
                         const RecurrenceInputs& inputs, const RecurrenceOutputGrads& output_grads,
                         const RecurrenceInputGrads& input_grads,
                         const FeatureMapGrads* map_grads) {
  const RecurrenceShape shape = check_recurrence(spec, inputs);
  check_state(spec, shape, inputs.initial_state, "the initial state");
  check_state(spec, shape, output_grads.final_state, "the gradient of the final state");
  check_state(spec, shape, input_grads.initial_state, "the gradient of the initial state");
  check_rows(spec, output_grads.o, "the gradient of o", shape, shape.output_heads, shape.values,
             false);
  check_rows(spec, input_grads.q, "the gradient of q", shape, shape.query_heads, shape.keys, true);
  check_rows(spec, input_grads.k, "the gradient of k", shape, shape.key_heads, shape.keys, true);
  check_rows(spec, input_grads.v, "the gradient of v", shape, shape.value_heads, shape.values,
             true);
  if (map_grads != nullptr) check_feature_map_grads(spec.law->name, spec.map, *map_grads);
  Backward(context, spec, shape, inputs, output_grads, input_grads, map_grads).run();
}

}  // namespace ouzel
