#include "src/ops/recurrence.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/base/dense_tensor.h"
#include "src/ops/heads_scan.h"
#include "src/ops/key_exponents.h"
#include "src/ops/recurrence_parallel.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/widened.h"

namespace ouzel {

StateView state_view(const Tensor& s, const Tensor& z, std::vector<SequenceState>& storage) {
  if (s.rank != 4 || s.dtype != DType::kF32 || (s.extent[3] > 1 && s.stride[3] != 1)) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a state must be a float32 array [N, HV, K, V] with contiguous rows, "
                            "not {}",
                            described(s)));
  }
  if (z.present() && (z.rank != 3 || z.dtype != DType::kF32 || z.extent[0] != s.extent[0] ||
                      z.extent[1] != s.extent[1] || z.extent[2] != s.extent[2] ||
                      (z.extent[2] > 1 && z.stride[2] != 1))) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a normaliser's state that goes with S {} must be a contiguous float32 "
                            "array [N, HV, K], not {}",
                            shape_string(s), described(z)));
  }
  storage.assign(static_cast<std::size_t>(s.extent[0]), SequenceState{});
  for (std::int64_t n = 0; n < s.extent[0]; ++n) {
    SequenceState& state = storage[static_cast<std::size_t>(n)];
    state.s = static_cast<float*>(s.data) + n * s.stride[0];
    if (z.present()) state.z = static_cast<float*>(z.data) + n * z.stride[0];
  }
  StateView view;
  view.sequences = storage;
  view.heads = s.extent[1];
  view.keys = s.extent[2];
  view.values = s.extent[3];
  view.head_stride = s.stride[1];
  view.key_stride = s.stride[2];
  view.z_head_stride = z.present() ? z.stride[1] : 0;
  return view;
}

namespace {

struct ForwardBuffers {
  template <class Memory>
  ForwardBuffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape,
                 const RecurrenceInputs& inputs, const Tensor& o, std::int64_t columns)
      : pass(memory, shape.features, columns),
        q_map(memory, spec.map, shape.map, MapUse::kForward),
        k_map(memory, spec.map, shape.map, MapUse::kForward) {
    factor = memory.template take<float>(kChunk);
    den = memory.template take<float>(kChunk);
    z = memory.template take<float>(q_map.pitch());
    z_residue = memory.template take<float>(q_map.pitch());
    const auto wide = [&](const ConstTensor& x, std::int64_t size) {
      return memory.template take<float>(is_narrow(x) ? wide_floats(size) : 0);
    };
    wide_q = wide(inputs.q, shape.keys);
    wide_k = wide(inputs.k, shape.keys);
    wide_v = wide(inputs.v, columns);
    wide_o = wide(o, columns);
  }
  StatePass pass;
  HeadMap q_map, k_map;
  float *factor, *den, *z, *z_residue;
  float *wide_q, *wide_k, *wide_v, *wide_o;  // a chunk of rows that have 16 bits
};

struct Forward {
  const RecurrenceSpec& spec;
  const RecurrenceShape& shape;
  const RecurrenceInputs& inputs;
  const RecurrenceOutputs& outputs;
  const KeyExponents& exponents;
  Isa isa;

  // Columns [column, column + columns) of a state and of every output that reads it.
  void run(std::int64_t n, std::int64_t state, std::int64_t column, std::int64_t columns,
           Scratch& scratch) const {
    ForwardBuffers buffers(scratch, spec, shape, inputs, outputs.o, columns);
    // The final state may be the memory of the initial one: it is written last.
    for (std::int64_t r = shape.outputs_per_state(); r-- > 0;) {
      const std::int64_t output = state * shape.outputs_per_state() + r;
      run_output(n, state, output, column, columns, r == 0, buffers);
    }
  }

  void run_output(std::int64_t n, std::int64_t state, std::int64_t output, std::int64_t column,
                  std::int64_t columns, bool final, ForwardBuffers& b) const {
    const Segment segment = shape.segment(n), keys = shape.key_segment(n);
    const std::int64_t key_head = shape.key_of(state), query_head = shape.query_of(output);
    const AnyRows<const void> q = any_rows_of(inputs.q, segment, query_head, spec.reverse);
    const AnyRows<const void> k = any_rows_of(inputs.k, keys, key_head, spec.reverse);
    const AnyRows<const void> v = any_rows_of(inputs.v, keys, state, spec.reverse).from(column);
    const AnyRows<void> o = any_rows_of(outputs.o, segment, output, spec.reverse).from(column);
    const Fold fold(log_decay_of(spec, state), false);
    const StateView& from = inputs.initial_state;
    const TokenValues scales = exponents.of(keys, state, spec.reverse);
    b.q_map.bind(isa, spec.map.q, query_head, path_of(from, n, segment.length, false));
    b.k_map.bind(isa, key_weights(spec.map), key_head,
                 path_of(from, n, keys.length, false, scales));
    begin(n, state, column, fold, b);
    float exponent = exponents ? exponents.initial(n, state) : 0;
    const auto rescale = [&](float to) {
      if (to == exponent) return;
      const float factor = power_of_two(exponent - to);
      b.pass.rescale(factor);
      for (float* z : {b.z, b.z_residue}) {
        for (std::int64_t f = 0; f < shape.features; ++f) z[f] *= factor;
      }
      exponent = to;
    };

    const auto wide = [&](const AnyRows<const void>& rows, std::int64_t t, std::int64_t tokens,
                          std::int64_t size,
                          float* memory) { return wide_rows(isa, rows, t, tokens, size, memory); };
    const auto wide_v = [&](std::int64_t t, std::int64_t tokens) {
      const Rows<const float> rows = wide(v, t, tokens, columns, b.wide_v);
      return MappedRows{rows.at(t), rows.stride};
    };
    const auto fetch = [&](const auto& rows, std::int64_t t, std::int64_t size) {
      if (rows.dtype != DType::kF32) return;
      b.pass.prefetch(static_cast<const float*>(rows.at(t).first), rows.stride, size);
    };

    const std::int64_t length = segment.length;
    const Normalizer normalizer{b.z, b.z_residue, b.den};
    const Normalizer* norm = spec.normalize ? &normalizer : nullptr;
    if (!spec.causal) {
      for (std::int64_t t = 0, tokens = 0; t < keys.length; t += tokens) {
        check_cancelled();
        tokens = chunk_tokens(t, keys.length, scales);
        if (scales) rescale(scales[t]);
        b.pass.pack({}, b.k_map.apply(wide(k, t, tokens, shape.keys, b.wide_k), t, tokens), tokens,
                    nullptr, norm);
        b.pass.pack_values(wide_v(t, tokens), tokens);
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
      }
    }
    const TileMode mode = spec.causal ? TileMode::kScan : TileMode::kRead;
    const float scale = static_cast<float>(spec.scale);
    const bool may_stream = is_streamed(output_count(), o, columns);
    for (std::int64_t t = 0, tokens = 0; t < length; t += tokens) {
      check_cancelled();
      tokens = chunk_tokens(t, length, spec.causal ? scales : TokenValues());
      if (spec.causal && scales) rescale(scales[t]);
      const MappedRows read = b.q_map.apply(wide(q, t, tokens, shape.keys, b.wide_q), t, tokens);
      MappedRows write;
      if (spec.causal) {
        write = b.k_map.apply(wide(k, t, tokens, shape.keys, b.wide_k), t, tokens);
      }
      b.pass.pack(read, write, tokens, fold.write_or_null(), norm);
      if (spec.causal) b.pass.pack_values(wide_v(t, tokens), tokens);
      if (const float* own = b.q_map.exponents(); own != nullptr) {
        for (std::int64_t i = 0; i < tokens; ++i) {
          b.factor[i] = scale * output_factor(spec, scale * b.den[i], own[i] + exponent);
        }
      } else if (spec.normalize) {
        divide(spec, b.den, b.factor);
      } else {
        for (std::int64_t i = 0; i < kChunk; ++i) b.factor[i] = scale * fold.read[i];
      }
      if (const std::int64_t next = t + kChunk; next < length) {
        fetch(q, next, shape.keys);
        if (spec.causal) {
          fetch(k, next, shape.keys);
          fetch(v, next, columns);
        }
        if (!may_stream) fetch(o, next, columns);
      }
      const AnyRows<void> to = o.at(t);
      if (to.dtype == DType::kF32) {
        b.pass.run(mode, tokens, b.factor, static_cast<float*>(to.first), to.stride, may_stream);
        continue;
      }
      const std::int64_t pitch = padded(columns, kSlab);
      b.pass.run(mode, tokens, b.factor, b.wide_o, pitch, false);
      put_wide_rows(isa, b.wide_o, pitch, tokens, columns, to);
    }
    if (may_stream) finish_streams();
    if (!final || !outputs.final_state.present()) return;
    if (outputs.final_state.sequences[static_cast<std::size_t>(n)].exponent == nullptr) rescale(0);
    end(n, state, column, b);
  }

  // Several states, with elementwise maps and causality, and one of the outputs that read each.
  void run_heads(const HeadsTask& task, std::int64_t r, const Fold* folds, HeadsScan& scan) const {
    const std::int64_t n = task.n, output = task.first * shape.outputs_per_state() + r;
    const Segment segment = shape.segment(n);
    HeadsScanArgs args;
    args.read = any_rows_of(inputs.q, segment, shape.query_of(output), spec.reverse);
    args.write = any_rows_of(inputs.k, segment, shape.key_of(task.first), spec.reverse);
    args.values = any_rows_of(inputs.v, segment, task.first, spec.reverse).from(task.column);
    args.out = any_rows_of(outputs.o, segment, output, spec.reverse).from(task.column);
    args.map = element_map(spec.map.kind);
    args.read_scale = static_cast<float>(spec.scale);
    if (spec.normalize) args.normalize = &spec;
    args.stream = is_streamed(output_count(), args.out, task.columns);
    args.length = segment.length;
    for (std::int64_t h = 0; h < task.heads; ++h) {
      const std::int64_t state = task.first + h;
      const Held<const float> initial = held<const float>(inputs.initial_state, n, state);
      ScannedHead& head = scan.head(h);
      head = {};
      head.fold = folds + state;
      head.initial = initial.s.at_column(task.column);
      head.position = initial.position;
      head.z_initial = initial.z;
      head.z_residue_initial = initial.z_residue;
      if (r != 0) continue;
      const Held<float> final = held<float>(outputs.final_state, n, state);
      head.final = final.s.at_column(task.column);
      head.z_final = final.z;
      head.z_residue_final = final.z_residue;
    }
    scan.run(args);
  }

 private:
  // A state in the caller's memory.
  template <class T>
  struct Held {
    StateMemory<T> s;
    std::int64_t position = 0;
    T *z = nullptr, *z_residue = nullptr;  // if normalised
  };
  template <class T>
  Held<T> held(const StateView& view, std::int64_t n, std::int64_t state) const {
    if (!view.present()) return {};
    const SequenceState& s = view.sequences[static_cast<std::size_t>(n)];
    const std::int64_t head = state * view.head_stride, z_head = state * view.z_head_stride;
    Held<T> x;
    x.s = {s.s + head, s.s_residue != nullptr ? s.s_residue + head : nullptr, view.key_stride, 1};
    x.position = s.position;
    if (!spec.normalize) return x;
    x.z = s.z + z_head;
    if (s.z_residue != nullptr) x.z_residue = s.z_residue + z_head;
    return x;
  }
  std::int64_t output_count() const {
    return shape.batch * shape.tokens * shape.output_heads * shape.values;
  }

  void begin(std::int64_t n, std::int64_t state, std::int64_t column, const Fold& fold,
             ForwardBuffers& b) const {
    const Held<const float> from = held<const float>(inputs.initial_state, n, state);
    std::fill(b.z, b.z + b.q_map.pitch(), 0.0f);
    std::fill(b.z_residue, b.z_residue + b.q_map.pitch(), 0.0f);
    std::fill(b.den, b.den + kChunk, 0.0f);
    if (from.z != nullptr) std::copy_n(from.z, shape.features, b.z);
    if (from.z_residue != nullptr) std::copy_n(from.z_residue, shape.features, b.z_residue);
    b.pass.begin(isa, &fold, from.s.at_column(column), from.position);
  }

  void end(std::int64_t n, std::int64_t state, std::int64_t column, ForwardBuffers& b) const {
    const Held<float> to = held<float>(outputs.final_state, n, state);
    b.pass.end(to.s.at_column(column), false);
    if (to.z != nullptr) std::copy_n(b.z, shape.features, to.z);
    if (to.z_residue != nullptr) std::copy_n(b.z_residue, shape.features, to.z_residue);
  }
};

void run_states(Context& context, const Forward& forward, bool may_split) {
  const RecurrenceShape& shape = forward.shape;
  const std::int64_t states = shape.sequences * shape.value_heads;
  const ColumnGroups columns(shape.values, states, may_split, context.threads());
  ScratchCounter counter;
  ForwardBuffers(counter, forward.spec, shape, forward.inputs, forward.outputs.o, columns.width);
  context.impl().reserve(counter.bytes());
  const std::int64_t tasks = states * columns.count();
  context.impl().run(tasks + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks) return zero_gaps(shape, task - tasks, forward.outputs.o);
    const std::int64_t c = task % columns.count(), state = task / columns.count();
    forward.run(state / shape.value_heads, state % shape.value_heads, columns.begin(c),
                columns.size(c), scratch);
  });
}

// Rows that are packed as they are: several heads a task.
void run_heads(Context& context, const Forward& forward, bool may_split) {
  const RecurrenceShape& shape = forward.shape;
  std::vector<Fold> folds;
  for (std::int64_t h = 0; h < shape.value_heads; ++h) {
    folds.emplace_back(log_decay_of(forward.spec, h), false);
  }
  const RecurrenceInputs& in = forward.inputs;
  const bool side_by_side = shape.query_heads == shape.value_heads &&
                            shape.key_heads == shape.value_heads && is_side_by_side(in.q) &&
                            is_side_by_side(in.k) && is_side_by_side(in.v) &&
                            is_side_by_side(forward.outputs.o);
  const HeadsTasks tasks(shape, shape.value_heads, shape.features, shape.values, side_by_side,
                         may_split, context);
  const auto scan_of = [&](auto& memory, std::int64_t columns, std::int64_t heads) {
    return HeadsScan(memory, context, shape.features, columns, heads, forward.outputs.o.dtype,
                     forward.spec.normalize);
  };
  ScratchCounter counter;
  scan_of(counter, tasks.width(), tasks.most_heads());
  context.impl().reserve(counter.bytes());
  context.impl().run(tasks.count() + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks.count()) return zero_gaps(shape, task - tasks.count(), forward.outputs.o);
    const HeadsTask heads = tasks[task];
    HeadsScan scan = scan_of(scratch, heads.columns, heads.heads);
    // The final state may be the memory of the initial one: it is written last.
    for (std::int64_t r = shape.outputs_per_state(); r-- > 0;) {
      forward.run_heads(heads, r, folds.data(), scan);
    }
  });
}

// Whether rows are packed as they come, whatever their type.
bool is_plain(const RecurrenceSpec& spec, const RecurrenceShape& shape) {
  return spec.form != Form::kParallel && spec.causal && is_elementwise(spec.map.kind) &&
         StatePass::packs_ahead(shape.features, shape.values);
}

}  // namespace

void recurrence(Context& context, const RecurrenceSpec& spec, const RecurrenceInputs& inputs,
                const RecurrenceOutputs& outputs) {
  const RecurrenceShape shape = check_recurrence(spec, inputs);
  check_rows(spec, outputs.o, "o", shape, shape.tokens, shape.output_heads, shape.values, false);
  check_positions(spec, shape, inputs.initial_state);
  if (shape.is_empty(outputs.final_state)) return;
  const bool plain = is_plain(spec, shape);
  const bool by_heads = plain && (have_one_type(inputs) || !has_narrow(inputs, outputs.o));
  if (has_narrow(inputs, outputs.o) && info_of(spec.map.kind).running_maximum) {
    Widened widened(context);
    RecurrenceOutputs wide = outputs;
    wide.o = widened.out(outputs.o);
    recurrence(context, spec, widened.in(inputs), wide);
    return widened.finish();
  }
  if (spec.form == Form::kParallel) {
    recurrence_parallel(context, spec, shape, inputs, outputs);
    return;
  }
  if (outputs.weights.present()) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: the weights are formed by the parallel form only; ask for it, or "
                            "leave the weights out",
                            spec.law->name));
  }
  check_state(spec, shape, inputs.initial_state, "the initial state");
  check_state(spec, shape, outputs.final_state, "the final state");

  KeyExponents exponents;
  exponents.compute(context, spec, shape, inputs);
  const Forward forward{spec, shape, inputs, outputs, exponents, context.isa()};
  // z is one for all columns: a task that wrote it would take it from the others.
  const bool may_split = !(spec.normalize && outputs.final_state.present());
  by_heads ? run_heads(context, forward, may_split) : run_states(context, forward, may_split);
  if (outputs.final_state.present()) {
    for (std::int64_t n = 0; n < shape.sequences; ++n) {
      const auto i = static_cast<std::size_t>(n);
      const std::int64_t before =
          inputs.initial_state.present() ? inputs.initial_state.sequences[i].position : 0;
      SequenceState& final = outputs.final_state.sequences[i];
      final.position = before + shape.segment(n).length;
      for (std::int64_t h = 0; final.exponent != nullptr && h < shape.value_heads; ++h) {
        final.exponent[h] = exponents ? exponents.final(n, h)[0] : 0;
      }
    }
  }
}

}  // namespace ouzel
