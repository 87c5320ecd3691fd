#include "ouzel/efficient_attention.h"

#include <cmath>
#include <limits>

#include "src/ops/position_softmax.h"

namespace ouzel {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Sizes {
  std::int64_t keys = 0, values = 0, longest = 0;
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const EfficientAttentionOptions& options, const EfficientAttentionInputs& in)
      : op(op),
        options(options),
        k_shape(extents_of<4>(op, "q", in.q, "batch, tokens, heads, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, tokens, heads, values")),
        heads(k_shape[2]),
        sequences(op, in.segments, k_shape[0], k_shape[1]),
        sizes{k_shape[3], v_shape[3], options.causal ? sequences.longest() : 0},
        o_shape{k_shape[0], k_shape[1], heads, sizes.values},
        s_shape{sequences.count(), heads, sizes.keys, sizes.values},
        lse_shape{sequences.count(), heads, sizes.keys},
        q(required<const void, 4>(op, "q", in.q, k_shape)),
        k(required<const void, 4>(op, "k", in.k, k_shape)),
        v(required<const void, 4>(op, "v", in.v, o_shape)),
        s0(view_of<const float, 4>(op, "initial_state", in.initial_state, s_shape)),
        lse0(view_of<const float, 3>(op, "initial_lse", in.initial_lse, lse_shape)) {
    if (options.causal && options.variant == EfficientVariant::kScaling) {
      refuse(op,
             "the scaling variant divides by the length of the sequence, which a causal form "
             "does not know; use linear_attention");
    }
    if (in.initial_state.present() != in.initial_lse.present()) {
      refuse(op, "initial_state and initial_lse are one state: give both or none");
    }
    if (in.initial_state.present() && !options.causal) {
      refuse(op, "only the causal form has states");
    }
  }
  bool softmax() const { return options.variant == EfficientVariant::kSoftmax; }

  const char* op;
  EfficientAttentionOptions options;
  std::array<std::int64_t, 4> k_shape, v_shape;
  std::int64_t heads;
  Sequences sequences;
  Sizes sizes;
  std::array<std::int64_t, 4> o_shape, s_shape;
  std::array<std::int64_t, 3> lse_shape;
  AnyView<const void, 4> q, k, v;
  View<const float, 4> s0;
  View<const float, 3> lse0;
};

// One head of a sequence: rk(K)^T V, of all positions or of those so far, and the rows of a token.
struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : state(memory.template take<double>(z.keys * z.values)),
        lse(memory.template take<double>(z.keys)),
        q(memory.template take<double>(z.keys)),
        k(memory.template take<double>(z.keys)),
        v(memory.template take<double>(z.values)),
        o(memory.template take<double>(z.values)),
        keep(memory.template take<double>(z.keys * z.longest)),
        add(memory.template take<double>(z.keys * z.longest)) {}
  double *state, *lse, *q, *k, *v, *o;
  double *keep, *add;  // causal: factors of the past and weights of all tokens
};

// rq of a token into w.q.
void read_query(const Call& c, const Segment& seq, std::int64_t t, std::int64_t h, const Work& w) {
  check_cancelled();
  read(c.q(seq.batch, t, h), c.sizes.keys, w.q);
  if (c.softmax()) return softmax64(w.q, c.sizes.keys);
  const double root = 1 / std::sqrt(static_cast<double>(seq.length));
  for (std::int64_t i = 0; i < c.sizes.keys; ++i) w.q[i] *= root;
}
// Of a token that is not among others: rk into w.k (after `begin_full`), v into w.v.
void read_key(const Call& c, const Segment& seq, std::int64_t t, std::int64_t h, const Work& w) {
  check_cancelled();
  read(c.v(seq.batch, t, h), c.sizes.values, w.v);
  if (c.softmax()) return position_weights(c.k(seq.batch, t, h), w.lse, c.sizes.keys, w.k);
  const double root = 1 / std::sqrt(static_cast<double>(seq.length));
  read(c.k(seq.batch, t, h), c.sizes.keys, w.k);
  for (std::int64_t i = 0; i < c.sizes.keys; ++i) w.k[i] *= root;
}

// The sum over all positions.
void begin_full(Isa isa, const Call& c, const Segment& seq, std::int64_t h, const Work& w) {
  const Sizes& z = c.sizes;
  clear(w.state, z.keys * z.values);
  if (c.softmax()) position_lse(c.k, seq, h, z.keys, w.lse);
  for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
    read_key(c, seq, t, h, w);
    add_outer(isa, 1, w.k, w.v, {w.state, z.keys, z.values});
  }
}

// The initial state, and the factors of all tokens; w.lse becomes the last.
void begin_causal(const Call& c, const Segment& seq, std::int64_t n, std::int64_t h,
                  const Work& w) {
  const Sizes& z = c.sizes;
  read_matrix(c.s0, Matrix64{w.state, z.keys, z.values}, n, h);
  for (std::int64_t i = 0; i < z.keys; ++i) {
    double& lse = w.lse[i];
    lse = c.lse0.data == nullptr ? -kInf : static_cast<double>(c.lse0.at(n, h, i));
    for (std::int64_t t = 0; t < seq.length; ++t) {
      check_cancelled_at(t);
      const auto k = static_cast<double>(c.k.at(seq.batch, seq.begin + t, h, i));
      const double top = std::max(lse, k);
      const double next =
          top == -kInf ? -kInf : top + std::log(std::exp(lse - top) + std::exp(k - top));
      w.keep[t * z.keys + i] = lse == -kInf ? 0 : std::exp(lse - next);
      w.add[t * z.keys + i] = k == -kInf ? 0 : std::exp(k - next);
      lse = next;
    }
  }
}

void advance(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t t,
             const Work& w, double* state) {
  check_cancelled();
  const Matrix64 s = {state, c.sizes.keys, c.sizes.values};
  read(c.v(seq.batch, seq.begin + t, h), s.columns, w.v);
  scale_rows(isa, w.keep + t * s.rows, s);
  add_outer(isa, 1, w.add + t * s.rows, w.v, s);
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        history(memory, z.keys * z.values, z.longest),
        d_state(memory.template take<double>(z.keys * z.values)),
        d_key(memory.template take<double>(z.keys)),
        d_keep(memory.template take<double>(z.keys)),
        d_lse(memory.template take<double>(z.keys)),
        d_value(memory.template take<double>(z.values)) {}
  Work forward;
  StateHistory history;
  double *d_state, *d_key, *d_keep, *d_lse, *d_value;
};

// The views of a backward call.
struct Grads {
  Grads(const Call& c, const EfficientAttentionOutputGrads& up,
        const EfficientAttentionInputGrads& to)
      : o(required<const void, 4>(c.op, "d_o", up.o, c.o_shape)),
        last(view_of<const float, 4>(c.op, "d_final_state", up.final_state, c.s_shape)),
        q(view_of<void, 4>(c.op, "dq", to.q, c.k_shape)),
        k(view_of<void, 4>(c.op, "dk", to.k, c.k_shape)),
        v(view_of<void, 4>(c.op, "dv", to.v, c.o_shape)),
        first(view_of<float, 4>(c.op, "d_initial_state", to.initial_state, c.s_shape)),
        lse(view_of<float, 3>(c.op, "d_initial_lse", to.initial_lse, c.lse_shape)) {}
  AnyView<const void, 4> o;
  View<const float, 4> last;
  AnyView<void, 4> q, k, v;
  View<float, 4> first;
  View<float, 3> lse;
};

// Through o = S^T rq(q): adds to the gradient of S, writes that of q.
void output_adjoint(Isa isa, const Call& c, const Grads& g, const Segment& seq, std::int64_t t,
                    std::int64_t h, double* state, const BackwardWork& b) {
  const Sizes& z = c.sizes;
  const Work& w = b.forward;
  read_query(c, seq, t, h, w);
  read(g.o(seq.batch, t, h), z.values, w.o);
  add_outer(isa, 1, w.q, w.o, {b.d_state, z.keys, z.values});
  clear(b.d_key, z.keys);
  add_product(isa, {state, z.keys, z.values}, w.o, b.d_key);
  const double mean = c.softmax() ? dot(isa, w.q, b.d_key, z.keys) : 0;
  const double root = c.softmax() ? 0 : 1 / std::sqrt(static_cast<double>(seq.length));
  for (std::int64_t i = 0; i < z.keys; ++i) {
    b.d_key[i] = c.softmax() ? w.q[i] * (b.d_key[i] - mean) : root * b.d_key[i];
  }
  write(b.d_key, z.keys, row_at(g.q, seq.batch, t, h));
}

void full_backward(Isa isa, const Call& c, const Grads& g, const Segment& seq, std::int64_t h,
                   const BackwardWork& b) {
  const Sizes& z = c.sizes;
  const Work& w = b.forward;
  const Matrix64 d_state = {b.d_state, z.keys, z.values};
  begin_full(isa, c, seq, h, w);
  clear(b.d_state, d_state.size());
  for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
    output_adjoint(isa, c, g, seq, t, h, w.state, b);
  }
  clear(b.d_keep, z.keys);  // sums over positions of weights and their gradients
  add_row_products(isa, d_state, {w.state, z.keys, z.values}, b.d_keep);
  const double root = 1 / std::sqrt(static_cast<double>(seq.length));
  for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
    read_key(c, seq, t, h, w);
    clear(b.d_key, z.keys);
    clear(b.d_value, z.values);
    add_product(isa, d_state, w.v, b.d_key);
    add_transposed_product(isa, d_state, w.k, b.d_value);
    if (c.softmax()) {
      position_adjoint(w.k, b.d_keep, z.keys, b.d_key);
    } else {
      for (std::int64_t i = 0; i < z.keys; ++i) b.d_key[i] *= root;
    }
    write(b.d_key, z.keys, row_at(g.k, seq.batch, t, h));
    write(b.d_value, z.values, row_at(g.v, seq.batch, t, h));
  }
}

void causal_backward(Isa isa, const Call& c, const Grads& g, const Segment& seq, std::int64_t n,
                     std::int64_t h, BackwardWork& b) {
  const Sizes& z = c.sizes;
  const Work& w = b.forward;
  const Matrix64 d_state = {b.d_state, z.keys, z.values};
  const auto step = [&](std::int64_t t, double* state) { advance(isa, c, seq, h, t, w, state); };
  begin_causal(c, seq, n, h, w);
  b.history.run(w.state, seq.length, step);
  read_matrix(g.last, d_state, n, h);
  clear(b.d_lse, z.keys);
  for (std::int64_t t = seq.length; t-- > 0;) {
    const std::int64_t at = seq.begin + t;
    double* before = b.history.before(t, step);
    output_adjoint(isa, c, g, seq, at, h, before + d_state.size(), b);
    const double *keep = w.keep + t * z.keys, *add = w.add + t * z.keys;
    read(c.v(seq.batch, at, h), z.values, w.v);
    for (double* x : {b.d_key, b.d_keep}) clear(x, z.keys);
    clear(b.d_value, z.values);
    add_product(isa, d_state, w.v, b.d_key);
    add_transposed_product(isa, d_state, add, b.d_value);
    scale_rows(isa, keep, d_state);
    add_row_products(isa, d_state, {before, z.keys, z.values}, b.d_keep);
    for (std::int64_t i = 0; i < z.keys; ++i) {
      // keep = e^(lse - lse'), add = e^(k - lse'), lse' = log(e^lse + e^k).
      if (keep[i] == 0) b.d_keep[i] = 0;
      const double in = b.d_key[i] * add[i];
      const double d_next = b.d_lse[i] - b.d_keep[i] - in;
      b.d_key[i] = in + d_next * add[i];
      b.d_lse[i] = b.d_keep[i] + d_next * keep[i];
    }
    write(b.d_key, z.keys, row_at(g.k, seq.batch, at, h));
    write(b.d_value, z.values, row_at(g.v, seq.batch, at, h));
  }
  write_matrix(d_state, g.first, n, h);
  write(b.d_lse, z.keys, row_at(g.lse, n, h));
}

}  // namespace

void efficient_attention(Context& context, const EfficientAttentionOptions& options,
                         const EfficientAttentionInputs& inputs,
                         const EfficientAttentionOutputs& outputs) {
  const Call c("efficient_attention", options, inputs);
  const auto o = required<void, 4>(c.op, "o", outputs.o, c.o_shape);
  const auto final = view_of<float, 4>(c.op, "final_state", outputs.final_state, c.s_shape);
  const auto lse = view_of<float, 3>(c.op, "lse", outputs.lse, c.lse_shape);
  if (c.sequences.are_empty(final, lse)) return;
  if (!options.causal && (final.data != nullptr || lse.data != nullptr)) {
    refuse(c.op, "only the causal form has states");
  }
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  each_head<Work>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& w) {
    options.causal ? begin_causal(c, seq, n, h, w) : begin_full(isa, c, seq, h, w);
    for (std::int64_t t = 0; t < seq.length; ++t) {
      if (options.causal) advance(isa, c, seq, h, t, w, w.state);
      read_query(c, seq, seq.begin + t, h, w);
      clear(w.o, z.values);
      add_transposed_product(isa, {w.state, z.keys, z.values}, w.q, w.o);
      write(w.o, z.values, o(seq.batch, seq.begin + t, h));
    }
    write_matrix(Matrix64{w.state, z.keys, z.values}, final, n, h);
    write(w.lse, z.keys, row_at(lse, n, h));
  });
  c.sequences.zero_padding(outputs.o);
}

void efficient_attention_backward(Context& context, const EfficientAttentionOptions& options,
                                  const EfficientAttentionInputs& inputs,
                                  const EfficientAttentionOutputGrads& output_grads,
                                  const EfficientAttentionInputGrads& input_grads) {
  const Call c("efficient_attention_backward", options, inputs);
  const Grads g(c, output_grads, input_grads);
  if (c.sequences.are_empty(g.first, g.lse)) return;
  const Isa isa = context.isa();
  each_head<BackwardWork>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& b) {
    options.causal ? causal_backward(isa, c, g, seq, n, h, b) : full_backward(isa, c, g, seq, h, b);
  });
  for (const Tensor* rows : {&input_grads.q, &input_grads.k, &input_grads.v}) {
    c.sequences.zero_padding(*rows);
  }
}

void efficient_attention_step(Context& context, const ConstTensor& q, const ConstTensor& k,
                              const ConstTensor& v, const Tensor& state, const Tensor& lse,
                              const Tensor& o) {
  check_step("efficient_attention_step", "q", q, state);
  efficient_attention(context, {.causal = true}, {q, k, v, state, lse}, {o, state, lse});
}

}  // namespace ouzel
