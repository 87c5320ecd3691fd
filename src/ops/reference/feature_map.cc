#include "src/ops/reference/feature_map.h"

#include <cmath>
#include <cstddef>
#include <utility>

#include "src/ops/reference/autodiff.h"

namespace ouzel::reference {
namespace {

using Int = std::int64_t;
using enum FeatureMapKind;
using std::cos;
using std::exp;
using std::sin;
using std::sqrt;

template <class Real>
Real value_of(Real x) {
  return x;
}
template <class Real>
Real value_of(const Traced<Real>& x) {
  return x.value;
}

// What a map's features are made of: the row x, its projections y = W x + b, and psi. N is Real, or
// Traced<Real>.
template <class N>
struct Ingredients {
  std::vector<N> x, y1, y2, psi_w1, psi_b1, psi_w2, psi_b2;
};

template <class N>
N dot(const N* a, const N* b, Int size) {
  N sum = 0;
  for (Int i = 0; i < size; ++i) sum = sum + a[i] * b[i];
  return sum;
}

template <class N>
std::vector<N> softmax(const std::vector<N>& x) {
  auto top = value_of(x.front());
  for (const N& v : x) top = std::max(top, value_of(v));
  std::vector<N> y;
  N sum = 0;
  for (const N& v : x) {
    y.push_back(exp(v - N(top)));
    sum = sum + y.back();
  }
  for (N& v : y) v = v / sum;
  return y;
}

template <class N>
N relu(const N& x) {
  return value_of(x) > 0 ? x : N(0);
}
template <class N>
std::vector<N> negated(const std::vector<N>& x) {
  std::vector<N> y;
  for (const N& v : x) y.push_back(N(0) - v);
  return y;
}
template <class N>
std::vector<N> both(std::vector<N> a, const std::vector<N>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}
template <class N, class Function>
std::vector<N> each(const std::vector<N>& x, Function f) {
  std::vector<N> y;
  for (const N& v : x) y.push_back(f(v));
  return y;
}

template <class Real, class N>
std::vector<N> phi(const Map& map, const Ingredients<N>& p, Int position) {
  const std::vector<N>&x = p.x, &y = p.y1;
  const Real size = static_cast<Real>(x.size());
  const Real rows = static_cast<Real>(y.size());
  const FeatureMapOptions& o = map.options;
  const Real s = o.kernel_scale ? static_cast<Real>(*o.kernel_scale) : 1 / std::sqrt(size);
  const auto scaled = [](const std::vector<N>& v, Real factor) {
    return each(v, [factor](const N& e) { return e * N(factor); });
  };
  const auto products = [&](bool half, Real square, Real cross) {
    std::vector<N> squares, pairs;
    for (std::size_t i = 0; i < x.size(); ++i) {
      squares.push_back(N(square) * x[i] * x[i]);
      for (std::size_t j = half ? i + 1 : 0; j < x.size(); ++j) {
        pairs.push_back(N(cross) * x[i] * x[j]);
      }
    }
    return half ? both(squares, pairs) : pairs;
  };
  const auto exponents = [&](Real sign) {
    const std::vector<N> z = scaled(y, sign * std::pow(size, Real(-0.25)));
    const N norm = dot(x.data(), x.data(), static_cast<Int>(x.size())) / N(2 * std::sqrt(size));
    return each(z, [&](const N& e) { return exp(e - norm); });
  };
  const auto root = std::sqrt(Real(2));
  switch (map.kind) {
    case kIdentity:
      return x;
    case kElu1:
      return each(x, [](const N& v) { return value_of(v) > 0 ? v + N(1) : exp(v); });
    case kRelu:
      return each(x, [](const N& v) { return relu(v); });
    case kRelu2:
      return each(x, [](const N& v) { return relu(v) * relu(v); });
    case kExp:
      return each(x, [](const N& v) { return exp(v); });
    case kSoftmax:
      return softmax(x);
    case kTaylor1:
      return both({N(1)}, scaled(x, std::sqrt(s)));
    case kTaylor2:
      return both(both({N(1)}, scaled(x, std::sqrt(s))), products(false, 0, s / root));
    case kTaylor2Symmetric:
      return both(both({N(1)}, scaled(x, std::sqrt(s))), products(true, s / root, s));
    case kRebased:
      return products(true, s, s * root);
    case kFavorPositive:
      return scaled(exponents(1), 1 / std::sqrt(rows));
    case kFavorHyperbolic:
      return scaled(both(exponents(1), exponents(-1)), 1 / std::sqrt(2 * rows));
    case kFavorRelu:
      return each(y, [&](const N& v) { return relu(v) + N(static_cast<Real>(o.kernel_eps)); });
    case kRandomFourier:
      return scaled(both(each(y, [](const N& v) { return cos(v); }),
                         each(y, [](const N& v) { return sin(v); })),
                    1 / std::sqrt(rows));
    case kCosformer: {
      const Real angle =
          std::acos(Real(0)) * static_cast<Real>(position) / static_cast<Real>(o.max_length);
      const std::vector<N> r = each(x, [](const N& v) { return relu(v); });
      return both(scaled(r, std::cos(angle)), scaled(r, std::sin(angle)));
    }
    case kDpfp: {
      const std::vector<N> r = each(both(x, negated(x)), [](const N& v) { return relu(v); });
      std::vector<N> f;
      for (Int j = 1; j <= o.nu; ++j) {
        const std::size_t turn = static_cast<std::size_t>(j) % r.size();
        for (std::size_t i = 0; i < r.size(); ++i) {
          f.push_back(r[i] * r[(i + r.size() - turn) % r.size()]);
        }
      }
      return f;
    }
    case kT2r:
      return each(y, [](const N& v) { return relu(v); });
    case kHedgehog: {
      const std::vector<N> z = scaled(y, 2);
      return softmax(both(z, negated(z)));
    }
    case kHedgehogSeparate:
      return both(softmax(y), softmax(negated(y)));
    case kElementwiseProduct: {
      std::vector<N> f;
      for (std::size_t i = 0; i < y.size(); ++i) f.push_back(y[i] * p.y2[i]);
      return f;
    }
    case kLuna: {
      std::vector<N> f;
      for (const N& a : y) {
        std::vector<N> hidden;
        for (std::size_t j = 0; j < p.psi_w1.size(); ++j) {
          const N h = p.psi_w1[j] * a + p.psi_b1[j];
          hidden.push_back(h / (N(1) + exp(N(0) - h)));
        }
        for (std::size_t l = 0; l < p.psi_b2.size(); ++l) {
          const N* w = p.psi_w2.data() + l * hidden.size();
          const N sum = dot(w, hidden.data(), static_cast<Int>(hidden.size())) + p.psi_b2[l];
          f.push_back(sum / N(std::sqrt(rows)));
        }
      }
      return f;
    }
    case kL2Norm: {
      const N square = dot(x.data(), x.data(), static_cast<Int>(x.size()));
      const N length = sqrt(square + N(static_cast<Real>(o.l2norm_eps)));
      return each(x, [&](const N& v) { return v / length; });
    }
  }
  return {};
}

// The parameter of one head.
template <class Real>
const Real* of_head(const Array<Real>& a, std::size_t rank, Int head) {
  if (a.rank() == rank) return a.data.data();
  return a.data.data() +
         static_cast<std::size_t>(head) * a.data.size() / static_cast<std::size_t>(a.extent(0));
}
template <class Real>
Real* of_head(Array<Real>& a, std::size_t rank, Int head) {
  return const_cast<Real*>(of_head(std::as_const(a), rank, head));
}

// W x + b, nothing without W.
template <class Real>
std::vector<Real> affine(const Array<Real>& w, const Array<Real>& b, Int head, const Real* x,
                         Int size) {
  std::vector<Real> y;
  for (Int r = 0; w.present() && r < w.extent(w.rank() - 2); ++r) {
    const Real sum = dot(of_head(w, 2, head) + r * size, x, size);
    y.push_back(b.present() ? sum + of_head(b, 1, head)[r] : sum);
  }
  return y;
}
// dw += dy x^T, db += dy, dx += W^T dy.
template <class Real>
void affine_backward(const Array<Real>& w, Int head, const Real* x, Int size,
                     const std::vector<Real>& dy, Array<Real>& dw, Array<Real>& db, Real* dx) {
  for (std::size_t r = 0; r < dy.size(); ++r) {
    const std::ptrdiff_t row = static_cast<std::ptrdiff_t>(r) * size;
    for (Int i = 0; i < size; ++i) {
      of_head(dw, 2, head)[row + i] += dy[r] * x[i];
      dx[i] += dy[r] * of_head(w, 2, head)[row + i];
    }
    if (db.present()) of_head(db, 1, head)[r] += dy[r];
  }
}

}  // namespace

template <class Real>
Int feature_count(const Map& map, const MapWeights<Real>& weights, Int size) {
  const std::vector<Real> ones(static_cast<std::size_t>(size), Real(1));
  return static_cast<Int>(features(map, weights, 0, ones.data(), size, 0).size());
}

template <class Real>
std::vector<Real> features(const Map& map, const MapWeights<Real>& w, Int head, const Real* x,
                           Int size, Int position) {
  return phi<Real, Real>(map,
                         {std::vector<Real>(x, x + size), affine(w.w1, w.b1, head, x, size),
                          affine(w.w2, w.b2, head, x, size), w.psi_w1.data, w.psi_b1.data,
                          w.psi_w2.data, w.psi_b2.data},
                         position);
}

template <class Real>
void features_backward(const Map& map, const MapWeights<Real>& w, Int head, const Real* x, Int size,
                       Int position, const std::vector<Real>& dphi, MapWeights<Real>& d, Real* dx) {
  using N = Traced<Real>;
  Tape<Real> tape;
  const auto leaves = [&tape](const std::vector<Real>& values) {
    std::vector<N> list;
    for (Real value : values) list.push_back({value, tape.variable()});
    return list;
  };
  const Ingredients<N> p{leaves(std::vector<Real>(x, x + size)),
                         leaves(affine(w.w1, w.b1, head, x, size)),
                         leaves(affine(w.w2, w.b2, head, x, size)),
                         leaves(w.psi_w1.data),
                         leaves(w.psi_b1.data),
                         leaves(w.psi_w2.data),
                         leaves(w.psi_b2.data)};
  const std::vector<N> results = phi<Real, N>(map, p, position);
  std::vector<Real> seed(tape.size());
  for (std::size_t i = 0; i < results.size(); ++i) seed[results[i].node] += dphi[i];
  const std::vector<Real> gradient = tape.gradients(std::move(seed));
  const auto of = [&gradient](const std::vector<N>& list) {
    std::vector<Real> values;
    for (const N& x : list) values.push_back(gradient[x.node]);
    return values;
  };
  const auto add = [&](const std::vector<N>& list, Real* to) {
    for (const N& x : list) *to++ += gradient[x.node];
  };
  add(p.x, dx);
  affine_backward(w.w1, head, x, size, of(p.y1), d.w1, d.b1, dx);
  affine_backward(w.w2, head, x, size, of(p.y2), d.w2, d.b2, dx);
  add(p.psi_w1, d.psi_w1.data.data());
  add(p.psi_b1, d.psi_b1.data.data());
  add(p.psi_w2, d.psi_w2.data.data());
  add(p.psi_b2, d.psi_b2.data.data());
}

#define OUZEL_INSTANTIATE(Real)                                                                    \
  template Int feature_count(const Map&, const MapWeights<Real>&, Int);                            \
  template std::vector<Real> features(const Map&, const MapWeights<Real>&, Int, const Real*, Int,  \
                                      Int);                                                        \
  template void features_backward(const Map&, const MapWeights<Real>&, Int, const Real*, Int, Int, \
                                  const std::vector<Real>&, MapWeights<Real>&, Real*);
OUZEL_INSTANTIATE(double)
OUZEL_INSTANTIATE(long double)
#undef OUZEL_INSTANTIATE

}  // namespace ouzel::reference
