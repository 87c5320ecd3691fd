// w_ts = scale phi(q_t) . phi(k_s) e^(g (t - s)) for s <= t, divided by sum_s w_ts + eps if
// normalised; o_t = sum_s w_ts v_s. In blocks of 64 x 64.
#include "src/ops/recurrence_parallel.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/base/dense_tensor.h"
#include "src/ops/key_exponents.h"
#include "src/ops/recurrence_pass.h"

namespace ouzel {
namespace {

// Polynomial kernels are taken of the scores q.k: as sums of features they would cancel where the
// score is small beside |q| |k|.
bool has_closed_form(FeatureMapKind kind) {
  return kind == FeatureMapKind::kTaylor1 || kind == FeatureMapKind::kTaylor2 ||
         kind == FeatureMapKind::kTaylor2Symmetric || kind == FeatureMapKind::kRebased;
}
float closed_form(FeatureMapKind kind, float x) {
  if (kind == FeatureMapKind::kRebased) return x * x;
  return kind == FeatureMapKind::kTaylor1 ? 1 + x : 1 + x + 0.5f * x * x;
}

struct Buffers {
  template <class Memory>
  Buffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape)
      : q_map(memory, spec.map, shape.map, MapUse::kForward),
        k_map(memory, spec.map, shape.map, MapUse::kForward),
        depth(has_closed_form(spec.map.kind) ? shape.keys : shape.features),
        pitch(padded(depth, kSlab)),
        value_pitch(padded(shape.values, kSlab)) {
    q = memory.template take<float>(kChunk * pitch);
    k = memory.template take<float>(kChunk * pitch);
    k_columns = memory.template take<float>(depth * kChunk);
    w = memory.template take<float>(kChunk * kChunk);
    v = memory.template take<float>(kChunk * value_pitch);
    o = memory.template take<float>(kChunk * value_pitch);
    wide = memory.template take<float>(wide_floats(std::max(shape.keys, shape.values)));
  }
  HeadMap q_map, k_map;
  std::int64_t depth, pitch, value_pitch;
  float *q, *k, *k_columns, *w, *v, *o;
  float* wide;  // a chunk of rows that have 16 bits
};

struct Parallel {
  const RecurrenceSpec& spec;
  const RecurrenceShape& shape;
  const RecurrenceInputs& inputs;
  const RecurrenceOutputs& outputs;
  const KeyExponents& exponents;
  Isa isa;

  void run(std::int64_t n, std::int64_t output, Scratch& scratch) const {
    Buffers b(scratch, spec, shape);
    const Segment segment = shape.segment(n);
    const std::int64_t state = shape.state_of(output);
    const std::int64_t key_head = shape.key_of(state), query_head = shape.query_of(output);
    const Segment keys = shape.key_segment(n);
    b.q_map.bind(isa, spec.map.q, query_head, path_of({}, n, segment.length, false));
    b.k_map.bind(isa, key_weights(spec.map), key_head,
                 path_of({}, n, keys.length, false, exponents.of(keys, state, spec.reverse)));
    for (std::int64_t t = 0; t < segment.length; t += kChunk) {
      run_rows(n, output, t, std::min(segment.length - t, kChunk), b);
    }
  }

  // Features, or numbers that a closed form is taken of.
  void dense(HeadMap& map, const AnyRows<const void>& given, std::int64_t t, std::int64_t tokens,
             std::int64_t pitch, float* wide, float* out) const {
    const Rows<const float> x = wide_rows(isa, given, t, tokens, shape.keys, wide);
    if (!has_closed_form(spec.map.kind)) return map.dense(x, t, tokens, out);
    copy_rows(x.at(t), x.stride, tokens, shape.keys, out, pitch);
  }
  void copy_rows(const float* rows, std::int64_t stride, std::int64_t tokens, std::int64_t size,
                 float* out, std::int64_t pitch) const {
    PackArgs pack;
    pack.rows = rows;
    pack.stride = stride;
    pack.tokens = tokens;
    pack.size = size;
    pack.out = out;
    pack.token_pitch = pitch;
    pack_dense(isa, pack);
  }

  void run_rows(std::int64_t n, std::int64_t output, std::int64_t t, std::int64_t rows,
                Buffers& b) const {
    const Segment segment = shape.segment(n), keys = shape.key_segment(n);
    const std::int64_t state = shape.state_of(output);
    const auto q = any_rows_of(inputs.q, segment, shape.query_of(output), spec.reverse);
    const auto k = any_rows_of(inputs.k, keys, shape.key_of(state), spec.reverse);
    const auto v = any_rows_of(inputs.v, keys, state, spec.reverse);
    const AnyRows<void> o = any_rows_of(outputs.o, segment, output, spec.reverse).at(t);
    const double log_decay = log_decay_of(spec, state);
    // Weights are multiples of 2^(own_i + last_i).
    const TokenValues scales = exponents.of(keys, state, spec.reverse);
    const TokenValues last = spec.causal || !scales ? scales : exponents.final(n, state);
    dense(b.q_map, q, t, rows, b.pitch, b.wide, b.q);
    const double kernel_scale =
        spec.map.options.kernel_scale.value_or(1 / std::sqrt(static_cast<double>(shape.keys)));
    std::fill(b.o, b.o + kChunk * b.value_pitch, 0.0f);
    double sums[kChunk] = {};
    const std::int64_t end = spec.causal ? t + rows : keys.length;
    for (std::int64_t s = 0; s < end; s += kChunk) {
      check_cancelled();
      const std::int64_t columns = std::min(end - s, kChunk);
      dense(b.k_map, k, s, columns, b.pitch, b.wide, b.k);
      for (std::int64_t f = 0; f < b.depth; ++f) {
        for (std::int64_t j = 0; j < kChunk; ++j) {
          b.k_columns[f * kChunk + j] = j < columns ? b.k[j * b.pitch + f] : 0.0f;
        }
      }
      SmallProductArgs p;
      p.rows = rows;
      p.columns = kChunk;
      p.depth = b.depth;
      p.a = b.q;
      p.a_row = b.pitch;
      p.b = b.k_columns;
      p.b_row = p.c_row = kChunk;
      p.c = b.w;
      small_product(isa, p);
      for (std::int64_t i = 0; i < rows; ++i) {
        for (std::int64_t j = 0; j < kChunk; ++j) {
          float& w = b.w[i * kChunk + j];
          const std::int64_t distance = t + i - (s + j);
          if (j >= columns || (spec.causal && distance < 0)) {
            w = 0;
          } else {
            if (has_closed_form(spec.map.kind)) {
              w = closed_form(spec.map.kind, static_cast<float>(kernel_scale) * w);
            }
            w *= static_cast<float>(spec.scale);
            if (scales && scales[s + j] != last[t + i]) {
              w *= power_of_two(scales[s + j] - last[t + i]);
            }
            if (distance > 0 && log_decay != 0) {
              const double decay = std::exp(static_cast<double>(distance) * log_decay);
              w = decay == 0 ? 0 : w * static_cast<float>(decay);
            }
            sums[i] += static_cast<double>(w);
          }
        }
        if (float* row = weights(segment, output, t + i); row != nullptr) {
          for (std::int64_t j = 0; j < columns; ++j) row[column(keys, s + j)] = b.w[i * kChunk + j];
        }
      }
      const Rows<const float> values = wide_rows(isa, v, s, columns, shape.values, b.wide);
      copy_rows(values.at(s), values.stride, columns, shape.values, b.v, b.value_pitch);
      p.columns = b.value_pitch;
      p.depth = columns;
      p.a = b.w;
      p.a_row = kChunk;
      p.b = b.v;
      p.b_row = p.c_row = b.value_pitch;
      p.c = b.o;
      p.add = true;
      // A row of a block on the diagonal ends at its own token: 0 * NaN would be NaN.
      const bool diagonal = spec.causal && s == t;
      if (diagonal) p.rows = 1;
      for (std::int64_t i = 0; i < (diagonal ? rows : 1); ++i) {
        if (diagonal) p.depth = i + 1;
        small_product(isa, p);
        p.a += kChunk;
        p.c += b.value_pitch;
      }
    }
    for (std::int64_t i = 0; i < rows; ++i) {
      const float exponent = scales ? b.q_map.exponents()[i] + last[t + i] : 0;
      const float factor = output_factor(spec, static_cast<float>(sums[i]), exponent);
      float* from = b.o + i * b.value_pitch;
      float* to = o.dtype == DType::kF32 ? static_cast<float*>(o.at(i).first) : from;
      for (std::int64_t j = 0; j < shape.values; ++j) to[j] = from[j] * factor;
      if (float* row = weights(segment, output, t + i); row != nullptr && factor != 1) {
        for (std::int64_t s = 0; s < end; ++s) row[column(keys, s)] *= factor;
      }
    }
    if (o.dtype != DType::kF32) put_wide_rows(isa, b.o, b.value_pitch, rows, shape.values, o);
  }

  std::int64_t column(const Segment& segment, std::int64_t t) const {
    return segment.begin + (spec.reverse ? segment.length - 1 - t : t);
  }
  float* weights(const Segment& segment, std::int64_t output, std::int64_t t) const {
    if (!outputs.weights.present()) return nullptr;
    return outputs.weights.view<float, 4>()(segment.batch, output, column(segment, t));
  }
};

}  // namespace

void recurrence_parallel(Context& context, const RecurrenceSpec& spec, const RecurrenceShape& shape,
                         const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs) {
  const auto refuse = [&spec](const std::string& sentence) {
    throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", spec.law->name, sentence));
  };
  if (inputs.initial_state.present() || outputs.final_state.present()) {
    refuse("the parallel form has no states; use the scan");
  }
  const Tensor& weights = outputs.weights;
  if (weights.present()) {
    const std::int64_t shape4[] = {shape.batch, shape.output_heads, shape.tokens, shape.key_tokens};
    bool fits = weights.rank == 4 && weights.dtype == DType::kF32 &&
                (weights.extent[3] <= 1 || weights.stride[3] == 1);
    for (std::size_t i = 0; i < 4 && fits; ++i) fits = weights.extent[i] == shape4[i];
    if (!fits) {
      refuse(fmt::format("weights must be a contiguous float32 array [{}, {}, {}, {}], not {}",
                         shape4[0], shape4[1], shape4[2], shape4[3], described(weights)));
    }
    context.impl().run(shape.batch * shape.output_heads, [&](std::int64_t task, Scratch&) {
      const View<float, 4> w = weights.view<float, 4>();
      for (std::int64_t t = 0; t < shape.tokens; ++t) {
        check_cancelled();
        std::memset(w(task / shape.output_heads, task % shape.output_heads, t), 0,
                    static_cast<std::size_t>(shape.key_tokens) * sizeof(float));
      }
    });
  }
  KeyExponents exponents;
  exponents.compute(context, spec, shape, inputs);
  const Parallel parallel{spec, shape, inputs, outputs, exponents, context.isa()};
  ScratchCounter counter;
  Buffers(counter, spec, shape);
  context.impl().reserve(counter.bytes());
  const std::int64_t tasks = shape.sequences * shape.output_heads;
  context.impl().run(tasks + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks) {
      zero_gaps(shape, task - tasks, outputs.o);
      return;
    }
    parallel.run(task / shape.output_heads, task % shape.output_heads, scratch);
  });
}

}  // namespace ouzel
