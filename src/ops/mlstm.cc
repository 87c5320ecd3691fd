// The normaliser is one more column of S, whose values are 1.
#include "ouzel/mlstm.h"

#include <cmath>
#include <limits>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }
double log_sigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

struct Sizes {
  std::int64_t keys = 0, values = 0, longest = 0;
  std::int64_t columns() const { return values + 1; }
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const MlstmOptions& options, const MlstmInputs& in)
      : op(op),
        k_shape(extents_of<4>(op, "q", in.q, "batch, tokens, heads, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, tokens, heads, values")),
        heads(k_shape[2]),
        sequences(op, in.segments, k_shape[0], k_shape[1]),
        sizes{k_shape[3], v_shape[3], sequences.longest()},
        o_shape{k_shape[0], k_shape[1], heads, sizes.values},
        gate_shape{k_shape[0], k_shape[1], heads},
        s_shape{sequences.count(), heads, sizes.keys, sizes.values},
        z_shape{sequences.count(), heads, sizes.keys},
        m_shape{sequences.count(), heads},
        scale(scale_of(op, options.scale, sizes.keys)),
        q(required<const void, 4>(op, "q", in.q, k_shape)),
        k(required<const void, 4>(op, "k", in.k, k_shape)),
        v(required<const void, 4>(op, "v", in.v, o_shape)),
        i(required<const void, 3>(op, "i", in.i, gate_shape)),
        f(required<const void, 3>(op, "f", in.f, gate_shape)),
        s0(view_of<const float, 4>(op, "initial_state", in.initial_state, s_shape)),
        z0(view_of<const float, 3>(op, "initial_z", in.initial_z, z_shape)),
        m0(view_of<const float, 2>(op, "initial_m", in.initial_m, m_shape)) {
    if (in.initial_state.present() != in.initial_z.present() ||
        in.initial_state.present() != in.initial_m.present()) {
      refuse(op, "initial_state, initial_z and initial_m are one state: give all three or none");
    }
  }

  const char* op;
  std::array<std::int64_t, 4> k_shape, v_shape;
  std::int64_t heads;
  Sequences sequences;
  Sizes sizes;
  std::array<std::int64_t, 4> o_shape;
  std::array<std::int64_t, 3> gate_shape;
  std::array<std::int64_t, 4> s_shape;
  std::array<std::int64_t, 3> z_shape;
  std::array<std::int64_t, 2> m_shape;
  double scale;
  AnyView<const void, 4> q, k, v;
  AnyView<const void, 3> i, f;
  View<const float, 4> s0;
  View<const float, 3> z0;
  View<const float, 2> m0;
};

// One head's state, the gates of all tokens, and the rows of one.
struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : state(memory.template take<double>(z.keys * z.columns())),
        q(memory.template take<double>(z.keys)),
        k(memory.template take<double>(z.keys)),
        v(memory.template take<double>(z.columns())),
        o(memory.template take<double>(z.columns())),
        keep(memory.template take<double>(z.longest)),
        write(memory.template take<double>(z.longest)),
        m(memory.template take<double>(z.longest + 1)) {}
  double *state, *q, *k, *v, *o;
  double *keep, *write;  // e^(lf + m - m'), e^(i - m')
  double* m;             // before each token, and the last
};

Matrix64 matrix_of(double* state, const Sizes& z) { return {state, z.keys, z.columns()}; }

// A head of a sequence: the initial state, and the gates of all tokens.
void begin(const Call& c, const Segment& seq, std::int64_t n, std::int64_t h, Work& w) {
  read_with_z(c.s0, c.z0, n, h, matrix_of(w.state, c.sizes));
  w.m[0] = c.m0.data == nullptr ? 0 : static_cast<double>(c.m0.at(n, h));
  for (std::int64_t t = 0; t < seq.length; ++t) {
    check_cancelled_at(t);
    const auto i = static_cast<double>(c.i.at(seq.batch, seq.begin + t, h));
    const auto f = static_cast<double>(c.f.at(seq.batch, seq.begin + t, h));
    const double kept = log_sigmoid(f) + w.m[t], m = std::max(kept, i);
    w.m[t + 1] = m;
    w.keep[t] = kept == -kInf ? 0 : std::exp(kept - m);
    w.write[t] = i == -kInf ? 0 : std::exp(i - m);
  }
}

// Token t into the state; w.k and w.v are its rows, with scale and the column of 1.
void advance(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t t, Work& w,
             double* state) {
  check_cancelled();
  const Sizes& z = c.sizes;
  read(c.k(seq.batch, seq.begin + t, h), z.keys, w.k);
  read(c.v(seq.batch, seq.begin + t, h), z.values, w.v);
  w.v[z.values] = 1;
  for (std::int64_t i = 0; i < z.keys; ++i) w.k[i] *= c.scale;
  const double keep = w.keep[t];
  for (std::int64_t x = 0; x < z.keys * z.columns(); ++x) {
    state[x] = keep == 0 ? 0 : keep * state[x];
  }
  add_outer(isa, w.write[t], w.k, w.v, matrix_of(state, z));
}

// q into w.q, numerators and z . q into w.o; returns the denominator.
double look_up(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t t, Work& w,
               double* state) {
  read(c.q(seq.batch, seq.begin + t, h), c.sizes.keys, w.q);
  clear(w.o, c.sizes.columns());
  add_transposed_product(isa, matrix_of(state, c.sizes), w.q, w.o);
  return std::max(std::abs(w.o[c.sizes.values]), std::exp(-w.m[t + 1]));
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        history(memory, z.keys * z.columns(), z.longest),
        d_state(memory.template take<double>(z.keys * z.columns())),
        dq(memory.template take<double>(z.keys)),
        dk(memory.template take<double>(z.keys)),
        dv(memory.template take<double>(z.columns())),
        d_o(memory.template take<double>(z.columns())) {}
  Work forward;
  StateHistory history;
  double *d_state, *dq, *dk, *dv, *d_o;
};

}  // namespace

void mlstm(Context& context, const MlstmOptions& options, const MlstmInputs& inputs,
           const MlstmOutputs& outputs) {
  const Call c("mlstm", options, inputs);
  const auto o = required<void, 4>(c.op, "o", outputs.o, c.o_shape);
  const auto final = view_of<float, 4>(c.op, "final_state", outputs.final_state, c.s_shape);
  const auto z_final = view_of<float, 3>(c.op, "z", outputs.z, c.z_shape);
  const auto m_final = view_of<float, 2>(c.op, "m", outputs.m, c.m_shape);
  if (c.sequences.are_empty(final, z_final, m_final)) return;
  const Sizes& z = c.sizes;
  each_head<Work>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& w) {
    begin(c, seq, n, h, w);
    for (std::int64_t t = 0; t < seq.length; ++t) {
      advance(context.isa(), c, seq, h, t, w, w.state);
      const double denominator = look_up(context.isa(), c, seq, h, t, w, w.state);
      for (std::int64_t i = 0; i < z.values; ++i) w.o[i] /= denominator;
      write(w.o, z.values, o(seq.batch, seq.begin + t, h));
    }
    write_with_z(matrix_of(w.state, z), final, z_final, n, h);
    write(w.m + seq.length, 1, row_at(m_final, n, h));
  });
  c.sequences.zero_padding(outputs.o);
}

void mlstm_backward(Context& context, const MlstmOptions& options, const MlstmInputs& inputs,
                    const MlstmOutputGrads& output_grads, const MlstmInputGrads& grads) {
  const Call c("mlstm_backward", options, inputs);
  const auto d_o = required<const void, 4>(c.op, "d_o", output_grads.o, c.o_shape);
  const auto ds_last =
      view_of<const float, 4>(c.op, "d_final_state", output_grads.final_state, c.s_shape);
  const auto dz_last = view_of<const float, 3>(c.op, "dz", output_grads.z, c.z_shape);
  const auto dm_last = view_of<const float, 2>(c.op, "dm", output_grads.m, c.m_shape);
  const auto dq = view_of<void, 4>(c.op, "dq", grads.q, c.k_shape);
  const auto dk = view_of<void, 4>(c.op, "dk", grads.k, c.k_shape);
  const auto dv = view_of<void, 4>(c.op, "dv", grads.v, c.o_shape);
  const auto di = view_of<void, 3>(c.op, "di", grads.i, c.gate_shape);
  const auto df = view_of<void, 3>(c.op, "df", grads.f, c.gate_shape);
  const auto ds0 = view_of<float, 4>(c.op, "d_initial_state", grads.initial_state, c.s_shape);
  const auto dz0 = view_of<float, 3>(c.op, "d_initial_z", grads.initial_z, c.z_shape);
  const auto dm0 = view_of<float, 2>(c.op, "d_initial_m", grads.initial_m, c.m_shape);
  if (c.sequences.are_empty(ds0, dz0, dm0)) return;
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  const std::int64_t size = z.keys * z.columns();
  each_head<BackwardWork>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& b) {
    Work& w = b.forward;
    const auto step = [&](std::int64_t t, double* state) { advance(isa, c, seq, h, t, w, state); };
    begin(c, seq, n, h, w);
    b.history.run(w.state, seq.length, step);
    const Matrix64 d_state = matrix_of(b.d_state, z);
    read_with_z(ds_last, dz_last, n, h, d_state);
    // Outputs do not know m: what they pass to S, z and m is 0 along (S e^-a, z e^-a, m + a). What
    // the final state passes along it, `along`, goes to whichever of the two m' is.
    double along = dm_last.data == nullptr ? 0 : static_cast<double>(dm_last.at(n, h));
    along -= dot(isa, w.state, b.d_state, size);
    for (std::int64_t t = seq.length; t-- > 0;) {
      const std::int64_t at = seq.begin + t;
      double *before = b.history.before(t, step), *after = before + size;
      // The output: o = n / max(|d|, e^-m).
      const double denominator = look_up(isa, c, seq, h, t, w, after);
      read(d_o(seq.batch, at, h), z.values, b.d_o);
      double d_denominator = 0;
      for (std::int64_t i = 0; i < z.values; ++i) {
        b.d_o[i] /= denominator;
        d_denominator -= b.d_o[i] * w.o[i] / denominator;
      }
      const double d = w.o[z.values];
      b.d_o[z.values] = std::abs(d) < denominator ? 0 : d < 0 ? -d_denominator : d_denominator;
      clear(b.dq, z.keys);
      add_product(isa, matrix_of(after, z), b.d_o, b.dq);
      write(b.dq, z.keys, row_at(dq, seq.batch, at, h));
      add_outer(isa, 1, w.q, b.d_o, d_state);
      // The write, e^(i - m') (scale k) [v, 1]^T.
      read(c.k(seq.batch, at, h), z.keys, w.k);
      read(c.v(seq.batch, at, h), z.values, w.v);
      w.v[z.values] = 1;
      clear(b.dk, z.keys);
      clear(b.dv, z.columns());
      add_product(isa, d_state, w.v, b.dk);
      add_transposed_product(isa, d_state, w.k, b.dv);
      const double weight = w.write[t] * c.scale;
      for (std::int64_t i = 0; i < z.keys; ++i) b.dk[i] *= weight;
      for (std::int64_t i = 0; i < z.values; ++i) b.dv[i] *= weight;
      write(b.dk, z.keys, row_at(dk, seq.batch, at, h));
      write(b.dv, z.values, row_at(dv, seq.batch, at, h));
      const bool opens = w.keep[t] < 1;  // m' is i
      const double d_i = dot(isa, b.dk, w.k, z.keys) + (opens ? along : 0);
      write(&d_i, 1, row_at(di, seq.batch, at, h));
      // What is kept.
      const double keep = w.keep[t];
      if (opens) along = 0;
      const double d_log_f = (keep == 0 ? 0 : keep * dot(isa, b.d_state, before, size)) + along;
      const double d_f = d_log_f * sigmoid(-static_cast<double>(c.f.at(seq.batch, at, h)));
      write(&d_f, 1, row_at(df, seq.batch, at, h));
      for (std::int64_t x = 0; x < size; ++x) b.d_state[x] *= keep;
    }
    write_with_z(d_state, ds0, dz0, n, h);
    read_with_z(c.s0, c.z0, n, h, matrix_of(w.state, z));
    const double d_m = dot(isa, w.state, b.d_state, size) + along;
    write(&d_m, 1, row_at(dm0, n, h));
  });
  for (const Tensor* rows : {&grads.q, &grads.k, &grads.v, &grads.i, &grads.f}) {
    c.sequences.zero_padding(*rows);
  }
}

void mlstm_step(Context& context, const MlstmOptions& options, const MlstmInputs& inputs,
                const Tensor& state, const Tensor& z, const Tensor& m, const Tensor& o) {
  check_step("mlstm_step", "q", inputs.q, state);
  MlstmInputs token = inputs;
  token.initial_state = state;
  token.initial_z = z;
  token.initial_m = m;
  token.segments = nullptr;
  mlstm(context, options, token, {o, state, z, m});
}

}  // namespace ouzel
