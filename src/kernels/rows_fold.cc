// Rows of keys with folded decays (rows_backward.h), and their gradients back.
#include "src/kernels/rows_backward.h"

#include <algorithm>
#include <limits>

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
constexpr float kInfinity = std::numeric_limits<float>::infinity();

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

// body(i) for the vectors of keys, which are whole groups.
template <class Body>
HWY_INLINE void for_keys(std::int64_t keys, Body body) {
  for (std::int64_t i = 0; i < keys; i += kKeyGroup) {
    OUZEL_UNROLL
    for (std::int64_t j = 0; j < kKeyGroup; j += kLanes) body(i + j);
  }
}

// A row times its factor.
HWY_INLINE void fold_row(const FoldRowsArgs& a, std::int64_t t, const float* in, float* out) {
  const D d;
  const std::int64_t keys = a.keys;
  if (a.factor == nullptr) {
    for_keys(keys, [&](std::int64_t i) HWY_ATTR { hn::Store(hn::Load(d, in + i), d, out + i); });
    return;
  }
  const float* factor = a.factor + (t + (a.next ? 1 : 0)) * a.folds->pitch;
  if (a.folds->per_key) {
    for_keys(keys, [&](std::int64_t i) HWY_ATTR {
      hn::Store(hn::Mul(hn::Load(d, in + i), hn::Load(d, factor + i)), d, out + i);
    });
  } else {
    const V f = hn::Load(d, factor);
    for_keys(keys, [&](std::int64_t i)
                       HWY_ATTR { hn::Store(hn::Mul(hn::Load(d, in + i), f), d, out + i); });
  }
}

}  // namespace

float LeastDecay(const float* g, const Folds& f) {
  const D d;
  const std::int64_t width = f.per_key ? f.width : f.rows, rows = f.per_key ? f.rows : 1;
  V least = hn::Zero(d);
  auto nan = hn::FirstN(d, 0);
  const auto look = [&](V x) HWY_ATTR {
    least = hn::Min(least, x);
    nan = hn::Or(nan, hn::Not(hn::Eq(x, x)));
  };
  for (std::int64_t t = 0; t < rows; ++t, g += f.pitch) {
    std::int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) look(hn::Load(d, g + i));
    for (; i < width; ++i) look(hn::Set(d, g[i]));
  }
  return hn::AllFalse(d, nan) ? hn::GetLane(hn::MinOfLanes(d, least)) : -kInfinity;
}

namespace {

// body(row, log decay, the sum of those of the key up to the row, store) for each vector, where
// store(x, to, row) takes an array [..][pitch]; a decay per head is computed once.
template <bool kPerKey, class Body>
HWY_INLINE void for_each_decay(const float* g, const Folds f, Body body) {
  const D d;
  const std::int64_t computed = kPerKey ? f.width : kLanes, copies = kPerKey ? kLanes : f.width;
  for (std::int64_t i = 0; i < computed; i += kLanes) {
    const auto store = [&](V x, float* to, std::int64_t row) HWY_ATTR {
      to += row * f.pitch + i;
      if constexpr (kPerKey) {
        hn::Store(x, d, to);
      } else {
        for (std::int64_t c = 0; c < copies; c += kLanes) hn::Store(x, d, to + c);
      }
    };
    V sum = hn::Zero(d);
    for (std::int64_t t = 0; t < f.rows; ++t) {
      const V x = kPerKey ? hn::Load(d, g + t * f.pitch + i) : hn::Set(d, g[t]);
      sum = hn::Add(sum, x);
      body(t, x, sum, store);
    }
    store(sum, f.total, 0);
  }
}
template <class Body>
HWY_INLINE void for_each_decay(const float* g, const Folds& f, Body body) {
  f.per_key ? for_each_decay<true>(g, f, body) : for_each_decay<false>(g, f, body);
}

}  // namespace

void FoldDecays(const float* g, const Folds& folds) {
  const Folds f = folds;
  const D d;
  V lambda = hn::Set(d, 1.0f);
  for_each_decay(g, f, [&](std::int64_t t, V x, const V& sum, auto store) HWY_ATTR {
    if (t == 0) {
      lambda = hn::Set(d, 1.0f);
      store(lambda, f.lambda, 0);
      store(lambda, f.inverse, 0);
    }
    // Sums of logarithms above this make the product: rounded factors would drift, 3e-8 a row,
    // where a weak decay is the same in every row.
    const auto weak = hn::Gt(sum, hn::Set(d, -1.0f));
    const V decay = math::exp(d, hn::IfThenElse(weak, sum, x));
    lambda = hn::IfThenElse(weak, decay, hn::Mul(lambda, decay));
    store(lambda, f.lambda, t + 1);
    store(reciprocal(d, lambda), f.inverse, t + 1);
  });
}

bool RowDecays(const float* g, const Folds& folds) {
  const Folds f = folds;
  const D d;
  auto zero = hn::FirstN(d, 0);
  for_each_decay(g, f, [&](std::int64_t t, V x, V& sum, auto store) HWY_ATTR {
    const V decay = math::exp(d, x);
    const auto reset = hn::Eq(decay, hn::Zero(d));
    zero = hn::Or(zero, reset);
    // A reset begins the sum anew, which may be NaN.
    sum = hn::IfThenElse(reset, x, sum);
    store(decay, f.factor, t);
  });
  // What fills up the keys is 0, but for NaN: it decays to nothing.
  if (f.per_key) {
    std::fill(f.total + f.keys, f.total + f.width, -kInfinity);
    for (std::int64_t t = 0; t < f.rows; ++t) {
      std::fill(f.factor + t * f.pitch + f.keys, f.factor + t * f.pitch + f.width, 0.0f);
    }
  }
  return !hn::AllFalse(d, zero);
}

void FoldRows(const FoldRowsArgs& a, const float* in, float* out) {
  for (std::int64_t t = 0; t < a.rows; ++t, in += a.pitch, out += a.pitch) {
    for (std::int64_t n = 1; n < a.every; ++n, ++t, out += a.pitch) std::fill_n(out, a.keys, 0.0f);
    fold_row(a, t, in, out);
  }
}

void UnfoldRows(const FoldRowsArgs& a, const float* in, float* out) {
  for (std::int64_t t = a.every - 1; t < a.rows; t += a.every, out += a.pitch) {
    fold_row(a, t, in + t * a.pitch, out);
  }
}

void SumKeys(const FoldRowsArgs& a, const float* in, float* out) {
  const D d;
  for (std::int64_t t = 0; t < a.rows; ++t, in += a.pitch) {
    V sum = hn::Zero(d);
    for (std::int64_t i = 0; i < a.keys; i += kLanes) sum = hn::Add(sum, hn::Load(d, in + i));
    out[t] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

namespace {

enum class Erase { kNone, kCollinear, kGeneral };

// kOne: a query a row.
template <Erase kErase, bool kBefore, bool kOne>
void gate_grads(const GateArgs a) {
  const D d;
  constexpr bool kErases = kErase != Erase::kNone;
  constexpr bool kReadBefore = kBefore && !kErases, kEraseBefore = kBefore && kErases;
  const std::int64_t tokens = a.rows / a.every, pitch = a.pitch;
  const auto product = [&](const float* x, const float* dx, std::int64_t at)
                           HWY_ATTR { return hn::Mul(hn::Load(d, x + at), hn::Load(d, dx + at)); };
  for (std::int64_t i = 0; i < a.keys; i += kLanes) {
    // Where the queries' token stands, and how many rows from here it has its own: divisions would
    // take longer.
    std::int64_t query = tokens * pitch + i, until = 1;
    const float* block = a.sums + (a.rows - 1) / kGateBlock * pitch + i;
    std::int64_t at = (a.rows - 1) * pitch + i, left = (a.rows - 1) % kGateBlock + 1;
    for (; at >= 0; left = kGateBlock, block -= pitch) {
      V sum = hn::Load(d, block);
      for (; left > 0; --left, at -= pitch) {
        V read = hn::Zero(d);
        if constexpr (kOne) {
          read = product(a.q, a.dq, at);
        } else if (--until == 0) {
          until = a.every;
          query -= pitch;
          for (std::int64_t n = 0, x = query; n < a.queries; ++n, x += tokens * pitch) {
            read = hn::Add(read, product(a.q, a.dq, x));
          }
        }
        V change = kReadBefore ? hn::Zero(d) : read;
        change = hn::Sub(change, product(a.k, a.dk, at));
        if constexpr (kErase == Erase::kGeneral) change = hn::Sub(change, product(a.b, a.db, at));
        V erased = hn::Zero(d);
        if constexpr (kErases) erased = product(a.e, a.de, at);
        if constexpr (kErases && !kEraseBefore) change = hn::Add(change, erased);
        sum = hn::Add(sum, change);
        hn::Store(sum, d, a.dg + at);
        if constexpr (kEraseBefore) sum = hn::Add(sum, erased);
        if constexpr (kReadBefore) sum = hn::Add(sum, read);
      }
    }
  }
}

template <Erase kErase, bool kBefore>
void gate_grads(const GateArgs& a) {
  a.queries == 1 && a.every == 1 ? gate_grads<kErase, kBefore, true>(a)
                                 : gate_grads<kErase, kBefore, false>(a);
}
template <Erase kErase>
void gate_grads(const GateArgs& a) {
  a.before ? gate_grads<kErase, true>(a) : gate_grads<kErase, false>(a);
}

}  // namespace

void GateGrads(const GateArgs& a) {
  if (a.e == nullptr) {
    gate_grads<Erase::kNone>(a);
  } else if (a.b == nullptr) {
    gate_grads<Erase::kCollinear>(a);
  } else {
    gate_grads<Erase::kGeneral>(a);
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
HWY_EXPORT(LeastDecay);
HWY_EXPORT(FoldDecays);
HWY_EXPORT(RowDecays);
HWY_EXPORT(FoldRows);
HWY_EXPORT(UnfoldRows);
HWY_EXPORT(SumKeys);
HWY_EXPORT(GateGrads);
HWY_EXPORT(Exponentials);
HWY_EXPORT(BonusGrads);
float least_decay(Isa isa, const float* g, const Folds& folds) {
  return OUZEL_DISPATCH(isa, LeastDecay)(g, folds);
}
void fold_decays(Isa isa, const float* g, const Folds& folds) {
  OUZEL_DISPATCH(isa, FoldDecays)(g, folds);
}
bool row_decays(Isa isa, const float* g, const Folds& folds) {
  return OUZEL_DISPATCH(isa, RowDecays)(g, folds);
}
void fold_rows(Isa isa, const FoldRowsArgs& args, const float* in, float* out) {
  OUZEL_DISPATCH(isa, FoldRows)(args, in, out);
}
void unfold_rows(Isa isa, const FoldRowsArgs& args, const float* in, float* out) {
  OUZEL_DISPATCH(isa, UnfoldRows)(args, in, out);
}
void sum_keys(Isa isa, const FoldRowsArgs& args, const float* in, float* out) {
  OUZEL_DISPATCH(isa, SumKeys)(args, in, out);
}
void gate_grads(Isa isa, const GateArgs& args) { OUZEL_DISPATCH(isa, GateGrads)(args); }
void exponentials(Isa isa, std::int64_t count, const float* x, float* y) {
  OUZEL_DISPATCH(isa, Exponentials)(count, x, y);
}
void bonus_grads(Isa isa, const BonusArgs& args) { OUZEL_DISPATCH(isa, BonusGrads)(args); }
}  // namespace ouzel
#endif
