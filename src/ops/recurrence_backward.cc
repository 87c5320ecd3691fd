// Backward of the recurrence: the forward pass three times with roles exchanged. With G_t = d loss
// / d S_t = e^g G_{t+1} + (scale phi(q_t)) do_t^T:
//
//     d(phi(q))_t = scale S_t do_t      forward in time: read do, write v, values phi(k)
//     d(phi(k))_t = G_t v_t             backward:        read v, write do, values scale phi(q)
//     dv_t        = G_t^T phi(k_t)      backward:        read phi(k), write scale phi(q), values do
//
// The first two hold the transposed state. 12 K V operations where 10 are the least; keeping all
// three products in one sweep would add the horizontal sums that this form has none of.
//
// Normalised, with r_t = 1 / (z_t . u_t + eps), u_t = scale phi(q_t): do_t is replaced by r_t do_t,
// and d(den)_t = -r_t u_t . (S_t r_t do_t) reaches phi(q) through z_t and phi(k) through a running
// sum of d(den)_t u_t. The first pass leaves r and d(den), two numbers a token and head, to the
// others.
#include <algorithm>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/ops/recurrence_pass.h"

namespace ouzel {
namespace {

struct BackwardBuffers {
  // A state of `rows` x `columns`.
  template <class Memory>
  BackwardBuffers(Memory& memory, const RecurrenceSpec& spec, const RecurrenceShape& shape,
                  std::int64_t rows, std::int64_t columns)
      : pass(memory, rows, columns),
        q_map(memory, spec.map, shape.keys, shape.features, true),
        k_map(memory, spec.map, shape.keys, shape.features, true) {
    for (float** p : {&read_factor, &write_factor, &den, &denominator_grad}) {
      *p = memory.template take<float>(kChunk);
    }
    for (float** p : {&z, &z_residue}) *p = memory.template take<float>(q_map.pitch());
    gradient_size = kChunk * std::max(q_map.pitch(), padded(columns, kSlab));
    gradient = memory.template take<float>(gradient_size);
    if (!spec.normalize) return;
    for (float** p : {&q_rows, &k_rows, &z_rows}) {
      *p = memory.template take<float>(kChunk * q_map.pitch());
    }
  }
  StatePass pass;
  HeadMap q_map, k_map;
  float *read_factor, *write_factor, *den, *denominator_grad, *z, *z_residue;
  std::int64_t gradient_size;
  float* gradient;  // [64][pitch], of columns of the state
  float *q_rows = nullptr, *k_rows = nullptr, *z_rows = nullptr;  // [64][pitch]
};

// Gradients of one sequence's state among the caller's, or nothing.
template <class T>
StateMemory<T> memory_of(const StateView& view, std::int64_t n, std::int64_t state,
                         bool transposed) {
  if (!view.present()) return {};
  StateMemory<T> memory;
  memory.s = view.sequences[static_cast<std::size_t>(n)].s + state * view.head_stride;
  memory.row = transposed ? 1 : view.key_stride;
  memory.column = transposed ? view.key_stride : 1;
  return memory;
}

// One number per token, in the order of a pass.
struct TokenValues {
  float* first = nullptr;
  std::int64_t step = 1;
  float& operator[](std::int64_t t) const { return first[t * step]; }
};

class Backward {
 public:
  Backward(Context& context, const RecurrenceSpec& spec, const RecurrenceShape& shape,
           const RecurrenceInputs& inputs, const RecurrenceOutputGrads& output_grads,
           const RecurrenceInputGrads& input_grads, const FeatureMapGrads* map_grads)
      : context_(context),
        spec_(spec),
        shape_(shape),
        in_(inputs),
        up_(output_grads),
        out_(input_grads),
        map_grads_(is_learned(spec.map) ? map_grads : nullptr),
        isa_(context.isa()),
        // The sequences of a batch share a few sets of sums of parameter gradients.
        sequence_groups_(map_grads_ != nullptr ? std::min<std::int64_t>(shape.sequences, 16)
                                               : shape.sequences),
        scale_(static_cast<float>(spec.scale)),
        write_scale_(scale_),
        read_scale_(1),
        plain_(spec.map.kind == FeatureMapKind::kIdentity && !spec.normalize) {
    if (!output_grads.final_state.present() && !input_grads.initial_state.present()) {
      std::swap(write_scale_, read_scale_);
    }
  }

  void run();

 private:
  void query_pass(std::int64_t n, std::int64_t query_head, std::int64_t column,
                  std::int64_t columns, const WeightSums* sums, BackwardBuffers& b);
  void key_pass(std::int64_t n, std::int64_t key_head, std::int64_t column, std::int64_t columns,
                const WeightSums* sums, BackwardBuffers& b);
  void value_pass(std::int64_t n, std::int64_t state, std::int64_t column, std::int64_t columns,
                  BackwardBuffers& b);
  void normalizer_adjoint(std::int64_t tokens, const TokenValues& inverse,
                          const TokenValues& denominator_grad, std::int64_t t, BackwardBuffers& b);

  // r (which = 0) and d(den) (1) of a sequence and output head.
  TokenValues token_values(std::int64_t which, const Segment& s, std::int64_t output,
                           bool backwards) const {
    if (!spec_.normalize) return {};
    float* row = per_token_.f32() +
                 ((which * shape_.batch + s.batch) * shape_.output_heads + output) * shape_.tokens +
                 s.begin;
    return backwards ? TokenValues{row + s.length - 1, -1} : TokenValues{row, 1};
  }
  WeightSums weight_sums(std::int64_t group, std::int64_t head, bool key) const;
  void add_weight_grads(const FeatureMapWeightGrads& grads, bool from_q, bool from_k);

  Context& context_;
  const RecurrenceSpec& spec_;
  const RecurrenceShape& shape_;
  const RecurrenceInputs& in_;
  const RecurrenceOutputGrads& up_;
  const RecurrenceInputGrads& out_;
  const FeatureMapGrads* map_grads_;
  Isa isa_;
  std::int64_t sequence_groups_;
  float scale_;
  // The scale stands on the rows that are written into the state; or, where no gradient of a state
  // comes in or goes out, on those that are read out of it: then packing is plain copying.
  float write_scale_, read_scale_;
  bool plain_;  // the gradients of phi(q) and phi(k) are those of q and k
  Buffer per_token_, sums_;
};

// d(den) of a chunk of the first pass, and what it adds to the gradient of phi(q); scale S_t r_t
// do_t is in b.gradient already.
void Backward::normalizer_adjoint(std::int64_t tokens, const TokenValues& inverse,
                                  const TokenValues& denominator_grad, std::int64_t t,
                                  BackwardBuffers& b) {
  const std::int64_t pitch = b.q_map.pitch();
  row_dots(isa_, tokens, pitch, b.q_rows, pitch, b.gradient, pitch, b.den);
  for (std::int64_t i = 0; i < tokens; ++i) {
    const float dd = -b.den[i] * inverse[t + i];
    denominator_grad[t + i] = dd;
    b.denominator_grad[i] = scale_ * dd;
  }
  row_add(isa_, tokens, pitch, b.denominator_grad, b.z_rows, pitch, b.gradient, pitch);
}

void Backward::query_pass(std::int64_t n, std::int64_t query_head, std::int64_t column,
                          std::int64_t columns, const WeightSums* sums, BackwardBuffers& b) {
  const Segment segment = shape_.segment(n);
  const std::int64_t length = segment.length, pitch = b.q_map.pitch();
  const bool backwards = spec_.reverse;
  const Rows<const float> q = rows_of(in_.q, segment, query_head, backwards);
  const Rows<float> dq = rows_of(out_.q, segment, query_head, backwards);
  b.q_map.bind(isa_, spec_.map.q, query_head);
  std::fill(b.gradient, b.gradient + b.gradient_size, 0.0f);  // columns that no pass writes
  const std::int64_t per_query = shape_.outputs_per_query();
  for (std::int64_t r = 0; r < per_query; ++r) {
    const std::int64_t output = query_head * per_query + r;
    const std::int64_t state = shape_.state_of(output), key_head = shape_.key_of(state);
    const Rows<const float> k = rows_of(in_.k, segment, key_head, backwards);
    const Rows<const float> v = rows_of(in_.v, segment, state, backwards);
    const Rows<const float> dout = rows_of(up_.o, segment, output, backwards);
    const TokenValues inverse = token_values(0, segment, output, backwards);
    const TokenValues denominator_grad = token_values(1, segment, output, backwards);
    const Fold fold(log_decay_of(spec_, state), false);
    b.k_map.bind(isa_, key_weights(spec_.map), key_head);

    StateMemory<const float> initial = memory_of<const float>(in_.initial_state, n, state, true);
    std::fill(b.z, b.z + pitch, 0.0f);
    std::fill(b.z_residue, b.z_residue + pitch, 0.0f);
    std::int64_t position = 0;
    if (initial.s != nullptr) {
      const StateView& from = in_.initial_state;
      const SequenceState& s = from.sequences[static_cast<std::size_t>(n)];
      position = s.position;
      if (s.s_residue != nullptr) initial.residue = s.s_residue + state * from.head_stride;
      if (spec_.normalize) {
        const std::int64_t head = state * from.z_head_stride;
        std::copy_n(s.z + head, shape_.features, b.z);
        if (s.z_residue != nullptr) std::copy_n(s.z_residue + head, shape_.features, b.z_residue);
      }
    }
    b.pass.begin(isa_, &fold, initial.at_column(column), position);

    NormalizerArgs norm;
    norm.blocks = pitch / kKeyBlock;
    norm.q = b.q_rows;
    norm.k = b.k_rows;
    norm.pitch = pitch;
    norm.z = b.z;
    norm.z_residue = b.z_residue;
    norm.den = b.den;
    const auto pack_values = [&](std::int64_t t, std::int64_t tokens) {
      if (spec_.normalize) {
        b.k_map.dense(k.at(t), k.stride, tokens, b.k_rows);
        b.pass.pack_values({b.k_rows + column, pitch}, tokens);
      } else {
        MappedRows rows = b.k_map.apply(k.at(t), k.stride, tokens);
        rows.rows += column;
        b.pass.pack_values(rows, tokens);
      }
    };
    if (!spec_.causal) {
      for (std::int64_t t = 0; t < length; t += kChunk) {
        const std::int64_t tokens = std::min(length - t, kChunk);
        b.pass.pack({}, {v.at(t), v.stride}, tokens, nullptr);
        pack_values(t, tokens);
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
        if (spec_.normalize) {
          norm.mode = TileMode::kWrite;
          norm.tokens = tokens;
          norm.z_rows = nullptr;
          normalizer_scan(isa_, norm);
        }
      }
    }
    const TileMode mode = spec_.causal ? TileMode::kScan : TileMode::kRead;
    bool packed = false;  // by the run before
    for (std::int64_t t = 0; t < length; t += kChunk) {
      const std::int64_t tokens = std::min(length - t, kChunk);
      const MappedRows write = spec_.causal ? MappedRows{v.at(t), v.stride} : MappedRows{};
      if (!packed) {
        b.pass.pack({dout.at(t), dout.stride}, write, tokens, fold.write_or_null());
        if (spec_.causal) pack_values(t, tokens);
      }
      const std::int64_t next = t + kChunk;
      packed = plain_ && spec_.causal && next + kChunk <= length &&
               b.pass.pack_ahead({dout.at(next), dout.stride}, {v.at(next), v.stride},
                                 {k.at(next) + column, k.stride},
                                 next + 2 * kChunk <= length ? dout.at(next + kChunk) : nullptr);
      if (next < length && !packed) {
        b.pass.prefetch(dout.at(next), dout.stride, shape_.values);
        b.pass.prefetch(v.at(next), v.stride, shape_.values);
        b.pass.prefetch(k.at(next) + column, k.stride, columns);
        b.pass.prefetch(q.at(next) + column, q.stride, columns);
      }
      for (std::int64_t i = 0; i < tokens; ++i) b.read_factor[i] = scale_ * fold.read[i];
      if (spec_.normalize) {
        b.q_map.dense(q.at(t), q.stride, tokens, b.q_rows);
        norm.mode = mode;
        norm.tokens = tokens;
        norm.z_rows = b.z_rows;
        normalizer_scan(isa_, norm);
        const float eps = static_cast<float>(spec_.eps);
        for (std::int64_t i = 0; i < tokens; ++i) {
          inverse[t + i] = 1 / (scale_ * b.den[i] + eps);
          b.read_factor[i] *= inverse[t + i];
        }
      }
      if (dq && next < length) b.pass.prefetch(dq.at(next) + column, dq.stride, columns);
      if (dq && r == 0 && plain_) {
        b.pass.run(mode, tokens, b.read_factor, dq.at(t) + column, dq.stride);
        continue;
      }
      b.pass.run(mode, tokens, b.read_factor, b.gradient, pitch);
      if (spec_.normalize) {
        normalizer_adjoint(tokens, inverse, denominator_grad, t, b);
      }
      b.q_map.adjoint(q.at(t), q.stride, tokens, b.gradient, dq ? dq.at(t) : nullptr, dq.stride,
                      r > 0, column, columns, sums);
    }
  }
}

void Backward::key_pass(std::int64_t n, std::int64_t key_head, std::int64_t column,
                        std::int64_t columns, const WeightSums* sums, BackwardBuffers& b) {
  const Segment segment = shape_.segment(n);
  const std::int64_t length = segment.length, pitch = b.q_map.pitch();
  const bool backwards = !spec_.reverse;
  const Rows<const float> k = rows_of(in_.k, segment, key_head, backwards);
  const Rows<float> dk = rows_of(out_.k, segment, key_head, backwards);
  b.k_map.bind(isa_, key_weights(spec_.map), key_head);
  std::fill(b.gradient, b.gradient + b.gradient_size, 0.0f);  // columns that no pass writes
  const std::int64_t per_state = shape_.outputs_per_state();
  const std::int64_t per_key = shape_.states_per_key() * per_state;
  for (std::int64_t r = 0; r < per_key; ++r) {
    const std::int64_t output = key_head * per_key + r;
    const std::int64_t state = shape_.state_of(output), query_head = shape_.query_of(output);
    const bool first = r % per_state == 0;  // of this state's outputs: the final state's gradient
    const Rows<const float> q = rows_of(in_.q, segment, query_head, backwards);
    const Rows<const float> v = rows_of(in_.v, segment, state, backwards);
    const Rows<const float> dout = rows_of(up_.o, segment, output, backwards);
    const TokenValues inverse = token_values(0, segment, output, backwards);
    const TokenValues denominator_grad = token_values(1, segment, output, backwards);
    const Fold fold(log_decay_of(spec_, state), true);
    b.q_map.bind(isa_, spec_.map.q, query_head);

    StateMemory<const float> final;
    std::fill(b.z, b.z + pitch, 0.0f);
    std::fill(b.z_residue, b.z_residue + pitch, 0.0f);
    if (first && up_.final_state.present()) {
      final = memory_of<const float>(up_.final_state, n, state, true);
      const SequenceState& s = up_.final_state.sequences[static_cast<std::size_t>(n)];
      if (spec_.normalize) {
        std::copy_n(s.z + state * up_.final_state.z_head_stride, shape_.features, b.z);
      }
    }
    b.pass.begin(isa_, &fold, final.at_column(column), 0);

    VectorScanArgs scan;
    scan.blocks = pitch / kKeyBlock;
    scan.x = b.q_rows;
    scan.y = b.gradient;
    scan.pitch = pitch;
    scan.a = b.denominator_grad;
    scan.b = fold.read;
    scan.sum = b.z;
    scan.sum_residue = b.z_residue;
    const bool plain_factor = !spec_.normalize && write_scale_ == 1 && fold.log_decay == 0;
    const auto pack = [&](std::int64_t t, std::int64_t tokens, const MappedRows& read) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        b.write_factor[i] = write_scale_ * fold.write[i];
        if (spec_.normalize) {
          b.write_factor[i] *= inverse[t + i];
          b.denominator_grad[i] = scale_ * denominator_grad[t + i];
        }
      }
      b.pass.pack(read, {dout.at(t), dout.stride}, tokens, plain_factor ? nullptr : b.write_factor);
      if (spec_.normalize) {
        b.q_map.dense(q.at(t), q.stride, tokens, b.q_rows);
        b.pass.pack_values({b.q_rows + column, pitch}, tokens);
      } else {
        MappedRows rows = b.q_map.apply(q.at(t), q.stride, tokens);
        rows.rows += column;
        b.pass.pack_values(rows, tokens);
      }
    };
    if (!spec_.causal) {
      for (std::int64_t t = 0; t < length; t += kChunk) {
        const std::int64_t tokens = std::min(length - t, kChunk);
        pack(t, tokens, {});
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
        if (spec_.normalize) {
          scan.mode = TileMode::kWrite;
          scan.tokens = tokens;
          vector_scan(isa_, scan);
        }
      }
    }
    const TileMode mode = spec_.causal ? TileMode::kScan : TileMode::kRead;
    for (std::int64_t i = 0; i < kChunk; ++i) b.read_factor[i] = read_scale_ * fold.read[i];
    bool packed = false;  // by the run before
    for (std::int64_t t = 0; t < length; t += kChunk) {
      const std::int64_t tokens = std::min(length - t, kChunk);
      const MappedRows read{v.at(t), v.stride};
      if (!packed) {
        spec_.causal ? pack(t, tokens, read) : b.pass.pack(read, {}, tokens, nullptr);
      }
      const std::int64_t next = t + kChunk;
      packed = plain_ && plain_factor && spec_.causal && next + kChunk <= length &&
               b.pass.pack_ahead({v.at(next), v.stride}, {dout.at(next), dout.stride},
                                 {q.at(next) + column, q.stride},
                                 next + 2 * kChunk <= length ? v.at(next + kChunk) : nullptr);
      if (next < length && !packed) {
        b.pass.prefetch(v.at(next), v.stride, shape_.values);
        b.pass.prefetch(dout.at(next), dout.stride, shape_.values);
        b.pass.prefetch(q.at(next) + column, q.stride, columns);
        b.pass.prefetch(k.at(next) + column, k.stride, columns);
      }
      if (dk && next < length) b.pass.prefetch(dk.at(next) + column, dk.stride, columns);
      if (dk && r == 0 && plain_) {
        b.pass.run(mode, tokens, b.read_factor, dk.at(t) + column, dk.stride);
        continue;
      }
      b.pass.run(mode, tokens, b.read_factor, b.gradient, pitch);
      if (spec_.normalize) {
        scan.mode = mode;
        scan.tokens = tokens;
        vector_scan(isa_, scan);
      }
      b.k_map.adjoint(k.at(t), k.stride, tokens, b.gradient, dk ? dk.at(t) : nullptr, dk.stride,
                      r > 0, column, columns, sums);
    }
    if (spec_.normalize && out_.initial_state.present()) {
      const StateView& to = out_.initial_state;
      float* dz = to.sequences[static_cast<std::size_t>(n)].z + state * to.z_head_stride;
      for (std::int64_t i = 0; i < shape_.features; ++i) {
        dz[i] = first ? b.z[i] : dz[i] + b.z[i];
      }
    }
  }
}

void Backward::value_pass(std::int64_t n, std::int64_t state, std::int64_t column,
                          std::int64_t columns, BackwardBuffers& b) {
  const Segment segment = shape_.segment(n);
  const std::int64_t length = segment.length, pitch = padded(columns, kSlab);
  const bool backwards = !spec_.reverse;
  const std::int64_t key_head = shape_.key_of(state);
  const Rows<const float> k = rows_of(in_.k, segment, key_head, backwards);
  const Rows<float> dv = rows_of(out_.v, segment, state, backwards);
  const Fold fold(log_decay_of(spec_, state), true);
  b.k_map.bind(isa_, key_weights(spec_.map), key_head);
  std::fill(b.gradient, b.gradient + b.gradient_size, 0.0f);  // columns that no pass writes
  const std::int64_t per_state = shape_.outputs_per_state();
  for (std::int64_t r = 0; r < per_state; ++r) {
    const std::int64_t output = state * per_state + r, query_head = shape_.query_of(output);
    const Rows<const float> q = rows_of(in_.q, segment, query_head, backwards);
    const Rows<const float> dout = rows_of(up_.o, segment, output, backwards);
    const TokenValues inverse = token_values(0, segment, output, backwards);
    b.q_map.bind(isa_, spec_.map.q, query_head);
    StateMemory<const float> final;
    if (r == 0) final = memory_of<const float>(up_.final_state, n, state, false);
    b.pass.begin(isa_, &fold, final.at_column(column), 0);

    const bool plain_factor = !spec_.normalize && write_scale_ == 1 && fold.log_decay == 0;
    const auto pack = [&](std::int64_t t, std::int64_t tokens, const MappedRows& read) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        b.write_factor[i] = write_scale_ * fold.write[i];
        if (spec_.normalize) b.write_factor[i] *= inverse[t + i];
      }
      b.pass.pack(read, b.q_map.apply(q.at(t), q.stride, tokens), tokens,
                  plain_factor ? nullptr : b.write_factor);
      b.pass.pack_values({dout.at(t) + column, dout.stride}, tokens);
    };
    if (!spec_.causal || !dv) {
      for (std::int64_t t = 0; t < length; t += kChunk) {
        const std::int64_t tokens = std::min(length - t, kChunk);
        pack(t, tokens, {});
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
      }
    }
    const TileMode mode = spec_.causal ? TileMode::kScan : TileMode::kRead;
    for (std::int64_t i = 0; i < kChunk; ++i) b.read_factor[i] = read_scale_ * fold.read[i];
    bool packed = false;  // by the run before
    for (std::int64_t t = 0; t < length && dv; t += kChunk) {
      const std::int64_t tokens = std::min(length - t, kChunk);
      if (!packed) {
        const MappedRows read = b.k_map.apply(k.at(t), k.stride, tokens);
        spec_.causal ? pack(t, tokens, read) : b.pass.pack(read, {}, tokens, nullptr);
      }
      const std::int64_t next = t + kChunk;
      packed = plain_ && plain_factor && spec_.causal && next + kChunk <= length &&
               b.pass.pack_ahead({k.at(next), k.stride}, {q.at(next), q.stride},
                                 {dout.at(next) + column, dout.stride},
                                 next + 2 * kChunk <= length ? k.at(next + kChunk) : nullptr);
      if (next < length && !packed) {
        b.pass.prefetch(k.at(next), k.stride, shape_.keys);
        b.pass.prefetch(q.at(next), q.stride, shape_.keys);
        b.pass.prefetch(dout.at(next) + column, dout.stride, columns);
      }
      if (next < length) b.pass.prefetch(dv.at(next) + column, dv.stride, columns);
      if (r == 0) {
        b.pass.run(mode, tokens, b.read_factor, dv.at(t) + column, dv.stride);
        continue;
      }
      b.pass.run(mode, tokens, b.read_factor, b.gradient, pitch);
      MapAdjointArgs add;
      add.tokens = tokens;
      add.size = columns;
      add.x = b.gradient;
      add.x_stride = pitch;
      add.dy = b.gradient;
      add.dy_stride = pitch;
      add.dx = dv.at(t) + column;
      add.dx_stride = dv.stride;
      add.add = true;
      map_adjoint(isa_, add);
    }
    b.pass.end(memory_of<float>(out_.initial_state, n, state, false).at_column(column), r > 0);
  }
}

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

}  // namespace

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
