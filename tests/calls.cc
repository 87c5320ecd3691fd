#include "tests/calls.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "ouzel/linear_attention.h"
#include "ouzel/retention.h"
#include "ouzel/short_conv.h"
#include "ouzel/softmax_attention.h"
#include "src/ops/feature_map.h"
#include "tests/by_name.h"
#include "tests/contexts.h"
#include "tests/operand.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

template <class Real>
void add_slot(std::vector<Slot>& list, const std::string& name, Role role,
              reference::Array<Real>& array) {
  if (array.present()) list.push_back({name, role, &array});
}

template <class Real>
using NamedList = std::vector<Named<Real>>;

// Only what is there: an operator gives no gradient of an argument that it was not given.
template <class Real>
NamedList<Real> present(NamedList<Real> list) {
  std::erase_if(list, [](const Named<Real>& x) { return !x.array.present(); });
  return list;
}

// What golden files call the gradients of a map's first projection: W1 beside W2, Wq beside Wk.
struct MapNames {
  explicit MapNames(const Recurrence& a) {
    const bool product = a.map == FeatureMapKind::kElementwiseProduct;
    const char* end = product ? "1" : a.k_map.w1.present() ? "q" : "";
    w1 = std::string("dW") + end;
    b1 = std::string("db") + end;
  }
  std::string w1, b1;
};

// A call whose keys are those of the queries' tokens takes all rows together.
Role key_role(const Recurrence& a) {
  return a.q.extent(1) == a.k.extent(1) ? Role::kToken : Role::kKeyToken;
}

template <class Real>
Results<Real> named(const Recurrence& a, const reference::RecurrenceResults<Real>& r,
                    const reference::Array<Real>& weights,
                    const reference::RecurrenceGradients<Real>& g) {
  const MapNames names(a);
  return {present<Real>({{"o", Role::kToken, r.o},
                         {"final_state", Role::kSequence, r.s},
                         {"z", Role::kSequence, r.z},
                         {"weights", Role::kWeights, weights}}),
          present<Real>({{"dq", Role::kToken, g.q},
                         {"dk", key_role(a), g.k},
                         {"dv", key_role(a), g.v},
                         {"dh0", Role::kSequence, g.s0},
                         {"dz0", Role::kSequence, g.z0},
                         {names.w1, Role::kParameter, g.q_map.w1},
                         {names.b1, Role::kParameter, g.q_map.b1},
                         {"dW2", Role::kParameter, g.q_map.w2},
                         {"db2", Role::kParameter, g.q_map.b2},
                         {"dWk", Role::kParameter, g.k_map.w1},
                         {"dbk", Role::kParameter, g.k_map.b1},
                         {"dWk2", Role::kParameter, g.k_map.w2},
                         {"dbk2", Role::kParameter, g.k_map.b2},
                         {"dpsi_w1", Role::kParameter, g.q_map.psi_w1},
                         {"dpsi_b1", Role::kParameter, g.q_map.psi_b1},
                         {"dpsi_w2", Role::kParameter, g.q_map.psi_w2},
                         {"dpsi_b2", Role::kParameter, g.q_map.psi_b2}})};
}

// Where the keys are the queries' tokens (self-attention), all rows go together.
Role key_role(const Attention& a) {
  return a.q.extent(1) == a.k.extent(1) ? Role::kToken : Role::kKeyToken;
}

template <class Real>
Results<Real> named(const Attention& a, const reference::SoftmaxAttentionResults<Real>& r,
                    const reference::SoftmaxAttentionGradients<Real>& g) {
  return {present<Real>({{"o", Role::kToken, r.o}, {"lse", Role::kToken, r.lse}}),
          present<Real>(
              {{"dq", Role::kToken, g.q}, {"dk", key_role(a), g.k}, {"dv", key_role(a), g.v}})};
}

template <class Real>
Results<Real> named(const reference::ShortConvResults<Real>& r,
                    const reference::ShortConvGradients<Real>& g) {
  return {present<Real>({{"o", Role::kToken, r.y}, {"final_state", Role::kSequence, r.s}}),
          present<Real>({{"dx", Role::kToken, g.x},
                         {"dweight", Role::kParameter, g.weight},
                         {"dbias", Role::kParameter, g.bias},
                         {"dh0", Role::kSequence, g.s0}})};
}

// --- linear attention and retention

struct MapOperands {
  Operand w1, b1, w2, b2, psi_w1, psi_b1, psi_w2, psi_b2;

  static MapOperands input(const reference::MapWeights<double>& w) {
    return {Operand::input(w.w1),     Operand::input(w.b1),     Operand::input(w.w2),
            Operand::input(w.b2),     Operand::input(w.psi_w1), Operand::input(w.psi_b1),
            Operand::input(w.psi_w2), Operand::input(w.psi_b2)};
  }
  // Of parameters that have gradients: random projections have none.
  static MapOperands gradients(const MapOperands& w, FeatureMapKind kind) {
    if (!info_of(kind).trained) return {};
    return {Operand::zeros_like(w.w1),     Operand::zeros_like(w.b1),
            Operand::zeros_like(w.w2),     Operand::zeros_like(w.b2),
            Operand::zeros_like(w.psi_w1), Operand::zeros_like(w.psi_b1),
            Operand::zeros_like(w.psi_w2), Operand::zeros_like(w.psi_b2)};
  }
  FeatureMapWeights weights() {
    return {w1.tensor(),     b1.tensor(),     w2.tensor(),     b2.tensor(),
            psi_w1.tensor(), psi_b1.tensor(), psi_w2.tensor(), psi_b2.tensor()};
  }
  FeatureMapWeightGrads weight_grads() {
    return {w1.tensor(),     b1.tensor(),     w2.tensor(),     b2.tensor(),
            psi_w1.tensor(), psi_b1.tensor(), psi_w2.tensor(), psi_b2.tensor()};
  }
  reference::MapWeights<float> floats() {
    return {w1.floats(),     b1.floats(),     w2.floats(),     b2.floats(),
            psi_w1.floats(), psi_b1.floats(), psi_w2.floats(), psi_b2.floats()};
  }
};

// The arguments of a call in float32, and the operator's options, which point into them.
struct RecurrenceInFloat {
  RecurrenceInFloat(const Call& call, const Recurrence& arguments)
      : a(arguments),
        strided(call.strided),
        q(Operand::input(a.q, strided)),
        k(Operand::input(a.k, strided)),
        v(Operand::input(a.v, strided)),
        initial(state_of(a.s0, a.z0)),
        q_map(MapOperands::input(a.q_map)),
        k_map(MapOperands::input(a.k_map)),
        is_retention(!a.log_decay.empty()) {
    retention_options.scale = a.scale;
    retention_options.log_decay = a.log_decay;
    retention_options.reverse = a.reverse;
    retention_options.form = call.form;
    FeatureMap& map = linear_options.feature_map;
    map.kind = a.map;
    map.options = a.map_options;
    map.q = q_map.weights();
    map.k = k_map.weights();
    linear_options.scale = a.scale;
    linear_options.normalize = a.normalize;
    linear_options.eps = a.eps;
    linear_options.causal = a.causal;
    linear_options.reverse = a.reverse;
    linear_options.form = call.form;
    inputs.q = q.tensor();
    inputs.k = k.tensor();
    inputs.v = v.tensor();
    if (call.residue) initial.add_residue(*call.residue);
    inputs.initial_state = initial.view();
    inputs.segments = &a.segments;
  }
  RecurrenceInFloat(const RecurrenceInFloat&) = delete;

  Operand output() const {
    return Operand::output(
        {q.extent(0), q.extent(1), std::max(q.extent(2), v.extent(2)), v.extent(3)}, strided);
  }
  StateOperands state(Int sequences) const {
    const Int features =
        reference::feature_count(reference::Map{a.map, a.map_options}, a.q_map, k.extent(3));
    StateOperands state;
    state.s = Operand::output({sequences, v.extent(2), features, v.extent(3)});
    if (a.normalize) state.z = Operand::output({sequences, v.extent(2), features});
    return state;
  }

  const Recurrence& a;
  bool strided;
  Operand q, k, v;
  StateOperands initial;
  MapOperands q_map, k_map;
  bool is_retention;
  LinearAttentionOptions linear_options;
  RetentionOptions retention_options;
  RecurrenceInputs inputs;
};

Results<float> run(Context& context, const Call& call, const Recurrence& a) {
  RecurrenceInFloat in(call, a);
  RecurrenceOutputs outputs;
  Operand o = in.output(), weights;
  StateOperands final;
  outputs.o = o.tensor();
  if (call.form == Form::kParallel) {
    weights = Operand::output({o.extent(0), o.extent(2), o.extent(1), in.k.extent(1)});
    outputs.weights = weights.tensor();
  } else if (a.causal) {
    final = in.state(a.segments.count());
    if (call.residue) final.add_residue({});
    outputs.final_state = final.view();
  }
  Buffer saved;
  if (call.saved && call.backward()) {
    saved = Buffer(in.is_retention ? retention_saved_bytes(in.retention_options, in.inputs)
                                   : linear_attention_saved_bytes(in.linear_options, in.inputs));
    outputs.saved = saved.data();
  }
  if (in.is_retention) {
    retention(context, in.retention_options, in.inputs, outputs);
  } else {
    linear_attention(context, in.linear_options, in.inputs, outputs);
  }
  const reference::RecurrenceResults<float> r{o.floats(), final.s.floats(), final.z.floats()};
  Results<float> results = named(a, r, weights.floats(), {});
  if (call.residue) {
    results.outputs.push_back({"s_residue", Role::kSequence, final.s_residue.floats()});
    if (a.normalize) {
      results.outputs.push_back({"z_residue", Role::kSequence, final.z_residue.floats()});
    }
  }
  if (!call.backward()) return results;

  Operand d_o = Operand::input(call.up("do"), in.strided);
  StateOperands d_final = state_of(call.up("dht"), call.up("dzt"));
  const RecurrenceOutputGrads output_grads{d_o.tensor(), d_final.view()};
  Operand dq = Operand::output_like(in.q), dk = Operand::output_like(in.k),
          dv = Operand::output_like(in.v);
  StateOperands d_initial{
      Operand::output_like(in.initial.s), Operand::output_like(in.initial.z), {}};
  MapOperands d_q_map = MapOperands::gradients(in.q_map, a.map),
              d_k_map = MapOperands::gradients(in.k_map, a.map);
  const RecurrenceInputGrads input_grads{
      .q = dq.tensor(), .k = dk.tensor(), .v = dv.tensor(), .initial_state = d_initial.view()};
  if (in.is_retention) {
    retention_backward(context, in.retention_options, in.inputs, outputs.saved, output_grads,
                       input_grads);
  } else {
    const FeatureMapGrads map_grads{d_q_map.weight_grads(), d_k_map.weight_grads()};
    linear_attention_backward(context, in.linear_options, in.inputs, outputs.saved, output_grads,
                              input_grads, &map_grads);
  }
  results.gradients = named<float>(a, r, {},
                                   {dq.floats(), dk.floats(), dv.floats(), d_initial.s.floats(),
                                    d_initial.z.floats(), d_q_map.floats(), d_k_map.floats()})
                          .gradients;
  return results;
}

Results<float> run_steps(Context& context, const Call& call, const Recurrence& a) {
  RecurrenceInFloat in(call, a);
  const Int sequences = in.q.extent(0), tokens = in.q.extent(1);
  Operand o = in.output();
  StateOperands zeros = in.state(sequences);
  StateOperands state;
  state.s = Operand::zeros_like(zeros.s);
  state.z = Operand::zeros_like(zeros.z);
  if (in.initial.s.present()) state = in.initial;
  const StateView view = state.view();
  for (Int t = 0; t < tokens; ++t) {
    const Tensor q = in.q.token(t), k = in.k.token(t), v = in.v.token(t);
    if (in.is_retention) {
      retention_step(context, in.retention_options, q, k, v, view, o.token(t));
    } else {
      linear_attention_step(context, in.linear_options, q, k, v, view, o.token(t));
    }
  }
  return named<float>(a, {o.floats(), state.s.floats(), state.z.floats()}, {}, {});
}

Results<double> run_reference(const Call& call, const Recurrence& a) {
  reference::RecurrenceResults<double> r = reference::recurrence(a);
  Doubles weights;
  if (call.form == Form::kParallel) weights = reference::recurrence_weights(a);
  if (!a.causal || call.form == Form::kParallel) r.s = r.z = Doubles();
  if (!a.normalize) r.z = Doubles();
  reference::RecurrenceGradients<double> g;
  if (call.backward())
    g = reference::recurrence_backward(a, {call.up("do"), call.up("dht"), call.up("dzt")});
  if (!a.s0.present()) g.s0 = Doubles();
  if (!a.z0.present()) g.z0 = Doubles();
  if (!info_of(a.map).trained) g.q_map = g.k_map = {};
  return named(a, r, weights, g);
}

// --- softmax attention

SoftmaxAttentionOptions options_of(const Attention& a) {
  SoftmaxAttentionOptions options;
  options.scale = a.scale;
  options.causal = a.causal;
  options.window = a.window;
  options.q_offset = a.q_offset;
  return options;
}

Results<float> run(Context& context, const Call& call, const Attention& a) {
  Operand q = Operand::input(a.q, call.strided), k = Operand::input(a.k, call.strided),
          v = Operand::input(a.v, call.strided);
  const SoftmaxAttentionInputs inputs{q.tensor(), k.tensor(), v.tensor(), &a.query_segments,
                                      &a.key_segments};
  Operand o = Operand::output({q.extent(0), q.extent(1), q.extent(2), v.extent(3)}, call.strided);
  Doubles lse({q.extent(0), q.extent(1), q.extent(2)});
  lse.data.push_back(0);  // an array without elements has an address too
  const View<double, 3> lse_view(lse.data.data(), {q.extent(0), q.extent(1), q.extent(2)});
  softmax_attention(context, options_of(a), inputs, {o.tensor(), lse_view});
  reference::SoftmaxAttentionResults<float> r{o.floats(), Floats(lse.shape)};
  std::copy_n(lse.data.begin(), r.lse.data.size(), r.lse.data.begin());
  if (!call.backward()) return named<float>(a, r, {});
  Operand d_o = Operand::input(call.up("do"), call.strided);
  Operand dq = Operand::output_like(q), dk = Operand::output_like(k), dv = Operand::output_like(v);
  softmax_attention_backward(context, options_of(a), inputs, o.tensor(), lse_view, d_o.tensor(),
                             dq.tensor(), dk.tensor(), dv.tensor());
  return named<float>(a, r, {dq.floats(), dk.floats(), dv.floats()});
}

// Causal self-attention with a cache of just the capacity that it needs.
Results<float> run_steps(Context& context, const Call& call, const Attention& a) {
  Operand q = Operand::input(a.q, call.strided), k = Operand::input(a.k, call.strided),
          v = Operand::input(a.v, call.strided);
  const Int sequences = q.extent(0), tokens = q.extent(1);
  const Int capacity = a.window > 0 ? std::min(a.window, tokens) : tokens;
  Operand o = Operand::output({sequences, tokens, q.extent(2), v.extent(3)}, call.strided);
  Floats k_cache({sequences, capacity, k.extent(2), k.extent(3)});
  Floats v_cache({sequences, capacity, v.extent(2), v.extent(3)});
  std::vector<KvCache> caches;
  for (Int n = 0; n < sequences; ++n) {
    caches.push_back({&k_cache(n, 0, 0, 0), &v_cache(n, 0, 0, 0), capacity, 0});
  }
  for (Int t = 0; t < tokens; ++t) {
    softmax_attention_step(context, options_of(a), q.token(t), k.token(t), v.token(t), caches,
                           o.token(t));
  }
  return named<float>(a, {o.floats(), {}}, {});
}

Results<double> run_reference(const Call& call, const Attention& a) {
  reference::SoftmaxAttentionGradients<double> g;
  if (call.backward()) g = reference::softmax_attention_backward(a, call.up("do"));
  return named(a, reference::softmax_attention(a), g);
}

// --- short convolution

ShortConvOptions options_of(const Conv& a) {
  return {a.silu ? ConvActivation::kSilu : ConvActivation::kNone};
}

Results<float> run(Context& context, const Call& call, const Conv& a) {
  Operand x = Operand::input(a.x, call.strided), weight = Operand::input(a.weight),
          bias = Operand::input(a.bias), s0 = Operand::input(a.s0);
  const ShortConvInputs inputs{x.tensor(), weight.tensor(), bias.tensor(), s0.tensor(),
                               &a.segments};
  Operand y = Operand::output_like(x);
  Operand s = Operand::output({a.segments.count(), weight.extent(0), weight.extent(1)});
  short_conv(context, options_of(a), inputs, y.tensor(), s.tensor());
  const reference::ShortConvResults<float> r{y.floats(), s.floats()};
  if (!call.backward()) return named<float>(r, {});
  Operand d_y = Operand::input(call.up("do"), call.strided), d_s = Operand::input(call.up("dht"));
  Operand dx = Operand::output_like(x), d_weight = Operand::zeros_like(weight),
          d_bias = Operand::zeros_like(bias), d_s0 = Operand::output_like(s0);
  short_conv_backward(context, options_of(a), inputs, d_y.tensor(), d_s.tensor(), dx.tensor(),
                      d_weight.tensor(), d_bias.tensor(), d_s0.tensor());
  return named<float>(r, {dx.floats(), d_weight.floats(), d_bias.floats(), d_s0.floats()});
}

Results<float> run_steps(Context& context, const Call& call, const Conv& a) {
  Operand x = Operand::input(a.x, call.strided), weight = Operand::input(a.weight),
          bias = Operand::input(a.bias), y = Operand::output_like(x);
  Operand s = Operand::input(
      a.s0.present() ? a.s0 : Doubles({x.extent(0), weight.extent(0), weight.extent(1)}));
  for (Int t = 0; t < x.extent(1); ++t) {
    short_conv_step(context, options_of(a), x.token(t), weight.tensor(), bias.tensor(), s.tensor(),
                    y.token(t));
  }
  return named<float>({y.floats(), s.floats()}, {});
}

Results<double> run_reference(const Call& call, const Conv& a) {
  reference::ShortConvGradients<double> g;
  if (call.backward()) g = reference::short_conv_backward(a, {call.up("do"), call.up("dht")});
  if (!a.s0.present()) g.s0 = Doubles();
  return named(reference::short_conv(a), g);
}

}  // namespace

std::vector<Slot> slots(Call& call) {
  std::vector<Slot> list;
  if (auto* a = std::get_if<Recurrence>(&call.arguments)) {
    add_slot(list, "q", Role::kToken, a->q);
    add_slot(list, "k", key_role(*a), a->k);
    add_slot(list, "v", key_role(*a), a->v);
    add_slot(list, "initial_state", Role::kSequence, a->s0);
    add_slot(list, "initial_z", Role::kSequence, a->z0);
    for (auto* map : {&a->q_map, &a->k_map}) {
      add_slot(list, "W1", Role::kParameter, map->w1);
      add_slot(list, "b1", Role::kParameter, map->b1);
      add_slot(list, "W2", Role::kParameter, map->w2);
      add_slot(list, "b2", Role::kParameter, map->b2);
      add_slot(list, "psi_w1", Role::kParameter, map->psi_w1);
      add_slot(list, "psi_b1", Role::kParameter, map->psi_b1);
      add_slot(list, "psi_w2", Role::kParameter, map->psi_w2);
      add_slot(list, "psi_b2", Role::kParameter, map->psi_b2);
    }
  } else if (auto* b = std::get_if<Attention>(&call.arguments)) {
    add_slot(list, "q", Role::kToken, b->q);
    add_slot(list, "k", key_role(*b), b->k);
    add_slot(list, "v", key_role(*b), b->v);
  } else if (auto* c = std::get_if<Conv>(&call.arguments)) {
    add_slot(list, "x", Role::kToken, c->x);
    add_slot(list, "weight", Role::kParameter, c->weight);
    add_slot(list, "bias", Role::kParameter, c->bias);
    add_slot(list, "initial_state", Role::kSequence, c->s0);
  } else if (auto* d = std::get_if<ByName>(&call.arguments)) {
    add_slots(list, *d);
  }
  for (auto& [name, array] : call.upstream) {
    add_slot(list, name, name == "do" ? Role::kToken : Role::kSequence, array);
  }
  if (call.residue) {
    add_slot(list, "s_residue", Role::kSequence, call.residue->s);
    add_slot(list, "z_residue", Role::kSequence, call.residue->z);
  }
  return list;
}

Results<float> run(Context& context, const Call& call) {
  return std::visit([&](const auto& a) { return run(context, call, a); }, call.arguments);
}
Results<double> run_reference(const Call& call) {
  return std::visit([&](const auto& a) { return run_reference(call, a); }, call.arguments);
}
Results<float> run_steps(Context& context, const Call& call) {
  return std::visit([&](const auto& a) { return run_steps(context, call, a); }, call.arguments);
}

Segments& segments_of(Call& call) {
  if (auto* a = std::get_if<Recurrence>(&call.arguments)) return a->segments;
  if (auto* a = std::get_if<Attention>(&call.arguments)) return a->query_segments;
  if (auto* a = std::get_if<Conv>(&call.arguments)) return a->segments;
  return std::get<ByName>(call.arguments).segments;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.shape == b.shape && (a.data.empty() || std::memcmp(a.data.data(), b.data.data(),
                                                              a.data.size() * sizeof(float)) == 0);
}

namespace {

void expect_same(const std::vector<Named<float>>& a, const std::vector<Named<float>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same_bits(a[i].array, b[i].array)) << a[i].name;
  }
}

}  // namespace

void expect_same(const Results<float>& a, const Results<float>& b) {
  expect_same(a.outputs, b.outputs);
  expect_same(a.gradients, b.gradients);
}

void expect_threads_change_no_bit(const Call& call) {
  for (const Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    Context one({.threads = 1, .isa = isa, .poison_scratch = true}),
        five({.threads = 5, .isa = isa, .poison_scratch = true}),
        other = with_other_cache({.threads = 2, .isa = isa, .poison_scratch = true});
    const Results<float> first = run(one, call);
    expect_same(run(five, call), first);
    expect_same(run(other, call), first);
    // Nor does what scratch held before: NaN above, here what a call left.
    Context used({.threads = 1, .isa = isa});
    run(used, call);
    expect_same(run(used, call), first);
  }
}

}  // namespace ouzel::test
