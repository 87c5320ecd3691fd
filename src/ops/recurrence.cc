#include "src/ops/recurrence.h"

#include <algorithm>
#include <limits>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/ops/key_exponents.h"
#include "src/ops/recurrence_parallel.h"
#include "src/ops/recurrence_pass.h"

namespace ouzel {

StateView state_view(const Tensor& s, const Tensor& z, std::vector<SequenceState>& storage) {
  if (s.rank != 4 || s.dtype != DType::kF32 || (s.extent[3] > 1 && s.stride[3] != 1)) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a state must be a float32 array [N, HV, K, V] with contiguous rows, "
                            "not {} {}",
                            name_of(s.dtype), shape_string(s)));
  }
  if (z.present() && (z.rank != 3 || z.dtype != DType::kF32 || z.extent[0] != s.extent[0] ||
                      z.extent[1] != s.extent[1] || z.extent[2] != s.extent[2] ||
                      (z.extent[2] > 1 && z.stride[2] != 1))) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("a normaliser's state that goes with S {} must be a contiguous float32 "
                            "array [N, HV, K], not {} {}",
                            shape_string(s), name_of(z.dtype), shape_string(z)));
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
                 std::int64_t columns)
      : pass(memory, shape.features, columns),
        q_map(memory, spec.map, shape.map, MapUse::kForward),
        k_map(memory, spec.map, shape.map, MapUse::kForward) {
    factor = memory.template take<float>(kChunk);
    den = memory.template take<float>(kChunk);
    z = memory.template take<float>(q_map.pitch());
    z_residue = memory.template take<float>(q_map.pitch());
  }
  StatePass pass;
  HeadMap q_map, k_map;
  float *factor, *den, *z, *z_residue;
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
    ForwardBuffers buffers(scratch, spec, shape, columns);
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
    const Rows<const float> q = rows_of(inputs.q, segment, query_head, spec.reverse);
    const Rows<const float> k = rows_of(inputs.k, keys, key_head, spec.reverse);
    const Rows<const float> v = rows_of(inputs.v, keys, state, spec.reverse);
    const Rows<float> o = rows_of(outputs.o, segment, output, spec.reverse);
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

    const std::int64_t length = segment.length;
    const Normalizer normalizer{b.z, b.z_residue, b.den};
    const Normalizer* norm = spec.normalize ? &normalizer : nullptr;
    if (!spec.causal) {
      for (std::int64_t t = 0, tokens = 0; t < keys.length; t += tokens) {
        check_cancelled();
        tokens = chunk_tokens(t, keys.length, scales);
        if (scales) rescale(scales[t]);
        b.pass.pack({}, b.k_map.apply(k, t, tokens), tokens, nullptr, norm);
        b.pass.pack_values({v.at(t) + column, v.stride}, tokens);
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
      }
    }
    const TileMode mode = spec.causal ? TileMode::kScan : TileMode::kRead;
    const float scale = static_cast<float>(spec.scale);
    const bool elementwise = is_elementwise(spec.map.kind);
    const bool may_stream = is_streamed(
        shape.batch * shape.tokens * shape.output_heads * shape.values, o, column, columns);
    bool packed = false;  // by the run before
    for (std::int64_t t = 0, tokens = 0; t < length; t += tokens) {
      check_cancelled();
      tokens = chunk_tokens(t, length, spec.causal ? scales : TokenValues());
      if (spec.causal && scales) rescale(scales[t]);
      if (!packed) {
        const MappedRows read = b.q_map.apply(q, t, tokens);
        MappedRows write;
        if (spec.causal) write = b.k_map.apply(k, t, tokens);
        b.pass.pack(read, write, tokens, fold.write_or_null(), norm);
        if (spec.causal) b.pass.pack_values({v.at(t) + column, v.stride}, tokens);
      }
      packed = false;
      if (const float* own = b.q_map.exponents(); own != nullptr) {
        for (std::int64_t i = 0; i < tokens; ++i) {
          b.factor[i] = scale * output_factor(spec, scale * b.den[i], own[i] + exponent);
        }
      } else if (spec.normalize) {
        divide(b.den, b.factor);
      } else {
        for (std::int64_t i = 0; i < kChunk; ++i) b.factor[i] = scale * fold.read[i];
      }
      if (const std::int64_t next = t + kChunk; next < length) {
        if (spec.causal && elementwise && next + kChunk <= length) {
          packed = b.pass.pack_ahead(b.q_map.apply(q, next, kChunk), b.k_map.apply(k, next, kChunk),
                                     {v.at(next) + column, v.stride}, length - next,
                                     fold.write_or_null(), norm);
        }
        if (!packed) {
          b.pass.prefetch(q.at(next), q.stride, shape.keys);
          if (spec.causal) {
            b.pass.prefetch(k.at(next), k.stride, shape.keys);
            b.pass.prefetch(v.at(next) + column, v.stride, columns);
          }
        }
      }
      if (!may_stream && t + kChunk < length) {
        b.pass.prefetch(o.at(t + kChunk) + column, o.stride, columns);
      }
      b.pass.run(mode, tokens, b.factor, o.at(t) + column, o.stride, may_stream);
    }
    if (may_stream) finish_streams();
    if (!final || !outputs.final_state.present()) return;
    if (outputs.final_state.sequences[static_cast<std::size_t>(n)].exponent == nullptr) rescale(0);
    end(n, state, column, b);
  }

  // output_factor without exponents, in a loop of known length and without branches, which becomes
  // one of vectors: beyond a chunk's last token, too.
  void divide(const float* den, float* factor) const {
    const float scale = static_cast<float>(spec.scale), eps = static_cast<float>(spec.eps);
    const float least = spec.clamp ? eps : -std::numeric_limits<float>::infinity();
    const float add = spec.clamp ? 0 : eps;
    for (std::int64_t i = 0; i < kChunk; ++i) {
      const float sum = scale * den[i] + add;
      factor[i] = scale * (1 / (sum < least ? least : sum));
    }
  }

  void begin(std::int64_t n, std::int64_t state, std::int64_t column, const Fold& fold,
             ForwardBuffers& b) const {
    const StateView& from = inputs.initial_state;
    std::fill(b.z, b.z + b.q_map.pitch(), 0.0f);
    std::fill(b.z_residue, b.z_residue + b.q_map.pitch(), 0.0f);
    std::fill(b.den, b.den + kChunk, 0.0f);
    StateMemory<const float> memory;
    std::int64_t position = 0;
    if (from.present()) {
      const SequenceState& s = from.sequences[static_cast<std::size_t>(n)];
      const std::int64_t head = state * from.head_stride;
      position = s.position;
      memory = {s.s + head, s.s_residue != nullptr ? s.s_residue + head : nullptr, from.key_stride,
                1};
      if (spec.normalize) {
        const std::int64_t z_head = state * from.z_head_stride;
        std::copy_n(s.z + z_head, shape.features, b.z);
        if (s.z_residue != nullptr) std::copy_n(s.z_residue + z_head, shape.features, b.z_residue);
      }
    }
    b.pass.begin(isa, &fold, memory.at_column(column), position);
  }

  void end(std::int64_t n, std::int64_t state, std::int64_t column, ForwardBuffers& b) const {
    const StateView& to = outputs.final_state;
    const SequenceState& s = to.sequences[static_cast<std::size_t>(n)];
    const std::int64_t head = state * to.head_stride;
    const StateMemory<float> memory{
        s.s + head, s.s_residue != nullptr ? s.s_residue + head : nullptr, to.key_stride, 1};
    b.pass.end(memory.at_column(column), false);
    if (spec.normalize) {
      const std::int64_t z_head = state * to.z_head_stride;
      std::copy_n(b.z, shape.features, s.z + z_head);
      if (s.z_residue != nullptr) std::copy_n(b.z_residue, shape.features, s.z_residue + z_head);
    }
  }
};

}  // namespace

void recurrence(Context& context, const RecurrenceSpec& spec, const RecurrenceInputs& inputs,
                const RecurrenceOutputs& outputs) {
  const RecurrenceShape shape = check_recurrence(spec, inputs);
  check_rows(spec, outputs.o, "o", shape, shape.tokens, shape.output_heads, shape.values, false);
  check_positions(spec, shape, inputs.initial_state);
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
  const std::int64_t states = shape.sequences * shape.value_heads;
  // z is one for all columns: a task that wrote it would take it from the others.
  const ColumnGroups groups(shape.values, states,
                            !(spec.normalize && outputs.final_state.present()));
  ScratchCounter counter;
  ForwardBuffers(counter, spec, shape, groups.width);
  context.impl().reserve(counter.bytes());
  const std::int64_t tasks = states * groups.count();
  context.impl().run(tasks + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks) {
      zero_gaps(shape, task - tasks, outputs.o);
      return;
    }
    const std::int64_t group = task % groups.count(), state = task / groups.count();
    forward.run(state / shape.value_heads, state % shape.value_heads, groups.begin(group),
                groups.size(group), scratch);
  });
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
