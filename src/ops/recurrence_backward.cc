// Backward of the recurrence as a whole: its tasks, and the sums of the gradients of parameters.
// The formulas are with the passes (recurrence_backward_passes.cc).
#include "src/ops/recurrence_backward.h"

#include <algorithm>
#include <span>

namespace ouzel {

double* Backward::weight_sums(std::int64_t group, std::int64_t head, bool key) const {
  const std::int64_t heads = shape_.query_heads + shape_.key_heads;
  const std::int64_t slot = group * heads + (key ? shape_.query_heads : 0) + head;
  return sums_.as<double>() + slot * weight_sums_size(shape_.map);
}

void Backward::add_weight_grads(const FeatureMapWeightGrads& grads, bool from_q, bool from_k) {
  std::int64_t begin = 0;  // of the parameter's sums
  for (const MapParameter& p : map_parameters(shape_.map)) {
    const std::int64_t columns = p.columns != 0 ? p.columns : 1;
    const Tensor& d = grads.*p.gradient;
    const bool per_head = p.per_head && d.rank == (p.columns != 0 ? 3 : 2);
    const std::int64_t heads = !d.present() ? 0 : per_head ? d.extent[0] : 1;
    context_.impl().reserve(Scratch::rounded(static_cast<std::size_t>(columns) * sizeof(double)));
    context_.impl().run(heads * p.rows, [&](std::int64_t task, Scratch& scratch) {
      const std::int64_t head = task / p.rows, r = task % p.rows;
      const std::span sum(scratch.take<double>(columns), static_cast<std::size_t>(columns));
      std::ranges::fill(sum, 0.0);
      for (std::int64_t g = 0; g < sequence_groups_; ++g) {
        const auto side = [&](bool key, std::int64_t count) {
          for (std::int64_t h = per_head ? head : 0; h < (per_head ? head + 1 : count); ++h) {
            const double* from = weight_sums(g, h, key) + begin + r * columns;
            for (double& x : sum) x += *from++;
          }
        };
        if (from_q) side(false, shape_.query_heads);
        if (from_k) side(true, shape_.key_heads);
      }
      const auto last = static_cast<std::size_t>(d.rank - 1);
      float* row = static_cast<float*>(d.data) + (per_head ? head * d.stride[0] : 0) +
                   r * d.stride[p.columns != 0 ? last - 1 : last];
      for (double x : sum) {
        *row = static_cast<float>(static_cast<double>(*row) + x);
        ++row;
      }
    });
    begin += p.size();
  }
}

void Backward::run() {
  Context::Impl& impl = context_.impl();
  exponents_.compute(context_, spec_, shape_, in_);
  if (factors_) {
    per_token_ =
        Buffer(static_cast<std::size_t>(2 * shape_.batch * shape_.output_heads * shape_.tokens) *
               sizeof(float));
  }
  if (map_grads_ != nullptr) {
    sums_ = Buffer::zeros(
        static_cast<std::size_t>(sequence_groups_ * (shape_.query_heads + shape_.key_heads) *
                                 weight_sums_size(shape_.map)) *
        sizeof(double));
  }
  const bool state_grads = out_.initial_state.present();
  const bool maps = map_grads_ != nullptr;
  const bool queries = out_.q.present() || factors_ || maps;
  const bool keys = out_.k.present() || maps || (spec_.normalize && state_grads);
  const bool values = out_.v.present() || state_grads;
  // The adjoints of the normaliser and of most maps need whole rows.
  const bool split = !spec_.normalize && is_elementwise(spec_.map.kind);
  const std::int64_t groups = sequence_groups_;
  const int threads = context_.threads();
  const ColumnGroups query_columns(shape_.features, groups * shape_.query_heads, split, threads);
  const ColumnGroups key_columns(shape_.features, groups * shape_.key_heads, split, threads);
  const ColumnGroups value_columns(shape_.values, shape_.sequences * shape_.value_heads, true,
                                   threads);
  const HeadsTasks query_heads = heads_tasks(Gradient::kQ), key_heads = heads_tasks(Gradient::kK),
                   value_heads = heads_tasks(Gradient::kV);
  const auto count = [this](bool wanted, Gradient gradient, const HeadsTasks& heads,
                            std::int64_t others) {
    return !wanted ? 0 : in_heads(gradient) ? heads.count() : others;
  };
  const std::int64_t query_tasks = count(queries, Gradient::kQ, query_heads,
                                         groups * shape_.query_heads * query_columns.count());
  const std::int64_t key_tasks =
      count(keys, Gradient::kK, key_heads, groups * shape_.key_heads * key_columns.count());
  const std::int64_t value_tasks =
      count(values, Gradient::kV, value_heads,
            shape_.sequences * shape_.value_heads * value_columns.count());
  ScratchCounter transposed, straight;
  buffers(transposed, shape_.values, shape_.features);
  buffers(straight, shape_.features, value_columns.width);
  std::size_t bytes = std::max(transposed.bytes(), straight.bytes());
  for (const auto& [gradient, tasks] :
       {std::pair(Gradient::kQ, &query_heads), std::pair(Gradient::kK, &key_heads),
        std::pair(Gradient::kV, &value_heads)}) {
    if (in_heads(gradient)) bytes = std::max(bytes, heads_scratch(gradient, *tasks));
  }
  impl.reserve(bytes);

  const auto query_task = [&](std::int64_t task, Scratch& scratch) {
    if (in_heads(Gradient::kQ)) return heads_pass(Gradient::kQ, query_heads[task], scratch);
    const std::int64_t c = task % query_columns.count();
    const std::int64_t head = task / query_columns.count() % shape_.query_heads;
    const std::int64_t group = task / query_columns.count() / shape_.query_heads;
    double* sums = maps ? weight_sums(group, head, false) : nullptr;
    BackwardBuffers b = buffers(scratch, shape_.values, query_columns.size(c));
    for (std::int64_t n = group * shape_.sequences / groups;
         n < (group + 1) * shape_.sequences / groups; ++n) {
      query_pass(n, head, query_columns.begin(c), query_columns.size(c), sums, b);
    }
  };
  const auto key_task = [&](std::int64_t task, Scratch& scratch) {
    if (in_heads(Gradient::kK)) return heads_pass(Gradient::kK, key_heads[task], scratch);
    const std::int64_t c = task % key_columns.count();
    const std::int64_t head = task / key_columns.count() % shape_.key_heads;
    const std::int64_t group = task / key_columns.count() / shape_.key_heads;
    double* sums = maps ? weight_sums(group, head, true) : nullptr;
    BackwardBuffers b = buffers(scratch, shape_.values, key_columns.size(c));
    for (std::int64_t n = group * shape_.sequences / groups;
         n < (group + 1) * shape_.sequences / groups; ++n) {
      key_pass(n, head, key_columns.begin(c), key_columns.size(c), sums, b);
    }
  };
  const auto value_task = [&](std::int64_t task, Scratch& scratch) {
    if (in_heads(Gradient::kV)) return heads_pass(Gradient::kV, value_heads[task], scratch);
    const std::int64_t c = task % value_columns.count(), state = task / value_columns.count();
    BackwardBuffers b = buffers(scratch, shape_.features, value_columns.size(c));
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
  if (factors_) {  // the other passes wait for r and d(den)
    impl.run(query_tasks, query_task);
    impl.run(rest, rest_task);
  } else {
    impl.run(query_tasks + rest, [&](std::int64_t task, Scratch& scratch) {
      task < query_tasks ? query_task(task, scratch) : rest_task(task - query_tasks, scratch);
    });
  }
  for (std::int64_t n = 0; state_grads && n < shape_.sequences; ++n) {
    float* exponent = out_.initial_state.sequences[static_cast<std::size_t>(n)].exponent;
    for (std::int64_t h = 0; exponent != nullptr && h < shape_.value_heads; ++h) {
      exponent[h] = -first_exponent(n, h);
    }
  }
  if (maps) {
    const bool tied = !spec_.map.k.w1.present();
    add_weight_grads(map_grads_->q, true, tied);
    if (!tied) add_weight_grads(map_grads_->k, false, true);
  }
}

namespace {

// Whether arrays of 16 bits are to be float32 altogether: those with exponents, and gradients that
// are sums over outputs, which are rounded once.
bool are_widened(const RecurrenceSpec& spec, const RecurrenceShape& shape,
                 const RecurrenceInputs& inputs, const ConstTensor& above,
                 const RecurrenceInputGrads& grads) {
  if (info_of(spec.map.kind).running_maximum) {
    return has_narrow(inputs, above) || is_narrow(grads.q) || is_narrow(grads.k) ||
           is_narrow(grads.v);
  }
  const std::int64_t per_state = shape.outputs_per_state();
  return (is_narrow(grads.q) && shape.outputs_per_query() > 1) ||
         (is_narrow(grads.k) && shape.states_per_key() * per_state > 1) ||
         (is_narrow(grads.v) && per_state > 1);
}

}  // namespace

void recurrence_backward(Context& context, const RecurrenceSpec& spec,
                         const RecurrenceInputs& inputs, const RecurrenceOutputGrads& output_grads,
                         const RecurrenceInputGrads& input_grads,
                         const FeatureMapGrads* map_grads) {
  const RecurrenceShape shape = check_recurrence(spec, inputs);
  check_state(spec, shape, inputs.initial_state, "the initial state");
  check_state(spec, shape, output_grads.final_state, "the gradient of the final state");
  check_state(spec, shape, input_grads.initial_state, "the gradient of the initial state");
  check_rows(spec, output_grads.o, "the gradient of o", shape, shape.tokens, shape.output_heads,
             shape.values, false);
  check_rows(spec, input_grads.q, "the gradient of q", shape, shape.tokens, shape.query_heads,
             shape.keys, true);
  check_rows(spec, input_grads.k, "the gradient of k", shape, shape.key_tokens, shape.key_heads,
             shape.keys, true);
  check_rows(spec, input_grads.v, "the gradient of v", shape, shape.key_tokens, shape.value_heads,
             shape.values, true);
  check_positions(spec, shape, inputs.initial_state);
  if (map_grads != nullptr) check_feature_map_grads(spec.law->name, spec.map, *map_grads);
  if (shape.is_empty(input_grads.initial_state)) return;
  if (are_widened(spec, shape, inputs, output_grads.o, input_grads)) {
    Widened widened(context);
    RecurrenceOutputGrads wide_above = output_grads;
    wide_above.o = widened.in(output_grads.o);
    RecurrenceInputGrads wide = input_grads;
    for (Tensor* x : {&wide.q, &wide.k, &wide.v}) *x = widened.out(*x);
    recurrence_backward(context, spec, widened.in(inputs), wide_above, wide, map_grads);
    return widened.finish();
  }
  Backward(context, spec, shape, inputs, output_grads, input_grads, map_grads).run();
}

}  // namespace ouzel
