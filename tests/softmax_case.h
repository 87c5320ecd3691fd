// A call of softmax attention: random inputs, the operator on arrays with gaps between their rows,
// and the float64 reference.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/softmax_attention.h"
#include "src/ops/reference/softmax_attention.h"
#include "tests/compare.h"
#include "tests/random_arrays.h"

namespace ouzel::test::softmax {

using reference::Array;
using Arguments = reference::SoftmaxAttentionArguments<double>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

// A float copy of a double array with room between its rows, which is filled with NaN and must stay
// so.
template <class T>
class StridedOf {
 public:
  explicit StridedOf(const Array<double>& a, std::int64_t gap = 0) : shape_(a.shape) {
    layout(gap);
    for_each([&](std::size_t i, T& x) { x = static_cast<T>(a.data[i]); });
  }
  StridedOf(std::vector<std::int64_t> shape, std::int64_t gap) : shape_(std::move(shape)) {
    layout(gap);
  }

  BasicTensor<false> tensor() {
    BasicTensor<false> t;
    t.data = data_.data();
    t.dtype = DTypeOf<T>::value;
    t.rank = static_cast<int>(shape_.size());
    for (std::size_t i = 0; i < shape_.size(); ++i) {
      t.extent[i] = shape_[i];
      t.stride[i] = stride_[i];
    }
    return t;
  }
  // Rows [begin, end) of the second axis.
  BasicTensor<false> tokens(std::int64_t begin, std::int64_t end) {
    BasicTensor<false> t = tensor();
    t.data = data_.data() + begin * stride_[1];
    t.extent[1] = end - begin;
    return t;
  }
  Array<T> array() {
    Array<T> a(shape_);
    for_each([&](std::size_t i, T& x) { a.data[i] = x; });
    return a;
  }
  // Whether every element outside the array is still NaN.
  bool gaps_untouched() {
    std::vector<bool> inside(data_.size(), false);
    for_each(
        [&](std::size_t, T& x) { inside[static_cast<std::size_t>(&x - data_.data())] = true; });
    for (std::size_t i = 0; i < data_.size(); ++i) {
      if (!inside[i] && !std::isnan(data_[i])) return false;
    }
    return true;
  }

 private:
  void layout(std::int64_t gap) {
    stride_.resize(shape_.size());
    std::int64_t step = 1;
    for (std::size_t i = shape_.size(); i-- > 0;) {
      stride_[i] = step;
      step = step * shape_[i] + gap * (i > 0 && i + 1 <= shape_.size() ? 1 : 0);
    }
    data_.assign(static_cast<std::size_t>(step + 64), kNaN);
  }
  template <class F>
  void for_each(F&& f) {
    const auto n = static_cast<std::size_t>(
        std::accumulate(shape_.begin(), shape_.end(), std::int64_t{1}, std::multiplies<>()));
    std::vector<std::int64_t> index(shape_.size(), 0);
    for (std::size_t i = 0; i < n; ++i) {
      std::int64_t at = 0;
      for (std::size_t a = 0; a < shape_.size(); ++a) at += index[a] * stride_[a];
      f(i, data_[static_cast<std::size_t>(at)]);
      for (std::size_t a = shape_.size(); a-- > 0;) {
        if (++index[a] < shape_[a]) break;
        index[a] = 0;
      }
    }
  }

  std::vector<std::int64_t> shape_, stride_;
  std::vector<T> data_;
};
using Strided = StridedOf<float>;

struct Results {
  Array<float> o;
  Array<double> lse;
  Array<float> dq, dk, dv;
};

inline SoftmaxAttentionOptions options_of(const Arguments& a) {
  SoftmaxAttentionOptions options;
  options.scale = a.scale;
  options.causal = a.causal;
  options.window = a.window;
  options.q_offset = a.q_offset;
  return options;
}

struct Setting {
  Isa isa = supported_isas().front();
  int threads = 1;
  std::int64_t gap = 0;
};

inline Results run(const Arguments& a, const Array<double>& d_o, const Setting& setting = {}) {
  Context context({.threads = setting.threads, .isa = setting.isa, .poison_scratch = true});
  Strided q(a.q, setting.gap), k(a.k, setting.gap), v(a.v, setting.gap), g(d_o, setting.gap);
  Strided o(d_o.shape, setting.gap);
  StridedOf<double> lse({d_o.shape[0], d_o.shape[1], d_o.shape[2]}, setting.gap);
  Strided dq(a.q.shape, setting.gap), dk(a.k.shape, setting.gap), dv(a.v.shape, setting.gap);
  const SoftmaxAttentionInputs inputs{q.tensor(), k.tensor(), v.tensor(), &a.query_segments,
                                      &a.key_segments};
  softmax_attention(context, options_of(a), inputs, {o.tensor(), lse.tensor()});
  softmax_attention_backward(context, options_of(a), inputs, o.tensor(), lse.tensor(), g.tensor(),
                             dq.tensor(), dk.tensor(), dv.tensor());
  for (Strided* s : {&q, &k, &v, &g, &o, &dq, &dk, &dv}) EXPECT_TRUE(s->gaps_untouched());
  EXPECT_TRUE(lse.gaps_untouched());
  return {o.array(), lse.array(), dq.array(), dk.array(), dv.array()};
}

// lse is a number like a score: its error counts against the scores' size.
inline void expect_lse(const Array<double>& got, const Array<double>& truth) {
  for (std::size_t i = 0; i < truth.data.size(); ++i) {
    if (std::isfinite(truth.data[i])) {
      ASSERT_NEAR(got.data[i], truth.data[i], 1e-6 * (1 + std::abs(truth.data[i]))) << i;
    } else {
      ASSERT_EQ(got.data[i], truth.data[i]) << i;
    }
  }
}

// Runs `settings` against one truth.
inline void expect_right(const Arguments& a, const Array<double>& d_o,
                         const std::vector<Setting>& settings) {
  const auto truth = reference::softmax_attention(a);
  const auto gradients = reference::softmax_attention_backward(a, d_o);
  for (const Setting& setting : settings) {
    SCOPED_TRACE(name_of(setting.isa));
    const Results got = run(a, d_o, setting);
    Comparison comparison;
    comparison.output("o", got.o, truth.o);
    comparison.gradient("dq", got.dq, gradients.q);
    comparison.gradient("dk", got.dk, gradients.k);
    comparison.gradient("dv", got.dv, gradients.v);
    comparison.expect_within(kFloat32);
    expect_lse(got.lse, truth.lse);
  }
}

inline std::vector<Setting> every_isa(int threads, std::int64_t gap) {
  std::vector<Setting> settings;
  for (Isa isa : supported_isas()) settings.push_back({isa, threads, gap});
  return settings;
}

struct Shape {
  std::int64_t batch = 1, queries = 1, keys = 1, query_heads = 1, key_heads = 1, key_size = 1,
               value_size = 1;
};

inline Arguments arguments(Random& random, const Shape& s) {
  Arguments a;
  a.q = random_array<double>(random, {s.batch, s.queries, s.query_heads, s.key_size}, -2, 2);
  a.k = random_array<double>(random, {s.batch, s.keys, s.key_heads, s.key_size}, -2, 2);
  a.v = random_array<double>(random, {s.batch, s.keys, s.key_heads, s.value_size});
  a.query_segments = Segments::whole(s.batch, s.queries);
  a.key_segments = Segments::whole(s.batch, s.keys);
  a.scale = static_cast<float>(1 / std::sqrt(static_cast<double>(s.key_size)));
  return a;
}

inline Array<double> upstream(Random& random, const Arguments& a) {
  return random_array<double>(random, {a.q.extent(0), a.q.extent(1), a.q.extent(2), a.v.extent(3)});
}

template <class T>
bool same_bits(const Array<T>& a, const Array<T>& b) {
  return a.shape == b.shape &&
         std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(T)) == 0;
}
inline bool same_bits(const Results& a, const Results& b) {
  return same_bits(a.o, b.o) && same_bits(a.lse, b.lse) && same_bits(a.dq, b.dq) &&
         same_bits(a.dk, b.dk) && same_bits(a.dv, b.dv);
}

}  // namespace ouzel::test::softmax
