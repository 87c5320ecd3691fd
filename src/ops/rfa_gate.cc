// The normaliser is one more column of S, whose values are 1.
#include "ouzel/rfa_gate.h"

#include <cmath>

#include <fmt/format.h>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

constexpr double kNormEps = 1e-6;

struct Sizes {
  std::int64_t keys = 0, values = 0, projections = 0, longest = 0;
  std::int64_t columns() const { return values + 1; }
  std::int64_t features() const { return 2 * projections; }
  std::int64_t state() const { return features() * columns(); }
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const RfaGateInputs& in)
      : op(op),
        k_shape(extents_of<4>(op, "q", in.q, "batch, tokens, heads, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, tokens, heads, values")),
        heads(k_shape[2]),
        sequences(op, in.segments, k_shape[0], k_shape[1]),
        w(projection_of(op, in.w, heads, k_shape[3])),
        sizes{k_shape[3], v_shape[3], w.extent[1], sequences.longest()},
        o_shape{k_shape[0], k_shape[1], heads, sizes.values},
        gate_shape{k_shape[0], k_shape[1], heads},
        s_shape{sequences.count(), heads, sizes.features(), sizes.values},
        z_shape{sequences.count(), heads, sizes.features()},
        q(required<const void, 4>(op, "q", in.q, k_shape)),
        k(required<const void, 4>(op, "k", in.k, k_shape)),
        v(required<const void, 4>(op, "v", in.v, o_shape)),
        gate(required<const void, 3>(op, "gate", in.gate, gate_shape)),
        sigma(view_of<const float, 1>(op, "sigma", in.sigma, {sizes.keys})),
        s0(view_of<const float, 4>(op, "initial_state", in.initial_state, s_shape)),
        z0(view_of<const float, 3>(op, "initial_z", in.initial_z, z_shape)) {
    if (in.initial_state.present() != in.initial_z.present()) {
      refuse(op, "initial_state and initial_z are one state: give both or none");
    }
  }
  // [H, M, K]; one for all heads has stride 0.
  static View<const float, 3> projection_of(const char* op, const ConstTensor& w,
                                            std::int64_t heads, std::int64_t keys) {
    if (w.rank == 3) {
      return required<const float, 3>(op, "W", w, {heads, w.extent[1], keys});
    }
    const auto m = extents_of<2>(op, "W", w, "projections, keys")[0];
    const auto one = required<const float, 2>(op, "W", w, {m, keys});
    return {one.data, {heads, m, keys}, {0, one.stride[0], one.stride[1]}};
  }
  double factor(std::int64_t i) const {
    return sigma.data == nullptr ? 1 : static_cast<double>(sigma.at(i));
  }

  const char* op;
  std::array<std::int64_t, 4> k_shape, v_shape;
  std::int64_t heads;
  Sequences sequences;
  View<const float, 3> w;
  Sizes sizes;
  std::array<std::int64_t, 4> o_shape;
  std::array<std::int64_t, 3> gate_shape;
  std::array<std::int64_t, 4> s_shape;
  std::array<std::int64_t, 3> z_shape;
  AnyView<const void, 4> q, k, v;
  AnyView<const void, 3> gate;
  View<const float, 1> sigma;
  View<const float, 4> s0;
  View<const float, 3> z0;
};

// One row through the features: its unit vector, that times sigma, and the features.
struct Features {
  template <class Memory>
  Features(Memory& memory, const Sizes& z)
      : unit(memory.template take<double>(z.keys)),
        scaled(memory.template take<double>(z.keys)),
        f(memory.template take<double>(z.features())) {}

  void map(Isa isa, const Call& c, const Matrix64& w, const AnyRows<const void>& row) {
    const Sizes& z = c.sizes;
    read(row, z.keys, unit);
    inverse = 1 / std::sqrt(dot(isa, unit, unit, z.keys) + kNormEps);
    for (std::int64_t i = 0; i < z.keys; ++i) scaled[i] = (unit[i] *= inverse) * c.factor(i);
    double *cosine = f, *sine = f + z.projections;
    clear(cosine, z.projections);
    add_product(isa, w, scaled, cosine);
    const double root = 1 / std::sqrt(static_cast<double>(z.projections));
    for (std::int64_t j = 0; j < z.projections; ++j) {
      const double angle = cosine[j];
      cosine[j] = root * std::cos(angle);
      sine[j] = root * std::sin(angle);
    }
  }
  // From df (overwritten) to the gradient of the row; adds to that of sigma.
  void adjoint(Isa isa, const Call& c, const Matrix64& w, double* df, double* d_row,
               double* d_sigma) const {
    const Sizes& z = c.sizes;
    const double *cosine = f, *sine = f + z.projections;
    for (std::int64_t j = 0; j < z.projections; ++j) {
      df[j] = df[z.projections + j] * cosine[j] - df[j] * sine[j];  // of the angle
    }
    clear(d_row, z.keys);
    add_transposed_product(isa, w, df, d_row);
    for (std::int64_t i = 0; i < z.keys; ++i) {
      d_sigma[i] += d_row[i] * unit[i];
      d_row[i] *= c.factor(i);
    }
    const double along = dot(isa, d_row, unit, z.keys);
    for (std::int64_t i = 0; i < z.keys; ++i) d_row[i] = inverse * (d_row[i] - along * unit[i]);
  }

  double *unit, *scaled, *f;
  double inverse = 0;
};

struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : q(memory, z),
        k(memory, z),
        w{memory.template take<double>(z.projections * z.keys), z.projections, z.keys},
        state(memory.template take<double>(z.state())),
        v(memory.template take<double>(z.columns())),
        o(memory.template take<double>(z.columns())) {}
  Features q, k;
  Matrix64 w;
  double *state, *v, *o;
};

Matrix64 matrix_of(double* state, const Sizes& z) { return {state, z.features(), z.columns()}; }

double gate_of(const Call& c, const Segment& seq, std::int64_t h, std::int64_t t) {
  return std::clamp(static_cast<double>(c.gate.at(seq.batch, seq.begin + t, h)), 0.0, 1.0);
}

// Token t into the state.
void advance(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t t, Work& w,
             double* state) {
  check_cancelled();
  const Sizes& z = c.sizes;
  w.k.map(isa, c, w.w, c.k(seq.batch, seq.begin + t, h));
  read(c.v(seq.batch, seq.begin + t, h), z.values, w.v);
  w.v[z.values] = 1;
  const double gate = gate_of(c, seq, h, t);
  for (std::int64_t x = 0; x < z.state(); ++x) state[x] = gate == 0 ? 0 : gate * state[x];
  add_outer(isa, 1 - gate, w.k.f, w.v, matrix_of(state, z));
}

// Numerators and the denominator of token t into w.o.
void look_up(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t t, Work& w,
             double* state) {
  w.q.map(isa, c, w.w, c.q(seq.batch, seq.begin + t, h));
  clear(w.o, c.sizes.columns());
  add_transposed_product(isa, matrix_of(state, c.sizes), w.q.f, w.o);
}

void begin(const Call& c, std::int64_t n, std::int64_t h, Work& w) {
  read_matrix(c.w, w.w, h);
  read_with_z(c.s0, c.z0, n, h, matrix_of(w.state, c.sizes));
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        history(memory, z.state(), z.longest),
        d_state(memory.template take<double>(z.state())),
        df(memory.template take<double>(z.features())),
        d_row(memory.template take<double>(z.keys)),
        dv(memory.template take<double>(z.columns())),
        d_o(memory.template take<double>(z.columns())) {}
  Work forward;
  StateHistory history;
  double *d_state, *df, *d_row, *dv, *d_o;
};

void check_gates(Context& context, const Call& c) {
  context.impl().run(c.sequences.count(), [&](std::int64_t n, Scratch&) {
    const Segment seq = c.sequences[n];
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled_at(t);
      for (std::int64_t h = 0; h < c.heads; ++h) {
        const float gate = c.gate.at(seq.batch, t, h);
        if (gate < -LargestDecay::kMax || gate > 1 + LargestDecay::kMax) {
          refuse(c.op, fmt::format("gate holds {}; it should be a factor in [0, 1] (not its "
                                   "logarithm)",
                                   gate));
        }
      }
    }
  });
}

}  // namespace

void rfa_gate(Context& context, const RfaGateInputs& inputs, const RfaGateOutputs& outputs) {
  const Call c("rfa_gate", inputs);
  const auto o = required<void, 4>(c.op, "o", outputs.o, c.o_shape);
  const auto final = view_of<float, 4>(c.op, "final_state", outputs.final_state, c.s_shape);
  const auto z_final = view_of<float, 3>(c.op, "z", outputs.z, c.z_shape);
  if (c.sequences.are_empty(final, z_final)) return;
  check_gates(context, c);
  const Sizes& z = c.sizes;
  each_head<Work>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& w) {
    begin(c, n, h, w);
    for (std::int64_t t = 0; t < seq.length; ++t) {
      advance(context.isa(), c, seq, h, t, w, w.state);
      look_up(context.isa(), c, seq, h, t, w, w.state);
      for (std::int64_t i = 0; i < z.values; ++i) w.o[i] /= w.o[z.values];
      write(w.o, z.values, o(seq.batch, seq.begin + t, h));
    }
    write_with_z(matrix_of(w.state, z), final, z_final, n, h);
  });
  c.sequences.zero_padding(outputs.o);
}

void rfa_gate_backward(Context& context, const RfaGateInputs& inputs,
                       const RfaGateOutputGrads& output_grads, const RfaGateInputGrads& grads) {
  const Call c("rfa_gate_backward", inputs);
  const auto d_o = required<const void, 4>(c.op, "d_o", output_grads.o, c.o_shape);
  const auto ds_last =
      view_of<const float, 4>(c.op, "d_final_state", output_grads.final_state, c.s_shape);
  const auto dz_last = view_of<const float, 3>(c.op, "dz", output_grads.z, c.z_shape);
  const auto dq = view_of<void, 4>(c.op, "dq", grads.q, c.k_shape);
  const auto dk = view_of<void, 4>(c.op, "dk", grads.k, c.k_shape);
  const auto dv = view_of<void, 4>(c.op, "dv", grads.v, c.o_shape);
  const auto dgate = view_of<void, 3>(c.op, "dgate", grads.gate, c.gate_shape);
  const auto dsigma = view_of<float, 1>(c.op, "dsigma", grads.sigma, {c.sizes.keys});
  const auto ds0 = view_of<float, 4>(c.op, "d_initial_state", grads.initial_state, c.s_shape);
  const auto dz0 = view_of<float, 3>(c.op, "d_initial_z", grads.initial_z, c.z_shape);
  if (c.sequences.are_empty(ds0, dz0)) return;
  check_gates(context, c);
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  const std::int64_t tasks = c.sequences.count() * c.heads;
  double* d_sigmas = context.impl().shared<double>(tasks * z.keys);
  each_head<BackwardWork>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& b) {
    Work& w = b.forward;
    double* d_sigma = d_sigmas + (n * c.heads + h) * z.keys;
    clear(d_sigma, z.keys);
    const auto step = [&](std::int64_t t, double* state) { advance(isa, c, seq, h, t, w, state); };
    begin(c, n, h, w);
    b.history.run(w.state, seq.length, step);
    const Matrix64 d_state = matrix_of(b.d_state, z);
    read_with_z(ds_last, dz_last, n, h, d_state);
    for (std::int64_t t = seq.length; t-- > 0;) {
      const std::int64_t at = seq.begin + t;
      double *before = b.history.before(t, step), *after = before + z.state();
      // The output.
      look_up(isa, c, seq, h, t, w, after);
      const double denominator = w.o[z.values];
      read(d_o(seq.batch, at, h), z.values, b.d_o);
      b.d_o[z.values] = 0;
      for (std::int64_t i = 0; i < z.values; ++i) {
        b.d_o[i] /= denominator;
        b.d_o[z.values] -= b.d_o[i] * w.o[i] / denominator;
      }
      clear(b.df, z.features());
      add_product(isa, matrix_of(after, z), b.d_o, b.df);
      add_outer(isa, 1, w.q.f, b.d_o, d_state);
      w.q.adjoint(isa, c, w.w, b.df, b.d_row, d_sigma);
      write(b.d_row, z.keys, row_at(dq, seq.batch, at, h));
      // The write, (1 - gate) f(k) [v, 1]^T.
      const double gate = gate_of(c, seq, h, t);
      w.k.map(isa, c, w.w, c.k(seq.batch, at, h));
      read(c.v(seq.batch, at, h), z.values, w.v);
      w.v[z.values] = 1;
      clear(b.df, z.features());
      clear(b.dv, z.columns());
      add_product(isa, d_state, w.v, b.df);
      add_transposed_product(isa, d_state, w.k.f, b.dv);
      const double d_gate =
          dot(isa, b.d_state, before, z.state()) - dot(isa, b.df, w.k.f, z.features());
      write(&d_gate, 1, row_at(dgate, seq.batch, at, h));
      for (std::int64_t i = 0; i < z.features(); ++i) b.df[i] *= 1 - gate;
      for (std::int64_t i = 0; i < z.values; ++i) b.dv[i] *= 1 - gate;
      w.k.adjoint(isa, c, w.w, b.df, b.d_row, d_sigma);
      write(b.d_row, z.keys, row_at(dk, seq.batch, at, h));
      write(b.dv, z.values, row_at(dv, seq.batch, at, h));
      for (std::int64_t x = 0; x < z.state(); ++x) b.d_state[x] *= gate;
    }
    write_with_z(d_state, ds0, dz0, n, h);
  });
  for (std::int64_t i = 0; i < z.keys && dsigma.data != nullptr; ++i) {
    double sum = 0;
    for (std::int64_t task = 0; task < tasks; ++task) sum += d_sigmas[task * z.keys + i];
    dsigma.at(i) += static_cast<float>(sum);
  }
  for (const Tensor* rows : {&grads.q, &grads.k, &grads.v, &grads.gate}) {
    c.sequences.zero_padding(*rows);
  }
}

void rfa_gate_step(Context& context, const RfaGateInputs& inputs, const Tensor& state,
                   const Tensor& z, const Tensor& o) {
  check_step("rfa_gate_step", "q", inputs.q, state);
  RfaGateInputs token = inputs;
  token.initial_state = state;
  token.initial_z = z;
  token.segments = nullptr;
  rfa_gate(context, token, {o, state, z});
}

}  // namespace ouzel
