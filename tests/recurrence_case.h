// One call of linear_attention or retention: random inputs, the operator on float32 arrays with
// gaps between their rows, and the float64 reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ouzel/linear_attention.h"
#include "ouzel/retention.h"
#include "src/ops/reference/recurrence.h"
#include "tests/random_arrays.h"

namespace ouzel::test {

using Doubles = reference::Array<double>;

struct RecurrenceCase {
  std::string name;
  std::int64_t batch = 1, tokens = 19, hq = 2, hk = 2, hv = 2, k = 8, v = 9;
  FeatureMapKind map = FeatureMapKind::kIdentity;
  bool normalize = false, causal = true, reverse = false, states = true;
  bool decay = false;             // retention
  std::vector<double> log_decay;  // empty: the default
  bool separate_maps = false, heads_in_map = false;
  std::int64_t features = 0;  // of a learned map; 0: k
  std::vector<std::int64_t> cu_seqlens;
  bool positive = false;  // inputs spread narrowly around a third
};

inline double rms(const std::vector<double>& x) {
  double sum = 0;
  for (double v : x) sum += v * v;
  return x.empty() ? 0 : std::sqrt(sum / static_cast<double>(x.size()));
}

// RMS of the difference over RMS of the truth, floored at 1e-3 of `largest`; infinite where one is
// finite and the other is not.
inline double relative_error(const std::vector<double>& truth, const std::vector<double>& found,
                             double largest) {
  std::vector<double> difference;
  for (std::size_t i = 0; i < truth.size(); ++i) {
    if (!std::isfinite(found[i])) return std::numeric_limits<double>::infinity();
    difference.push_back(found[i] - truth[i]);
  }
  const double scale = std::max(rms(truth), 1e-3 * largest);
  return scale == 0 ? rms(difference) : rms(difference) / scale;
}

// A float32 array [B, T, H, D] inside a larger one; what lies between is NaN and must stay so.
class Strided {
 public:
  Strided() = default;
  Strided(std::vector<std::int64_t> shape, std::int64_t gap)
      : shape_(shape), row_(shape[3] + gap), memory_(count(), kGap) {
    each([&](std::size_t at, std::size_t) { memory_[at] = 0; });
  }
  Strided(const Doubles& x, std::int64_t gap) : Strided(x.shape, gap) {
    each([&](std::size_t at, std::size_t i) { memory_[at] = static_cast<float>(x.data[i]); });
  }
  View<float, 4> view() {
    return {memory_.data(),
            {shape_[0], shape_[1], shape_[2], shape_[3]},
            {shape_[1] * shape_[2] * row_, shape_[2] * row_, row_, 1}};
  }
  std::vector<double> values() const {
    std::vector<double> out;
    each([&](std::size_t at, std::size_t) { out.push_back(static_cast<double>(memory_[at])); });
    return out;
  }
  const std::vector<float>& memory() const { return memory_; }
  std::vector<float>& memory() { return memory_; }
  bool gaps_untouched() const {
    std::size_t gaps = memory_.size();
    each([&](std::size_t, std::size_t) { --gaps; });
    return static_cast<std::size_t>(std::count_if(memory_.begin(), memory_.end(), [](float x) {
             return std::memcmp(&x, &kGap, 4) == 0;
           })) == gaps;
  }

 private:
  static constexpr float kGap = std::numeric_limits<float>::quiet_NaN();
  std::size_t count() const {
    return static_cast<std::size_t>(shape_[0] * shape_[1] * shape_[2] * row_);
  }
  template <class F>
  void each(F f) const {
    std::size_t i = 0;
    for (std::int64_t r = 0; r < shape_[0] * shape_[1] * shape_[2]; ++r) {
      for (std::int64_t d = 0; d < shape_[3]; ++d) f(static_cast<std::size_t>(r * row_ + d), i++);
    }
  }
  std::vector<std::int64_t> shape_ = {0, 0, 0, 0};
  std::int64_t row_ = 0;
  std::vector<float> memory_;
};

inline std::vector<float> floats(const Doubles& x) { return {x.data.begin(), x.data.end()}; }
inline std::vector<double> doubles(const std::vector<float>& x) { return {x.begin(), x.end()}; }

// States of N sequences in dense memory, with residues if wanted.
struct States {
  std::vector<float> s, z, s_residue, z_residue;
  std::vector<SequenceState> sequences;
  StateView view;

  States() = default;
  States(std::int64_t n, std::int64_t heads, std::int64_t keys, std::int64_t values,
         bool residues = false)
      : s(static_cast<std::size_t>(n * heads * keys * values)),
        z(static_cast<std::size_t>(n * heads * keys)) {
    const Tensor s4(View<float, 4>(s.data(), {n, heads, keys, values}));
    const Tensor z3(View<float, 3>(z.data(), {n, heads, keys}));
    view = state_view(s4, z3, sequences);
    if (!residues) return;
    s_residue.resize(s.size());
    z_residue.resize(z.size());
    for (std::int64_t i = 0; i < n; ++i) {
      SequenceState& state = sequences[static_cast<std::size_t>(i)];
      state.s_residue = s_residue.data() + i * heads * keys * values;
      state.z_residue = z_residue.data() + i * heads * keys;
    }
  }
  States(const States&) = delete;
  States(States&&) = default;  // vectors keep their memory
  States& operator=(States&&) = default;
};

struct RecurrenceData {
  RecurrenceCase c;
  reference::RecurrenceArguments<double> a;
  reference::RecurrenceResults<double> up;
  std::int64_t n = 0, f = 0, ho = 0;

  // Data depend on the case's name alone, so that other cases may come and go.
  explicit RecurrenceData(const RecurrenceCase& rc, std::uint64_t seed = 0) : c(rc) {
    Random random(seed + std::hash<std::string>()(rc.name));
    const double lo = c.positive ? 0.3 : -1, hi = c.positive ? 0.36 : 1;
    a.q = random_array<double>(random, {c.batch, c.tokens, c.hq, c.k}, lo, hi);
    a.k = random_array<double>(random, {c.batch, c.tokens, c.hk, c.k}, lo, hi);
    a.v = random_array<double>(random, {c.batch, c.tokens, c.hv, c.v}, lo, hi);
    a.segments =
        c.cu_seqlens.empty() ? Segments::whole(c.batch, c.tokens) : Segments::packed(c.cu_seqlens);
    n = a.segments.count();
    a.map = c.map;
    f = c.k;
    if (c.map == FeatureMapKind::kElementwiseProduct) {
      f = c.features != 0 ? c.features : c.k;
      const auto weights = [&](std::int64_t heads) {
        using Shape = std::vector<std::int64_t>;
        const auto matrix = [&] {
          return random_array<double>(random, c.heads_in_map ? Shape{heads, f, c.k} : Shape{f, c.k},
                                      -0.5, 0.5);
        };
        // Mostly positive, so that denominators stay away from 0.
        const auto bias = [&] {
          return random_array<double>(random, c.heads_in_map ? Shape{heads, f} : Shape{f}, 1, 2);
        };
        reference::MapWeights<double> w;
        w.w1 = matrix();
        w.b1 = bias();
        w.w2 = matrix();
        w.b2 = bias();
        return w;
      };
      a.q_map = weights(c.hq);
      if (c.separate_maps) a.k_map = weights(c.hk);
    }
    ho = std::max(c.hq, c.hv);
    if (c.states) {
      a.s0 = random_array<double>(random, {n, c.hv, f, c.v}, lo, hi);
      if (c.normalize) a.z0 = random_array<double>(random, {n, c.hv, f}, 0.5, 1.5);
      up.s = random_array<double>(random, {n, c.hv, f, c.v}, lo, hi);
      if (c.normalize) up.z = random_array<double>(random, {n, c.hv, f}, lo, hi);
    }
    up.o = random_array<double>(random, {c.batch, c.tokens, ho, c.v}, lo, hi);
    if (c.decay) {
      a.log_decay =
          c.log_decay.empty() ? reference::retention_log_decay<double>(c.hv) : c.log_decay;
    }
    const bool plain = c.map == FeatureMapKind::kIdentity;
    a.scale = plain ? 1 / std::sqrt(static_cast<double>(c.k)) : 1;
    a.normalize = c.normalize;
    a.eps = plain ? 1e-10 : c.map == FeatureMapKind::kElementwiseProduct ? 0 : 1e-6;
    if (!c.normalize) a.eps = 0;
    a.causal = c.causal;
    a.reverse = c.reverse;
    if (plain && c.normalize) {  // a signed denominator: keep it away from 0
      for (Doubles* x : {&a.q, &a.k}) {
        for (double& value : x->data)
          value = static_cast<double>(static_cast<float>(value * 0.4 + 0.6));
      }
    }
  }
};

// The same call through the operator.
struct RecurrenceRun {
  const RecurrenceData& data;
  std::int64_t gap;
  Strided q, k, v, o, d_o, dq, dk, dv;
  States initial, final, d_final, d_initial;
  std::vector<float> w[2][4], dw[2][4];

  explicit RecurrenceRun(const RecurrenceData& d, std::int64_t gap = 3)
      : data(d),
        gap(gap),
        q(d.a.q, gap),
        k(d.a.k, gap),
        v(d.a.v, gap),
        o({d.c.batch, d.c.tokens, d.ho, d.c.v}, gap),
        d_o(d.up.o, gap),
        dq(d.a.q.shape, gap),
        dk(d.a.k.shape, gap),
        dv(d.a.v.shape, gap) {
    const RecurrenceCase& c = d.c;
    const auto states = [&](const Doubles& s, const Doubles& z) {
      States x(d.n, c.hv, d.f, c.v);
      if (s.present()) x.s.assign(s.data.begin(), s.data.end());
      if (z.present()) x.z.assign(z.data.begin(), z.data.end());
      // assign keeps the memory: the sizes are equal
      return x;
    };
    if (c.states) {
      initial = states(d.a.s0, d.a.z0);
      d_final = states(d.up.s, d.up.z);
      d_initial = States(d.n, c.hv, d.f, c.v);
    }
    final = States(d.n, c.hv, d.f, c.v);
    const reference::MapWeights<double>* maps[] = {&d.a.q_map, &d.a.k_map};
    for (int side = 0; side < 2; ++side) {
      const Doubles* arrays[] = {&maps[side]->w1, &maps[side]->b1, &maps[side]->w2,
                                 &maps[side]->b2};
      for (int i = 0; i < 4; ++i) {
        w[side][i] = floats(*arrays[i]);
        dw[side][i].assign(w[side][i].size(), 0.0f);
      }
    }
  }

  Tensor weight(std::vector<float>& memory, int side, int i) {
    if (memory.empty()) return {};
    const auto& m = side == 0 ? data.a.q_map : data.a.k_map;
    const Doubles& like = i == 0 ? m.w1 : i == 1 ? m.b1 : i == 2 ? m.w2 : m.b2;
    const auto& e = like.shape;
    if (e.size() == 3) return View<float, 3>(memory.data(), {e[0], e[1], e[2]});
    if (e.size() == 2) return View<float, 2>(memory.data(), {e[0], e[1]});
    return View<float, 1>(memory.data(), {e[0]});
  }
  RecurrenceInputs inputs() {
    RecurrenceInputs in;
    in.q = Tensor(q.view());
    in.k = Tensor(k.view());
    in.v = Tensor(v.view());
    in.initial_state = initial.view;
    if (!data.c.cu_seqlens.empty()) in.segments = &data.a.segments;
    return in;
  }
  LinearAttentionOptions linear_options() {
    LinearAttentionOptions options;
    options.feature_map.kind = data.c.map;
    FeatureMapWeights* sides[] = {&options.feature_map.q, &options.feature_map.k};
    for (int side = 0; side < 2; ++side) {
      sides[side]->w1 = weight(w[side][0], side, 0);
      sides[side]->b1 = weight(w[side][1], side, 1);
      sides[side]->w2 = weight(w[side][2], side, 2);
      sides[side]->b2 = weight(w[side][3], side, 3);
    }
    options.normalize = data.c.normalize;
    options.causal = data.c.causal;
    options.reverse = data.c.reverse;
    return options;
  }
  RetentionOptions retention_options() {
    RetentionOptions options;
    options.reverse = data.c.reverse;
    options.log_decay = data.c.log_decay;
    return options;
  }
  void forward(Context& context) {
    RecurrenceOutputs out;
    out.o = o.view();
    out.final_state = final.view;
    if (data.c.decay) {
      retention(context, retention_options(), inputs(), out);
    } else {
      linear_attention(context, linear_options(), inputs(), out);
    }
  }
  void backward(Context& context) {
    RecurrenceOutputGrads up;
    up.o = Tensor(d_o.view());
    up.final_state = d_final.view;
    RecurrenceInputGrads grads;
    grads.q = dq.view();
    grads.k = dk.view();
    grads.v = dv.view();
    grads.initial_state = d_initial.view;
    FeatureMapGrads map_grads;
    FeatureMapWeightGrads* sides[] = {&map_grads.q, &map_grads.k};
    for (int side = 0; side < 2; ++side) {
      sides[side]->w1 = weight(dw[side][0], side, 0);
      sides[side]->b1 = weight(dw[side][1], side, 1);
      sides[side]->w2 = weight(dw[side][2], side, 2);
      sides[side]->b2 = weight(dw[side][3], side, 3);
    }
    if (data.c.decay) {
      retention_backward(context, retention_options(), inputs(), nullptr, up, grads);
    } else {
      linear_attention_backward(context, linear_options(), inputs(), nullptr, up, grads,
                                &map_grads);
    }
  }
};

}  // namespace ouzel::test
