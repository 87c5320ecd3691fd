// Rows of keys with folded decays, in groups of 32 keys (rows_backward.h), and back.
#include "src/kernels/rows_backward.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_fold.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::CappedTag<float, 16>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_MIN(HWY_LANES(float), 16);
// Below this in any channel the running product is folded into the state.
constexpr float kLeast = 0x1p-60f;

// 1 / x to about an ulp: a division would take as long as all else that is done to a row.
HWY_INLINE V reciprocal(D d, V x) {
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX2
  V y = hn::ApproximateReciprocal(x);
  for (int i = 0; i < (HWY_TARGET == HWY_AVX3 ? 1 : 2); ++i) {
    y = hn::MulAdd(y, hn::NegMulAdd(x, y, hn::Set(d, 1.0f)), y);
  }
  return y;
#else
  return hn::Div(hn::Set(d, 1.0f), x);
#endif
}

// Returns the least log decays.
V fold_group(const float* g, std::int64_t step, const Folds& f, std::int64_t group) {
  const D d;
  const V one = hn::Set(d, 1.0f);
  const auto log_decay = [&](std::int64_t t, std::int64_t i) HWY_ATTR {
    return f.per_key ? hn::Load(d, g + t * step + group * kKeyGroup + i) : hn::Set(d, g[t]);
  };
  float* lambda = f.lambda + group * (f.rows + 1) * kKeyGroup;
  float* inverse = f.inverse + group * (f.rows + 1) * kKeyGroup;
  float* factor = f.factor + group * f.rows * kKeyGroup;
  float* total = f.total + group * kKeyGroup;
  V least = hn::Zero(d);
  // Sums of logarithms above this make the product: rounded factors would drift, 3e-8 a row, where
  // a weak decay is the same in every row.
  V bound = hn::Set(d, -1.0f);
  for (std::int64_t i = 0; i < kKeyGroup; i += kLanes) {
    hn::Store(one, d, lambda + i);
    hn::Store(one, d, inverse + i);
    hn::Store(hn::Zero(d), d, total + i);
  }
  for (std::int64_t t = 0; t < f.rows; ++t, lambda += kKeyGroup, inverse += kKeyGroup) {
    bool fold = false;
    for (std::int64_t i = 0; i < kKeyGroup; i += kLanes) {
      const V x = log_decay(t, i);
      least = hn::Min(least, x);
      const V sum = hn::Add(hn::Load(d, total + i), x);
      hn::Store(sum, d, total + i);
      const auto weak = hn::Gt(sum, bound);
      const V factor = math::exp(d, hn::IfThenElse(weak, sum, x));
      const V next = hn::IfThenElse(weak, factor, hn::Mul(hn::Load(d, lambda + i), factor));
      hn::Store(next, d, lambda + kKeyGroup + i);
      hn::Store(reciprocal(d, next), d, inverse + kKeyGroup + i);
      fold = fold || !hn::AllFalse(d, hn::Lt(next, hn::Set(d, kLeast)));
    }
    f.fold[group * f.rows + t] = fold;
    if (!fold) continue;
    bound = hn::Set(d, 1.0f);  // the product begins anew, the sum does not
    for (std::int64_t i = 0; i < kKeyGroup; i += kLanes) {
      hn::Store(hn::Load(d, lambda + kKeyGroup + i), d, factor + t * kKeyGroup + i);
      hn::Store(one, d, lambda + kKeyGroup + i);
      hn::Store(one, d, inverse + kKeyGroup + i);
    }
  }
  return least;
}

// body(grouped vector's offset, row's offset or -1, factor's offset), in the order of the groups.
template <class Body>
HWY_INLINE void for_vectors(const GroupArgs& a, Body body) {
  for (std::int64_t group = 0; group < a.groups; ++group) {
    const std::int64_t factor =
        ((a.per_key ? group * (a.rows + 1) : 0) + (a.next ? 1 : 0)) * kKeyGroup;
    for (std::int64_t t = 0; t < a.rows; ++t) {
      const bool none = (t + 1) % a.every != 0;
      const std::int64_t row = t / a.every * a.pitch + group * kKeyGroup;
      for (std::int64_t i = 0; i < kKeyGroup; i += kLanes) {
        body((group * a.rows + t) * kKeyGroup + i, none ? -1 : row + i, factor + t * kKeyGroup + i);
      }
    }
  }
}

}  // namespace

float FoldDecays(const float* g, std::int64_t pitch, const Folds& folds) {
  const D d;
  V least = hn::Zero(d);
  for (std::int64_t group = 0; group < folds.groups; ++group) {
    least = hn::Min(least, fold_group(g, pitch, folds, group));
  }
  return hn::GetLane(hn::MinOfLanes(d, least));
}

void GroupRows(const GroupArgs& a, const float* in, float* out) {
  const D d;
  for_vectors(a, [&](std::int64_t grouped, std::int64_t row, std::int64_t factor) HWY_ATTR {
    const V x = row < 0 ? hn::Zero(d) : hn::Load(d, in + row);
    hn::Store(a.factor == nullptr ? x : hn::Mul(x, hn::Load(d, a.factor + factor)), d,
              out + grouped);
  });
}

void UngroupRows(const GroupArgs& a, const float* in, float* out) {
  const D d;
  for_vectors(a, [&](std::int64_t grouped, std::int64_t row, std::int64_t factor) HWY_ATTR {
    if (row < 0) return;
    const V x = hn::Load(d, in + grouped);
    hn::Store(a.factor == nullptr ? x : hn::Mul(x, hn::Load(d, a.factor + factor)), d, out + row);
  });
}

void SumKeys(std::int64_t rows, std::int64_t pitch, const float* in, float* out) {
  const D d;
  for (std::int64_t t = 0; t < rows; ++t, in += pitch) {
    V sum = hn::Zero(d);
    for (std::int64_t i = 0; i < pitch; i += kLanes) sum = hn::Add(sum, hn::Load(d, in + i));
    out[t] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

void GateSums(const GateArgs& a) {
  const D d;
  std::fill_n(a.sums, a.groups * kKeyGroup, 0.0f);
  const float *s = a.state, *g = a.grad;
  for (std::int64_t tile = 0; tile < a.value_tiles * a.groups; ++tile) {
    float* sums = a.sums + tile % a.groups * kKeyGroup;
    for (std::int64_t i = 0; i < kKeyGroup; i += kLanes) {
      V sum = hn::Load(d, sums + i);
      for (std::int64_t j = 0; j < kStateTile; j += kKeyGroup) {
        sum = hn::MulAdd(hn::Load(d, s + i + j), hn::Load(d, g + i + j), sum);
      }
      hn::Store(sum, d, sums + i);
    }
    s += kStateTile;
    g += kStateTile;
  }
}

void GateGrads(const GateArgs& a) {
  const D d;
  const bool read_before = a.before && a.e == nullptr, erase_before = a.before && a.e != nullptr;
  const std::int64_t tokens = a.rows / a.every;
  for (std::int64_t i = 0; i < a.groups * kKeyGroup; i += kLanes) {
    V sum = hn::Load(d, a.sums + i);
    const auto product = [&](const float* x, const float* dx, std::int64_t row) HWY_ATTR {
      return hn::Mul(hn::Load(d, x + row * a.pitch + i), hn::Load(d, dx + row * a.pitch + i));
    };
    for (std::int64_t t = a.rows - 1; t >= 0; --t) {
      V read = hn::Zero(d);
      for (std::int64_t n = 0; (t + 1) % a.every == 0 && n < a.queries; ++n) {
        read = hn::Add(read, product(a.q, a.dq, n * tokens + t / a.every));
      }
      V change = read_before ? hn::Zero(d) : read;
      change = hn::Sub(change, product(a.k, a.dk, t));
      if (a.b != nullptr) change = hn::Sub(change, product(a.b, a.db, t));
      V erased = a.e == nullptr ? hn::Zero(d) : product(a.e, a.de, t);
      if (!erase_before) change = hn::Add(change, erased);
      sum = hn::Add(sum, change);
      hn::Store(sum, d, a.dg + t * a.pitch + i);
      if (erase_before) sum = hn::Add(sum, erased);
      if (read_before) sum = hn::Add(sum, read);
    }
  }
}

void Exponentials(std::int64_t count, const float* x, float* y) {
  const D d;
  for (std::int64_t i = 0; i < count; i += kLanes) {
    hn::Store(math::exp(d, hn::Load(d, x + i)), d, y + i);
  }
}

void BonusGrads(const BonusArgs& a) {
  const D d;
  for (std::int64_t t = 0; t < a.rows; ++t) {
    const float *q = a.q + t * a.key_pitch, *k = a.k + t * a.key_pitch;
    const float *v = a.v + t * a.value_pitch, *dout = a.output_grad + t * a.value_pitch;
    V products = hn::Zero(d), weights = hn::Zero(d);
    for (std::int64_t i = 0; i < a.value_pitch; i += kLanes) {
      products = hn::MulAdd(hn::Load(d, v + i), hn::Load(d, dout + i), products);
    }
    products = hn::SumOfLanes(d, products);  // v . do
    float *dq = a.dq + t * a.key_pitch, *dk = a.dk + t * a.key_pitch;
    for (std::int64_t i = 0; i < a.key_pitch; i += kLanes) {
      const V qi = hn::Load(d, q + i), ki = hn::Load(d, k + i), ui = hn::Load(d, a.u + i);
      const V uk = hn::Mul(ui, ki);
      weights = hn::MulAdd(qi, uk, weights);
      hn::Store(hn::MulAdd(uk, products, hn::Load(d, dq + i)), d, dq + i);
      hn::Store(hn::MulAdd(hn::Mul(ui, qi), products, hn::Load(d, dk + i)), d, dk + i);
      hn::Store(hn::MulAdd(hn::Mul(qi, ki), products, hn::Load(d, a.du + i)), d, a.du + i);
    }
    weights = hn::SumOfLanes(d, weights);  // q . (u * k)
    float* dv = a.dv + t * a.value_pitch;
    for (std::int64_t i = 0; i < a.value_pitch; i += kLanes) {
      hn::Store(hn::MulAdd(weights, hn::Load(d, dout + i), hn::Load(d, dv + i)), d, dv + i);
    }
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(FoldDecays);
HWY_EXPORT(GroupRows);
HWY_EXPORT(UngroupRows);
HWY_EXPORT(SumKeys);
HWY_EXPORT(GateSums);
HWY_EXPORT(GateGrads);
HWY_EXPORT(Exponentials);
HWY_EXPORT(BonusGrads);
float fold_decays(Isa isa, const float* g, std::int64_t pitch, const Folds& folds) {
  return OUZEL_DISPATCH(isa, FoldDecays)(g, pitch, folds);
}
void group_rows(Isa isa, const GroupArgs& args, const float* in, float* out) {
  OUZEL_DISPATCH(isa, GroupRows)(args, in, out);
}
void ungroup_rows(Isa isa, const GroupArgs& args, const float* in, float* out) {
  OUZEL_DISPATCH(isa, UngroupRows)(args, in, out);
}
void sum_keys(Isa isa, std::int64_t rows, std::int64_t pitch, const float* in, float* out) {
  OUZEL_DISPATCH(isa, SumKeys)(rows, pitch, in, out);
}
void gate_sums(Isa isa, const GateArgs& args) { OUZEL_DISPATCH(isa, GateSums)(args); }
void gate_grads(Isa isa, const GateArgs& args) { OUZEL_DISPATCH(isa, GateGrads)(args); }
void exponentials(Isa isa, std::int64_t count, const float* x, float* y) {
  OUZEL_DISPATCH(isa, Exponentials)(count, x, y);
}
void bonus_grads(Isa isa, const BonusArgs& args) { OUZEL_DISPATCH(isa, BonusGrads)(args); }
}  // namespace ouzel
#endif
