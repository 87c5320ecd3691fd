// One token: S and o in one pass over the caller's state; and the small products of learned feature
// maps.
#include "src/kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_step.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);

// Up to kVectors vectors of columns, `width` of them valid.
template <int kVectors, bool kResidue>
void step_columns(const StepArgs& a, std::int64_t column, std::int64_t width) {
  const D d;
  V v[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    v[j] = load_first(d, a.v + column + j * kLanes, width - j * kLanes);
  }
  const bool reset = a.decay == 0.0f, near_one = a.decay_minus_1 > -0.5f;
  const V shrink = hn::Set(d, near_one ? a.decay_minus_1 : a.decay);
  for (std::int64_t r = 0; r < a.queries; ++r) {
    V o[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) o[j] = hn::Zero(d);
    for (std::int64_t i = 0; i < a.keys; ++i) {
      float* row = a.s + i * a.key_stride + column;
      const V k = hn::Set(d, a.k[i]);
      const V q = hn::Set(d, a.q[r * a.q_stride + i]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const std::int64_t left = width - j * kLanes;
        V s = load_first(d, row + j * kLanes, left);
        if (r == 0) {
          if (reset) s = hn::Zero(d);
          if constexpr (kResidue) {
            float* residue = a.s_residue + i * a.key_stride + column + j * kLanes;
            const V low_before = load_first(d, residue, left);
            // All that changes, in one small number; then an exact addition.
            const V change = hn::MulAdd(
                k, v[j], hn::MulAdd(s, shrink, hn::MulAdd(low_before, shrink, low_before)));
            const V sum = hn::Add(s, change);
            const V change_part = hn::Sub(sum, s);
            const V s_part = hn::Sub(sum, change_part);
            const V low = hn::Add(hn::Sub(s, s_part), hn::Sub(change, change_part));
            store_first(d, low, residue, left);
            s = sum;
          } else {
            s = near_one ? hn::MulAdd(s, shrink, s) : hn::Mul(s, shrink);
            s = hn::MulAdd(k, v[j], s);
          }
          store_first(d, s, row + j * kLanes, left);
        }
        o[j] = hn::MulAdd(q, s, o[j]);
      }
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      store_first(d, hn::Mul(o[j], hn::Set(d, a.factor[r])),
                  a.o + r * a.o_stride + column + j * kLanes, width - j * kLanes);
    }
  }
}

template <bool kResidue>
void step(const StepArgs& a) {
  constexpr int kVectors = 4;
  for (std::int64_t column = 0; column < a.values; column += kVectors * kLanes) {
    step_columns<kVectors, kResidue>(a, column, a.values - column);
  }
}

// Rows and vectors of a product at a time: three by four take all 16 registers of AVX2.
constexpr int kProductRows = HWY_TARGET == HWY_AVX3 ? 8 : 3;
constexpr int kProductVectors = HWY_TARGET == HWY_AVX3 ? 1 : 4;

template <int kRows, int kVectors>
void product_tile(const SmallProductArgs& p, std::int64_t row, std::int64_t column) {
  const D d;
  V c[kRows][kVectors];
  float* to = p.c + row * p.c_row + column;
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t n = j * kLanes;
      c[i][j] = p.add               ? hn::Load(d, to + i * p.c_row + n)
                : p.bias != nullptr ? hn::Load(d, p.bias + column + n)
                                    : hn::Zero(d);
    }
  }
  const float *a = p.a + row * p.a_row, *b = p.b + column;
  const std::int64_t a_row = p.a_row, a_column = p.a_column, b_row = p.b_row;
  for (std::int64_t k = 0; k < p.depth; ++k, a += a_column, b += b_row) {
    V x[kRows];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) x[i] = hn::Set(d, a[i * a_row]);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V y = hn::Load(d, b + j * kLanes);
      OUZEL_UNROLL
      for (int i = 0; i < kRows; ++i) c[i][j] = hn::MulAdd(x[i], y, c[i][j]);
    }
  }
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) hn::Store(c[i][j], d, to + i * p.c_row + j * kLanes);
  }
}

template <int kRows>
void product_rows(const SmallProductArgs& p, std::int64_t row) {
  std::int64_t n = 0;
  if constexpr (kProductVectors > 1) {
    constexpr std::int64_t kStep = kProductVectors * kLanes;
    for (; n + kStep <= p.columns; n += kStep) product_tile<kRows, kProductVectors>(p, row, n);
  }
  for (; n < p.columns; n += kLanes) product_tile<kRows, 1>(p, row, n);
}

}  // namespace

void RecurrenceStep(const StepArgs& a) { a.s_residue != nullptr ? step<true>(a) : step<false>(a); }

void SmallProduct(const SmallProductArgs& p) {
  std::int64_t row = 0;
  for (; row + kProductRows <= p.rows; row += kProductRows) product_rows<kProductRows>(p, row);
  for (; row < p.rows; ++row) product_rows<1>(p, row);
}

void MatrixVector(std::int64_t rows, std::int64_t columns, const float* w, std::int64_t w_row,
                  const float* x, const float* bias, float* y) {
  const D d;
  for (std::int64_t f = 0; f < rows; ++f) {
    V sum = hn::Zero(d);
    for (std::int64_t i = 0; i < columns; i += kLanes) {
      sum = hn::MulAdd(load_first(d, w + f * w_row + i, columns - i),
                       load_first(d, x + i, columns - i), sum);
    }
    y[f] = hn::GetLane(hn::SumOfLanes(d, sum)) + (bias != nullptr ? bias[f] : 0.0f);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceStep);
HWY_EXPORT(SmallProduct);
HWY_EXPORT(MatrixVector);
void recurrence_step(Isa isa, const StepArgs& args) { OUZEL_DISPATCH(isa, RecurrenceStep)(args); }
void small_product(Isa isa, const SmallProductArgs& args) {
  OUZEL_DISPATCH(isa, SmallProduct)(args);
}
void matrix_vector(Isa isa, std::int64_t rows, std::int64_t columns, const float* w,
                   std::int64_t w_row, const float* x, const float* bias, float* y) {
  OUZEL_DISPATCH(isa, MatrixVector)(rows, columns, w, w_row, x, bias, y);
}
}  // namespace ouzel
#endif
