// The ladder is a binary counter: at position t, state j holds the 2^j tokens that bit j of t
// stands for. A token's product carries into the first free state what the lower ones hold.
#include "ouzel/log_linear_attention.h"

#include <bit>
#include <cmath>

#include <fmt/format.h>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

struct Sizes {
  std::int64_t keys = 0, values = 0, levels = 0, states = 0, longest = 0;
  std::int64_t state() const { return keys * values; }
};

// States that `tokens` tokens fill, one for each bit of the last position.
std::int64_t states_of(std::int64_t tokens) {
  return tokens < 2 ? 0 : std::bit_width(static_cast<std::uint64_t>(tokens - 1));
}

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const LogLinearAttentionInputs& in)
      : op(op),
        k_shape(extents_of<4>(op, "q", in.q, "batch, tokens, key heads, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, tokens, heads, values")),
        l_shape(extents_of<4>(op, "level_scales", in.level_scales, "batch, tokens, heads, levels")),
        heads(v_shape[2]),
        group(group_of(op, "v", heads, "q", k_shape[2])),
        sequences(op, in.segments, k_shape[0], k_shape[1]),
        sizes{k_shape[3], v_shape[3], l_shape[3], states_of(sequences.longest()),
              sequences.longest()},
        o_shape{k_shape[0], k_shape[1], heads, sizes.values},
        g_shape{k_shape[0], k_shape[1], heads},
        q(required<const void, 4>(op, "q", in.q, k_shape)),
        k(required<const void, 4>(op, "k", in.k, k_shape)),
        v(required<const void, 4>(op, "v", in.v, o_shape)),
        g(required<const void, 3>(op, "g", in.g, g_shape)),
        lambda(required<const void, 4>(op, "level_scales", in.level_scales,
                                       {k_shape[0], k_shape[1], heads, sizes.levels})) {
    if (sizes.levels <= sizes.states && sizes.longest > 0) {
      refuse(op, fmt::format("level_scales has {} levels; {} tokens need {}", sizes.levels,
                             sizes.longest, sizes.states + 1));
    }
  }

  const char* op;
  std::array<std::int64_t, 4> k_shape, v_shape, l_shape;
  std::int64_t heads, group;
  Sequences sequences;
  Sizes sizes;
  std::array<std::int64_t, 4> o_shape;
  std::array<std::int64_t, 3> g_shape;
  AnyView<const void, 4> q, k, v;
  AnyView<const void, 3> g;
  AnyView<const void, 4> lambda;
};

// The ladder of one head, and the rows of one token.
struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : ladder(memory.template take<double>(z.state() * z.states)),
        q(memory.template take<double>(z.keys)),
        k(memory.template take<double>(z.keys)),
        v(memory.template take<double>(z.values)),
        o(memory.template take<double>(z.values)),
        part(memory.template take<double>(std::max(z.keys, z.values))),
        lambda(memory.template take<double>(z.levels)) {}

  // Token t of the batch row for head j; the factor of what is past.
  double read_token(const Call& c, std::int64_t batch, std::int64_t t, std::int64_t j) {
    const Sizes& z = c.sizes;
    read(c.q(batch, t, j / c.group), z.keys, q);
    read(c.k(batch, t, j / c.group), z.keys, k);
    read(c.v(batch, t, j), z.values, v);
    read(c.lambda(batch, t, j), z.levels, lambda);
    return decay_of(static_cast<double>(c.g.at(batch, t, j)));
  }
  Matrix64 state(const Sizes& z, std::int64_t i) const {
    return {ladder + i * z.state(), z.keys, z.values};
  }

  double *ladder, *q, *k, *v, *o, *part, *lambda;
};

bool is_held(std::int64_t position, std::int64_t state) { return (position >> state & 1) != 0; }
// The state that the token at a position carries into.
std::int64_t carry_of(std::int64_t position) {
  return std::countr_one(static_cast<std::uint64_t>(position));
}

void decay(double factor, const Matrix64& s) {
  for (std::int64_t x = 0; x < s.size(); ++x) s.data[x] = factor == 0 ? 0 : factor * s.data[x];
}

// The token whose rows are in w, at `position`: its output into w.o, and itself into the ladder.
void advance(Isa isa, const Sizes& z, double scale, double factor, std::int64_t position, Work& w) {
  check_cancelled();
  clear(w.o, z.values);
  for (std::int64_t i = 0; i < z.states; ++i) {
    if (!is_held(position, i)) continue;
    decay(factor, w.state(z, i));
    clear(w.part, z.values);
    add_transposed_product(isa, w.state(z, i), w.q, w.part);
    add_scaled(isa, scale * w.lambda[i + 1], w.part, z.values, w.o);
  }
  add_scaled(isa, scale * w.lambda[0] * dot(isa, w.q, w.k, z.keys), w.v, z.values, w.o);
  const std::int64_t carry = carry_of(position);
  if (carry >= z.states) return;  // no later token reads it
  const Matrix64 to = w.state(z, carry);
  clear(to.data, to.size());
  for (std::int64_t i = 0; i < carry; ++i)
    add_scaled(isa, 1, w.state(z, i).data, to.size(), to.data);
  add_outer(isa, 1, w.k, w.v, to);
}

void check_gates(Context& context, const Call& c) {
  LargestDecay largest;
  context.impl().run(c.sequences.count(), [&](std::int64_t n, Scratch&) {
    const Segment seq = c.sequences[n];
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled_at(t);
      for (std::int64_t j = 0; j < c.heads; ++j) largest.see(c.g.at(seq.batch, t, j));
    }
  });
  largest.check(c.op, "g");
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        d_o(memory.template take<double>(z.values)),
        dv(memory.template take<double>(z.values)),
        row(memory.template take<double>(z.keys)),
        d_lambda(memory.template take<double>(z.levels)),
        balance(memory.template take<double>(z.longest)),
        dq(memory.template take<double>(z.keys * z.longest)),
        dk(memory.template take<double>(z.keys * z.longest)) {}
  Work forward;
  double *d_o, *dv, *row, *d_lambda;
  // Per token: the share of the loss that passes through its weights of past tokens, less that
  // through weights of it by later ones.
  double* balance;
  double *dq, *dk;  // of all tokens, summed over the heads of a key head
};

}  // namespace

void log_linear_attention(Context& context, const LogLinearAttentionOptions& options,
                          const LogLinearAttentionInputs& inputs, const Tensor& o) {
  const Call c("log_linear_attention", inputs);
  const auto o_rows = required<void, 4>(c.op, "o", o, c.o_shape);
  const double scale = checked(c.op, "scale", options.scale);
  if (c.sequences.are_empty()) return;
  check_gates(context, c);
  each_head<Work>(context, c, c.heads, [&](auto, auto j, const Segment& seq, auto& w) {
    for (std::int64_t t = 0; t < seq.length; ++t) {
      const double factor = w.read_token(c, seq.batch, seq.begin + t, j);
      advance(context.isa(), c.sizes, scale, factor, t, w);
      write(w.o, c.sizes.values, o_rows(seq.batch, seq.begin + t, j));
    }
  });
  c.sequences.zero_padding(o);
}

// In two sweeps, so that no state is kept: forward for what reads the ladder (dq and the levels'),
// backward over a ladder of gradients for what enters it (dk and dv). The gradient of a log gate is
// the loss that passes over it, sum_(s < t <= u) of the weights' shares: a difference of running
// sums, exact in float64.
void log_linear_attention_backward(Context& context, const LogLinearAttentionOptions& options,
                                   const LogLinearAttentionInputs& inputs, const ConstTensor& d_o,
                                   const LogLinearAttentionInputGrads& grads) {
  const Call c("log_linear_attention_backward", inputs);
  const auto d_o_rows = required<const void, 4>(c.op, "d_o", d_o, c.o_shape);
  const auto dq = view_of<void, 4>(c.op, "dq", grads.q, c.k_shape);
  const auto dk = view_of<void, 4>(c.op, "dk", grads.k, c.k_shape);
  const auto dv = view_of<void, 4>(c.op, "dv", grads.v, c.o_shape);
  const auto dg = view_of<void, 3>(c.op, "dg", grads.g, c.g_shape);
  const auto d_levels =
      view_of<void, 4>(c.op, "dlevel_scales", grads.level_scales, c.lambda.extent);
  if (c.sequences.are_empty()) return;
  check_gates(context, c);
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  const double scale = checked(c.op, "scale", options.scale);
  const std::int64_t key_heads = c.k_shape[2];
  each_head<BackwardWork>(context, c, key_heads, [&](auto, auto h, const Segment& seq, auto& b) {
    Work& w = b.forward;
    for (std::int64_t t = 0; t < seq.length; ++t) {
      check_cancelled_at(t);
      clear(b.dq + t * z.keys, z.keys);
      clear(b.dk + t * z.keys, z.keys);
    }
    for (std::int64_t j = h * c.group; j < (h + 1) * c.group; ++j) {
      for (std::int64_t t = 0; t < seq.length; ++t) {
        const std::int64_t at = seq.begin + t;
        const double factor = w.read_token(c, seq.batch, at, j);
        read(d_o_rows(seq.batch, at, j), z.values, b.d_o);
        advance(isa, z, scale, factor, t, w);
        // After the carry the lower states still stand as they were read.
        double* to = b.dq + t * z.keys;
        clear(b.d_lambda, z.levels);
        b.balance[t] = 0;
        for (std::int64_t i = 0; i < z.states; ++i) {
          if (!is_held(t, i)) continue;
          clear(b.row, z.keys);
          add_product(isa, w.state(z, i), b.d_o, b.row);
          add_scaled(isa, scale * w.lambda[i + 1], b.row, z.keys, to);
          b.d_lambda[i + 1] = scale * dot(isa, w.q, b.row, z.keys);
          b.balance[t] += w.lambda[i + 1] * b.d_lambda[i + 1];
        }
        const double along = scale * dot(isa, w.v, b.d_o, z.values);
        add_scaled(isa, along * w.lambda[0], w.k, z.keys, to);
        b.d_lambda[0] = along * dot(isa, w.q, w.k, z.keys);
        write(b.d_lambda, z.levels, row_at(d_levels, seq.batch, at, j));
      }
      clear(w.ladder, z.state() * z.states);
      double over = 0;  // the loss that passes over the gate of token t
      for (std::int64_t t = seq.length; t-- > 0;) {
        check_cancelled();
        const std::int64_t at = seq.begin + t, carry = carry_of(t);
        const double factor = w.read_token(c, seq.batch, at, j);
        read(d_o_rows(seq.batch, at, j), z.values, b.d_o);
        double* to = b.dk + t * z.keys;
        clear(b.dv, z.values);
        if (carry < z.states) {
          const Matrix64 from = w.state(z, carry);
          clear(b.row, z.keys);
          add_product(isa, from, w.v, b.row);
          add_scaled(isa, 1, b.row, z.keys, to);
          add_transposed_product(isa, from, w.k, b.dv);
          b.balance[t] -= dot(isa, w.k, b.row, z.keys);
          for (std::int64_t i = 0; i < carry; ++i) copy(from.data, z.state(), w.state(z, i).data);
          clear(from.data, z.state());
        }
        for (std::int64_t i = 0; i < z.states; ++i) {
          if (!is_held(t, i)) continue;
          add_outer(isa, scale * w.lambda[i + 1], w.q, b.d_o, w.state(z, i));
          decay(factor, w.state(z, i));
        }
        const double self = scale * w.lambda[0];
        add_scaled(isa, self * dot(isa, w.v, b.d_o, z.values), w.q, z.keys, to);
        add_scaled(isa, self * dot(isa, w.q, w.k, z.keys), b.d_o, z.values, b.dv);
        write(b.dv, z.values, row_at(dv, seq.batch, at, j));
        over += b.balance[t];
        const double d_gate = factor == 0 ? 0 : over;
        write(&d_gate, 1, row_at(dg, seq.batch, at, j));
      }
    }
    for (std::int64_t t = 0; t < seq.length; ++t) {
      check_cancelled_at(t);
      write(b.dq + t * z.keys, z.keys, row_at(dq, seq.batch, seq.begin + t, h));
      write(b.dk + t * z.keys, z.keys, row_at(dk, seq.batch, seq.begin + t, h));
    }
  });
  for (const Tensor* rows : {&grads.q, &grads.k, &grads.v, &grads.g, &grads.level_scales}) {
    c.sequences.zero_padding(*rows);
  }
}

void log_linear_attention_step(Context& context, const LogLinearAttentionOptions& options,
                               const LogLinearAttentionInputs& inputs,
                               std::span<const std::int64_t> positions, const Tensor& state,
                               const Tensor& o) {
  check_step("log_linear_attention_step", "q", inputs.q, state);
  LogLinearAttentionInputs token = inputs;
  token.segments = nullptr;
  Call c("log_linear_attention_step", token);
  c.sizes.states = c.sizes.levels - 1;
  const auto o_rows = required<void, 4>(c.op, "o", o, c.o_shape);
  const auto ladder = required<float, 5>(
      c.op, "state", state, {c.k_shape[0], c.heads, c.sizes.states, c.sizes.keys, c.sizes.values});
  if (static_cast<std::int64_t>(positions.size()) != c.k_shape[0]) {
    refuse(c.op,
           fmt::format("{} positions were given for {} sequences", positions.size(), c.k_shape[0]));
  }
  for (std::int64_t p : positions) {
    if (p >= 0 && states_of(p + 1) <= c.sizes.states) continue;
    refuse(c.op, fmt::format("position {} needs {} levels; level_scales has {}", p,
                             states_of(p + 1) + 1, c.sizes.levels));
  }
  const double scale = checked(c.op, "scale", options.scale);
  check_gates(context, c);
  const Sizes& z = c.sizes;
  reserve_for<Work>(context, z);
  context.impl().run(c.k_shape[0] * c.heads, [&](std::int64_t task, Scratch& scratch) {
    const std::int64_t n = task / c.heads, j = task % c.heads;
    const std::int64_t position = positions[static_cast<std::size_t>(n)];
    Work w(scratch, z);
    for (std::int64_t i = 0; i < z.states; ++i) {
      if (is_held(position, i)) read_matrix(ladder, w.state(z, i), n, j, i);
    }
    const double factor = w.read_token(c, n, 0, j);
    advance(context.isa(), z, scale, factor, position, w);
    write(w.o, z.values, o_rows(n, 0, j));
    for (std::int64_t i = 0; i < z.states; ++i) {
      if (is_held(position + 1, i)) write_matrix(w.state(z, i), ladder, n, j, i);
    }
  });
}

}  // namespace ouzel
