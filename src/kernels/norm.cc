// One group of D features at a time: a pass for the sum, a pass for the result, the second from the
// first-level cache.
#include "src/kernels/norm.h"

#include <cmath>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/norm.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"
#include "src/kernels/math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// What a gate is worth, and its slope.
struct NoGate {
  static constexpr bool kGate = false, kFirst = false;
};
template <bool kIsFirst>
struct Silu {
  static constexpr bool kGate = true, kFirst = kIsFirst;
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V value(D d, V g) {
    return math::silu(d, g);
  }
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V slope(D d, V g, V& value) {
    const V s = math::sigmoid(d, g);
    value = hn::Mul(g, s);
    return hn::MulAdd(value, hn::Sub(hn::Set(d, 1.0f), s), s);  // s + g s (1 - s)
  }
};
template <bool kIsFirst>
struct Sigmoid {
  static constexpr bool kGate = true, kFirst = kIsFirst;
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V value(D d, V g) {
    return math::sigmoid(d, g);
  }
  template <class D, class V = hn::Vec<D>>
  static HWY_INLINE V slope(D d, V g, V& value) {
    value = math::sigmoid(d, g);
    return hn::NegMulAdd(value, value, value);
  }
};

template <class T>
HWY_INLINE const T* RowOf(const NormRows<const void>& rows, int64_t row, int64_t group) {
  return static_cast<const T*>(rows.data) + row * rows.row + group * rows.group;
}
template <class T>
HWY_INLINE T* RowOf(const NormRows<void>& rows, int64_t row, int64_t group) {
  return static_cast<T*>(rows.data) + row * rows.row + group * rows.group;
}

// Calls f(gate, weight, element), types of above, std::bool_constant and that of the rows.
template <class Norm, class F>
HWY_INLINE void ForKind(const Norm& n, F&& f) {
  const auto with_type = [&](auto gate, auto weight) HWY_ATTR {
    if (n.dtype == DType::kBF16) return f(gate, weight, BFloat16());
    if (n.dtype == DType::kF16) return f(gate, weight, Float16());
    f(gate, weight, float());
  };
  const auto with_weight = [&](auto gate) HWY_ATTR {
    n.weight != nullptr ? with_type(gate, std::true_type()) : with_type(gate, std::false_type());
  };
  const auto with_order = [&](auto gate, auto gate_first) HWY_ATTR {
    n.options.gate_first ? with_weight(gate_first) : with_weight(gate);
  };
  if (n.gate.data == nullptr) {
    with_weight(NoGate());
  } else if (n.options.activation == GateActivation::kSilu) {
    with_order(Silu<false>(), Silu<true>());
  } else {
    with_order(Sigmoid<false>(), Sigmoid<true>());
  }
}

// What stands between the two passes is float32: in `work`, or in the result where that is.
template <class T>
HWY_INLINE float* Between(T* result, float* work) {
  if constexpr (std::is_same_v<T, float>) {
    return result;
  } else {
    return work;
  }
}

template <class Gate, bool kWeight, class T>
void Forward(const RmsNorm& n, int64_t begin, int64_t end, float* work) {
  const hn::ScalableTag<float> d;
  const int64_t groups = n.groups, size = n.size;
  const int64_t weight_pitch = n.options.weight_per_group ? size : 0;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const T* x = RowOf<T>(n.x, row, group);
      const T* gate = Gate::kGate ? RowOf<T>(n.gate, row, group) : nullptr;
      const float* weight = kWeight ? n.weight + group * weight_pitch : nullptr;
      T* y = RowOf<T>(n.y, row, group);
      float* between = Between(y, work);
      auto sum = hn::Zero(d);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        auto v = lanes.Load(d, x + i);
        if constexpr (Gate::kFirst) {
          v = hn::Mul(v, Gate::value(d, lanes.Load(d, gate + i)));
          lanes.Store(v, d, between + i);
        }
        sum = hn::MulAdd(v, v, sum);
      });
      const float mean = hn::GetLane(hn::SumOfLanes(d, sum)) / static_cast<float>(size);
      const float rstd = 1.0f / std::sqrt(mean + n.options.eps);
      if (n.rstd != nullptr) n.rstd[row * groups + group] = rstd;
      const auto scale = hn::Set(d, rstd);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        auto v = hn::Mul(Gate::kFirst ? lanes.Load(d, between + i) : lanes.Load(d, x + i), scale);
        if constexpr (kWeight) v = hn::Mul(v, lanes.Load(d, weight + i));
        if constexpr (Gate::kGate && !Gate::kFirst) {
          v = hn::Mul(v, Gate::value(d, lanes.Load(d, gate + i)));
        }
        lanes.Store(v, d, y + i);
      });
    }
  }
}

void RmsNormRows(const RmsNorm& n, int64_t begin, int64_t end, float* work) {
  ForKind(n, [&](auto gate, auto weight, auto element) HWY_ATTR {
    Forward<decltype(gate), decltype(weight)::value, decltype(element)>(n, begin, end, work);
  });
}

// With a = act(g), a' its slope and u what is normalised, x or (gate first) x a, times rstd:
//
//     gate last   t = dy w a;  dx = rstd (t - u mean(t u));  dw = sum dy a u;  dg = dy w u a'
//     gate first  t = dy w;    e = rstd (t - u mean(t u));   dw = sum dy u;    dx = e a, dg = e x
//     a'
//
// t is kept between the passes, in dx or in `work`.
template <class Gate, bool kWeight, class T>
void Backward(const RmsNormBackward& n, int64_t begin, int64_t end, float* work,
              float* HWY_RESTRICT dweights) {
  const hn::ScalableTag<float> d;
  const int64_t groups = n.groups, size = n.size;
  const int64_t weight_pitch = n.options.weight_per_group ? size : 0;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t group = 0; group < groups; ++group) {
      const T* x = RowOf<T>(n.x, row, group);
      const T* gate = Gate::kGate ? RowOf<T>(n.gate, row, group) : nullptr;
      const float* weight = kWeight ? n.weight + group * weight_pitch : nullptr;
      float* dweight = kWeight && dweights != nullptr ? dweights + group * weight_pitch : nullptr;
      const T* dy = RowOf<T>(n.dy, row, group);
      T* dx = RowOf<T>(n.dx, row, group);
      T* dgate = Gate::kGate ? RowOf<T>(n.dgate, row, group) : nullptr;
      float* between = Between(dx, work);
      const float rstd = n.rstd[row * groups + group];
      const auto scale = hn::Set(d, rstd);
      auto dot = hn::Zero(d);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        auto u = hn::Mul(lanes.Load(d, x + i), scale);
        auto t = lanes.Load(d, dy + i);
        if constexpr (Gate::kFirst) {
          u = hn::Mul(u, Gate::value(d, lanes.Load(d, gate + i)));
        } else if constexpr (Gate::kGate) {
          auto value = hn::Zero(d);
          auto dg = Gate::slope(d, lanes.Load(d, gate + i), value);
          dg = hn::Mul(hn::Mul(t, u), dg);
          if constexpr (kWeight) dg = hn::Mul(dg, lanes.Load(d, weight + i));
          lanes.Store(dg, d, dgate + i);
          t = hn::Mul(t, value);
        }
        if constexpr (kWeight) {
          if (dweight != nullptr) {
            lanes.Store(hn::MulAdd(t, u, lanes.Load(d, dweight + i)), d, dweight + i);
          }
          t = hn::Mul(t, lanes.Load(d, weight + i));
        }
        dot = hn::MulAdd(t, u, dot);
        lanes.Store(t, d, between + i);
      });
      const float mean = hn::GetLane(hn::SumOfLanes(d, dot)) / static_cast<float>(size);
      const auto back = hn::Set(d, -mean * rstd);
      ForVectors(d, size, [&](int64_t i, auto lanes) HWY_ATTR {
        const auto v = lanes.Load(d, x + i);
        const auto t = lanes.Load(d, between + i);
        if constexpr (Gate::kFirst) {
          auto value = hn::Zero(d);
          const auto slope = Gate::slope(d, lanes.Load(d, gate + i), value);
          const auto e = hn::Mul(hn::MulAdd(hn::Mul(v, value), back, t), scale);
          lanes.Store(hn::Mul(e, value), d, dx + i);
          lanes.Store(hn::Mul(hn::Mul(e, v), slope), d, dgate + i);
        } else {
          lanes.Store(hn::Mul(hn::MulAdd(v, back, t), scale), d, dx + i);
        }
      });
    }
  }
}

void RmsNormBackwardRows(const RmsNormBackward& n, int64_t begin, int64_t end, float* work,
                         float* dweight) {
  ForKind(n, [&](auto gate, auto weight, auto element) HWY_ATTR {
    Backward<decltype(gate), decltype(weight)::value, decltype(element)>(n, begin, end, work,
                                                                         dweight);
  });
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(RmsNormRows);
HWY_EXPORT(RmsNormBackwardRows);

void rms_norm_rows(Isa isa, const RmsNorm& norm, std::int64_t begin, std::int64_t end,
                   float* work) {
  OUZEL_DISPATCH(isa, RmsNormRows)(norm, begin, end, work);
}
void rms_norm_backward_rows(Isa isa, const RmsNormBackward& norm, std::int64_t begin,
                            std::int64_t end, float* work, float* dweight) {
  OUZEL_DISPATCH(isa, RmsNormBackwardRows)(norm, begin, end, work, dweight);
}

}  // namespace ouzel
#endif
