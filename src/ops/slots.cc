#include "src/ops/slots.h"

#include <cmath>
#include <limits>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

struct Sizes {
  std::int64_t keys = 0, values = 0, slots = 0, longest = 0;
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, std::optional<double> given_scale, const SlotTensors<true>& in,
       const Segments* segments)
      : op(op),
        q_shape(extents_of<4>(op, "q", in.q, "batch, tokens, query heads, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, tokens, heads, values")),
        s_shape(extents_of<4>(op, "s", in.s, "batch, tokens, heads, slots")),
        heads(v_shape[2]),
        group(group_of(op, "q", q_shape[2], "v", heads)),
        sequences(op, segments, q_shape[0], q_shape[1]),
        sizes{q_shape[3], v_shape[3], s_shape[3], sequences.longest()},
        k_shape{q_shape[0], q_shape[1], heads, sizes.keys},
        o_shape{q_shape[0], q_shape[1], q_shape[2], sizes.values},
        hk_shape{sequences.count(), heads, sizes.keys, sizes.slots},
        hv_shape{sequences.count(), heads, sizes.slots, sizes.values},
        lse_shape{sequences.count(), heads, sizes.slots},
        scale(scale_of(op, given_scale, sizes.keys)),
        q(required<const void, 4>(op, "q", in.q, q_shape)),
        k(required<const void, 4>(op, "k", in.k, k_shape)),
        v(required<const void, 4>(op, "v", in.v, {q_shape[0], q_shape[1], heads, sizes.values})),
        s(required<const void, 4>(op, "s", in.s, {q_shape[0], q_shape[1], heads, sizes.slots})),
        g(view_of<const void, 4>(op, "g", in.g, s.extent)),
        hk0(view_of<const float, 4>(op, "hk0", in.hk, hk_shape)),
        hv0(view_of<const float, 4>(op, "hv0", in.hv, hv_shape)),
        lse0(view_of<const float, 3>(op, "lse0", in.lse, lse_shape)) {}

  const char* op;
  std::array<std::int64_t, 4> q_shape, v_shape, s_shape;
  std::int64_t heads, group;
  Sequences sequences;
  Sizes sizes;
  std::array<std::int64_t, 4> k_shape, o_shape, hk_shape, hv_shape;
  std::array<std::int64_t, 3> lse_shape;
  double scale;
  AnyView<const void, 4> q, k, v, s, g;
  View<const float, 4> hk0, hv0;
  View<const float, 3> lse0;
};

// One head's memory, hk then hv, and the rows of one token.
struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : state(memory.template take<double>((z.keys + z.values) * z.slots)),
        q(memory.template take<double>(z.keys)),
        k(memory.template take<double>(z.keys)),
        v(memory.template take<double>(z.values)),
        o(memory.template take<double>(z.values)),
        p(memory.template take<double>(z.slots)),
        write(memory.template take<double>(z.slots * z.longest)),
        keep(memory.template take<double>(z.slots * z.longest)),
        lse(memory.template take<double>(z.slots)) {}
  // Weights with which token t enters, and factors of what was there, [slots].
  double *state, *q, *k, *v, *o, *p, *write, *keep, *lse;
};

Matrix64 hk_of(double* state, const Sizes& z) { return {state, z.keys, z.slots}; }
Matrix64 hv_of(double* state, const Sizes& z) {
  return {state + z.keys * z.slots, z.slots, z.values};
}

// A head of a sequence: the initial memory, and the factors of all tokens.
void begin(const Call& c, const Segment& seq, std::int64_t n, std::int64_t h, LargestDecay& decay,
           Work& w) {
  const Sizes& z = c.sizes;
  read_matrix(c.hk0, hk_of(w.state, z), n, h);
  read_matrix(c.hv0, hv_of(w.state, z), n, h);
  for (std::int64_t m = 0; m < z.slots; ++m) {
    w.lse[m] = c.lse0.data == nullptr ? -kInf : static_cast<double>(c.lse0.at(n, h, m));
  }
  for (std::int64_t t = 0; t < seq.length; ++t) {
    check_cancelled_at(t);
    double *write = w.write + t * z.slots, *keep = w.keep + t * z.slots;
    read(c.s(seq.batch, seq.begin + t, h), z.slots, write);
    if (c.g.data != nullptr) {
      const AnyRows<const void> g = c.g(seq.batch, seq.begin + t, h);
      decay.see(g, z.slots);
      read(g, z.slots, keep);
    }
    for (std::int64_t m = 0; m < z.slots; ++m) {
      if (c.g.data != nullptr) {
        keep[m] = decay_of(keep[m]);
      } else {
        const double s = write[m], top = std::max(w.lse[m], s);
        const double lse =
            top == -kInf ? -kInf : top + std::log(std::exp(w.lse[m] - top) + std::exp(s - top));
        keep[m] = w.lse[m] == -kInf ? 0 : std::exp(w.lse[m] - lse);
        write[m] = s == -kInf ? 0 : std::exp(s - lse);
        w.lse[m] = lse;
      }
    }
  }
}

// Token t into the memory.
void advance(Isa isa, const Call& c, const Segment& seq, std::int64_t h, std::int64_t t, Work& w,
             double* state) {
  check_cancelled();
  const Sizes& z = c.sizes;
  const Matrix64 hk = hk_of(state, z), hv = hv_of(state, z);
  read(c.k(seq.batch, seq.begin + t, h), z.keys, w.k);
  read(c.v(seq.batch, seq.begin + t, h), z.values, w.v);
  scale_columns(isa, w.keep + t * z.slots, hk);
  scale_rows(isa, w.keep + t * z.slots, hv);
  add_outer(isa, 1, w.k, w.write + t * z.slots, hk);
  add_outer(isa, 1, w.write + t * z.slots, w.v, hv);
}

// scale q of a query head into w.q, and its weights of the slots into w.p.
void look_up(Isa isa, const Call& c, const AnyRows<const void>& q, double* state, Work& w) {
  read(q, c.sizes.keys, w.q);
  for (std::int64_t i = 0; i < c.sizes.keys; ++i) w.q[i] *= c.scale;
  clear(w.p, c.sizes.slots);
  add_transposed_product(isa, hk_of(state, c.sizes), w.q, w.p);
  softmax64(w.p, c.sizes.slots);
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        history(memory, (z.keys + z.values) * z.slots, z.longest),
        d_state(memory.template take<double>((z.keys + z.values) * z.slots)),
        d_o(memory.template take<double>(z.values)),
        dk(memory.template take<double>(z.keys)),
        dv(memory.template take<double>(z.values)),
        dp(memory.template take<double>(z.slots)),
        d_write(memory.template take<double>(z.slots)),
        d_keep(memory.template take<double>(z.slots)),
        d_lse(memory.template take<double>(z.slots)) {}
  Work forward;
  StateHistory history;
  double *d_state, *d_o, *dk, *dv, *dp, *d_write, *d_keep, *d_lse;
};

}  // namespace

void slots_forward(Context& context, const char* op, std::optional<double> scale,
                   const SlotTensors<true>& inputs, const Segments* segments, const Tensor& o,
                   const SlotTensors<false>& final) {
  const Call c(op, scale, inputs, segments);
  const auto o_rows = required<void, 4>(op, "o", o, c.o_shape);
  const auto hkt = view_of<float, 4>(op, "hkt", final.hk, c.hk_shape);
  const auto hvt = view_of<float, 4>(op, "hvt", final.hv, c.hv_shape);
  const auto lset = view_of<float, 3>(op, "lset", final.lse, c.lse_shape);
  if (c.sequences.are_empty(hkt, hvt, lset)) return;
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  LargestDecay decay;
  each_head<Work>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& w) {
    begin(c, seq, n, h, decay, w);
    for (std::int64_t t = 0; t < seq.length; ++t) {
      advance(isa, c, seq, h, t, w, w.state);
      for (std::int64_t r = h * c.group; r < (h + 1) * c.group; ++r) {
        look_up(isa, c, c.q(seq.batch, seq.begin + t, r), w.state, w);
        clear(w.o, z.values);
        add_transposed_product(isa, hv_of(w.state, z), w.p, w.o);
        write(w.o, z.values, o_rows(seq.batch, seq.begin + t, r));
      }
    }
    write_matrix(hk_of(w.state, z), hkt, n, h);
    write_matrix(hv_of(w.state, z), hvt, n, h);
    write(w.lse, z.slots, row_at(lset, n, h));
  });
  decay.check(op, "g");
  c.sequences.zero_padding(o);
}

void slots_backward(Context& context, const char* op, std::optional<double> scale,
                    const SlotTensors<true>& inputs, const Segments* segments,
                    const ConstTensor& d_o, const SlotTensors<true>& upstream,
                    const SlotTensors<false>& grads) {
  const Call c(op, scale, inputs, segments);
  const auto d_o_rows = required<const void, 4>(op, "d_o", d_o, c.o_shape);
  const auto dhkt = view_of<const float, 4>(op, "dhkt", upstream.hk, c.hk_shape);
  const auto dhvt = view_of<const float, 4>(op, "dhvt", upstream.hv, c.hv_shape);
  const auto dq = view_of<void, 4>(op, "dq", grads.q, c.q.extent);
  const auto dk = view_of<void, 4>(op, "dk", grads.k, c.k.extent);
  const auto dv = view_of<void, 4>(op, "dv", grads.v, c.v.extent);
  const auto ds = view_of<void, 4>(op, "ds", grads.s, c.s.extent);
  const auto dg = view_of<void, 4>(op, "dg", grads.g, c.s.extent);
  const auto dhk0 = view_of<float, 4>(op, "dhk0", grads.hk, c.hk_shape);
  const auto dhv0 = view_of<float, 4>(op, "dhv0", grads.hv, c.hv_shape);
  const auto dlse0 = view_of<float, 3>(op, "dlse0", grads.lse, c.lse_shape);
  if (c.sequences.are_empty(dhk0, dhv0, dlse0)) return;
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  const bool averages = c.g.data == nullptr;
  LargestDecay decay;
  each_head<BackwardWork>(context, c, c.heads, [&](auto n, auto h, const Segment& seq, auto& b) {
    Work& w = b.forward;
    const auto step = [&](std::int64_t t, double* state) { advance(isa, c, seq, h, t, w, state); };
    begin(c, seq, n, h, decay, w);
    b.history.run(w.state, seq.length, step);
    const Matrix64 d_hk = hk_of(b.d_state, z), d_hv = hv_of(b.d_state, z);
    read_matrix(dhkt, d_hk, n, h);
    read_matrix(dhvt, d_hv, n, h);
    clear(b.d_lse, z.slots);
    for (std::int64_t t = seq.length; t-- > 0;) {
      const std::int64_t at = seq.begin + t;
      double* before = b.history.before(t, step);
      double* after = before + (z.keys + z.values) * z.slots;
      for (std::int64_t r = h * c.group; r < (h + 1) * c.group; ++r) {
        look_up(isa, c, c.q(seq.batch, at, r), after, w);
        read(d_o_rows(seq.batch, at, r), z.values, b.d_o);
        clear(b.dp, z.slots);
        add_product(isa, hv_of(after, z), b.d_o, b.dp);
        add_outer(isa, 1, w.p, b.d_o, d_hv);
        const double mean = dot(isa, w.p, b.dp, z.slots);
        for (std::int64_t m = 0; m < z.slots; ++m) b.dp[m] = w.p[m] * (b.dp[m] - mean);
        add_outer(isa, 1, w.q, b.dp, d_hk);
        clear(w.q, z.keys);
        add_product(isa, hk_of(after, z), b.dp, w.q);
        for (std::int64_t i = 0; i < z.keys; ++i) w.q[i] *= c.scale;
        write(w.q, z.keys, row_at(dq, seq.batch, at, r));
      }
      read(c.k(seq.batch, at, h), z.keys, w.k);
      read(c.v(seq.batch, at, h), z.values, w.v);
      const double *weight = w.write + t * z.slots, *keep = w.keep + t * z.slots;
      for (double* x : {b.d_write, b.d_keep}) clear(x, z.slots);
      clear(b.dk, z.keys);
      clear(b.dv, z.values);
      add_product(isa, d_hk, weight, b.dk);
      add_transposed_product(isa, d_hv, weight, b.dv);
      add_transposed_product(isa, d_hk, w.k, b.d_write);
      add_product(isa, d_hv, w.v, b.d_write);
      // Through what is kept: the gradient before the token, then times what was there.
      scale_columns(isa, keep, d_hk);
      scale_rows(isa, keep, d_hv);
      add_column_products(isa, d_hk, hk_of(before, z), b.d_keep);
      add_row_products(isa, d_hv, hv_of(before, z), b.d_keep);
      for (std::int64_t m = 0; m < z.slots; ++m) {
        if (keep[m] == 0) b.d_keep[m] = 0;
        if (!averages) continue;
        // keep = e^(lse - lse'), weight = e^(s - lse'), lse' = log(e^lse + e^s).
        const double in = b.d_write[m] * weight[m];
        const double d_next = b.d_lse[m] - b.d_keep[m] - in;
        b.d_write[m] = in + d_next * weight[m];
        b.d_lse[m] = b.d_keep[m] + d_next * keep[m];
      }
      write(b.dk, z.keys, row_at(dk, seq.batch, at, h));
      write(b.dv, z.values, row_at(dv, seq.batch, at, h));
      write(b.d_write, z.slots, row_at(ds, seq.batch, at, h));
      write(b.d_keep, z.slots, row_at(dg, seq.batch, at, h));
    }
    write_matrix(d_hk, dhk0, n, h);
    write_matrix(d_hv, dhv0, n, h);
    write(b.d_lse, z.slots, row_at(dlse0, n, h));
  });
  for (const Tensor* rows : {&grads.q, &grads.k, &grads.v, &grads.s, &grads.g}) {
    c.sequences.zero_padding(*rows);
  }
}

}  // namespace ouzel
