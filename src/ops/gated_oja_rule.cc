#include "ouzel/gated_oja_rule.h"

#include <cmath>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

struct Sizes {
  std::int64_t keys = 0, values = 0, group = 0, longest = 0;
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const GatedOjaRuleOptions& options, const GatedOjaRuleInputs& in)
      : op(op),
        options(options),
        k_shape(extents_of<4>(op, "q", in.q, "batch, tokens, heads, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, tokens, value heads, values")),
        heads(k_shape[2]),
        sequences(op, in.segments, k_shape[0], k_shape[1]),
        sizes{k_shape[3], v_shape[3], group_of(op, "v", v_shape[2], "q", heads),
              sequences.longest()},
        o_shape{k_shape[0], k_shape[1], v_shape[2], sizes.values},
        beta_shape{k_shape[0], k_shape[1], v_shape[2]},
        s_shape{sequences.count(), v_shape[2], sizes.keys, sizes.values},
        scale(scale_of(op, options.scale, sizes.keys)),
        q(required<const void, 4>(op, "q", in.q, k_shape)),
        k(required<const void, 4>(op, "k", in.k, k_shape)),
        v(required<const void, 4>(op, "v", in.v, o_shape)),
        beta(required<const void, 3>(op, "beta", in.beta, beta_shape)),
        gv(view_of<const void, 4>(op, "gv", in.gv, o_shape)),
        s0(view_of<const float, 4>(op, "initial_state", in.initial_state, s_shape)) {
    checked(op, "l2norm_eps", options.l2norm_eps, 0);
  }

  const char* op;
  GatedOjaRuleOptions options;
  std::array<std::int64_t, 4> k_shape, v_shape;
  std::int64_t heads;
  Sequences sequences;
  Sizes sizes;
  std::array<std::int64_t, 4> o_shape;
  std::array<std::int64_t, 3> beta_shape;
  std::array<std::int64_t, 4> s_shape;
  double scale;
  AnyView<const void, 4> q, k, v;
  AnyView<const void, 3> beta;
  AnyView<const void, 4> gv;
  View<const float, 4> s0;
};

// The rows of one token; `error` is k - R v.
struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : state(memory.template take<double>(z.keys * z.values)),
        q(memory.template take<double>(z.keys)),
        k(memory.template take<double>(z.keys)),
        error(memory.template take<double>(z.keys)),
        v(memory.template take<double>(z.values)),
        keep(memory.template take<double>(z.values)),
        o(memory.template take<double>(z.values)) {}
  double *state, *q, *k, *error, *v, *keep, *o;
};

// A row, perhaps of unit length; returns 1 / its length, or 1.
double read_unit(Isa isa, const Call& c, const AnyRows<const void>& row, bool normalize,
                 double* to) {
  const std::int64_t n = c.sizes.keys;
  read(row, n, to);
  if (!normalize) return 1;
  const double inverse = 1 / std::sqrt(dot(isa, to, to, n) + c.options.l2norm_eps);
  for (std::int64_t i = 0; i < n; ++i) to[i] *= inverse;
  return inverse;
}
// From the gradient of the unit row to that of the row.
void unit_adjoint(Isa isa, const double* unit, double inverse, std::int64_t n, bool normalize,
                  double* d) {
  if (!normalize) return;
  const double along = dot(isa, d, unit, n);
  for (std::int64_t i = 0; i < n; ++i) d[i] = inverse * (d[i] - along * unit[i]);
}

// Token t of value head j into the state.
void advance(Isa isa, const Call& c, const Segment& seq, std::int64_t j, std::int64_t t, Work& w,
             double* state) {
  check_cancelled();
  const Sizes& z = c.sizes;
  const std::int64_t at = seq.begin + t;
  const Matrix64 s = {state, z.keys, z.values};
  read_unit(isa, c, c.k(seq.batch, at, j / z.group), c.options.use_k_l2norm, w.k);
  read(c.v(seq.batch, at, j), z.values, w.v);
  if (c.gv.data != nullptr) {
    read(c.gv(seq.batch, at, j), z.values, w.keep);
    for (std::int64_t i = 0; i < z.values; ++i) w.keep[i] = decay_of(w.keep[i]);
    scale_columns(isa, w.keep, s);
  }
  clear(w.error, z.keys);
  add_product(isa, s, w.v, w.error);
  for (std::int64_t i = 0; i < z.keys; ++i) w.error[i] = w.k[i] - w.error[i];
  add_outer(isa, static_cast<double>(c.beta.at(seq.batch, at, j)), w.error, w.v, s);
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        history(memory, z.keys * z.values, z.longest),
        d_state(memory.template take<double>(z.keys * z.values)),
        du(memory.template take<double>(z.keys)),
        dv(memory.template take<double>(z.values)),
        dg(memory.template take<double>(z.values)),
        d_o(memory.template take<double>(z.values)),
        dq(memory.template take<double>(z.keys * z.longest)),
        dk(memory.template take<double>(z.keys * z.longest)) {}
  Work forward;
  StateHistory history;
  double *d_state, *du, *dv, *dg, *d_o;
  double *dq, *dk;  // of all tokens, summed over the value heads of a key head
};

void check_gates(Context& context, const Call& c) {
  if (c.gv.data == nullptr) return;
  LargestDecay decay;
  context.impl().run(c.sequences.count(), [&](std::int64_t n, Scratch&) {
    const Segment seq = c.sequences[n];
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled_at(t);
      for (std::int64_t j = 0; j < c.v_shape[2]; ++j) {
        decay.see(c.gv(seq.batch, t, j), c.sizes.values);
      }
    }
  });
  decay.check(c.op, "gv");
}

}  // namespace

void gated_oja_rule(Context& context, const GatedOjaRuleOptions& options,
                    const GatedOjaRuleInputs& inputs, const Tensor& o, const Tensor& final_state) {
  const Call c("gated_oja_rule", options, inputs);
  const auto o_rows = required<void, 4>(c.op, "o", o, c.o_shape);
  const auto final = view_of<float, 4>(c.op, "final_state", final_state, c.s_shape);
  if (c.sequences.are_empty(final)) return;
  check_gates(context, c);
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  each_head<Work>(context, c, c.v_shape[2], [&](auto n, auto j, const Segment& seq, auto& w) {
    const Matrix64 s = {w.state, z.keys, z.values};
    read_matrix(c.s0, s, n, j);
    for (std::int64_t t = 0; t < seq.length; ++t) {
      const std::int64_t at = seq.begin + t;
      advance(isa, c, seq, j, t, w, w.state);
      read_unit(isa, c, c.q(seq.batch, at, j / z.group), c.options.use_q_l2norm, w.q);
      clear(w.o, z.values);
      add_transposed_product(isa, s, w.q, w.o);
      for (std::int64_t i = 0; i < z.values; ++i) w.o[i] *= c.scale;
      write(w.o, z.values, o_rows(seq.batch, at, j));
    }
    write_matrix(s, final, n, j);
  });
  c.sequences.zero_padding(o);
}

void gated_oja_rule_backward(Context& context, const GatedOjaRuleOptions& options,
                             const GatedOjaRuleInputs& inputs, const ConstTensor& d_o,
                             const ConstTensor& d_final, const GatedOjaRuleInputGrads& grads) {
  const Call c("gated_oja_rule_backward", options, inputs);
  const auto d_o_rows = required<const void, 4>(c.op, "d_o", d_o, c.o_shape);
  const auto d_last = view_of<const float, 4>(c.op, "d_final", d_final, c.s_shape);
  const auto dq = view_of<void, 4>(c.op, "dq", grads.q, c.k_shape);
  const auto dk = view_of<void, 4>(c.op, "dk", grads.k, c.k_shape);
  const auto dv = view_of<void, 4>(c.op, "dv", grads.v, c.o_shape);
  const auto dbeta = view_of<void, 3>(c.op, "dbeta", grads.beta, c.beta_shape);
  const auto dgv = view_of<void, 4>(c.op, "dgv", grads.gv, c.o_shape);
  const auto d_first = view_of<float, 4>(c.op, "d_initial_state", grads.initial_state, c.s_shape);
  if (c.sequences.are_empty(d_first)) return;
  check_gates(context, c);
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  each_head<BackwardWork>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& b) {
    Work& w = b.forward;
    const Matrix64 s = {w.state, z.keys, z.values}, g = {b.d_state, z.keys, z.values};
    for (std::int64_t t = 0; t < seq.length; ++t) {
      check_cancelled_at(t);
      clear(b.dq + t * z.keys, z.keys);
      clear(b.dk + t * z.keys, z.keys);
    }
    for (std::int64_t j = h * z.group; j < (h + 1) * z.group; ++j) {
      const auto step = [&](std::int64_t t, double* state) {
        advance(isa, c, seq, j, t, w, state);
      };
      read_matrix(c.s0, s, n, j);
      b.history.run(w.state, seq.length, step);
      read_matrix(d_last, g, n, j);
      for (std::int64_t t = seq.length; t-- > 0;) {
        const std::int64_t at = seq.begin + t;
        double* before = b.history.before(t, step);
        copy(before, z.keys * z.values, w.state);
        advance(isa, c, seq, j, t, w, w.state);
        read_unit(isa, c, c.q(seq.batch, at, h), options.use_q_l2norm, w.q);
        read(d_o_rows(seq.batch, at, j), z.values, b.d_o);
        for (std::int64_t i = 0; i < z.values; ++i) b.d_o[i] *= c.scale;
        add_product(isa, s, b.d_o, b.dq + t * z.keys);
        add_outer(isa, 1, w.q, b.d_o, g);
        const auto beta = static_cast<double>(c.beta.at(seq.batch, at, j));
        clear(b.du, z.keys);
        clear(b.dv, z.values);
        add_product(isa, g, w.v, b.du);                 // of u = beta (k - R v)
        add_transposed_product(isa, g, w.error, b.dv);  // beta comes below
        for (std::int64_t i = 0; i < z.values; ++i) b.dv[i] *= beta;
        const double d_beta = dot(isa, b.du, w.error, z.keys);
        write(&d_beta, 1, row_at(dbeta, seq.batch, at, j));
        for (std::int64_t i = 0; i < z.keys; ++i) b.du[i] *= -beta;  // of R v
        add_scaled(isa, -1, b.du, z.keys, b.dk + t * z.keys);
        // R = S' - beta error v^T.
        add_outer(isa, -beta, w.error, w.v, s);
        add_transposed_product(isa, s, b.du, b.dv);
        write(b.dv, z.values, row_at(dv, seq.batch, at, j));
        add_outer(isa, 1, b.du, w.v, g);
        if (c.gv.data == nullptr) continue;
        scale_columns(isa, w.keep, g);
        clear(b.dg, z.values);
        add_column_products(isa, g, {before, z.keys, z.values}, b.dg);
        for (std::int64_t i = 0; i < z.values; ++i) {
          if (w.keep[i] == 0) b.dg[i] = 0;
        }
        write(b.dg, z.values, row_at(dgv, seq.batch, at, j));
      }
      write_matrix(g, d_first, n, j);
    }
    for (std::int64_t t = 0; t < seq.length; ++t) {
      check_cancelled_at(t);
      const std::int64_t at = seq.begin + t;
      const auto finish = [&](const AnyView<const void, 4>& x, bool normalize, double* d,
                              const AnyView<void, 4>& to) {
        const double inverse = read_unit(isa, c, x(seq.batch, at, h), normalize, w.q);
        unit_adjoint(isa, w.q, inverse, z.keys, normalize, d);
        write(d, z.keys, row_at(to, seq.batch, at, h));
      };
      finish(c.q, options.use_q_l2norm, b.dq + t * z.keys, dq);
      finish(c.k, options.use_k_l2norm, b.dk + t * z.keys, dk);
    }
  });
  for (const Tensor* rows : {&grads.q, &grads.k, &grads.v, &grads.beta, &grads.gv}) {
    c.sequences.zero_padding(*rows);
  }
}

void gated_oja_rule_step(Context& context, const GatedOjaRuleOptions& options,
                         const GatedOjaRuleInputs& inputs, const Tensor& state, const Tensor& o) {
  check_step("gated_oja_rule_step", "q", inputs.q, state);
  GatedOjaRuleInputs token = inputs;
  token.initial_state = state;
  token.segments = nullptr;
  gated_oja_rule(context, options, token, o, state);
}

}  // namespace ouzel
