#include "src/kernels/dense64.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/dense64.cc"
#include "src/kernels/targets.h"

#include "hwy/foreach_target.h"
#include "hwy/highway.h"

#include "src/kernels/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using D = hn::ScalableTag<double>;
using V = hn::Vec<D>;

double Dot(const double* x, const double* y, int64_t n) {
  const D d;
  V sum = hn::Zero(d);
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    sum = hn::MulAdd(lanes.Load(d, x + i), lanes.Load(d, y + i), sum);
  });
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

void AddScaled(double scale, const double* x, int64_t n, double* y) {
  const D d;
  const V factor = hn::Set(d, scale);
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    lanes.Store(hn::MulAdd(factor, lanes.Load(d, x + i), lanes.Load(d, y + i)), d, y + i);
  });
}

void AddProducts(const double* x, const double* f, int64_t n, double* y) {
  const D d;
  ForVectors(d, n, [&](int64_t i, auto lanes) HWY_ATTR {
    const V product = hn::Mul(lanes.Load(d, x + i), lanes.Load(d, f + i));
    lanes.Store(hn::Add(product, lanes.Load(d, y + i)), d, y + i);
  });
}

void AddProduct(const Matrix64& a, const double* x, double* y) {
  for (int64_t r = 0; r < a.rows; ++r) y[r] += Dot(a.data + r * a.columns, x, a.columns);
}
void AddTransposedProduct(const Matrix64& a, const double* x, double* y) {
  for (int64_t r = 0; r < a.rows; ++r) AddScaled(x[r], a.data + r * a.columns, a.columns, y);
}
void AddOuter(double scale, const double* x, const double* y, const Matrix64& a) {
  for (int64_t r = 0; r < a.rows; ++r) {
    AddScaled(scale * x[r], y, a.columns, a.data + r * a.columns);
  }
}
// A factor of 0 drops what it scales, even NaN.
void ScaleRows(const double* f, const Matrix64& a) {
  const D d;
  for (int64_t r = 0; r < a.rows; ++r) {
    double* row = a.data + r * a.columns;
    const V factor = hn::Set(d, f[r]);
    const auto is_zero = hn::Eq(factor, hn::Zero(d));
    ForVectors(d, a.columns, [&](int64_t i, auto lanes) HWY_ATTR {
      const V product = hn::Mul(factor, lanes.Load(d, row + i));
      lanes.Store(hn::IfThenZeroElse(is_zero, product), d, row + i);
    });
  }
}
void ScaleColumns(const double* f, const Matrix64& a) {
  const D d;
  for (int64_t r = 0; r < a.rows; ++r) {
    double* row = a.data + r * a.columns;
    ForVectors(d, a.columns, [&](int64_t i, auto lanes) HWY_ATTR {
      const V factor = lanes.Load(d, f + i);
      const V product = hn::Mul(factor, lanes.Load(d, row + i));
      lanes.Store(hn::IfThenZeroElse(hn::Eq(factor, hn::Zero(d)), product), d, row + i);
    });
  }
}
void AddRowProducts(const Matrix64& a, const Matrix64& b, double* y) {
  for (int64_t r = 0; r < a.rows; ++r) {
    y[r] += Dot(a.data + r * a.columns, b.data + r * a.columns, a.columns);
  }
}
void AddColumnProducts(const Matrix64& a, const Matrix64& b, double* y) {
  for (int64_t r = 0; r < a.rows; ++r) {
    AddProducts(a.data + r * a.columns, b.data + r * a.columns, a.columns, y);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {

HWY_EXPORT(Dot);
HWY_EXPORT(AddScaled);
HWY_EXPORT(AddProduct);
HWY_EXPORT(AddTransposedProduct);
HWY_EXPORT(AddOuter);
HWY_EXPORT(ScaleRows);
HWY_EXPORT(ScaleColumns);
HWY_EXPORT(AddRowProducts);
HWY_EXPORT(AddColumnProducts);

void add_product(Isa isa, const Matrix64& a, const double* x, double* y) {
  OUZEL_DISPATCH(isa, AddProduct)(a, x, y);
}
void add_transposed_product(Isa isa, const Matrix64& a, const double* x, double* y) {
  OUZEL_DISPATCH(isa, AddTransposedProduct)(a, x, y);
}
void add_outer(Isa isa, double scale, const double* x, const double* y, const Matrix64& a) {
  OUZEL_DISPATCH(isa, AddOuter)(scale, x, y, a);
}
void scale_rows(Isa isa, const double* f, const Matrix64& a) {
  OUZEL_DISPATCH(isa, ScaleRows)(f, a);
}
void scale_columns(Isa isa, const double* f, const Matrix64& a) {
  OUZEL_DISPATCH(isa, ScaleColumns)(f, a);
}
void add_row_products(Isa isa, const Matrix64& a, const Matrix64& b, double* y) {
  OUZEL_DISPATCH(isa, AddRowProducts)(a, b, y);
}
void add_column_products(Isa isa, const Matrix64& a, const Matrix64& b, double* y) {
  OUZEL_DISPATCH(isa, AddColumnProducts)(a, b, y);
}
double dot(Isa isa, const double* x, const double* y, std::int64_t n) {
  return OUZEL_DISPATCH(isa, Dot)(x, y, n);
}
void add_scaled(Isa isa, double scale, const double* x, std::int64_t n, double* y) {
  OUZEL_DISPATCH(isa, AddScaled)(scale, x, n, y);
}

}  // namespace ouzel
#endif
