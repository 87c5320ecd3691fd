#include "ouzel/ttt_linear.h"

#include <cmath>

#include <fmt/format.h>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

struct Sizes {
  std::int64_t width = 0, batch = 0, batches = 0;  // D, tokens of a mini-batch, of the longest
  std::int64_t state() const { return width * (width + 1); }  // S, then hb as one more row
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const TttLinearOptions& options, const TttLinearInputs& in)
      : op(op),
        options(options),
        shape(extents_of<4>(op, "q", in.q, "batch, tokens, heads, width")),
        heads(shape[2]),
        sequences(op, in.segments, shape[0], shape[1]),
        sizes(sizes_of(op, options, shape[3], sequences.longest())),
        eta_shape{shape[0], shape[1], heads},
        s_shape{sequences.count(), heads, sizes.width, sizes.width},
        hb_shape{sequences.count(), heads, sizes.width},
        scale(scale_of(op, options.scale, sizes.width)),
        q(required<const void, 4>(op, "q", in.q, shape)),
        k(required<const void, 4>(op, "k", in.k, shape)),
        v(required<const void, 4>(op, "v", in.v, shape)),
        w(required<const float, 2>(op, "w", in.w, {heads, sizes.width})),
        b(required<const float, 2>(op, "b", in.b, {heads, sizes.width})),
        eta(required<const void, 3>(op, "eta", in.eta, eta_shape)),
        s0(view_of<const float, 4>(op, "initial_state", in.initial_state, s_shape)),
        hb0(view_of<const float, 3>(op, "initial_bias", in.initial_bias, hb_shape)) {
    checked(op, "eps", options.eps, 0);
  }
  static Sizes sizes_of(const char* op, const TttLinearOptions& options, std::int64_t width,
                        std::int64_t longest) {
    const std::int64_t size = options.mini_batch_size;
    if (size < 1) {
      refuse(op, fmt::format("mini_batch_size should be at least 1, not {}", size));
    }
    const std::int64_t batch = std::max<std::int64_t>(1, std::min(size, longest));
    return {width, batch, (longest + batch - 1) / batch};
  }
  double eta_at(const Segment& seq, std::int64_t t, std::int64_t h) const {
    return static_cast<double>(eta.at(seq.batch, seq.begin + t, h));
  }

  const char* op;
  TttLinearOptions options;
  std::array<std::int64_t, 4> shape;
  std::int64_t heads;
  Sequences sequences;
  Sizes sizes;
  std::array<std::int64_t, 3> eta_shape;
  std::array<std::int64_t, 4> s_shape;
  std::array<std::int64_t, 3> hb_shape;
  double scale;
  AnyView<const void, 4> q, k, v;
  View<const float, 2> w, b;
  AnyView<const void, 3> eta;
  View<const float, 4> s0;
  View<const float, 3> hb0;
};

// x := LN(x); returns the standard deviation.
double normalize(double* x, std::int64_t n, double eps) {
  const auto count = static_cast<double>(n);
  double mean = 0, square = 0;
  for (std::int64_t i = 0; i < n; ++i) mean += x[i];
  mean /= count;
  for (std::int64_t i = 0; i < n; ++i) square += (x[i] - mean) * (x[i] - mean);
  const double deviation = std::sqrt(square / count + eps);
  for (std::int64_t i = 0; i < n; ++i) x[i] = (x[i] - mean) / deviation;
  return deviation;
}
// d := (d - mean(d) - x mean(d x)) / deviation: the adjoint of LN, x = LN(.) given.
void normalize_adjoint(Isa isa, const double* x, double deviation, std::int64_t n, double* d) {
  const auto count = static_cast<double>(n);
  double mean = 0;
  for (std::int64_t i = 0; i < n; ++i) mean += d[i];
  mean /= count;
  const double along = dot(isa, d, x, n) / count;
  for (std::int64_t i = 0; i < n; ++i) d[i] = (d[i] - mean - x[i] * along) / deviation;
}

// One head: its state, and the rows of a mini-batch.
struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : state(memory.template take<double>(z.state())),
        w(memory.template take<double>(z.width)),
        b(memory.template take<double>(z.width)),
        q(memory.template take<double>(z.batch * z.width)),
        k(memory.template take<double>(z.batch * z.width)),
        x(memory.template take<double>(z.batch * z.width)),
        r(memory.template take<double>(z.batch * z.width)),
        grad(memory.template take<double>(z.batch * z.width)),
        u(memory.template take<double>(z.batch * z.width)),
        deviation(memory.template take<double>(z.batch)) {}
  double *state, *w, *b;
  double *q, *k;         // scale q, k
  double *x, *r, *grad;  // LN(y), LN(y) w + b - (v - k), the gradient by y
  double* u;             // u, or LN(u)
  double* deviation;
};

void begin(const Call& c, std::int64_t n, std::int64_t h, const Work& w) {
  const std::int64_t d = c.sizes.width;
  read_matrix(c.s0, Matrix64{w.state, d, d}, n, h);
  read(row_at(c.hb0, n, h), d, w.state + d * d);
  read(c.w(h), d, w.w);
  read(c.b(h), d, w.b);
}

// Tokens [first, first + count): the gradients of their losses at `state`.
void learn(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t first,
           std::int64_t count, double* state, const Work& w) {
  const std::int64_t d = c.sizes.width;
  for (std::int64_t t = 0; t < count; ++t) {
    check_cancelled();
    const std::int64_t at = seq.begin + first + t;
    double *k = w.k + t * d, *x = w.x + t * d, *r = w.r + t * d, *grad = w.grad + t * d;
    read(c.k(seq.batch, at, h), d, k);
    read(c.v(seq.batch, at, h), d, r);
    copy(state + d * d, d, x);
    add_transposed_product(isa, {state, d, d}, k, x);
    w.deviation[t] = normalize(x, d, c.options.eps);
    for (std::int64_t i = 0; i < d; ++i) {
      r[i] = x[i] * w.w[i] + w.b[i] - (r[i] - k[i]);
      grad[i] = w.w[i] * r[i];
    }
    normalize_adjoint(isa, x, w.deviation[t], d, grad);
  }
}

// 1 + k_s . (scale q_t): how far gradient s moves u_t, over -eta_t.
double reach(Isa isa, const Work& w, std::int64_t s, std::int64_t t, std::int64_t d) {
  check_cancelled_at(s);
  return 1 + dot(isa, w.k + s * d, w.q + t * d, d);
}

// After `learn`: u of the tokens.
void read_out(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t first,
              std::int64_t count, double* state, const Work& w) {
  const std::int64_t d = c.sizes.width;
  for (std::int64_t t = 0; t < count; ++t) {
    double *q = w.q + t * d, *u = w.u + t * d;
    read(c.q(seq.batch, seq.begin + first + t, h), d, q);
    for (std::int64_t i = 0; i < d; ++i) q[i] *= c.scale;
    copy(state + d * d, d, u);
    add_transposed_product(isa, {state, d, d}, q, u);
    const double eta = c.eta_at(seq, first + t, h);
    for (std::int64_t s = 0; s <= t; ++s) {
      add_scaled(isa, -eta * reach(isa, w, s, t, d), w.grad + s * d, d, u);
    }
  }
}

// After `learn`: the step at the end of the mini-batch.
void step_state(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t first,
                std::int64_t count, double* state, const Work& w) {
  const std::int64_t d = c.sizes.width;
  const double eta = c.eta_at(seq, first + count - 1, h);
  for (std::int64_t s = 0; s < count; ++s) {
    add_outer(isa, -eta, w.k + s * d, w.grad + s * d, {state, d, d});
    add_scaled(isa, -eta, w.grad + s * d, d, state + d * d);
  }
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        history(memory, z.state(), z.batches),
        d_state(memory.template take<double>(z.state())),
        d_next(memory.template take<double>(z.state())),
        dw(memory.template take<double>(z.width)),
        db(memory.template take<double>(z.width)),
        dq(memory.template take<double>(z.batch * z.width)),
        dk(memory.template take<double>(z.batch * z.width)),
        d_grad(memory.template take<double>(z.batch * z.width)),
        d_eta(memory.template take<double>(z.batch)),
        du(memory.template take<double>(z.width)),
        dx(memory.template take<double>(z.width)),
        dv(memory.template take<double>(z.width)) {}
  Work forward;
  StateHistory history;
  double *d_state, *d_next, *dw, *db, *dq, *dk, *d_grad, *d_eta, *du, *dx, *dv;
};

// Through o_t = u_t + LN(u_t) w + b and u_t: b.du from d_o in it; adds to dq, dk, d_grad, d_eta and
// to the gradient of the state that the mini-batch began with.
void output_adjoint(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t first,
                    std::int64_t t, double* state, const BackwardWork& b) {
  const std::int64_t d = c.sizes.width;
  const Work& w = b.forward;
  double* u = w.u + t * d;
  const double deviation = normalize(u, d, c.options.eps);
  for (std::int64_t i = 0; i < d; ++i) {
    b.dw[i] += b.du[i] * u[i];
    b.db[i] += b.du[i];
    b.dx[i] = b.du[i] * w.w[i];
  }
  normalize_adjoint(isa, u, deviation, d, b.dx);
  add_scaled(isa, 1, b.dx, d, b.du);
  add_product(isa, {state, d, d}, b.du, b.dq + t * d);
  add_outer(isa, 1, w.q + t * d, b.du, {b.d_state, d, d});
  add_scaled(isa, 1, b.du, d, b.d_state + d * d);
  const double eta = c.eta_at(seq, first + t, h);
  for (std::int64_t s = 0; s <= t; ++s) {
    const double moved = dot(isa, w.grad + s * d, b.du, d), far = reach(isa, w, s, t, d);
    b.d_eta[t] -= far * moved;
    add_scaled(isa, -eta * far, b.du, d, b.d_grad + s * d);
    add_scaled(isa, -eta * moved, w.k + s * d, d, b.dq + t * d);
    add_scaled(isa, -eta * moved, w.q + t * d, d, b.dk + s * d);
  }
}

// Through the gradient of token s, (P(w r) / deviation with P the projection of LN's adjoint): from
// d_grad to dk, dv, w, b and the state. P is symmetric, so P(w r)'s adjoint is P again; x and the
// deviation are functions of y as well.
void learn_adjoint(Isa isa, const Call& c, std::int64_t s, double* state, const BackwardWork& b) {
  check_cancelled();
  const std::int64_t d = c.sizes.width;
  const auto count = static_cast<double>(d);
  const Work& w = b.forward;
  const double *x = w.x + s * d, *r = w.r + s * d, *g = b.d_grad + s * d, *k = w.k + s * d;
  const double deviation = w.deviation[s];
  double mean_ax = 0;  // of w r x
  for (std::int64_t i = 0; i < d; ++i) mean_ax += w.w[i] * r[i] * x[i] / count;
  const double along = dot(isa, g, x, d);
  const double d_deviation = -dot(isa, g, w.grad + s * d, d) / deviation;
  copy(g, d, b.du);
  normalize_adjoint(isa, x, deviation, d, b.du);  // of w r
  for (std::int64_t i = 0; i < d; ++i) {
    const double dr = b.du[i] * w.w[i];
    b.dw[i] += b.du[i] * r[i] + dr * x[i];
    b.db[i] += dr;
    b.dv[i] = -dr;
    b.dk[s * d + i] += dr;
    b.dx[i] = dr * w.w[i] - (g[i] * mean_ax + along * w.w[i] * r[i] / count) / deviation;
  }
  normalize_adjoint(isa, x, deviation, d, b.dx);
  add_scaled(isa, d_deviation / count, x, d, b.dx);  // now of y = S^T k + hb
  add_product(isa, {state, d, d}, b.dx, b.dk + s * d);
  add_outer(isa, 1, k, b.dx, {b.d_state, d, d});
  add_scaled(isa, 1, b.dx, d, b.d_state + d * d);
}

}  // namespace

void ttt_linear(Context& context, const TttLinearOptions& options, const TttLinearInputs& inputs,
                const TttLinearOutputs& outputs) {
  const Call c("ttt_linear", options, inputs);
  const auto o = required<void, 4>(c.op, "o", outputs.o, c.shape);
  const auto final = view_of<float, 4>(c.op, "final_state", outputs.final_state, c.s_shape);
  const auto bias = view_of<float, 3>(c.op, "final_bias", outputs.final_bias, c.hb_shape);
  if (c.sequences.are_empty(final, bias)) return;
  const Isa isa = context.isa();
  const std::int64_t d = c.sizes.width;
  each_head<Work>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& w) {
    begin(c, n, h, w);
    for (std::int64_t first = 0; first < seq.length; first += c.sizes.batch) {
      const std::int64_t count = std::min(c.sizes.batch, seq.length - first);
      learn(isa, c, seq, h, first, count, w.state, w);
      read_out(isa, c, seq, h, first, count, w.state, w);
      step_state(isa, c, seq, h, first, count, w.state, w);
      for (std::int64_t t = 0; t < count; ++t) {
        double *u = w.u + t * d, *out = w.q + t * d;
        copy(u, d, out);
        normalize(u, d, options.eps);
        for (std::int64_t i = 0; i < d; ++i) out[i] += u[i] * w.w[i] + w.b[i];
        write(out, d, o(seq.batch, seq.begin + first + t, h));
      }
    }
    write_matrix(Matrix64{w.state, d, d}, final, n, h);
    write(w.state + d * d, d, row_at(bias, n, h));
  });
  c.sequences.zero_padding(outputs.o);
}

void ttt_linear_backward(Context& context, const TttLinearOptions& options,
                         const TttLinearInputs& inputs, const TttLinearOutputGrads& output_grads,
                         const TttLinearInputGrads& grads) {
  const Call c("ttt_linear_backward", options, inputs);
  const auto d_o = required<const void, 4>(c.op, "d_o", output_grads.o, c.shape);
  const auto ds_last =
      view_of<const float, 4>(c.op, "d_final_state", output_grads.final_state, c.s_shape);
  const auto dhb_last =
      view_of<const float, 3>(c.op, "d_final_bias", output_grads.final_bias, c.hb_shape);
  const auto dq = view_of<void, 4>(c.op, "dq", grads.q, c.shape);
  const auto dk = view_of<void, 4>(c.op, "dk", grads.k, c.shape);
  const auto dv = view_of<void, 4>(c.op, "dv", grads.v, c.shape);
  const auto dw = view_of<float, 2>(c.op, "dw", grads.w, c.w.extent);
  const auto db = view_of<float, 2>(c.op, "db", grads.b, c.w.extent);
  const auto deta = view_of<void, 3>(c.op, "deta", grads.eta, c.eta_shape);
  const auto ds0 = view_of<float, 4>(c.op, "d_initial_state", grads.initial_state, c.s_shape);
  const auto dhb0 = view_of<float, 3>(c.op, "d_initial_bias", grads.initial_bias, c.hb_shape);
  if (c.sequences.are_empty(ds0, dhb0)) return;
  const Isa isa = context.isa();
  const Sizes& z = c.sizes;
  const std::int64_t d = z.width;
  reserve_for<BackwardWork>(context, z);
  // A task owns a head of all sequences, which share its w and b.
  context.impl().run(c.heads, [&](std::int64_t h, Scratch& scratch) {
    BackwardWork b(scratch, z);
    const Work& w = b.forward;
    clear(b.dw, d);
    clear(b.db, d);
    for (std::int64_t n = 0; n < c.sequences.count(); ++n) {
      const Segment seq = c.sequences[n];
      const std::int64_t batches = (seq.length + z.batch - 1) / z.batch;
      const auto tokens = [&](std::int64_t m) {
        return std::min(z.batch, seq.length - m * z.batch);
      };
      const auto step = [&](std::int64_t m, double* state) {
        learn(isa, c, seq, h, m * z.batch, tokens(m), state, w);
        step_state(isa, c, seq, h, m * z.batch, tokens(m), state, w);
      };
      begin(c, n, h, w);
      b.history.run(w.state, batches, step);
      read_matrix(ds_last, Matrix64{b.d_state, d, d}, n, h);
      read(row_at(dhb_last, n, h), d, b.d_state + d * d);
      for (std::int64_t m = batches; m-- > 0;) {
        const std::int64_t first = m * z.batch, count = tokens(m);
        double* state = b.history.before(m, step);
        learn(isa, c, seq, h, first, count, state, w);
        read_out(isa, c, seq, h, first, count, state, w);
        copy(b.d_state, z.state(), b.d_next);
        for (double* rows : {b.dq, b.dk, b.d_grad}) clear(rows, count * d);
        clear(b.d_eta, count);
        // The step at the end: S' = S - eta sum_s k_s grad_s^T, hb' = hb - eta sum_s grad_s.
        const double eta = c.eta_at(seq, first + count - 1, h);
        const Matrix64 d_s = {b.d_next, d, d};
        for (std::int64_t s = 0; s < count; ++s) {
          double *k = w.k + s * d, *grad = w.grad + s * d;
          copy(b.d_next + d * d, d, b.du);
          add_transposed_product(isa, d_s, k, b.du);
          b.d_eta[count - 1] -= dot(isa, b.du, grad, d);
          add_scaled(isa, -eta, b.du, d, b.d_grad + s * d);
          clear(b.dx, d);
          add_product(isa, d_s, grad, b.dx);
          add_scaled(isa, -eta, b.dx, d, b.dk + s * d);
        }
        for (std::int64_t t = 0; t < count; ++t) {
          read(d_o(seq.batch, seq.begin + first + t, h), d, b.du);
          output_adjoint(isa, c, seq, h, first, t, state, b);
        }
        for (std::int64_t s = 0; s < count; ++s) {
          const std::int64_t at = seq.begin + first + s;
          learn_adjoint(isa, c, s, state, b);
          for (std::int64_t i = 0; i < d; ++i) b.dq[s * d + i] *= c.scale;
          write(b.dq + s * d, d, row_at(dq, seq.batch, at, h));
          write(b.dk + s * d, d, row_at(dk, seq.batch, at, h));
          write(b.dv, d, row_at(dv, seq.batch, at, h));
          write(b.d_eta + s, 1, row_at(deta, seq.batch, at, h));
        }
      }
      write_matrix(Matrix64{b.d_state, d, d}, ds0, n, h);
      write(b.d_state + d * d, d, row_at(dhb0, n, h));
    }
    for (std::int64_t i = 0; i < d; ++i) {
      if (dw.data != nullptr) dw.at(h, i) += static_cast<float>(b.dw[i]);
      if (db.data != nullptr) db.at(h, i) += static_cast<float>(b.db[i]);
    }
  });
  for (const Tensor* rows : {&grads.q, &grads.k, &grads.v, &grads.eta}) {
    c.sequences.zero_padding(*rows);
  }
}

}  // namespace ouzel
