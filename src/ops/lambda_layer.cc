#include "ouzel/lambda_layer.h"

#include <fmt/format.h>

#include "src/ops/position_softmax.h"

namespace ouzel {
namespace {

struct Sizes {
  std::int64_t keys = 0, values = 0;
  std::int64_t maps = 0;  // none without positions
};

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const LambdaLayerInputs& in)
      : op(op),
        q_shape(extents_of<4>(op, "q", in.q, "batch, queries, heads, keys")),
        k_shape(extents_of<4>(op, "k", in.k, "batch, positions, maps, keys")),
        v_shape(extents_of<4>(op, "v", in.v, "batch, positions, maps, values")),
        queries(op, in.segments, q_shape[0], q_shape[1]),
        positions(op, in.key_segments != nullptr ? in.key_segments : in.segments, k_shape[0],
                  k_shape[1]),
        sizes{q_shape[3], v_shape[3], k_shape[1] == 0 ? 0 : k_shape[2]},
        o_shape{q_shape[0], q_shape[1], q_shape[2], sizes.values},
        q(required<const void, 4>(op, "q", in.q, q_shape)),
        k(required<const void, 4>(op, "k", in.k, {q_shape[0], k_shape[1], k_shape[2], sizes.keys})),
        v(required<const void, 4>(op, "v", in.v,
                                  {q_shape[0], k_shape[1], k_shape[2], sizes.values})) {
    if (positions.count() != queries.count()) {
      refuse(op, fmt::format("there are {} sequences of queries and {} of keys", queries.count(),
                             positions.count()));
    }
  }

  // Without queries and positions there is nothing to compute, however many heads, maps and
  // channels are without them.
  bool is_empty() const { return q_shape[1] == 0 && k_shape[1] == 0; }

  const char* op;
  std::array<std::int64_t, 4> q_shape, k_shape, v_shape;
  Sequences queries, positions;
  Sizes sizes;
  std::array<std::int64_t, 4> o_shape;
  AnyView<const void, 4> q, k, v;
};

struct Work {
  template <class Memory>
  Work(Memory& memory, const Sizes& z)
      : maps(memory.template take<double>(z.maps * z.keys * z.values)),
        lambda{memory.template take<double>(z.keys * z.values), z.keys, z.values},
        lse(memory.template take<double>(z.maps * z.keys)),
        p(memory.template take<double>(z.keys)),
        q(memory.template take<double>(z.keys)),
        v(memory.template take<double>(z.values)),
        o(memory.template take<double>(z.values)) {}
  Matrix64 map(std::int64_t u) const {
    return {maps + u * lambda.size(), lambda.rows, lambda.columns};
  }
  double* maps;     // of each u, [K, V]
  Matrix64 lambda;  // their sum
  double *lse, *p, *q, *v, *o;
};

void build(Isa isa, const Call& c, std::int64_t n, const Work& w) {
  const Sizes& z = c.sizes;
  const Segment seq = c.positions[n];
  clear(w.maps, z.maps * w.lambda.size());
  clear(w.lambda.data, w.lambda.size());
  for (std::int64_t u = 0; u < z.maps; ++u) {
    double* lse = w.lse + u * z.keys;
    position_lse(c.k, seq, u, z.keys, lse);
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled();
      position_weights(c.k(seq.batch, t, u), lse, z.keys, w.p);
      read(c.v(seq.batch, t, u), z.values, w.v);
      add_outer(isa, 1, w.p, w.v, w.map(u));
    }
    add_scaled(isa, 1, w.map(u).data, w.lambda.size(), w.lambda.data);
  }
}

struct BackwardWork {
  template <class Memory>
  BackwardWork(Memory& memory, const Sizes& z)
      : forward(memory, z),
        d_lambda{memory.template take<double>(z.keys * z.values), z.keys, z.values},
        sum(memory.template take<double>(z.keys)),
        d_key(memory.template take<double>(z.keys)),
        d_value(memory.template take<double>(z.values)) {}
  Work forward;
  Matrix64 d_lambda;
  double *sum, *d_key, *d_value;
};

}  // namespace

void lambda_layer(Context& context, const LambdaLayerInputs& inputs, const Tensor& o) {
  const Call c("lambda_layer", inputs);
  const auto o_rows = required<void, 4>(c.op, "o", o, c.o_shape);
  if (c.is_empty()) return;
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  reserve_for<Work>(context, z);
  context.impl().run(c.queries.count(), [&](std::int64_t n, Scratch& scratch) {
    const Segment seq = c.queries[n];
    const Work w(scratch, z);
    build(isa, c, n, w);
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled();
      for (std::int64_t h = 0; h < c.q_shape[2]; ++h) {
        read(c.q(seq.batch, t, h), z.keys, w.q);
        clear(w.o, z.values);
        add_transposed_product(isa, w.lambda, w.q, w.o);
        write(w.o, z.values, o_rows(seq.batch, t, h));
      }
    }
  });
  c.queries.zero_padding(o);
}

void lambda_layer_backward(Context& context, const LambdaLayerInputs& inputs,
                           const ConstTensor& d_o, const Tensor& dq, const Tensor& dk,
                           const Tensor& dv) {
  const Call c("lambda_layer_backward", inputs);
  const auto d_o_rows = required<const void, 4>(c.op, "d_o", d_o, c.o_shape);
  const auto dq_rows = view_of<void, 4>(c.op, "dq", dq, c.q_shape);
  const auto dk_rows = view_of<void, 4>(c.op, "dk", dk, c.k.extent);
  const auto dv_rows = view_of<void, 4>(c.op, "dv", dv, c.v.extent);
  if (c.is_empty()) return;
  const Sizes& z = c.sizes;
  const Isa isa = context.isa();
  reserve_for<BackwardWork>(context, z);
  context.impl().run(c.queries.count(), [&](std::int64_t n, Scratch& scratch) {
    const BackwardWork b(scratch, z);
    const Work& w = b.forward;
    build(isa, c, n, w);
    clear(b.d_lambda.data, b.d_lambda.size());
    const Segment seq = c.queries[n];
    for (std::int64_t t = seq.begin; t < seq.begin + seq.length; ++t) {
      check_cancelled();
      for (std::int64_t h = 0; h < c.q_shape[2]; ++h) {
        read(c.q(seq.batch, t, h), z.keys, w.q);
        read(d_o_rows(seq.batch, t, h), z.values, w.o);
        add_outer(isa, 1, w.q, w.o, b.d_lambda);
        clear(b.d_key, z.keys);
        add_product(isa, w.lambda, w.o, b.d_key);
        write(b.d_key, z.keys, row_at(dq_rows, seq.batch, t, h));
      }
    }
    const Segment keys = c.positions[n];
    for (std::int64_t u = 0; u < z.maps; ++u) {
      clear(b.sum, z.keys);
      add_row_products(isa, b.d_lambda, w.map(u), b.sum);
      for (std::int64_t t = keys.begin; t < keys.begin + keys.length; ++t) {
        check_cancelled();
        position_weights(c.k(keys.batch, t, u), w.lse + u * z.keys, z.keys, w.p);
        read(c.v(keys.batch, t, u), z.values, w.v);
        clear(b.d_key, z.keys);
        add_product(isa, b.d_lambda, w.v, b.d_key);
        position_adjoint(w.p, b.sum, z.keys, b.d_key);
        write(b.d_key, z.keys, row_at(dk_rows, keys.batch, t, u));
        clear(b.d_value, z.values);
        add_transposed_product(isa, b.d_lambda, w.p, b.d_value);
        write(b.d_value, z.values, row_at(dv_rows, keys.batch, t, u));
      }
    }
  });
  c.queries.zero_padding(dq);
  c.positions.zero_padding(dk);
  c.positions.zero_padding(dv);
}

}  // namespace ouzel
