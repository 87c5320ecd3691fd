#include "ouzel/nadaraya_watson.h"

#include <cmath>
#include <limits>

#include <fmt/format.h>

#include "src/ops/rows64.h"

namespace ouzel {
namespace {

constexpr std::int64_t kTaskRows = 16;  // queries or points of one task

// The call's shapes, and its inputs in float64 in memory that the tasks share.
struct Call {
  Call(const char* op, const NadarayaWatsonOptions& options, const NadarayaWatsonInputs& in)
      : op(op),
        options(options),
        x_shape(extents_of<2>(op, "x", in.x, "points, features")),
        points(x_shape[0]),
        features(x_shape[1]),
        values(extents_of<2>(op, "y", in.y, "points, values")[1]),
        queries(extents_of<2>(op, "queries", in.queries, "queries, features")[0]),
        x_view(required<const float, 2>(op, "x", in.x, x_shape)),
        y_view(required<const float, 2>(op, "y", in.y, {points, values})),
        q_view(required<const float, 2>(op, "queries", in.queries, {queries, features})),
        factor(options.kernel == RegressionKernel::kGaussian
                   ? 1 / (options.bandwidth * options.bandwidth)
                   : scale_of(op, options.scale, features)) {
    if (points == 0) refuse(op, "there are no points to average");
    if (options.kernel == RegressionKernel::kGaussian &&
        !(std::isnormal(factor) && options.bandwidth > 0)) {
      refuse(op, fmt::format("the bandwidth should be a number from 1e-154 to 1e154, not {}",
                             options.bandwidth));
    }
  }
  // Doubles that `load` takes, and what it fills.
  std::int64_t size() const { return points * (features + values) + queries * features; }
  void load(Context& context, double* memory) {
    x = {memory, points, features};
    y = {x.data + x.size(), points, values};
    q = {y.data + y.size(), queries, features};
    context.impl().run(1, [&](std::int64_t, Scratch&) {
      read_matrix(x_view, x);
      read_matrix(y_view, y);
      read_matrix(q_view, q);
    });
  }
  const double* x_row(std::int64_t j) const { return x.data + j * features; }
  const double* y_row(std::int64_t j) const { return y.data + j * values; }
  const double* q_row(std::int64_t i) const { return q.data + i * features; }

  double log_weight(Isa isa, std::int64_t i, std::int64_t j) const {
    check_cancelled_at(i + j);
    const double *a = q_row(i), *b = x_row(j);
    if (options.kernel == RegressionKernel::kExpDot) return factor * dot(isa, a, b, features);
    double distance = 0;
    for (std::int64_t d = 0; d < features; ++d) distance += (a[d] - b[d]) * (a[d] - b[d]);
    return -0.5 * factor * distance;
  }
  // to += ds times the slope of log_weight by x_j, or by query i.
  void add_slope(std::int64_t i, std::int64_t j, double ds, bool by_query, double* to) const {
    const double *a = q_row(i), *b = x_row(j);
    for (std::int64_t d = 0; d < features; ++d) {
      const double slope = options.kernel == RegressionKernel::kExpDot ? (by_query ? b[d] : a[d])
                           : by_query                                  ? b[d] - a[d]
                                                                       : a[d] - b[d];
      to[d] += ds * factor * slope;
    }
  }

  const char* op;
  NadarayaWatsonOptions options;
  std::array<std::int64_t, 2> x_shape;
  std::int64_t points, features, values, queries;
  View<const float, 2> x_view, y_view, q_view;
  double factor;  // of the dot product, or of half the squared distance
  Matrix64 x, y, q;
};

// The weights of all points for query i into w [points]; returns the log of their sum.
double weights(Isa isa, const Call& c, std::int64_t i, double* w) {
  double top = -std::numeric_limits<double>::infinity(), sum = 0;
  for (std::int64_t j = 0; j < c.points; ++j) top = std::max(top, w[j] = c.log_weight(isa, i, j));
  for (std::int64_t j = 0; j < c.points; ++j) sum += w[j] = std::exp(w[j] - top);
  for (std::int64_t j = 0; j < c.points; ++j) w[j] /= sum;
  return top + std::log(sum);
}

// body(row, scratch) for every row, in tasks of some.
template <class Body>
void for_rows(Context& context, std::int64_t rows, std::int64_t doubles, const Body& body) {
  context.impl().reserve(Scratch::rounded(static_cast<std::size_t>(doubles) * sizeof(double)));
  context.impl().run((rows + kTaskRows - 1) / kTaskRows, [&](std::int64_t task, Scratch& scratch) {
    double* work = scratch.take<double>(doubles);
    for (std::int64_t r = task * kTaskRows; r < std::min((task + 1) * kTaskRows, rows); ++r) {
      body(r, work);
    }
  });
}

}  // namespace

void nadaraya_watson(Context& context, const NadarayaWatsonOptions& options,
                     const NadarayaWatsonInputs& inputs, const Tensor& o) {
  Call c("nadaraya_watson", options, inputs);
  const auto o_rows = required<float, 2>(c.op, "o", o, {c.queries, c.values});
  const Isa isa = context.isa();
  c.load(context, context.impl().shared<double>(c.size()));
  for_rows(context, c.queries, c.points + c.values, [&](std::int64_t i, double* w) {
    double* out = w + c.points;
    weights(isa, c, i, w);
    clear(out, c.values);
    add_transposed_product(isa, c.y, w, out);
    write(out, c.values, o_rows(i));
  });
}

void nadaraya_watson_backward(Context& context, const NadarayaWatsonOptions& options,
                              const NadarayaWatsonInputs& inputs, const ConstTensor& d_o,
                              const Tensor& dx, const Tensor& dy, const Tensor& dqueries) {
  Call c("nadaraya_watson_backward", options, inputs);
  const auto d_o_rows = required<const float, 2>(c.op, "d_o", d_o, {c.queries, c.values});
  const auto dx_rows = view_of<float, 2>(c.op, "dx", dx, c.x_shape);
  const auto dy_rows = view_of<float, 2>(c.op, "dy", dy, {c.points, c.values});
  const auto dq_rows = view_of<float, 2>(c.op, "dqueries", dqueries, {c.queries, c.features});
  const Isa isa = context.isa();
  double* memory = context.impl().shared<double>(c.size() + c.queries * (c.values + 2));
  c.load(context, memory);
  double* lse = memory + c.size();  // of the weights of each query
  double* mean = lse + c.queries;   // its d_o . o
  const Matrix64 up = {mean + c.queries, c.queries, c.values};
  context.impl().run(1, [&](std::int64_t, Scratch&) { read_matrix(d_o_rows, up); });
  for_rows(context, c.queries, c.points + c.values + c.features, [&](std::int64_t i, double* w) {
    double *out = w + c.points, *dq = out + c.values;
    const double* d = up.data + i * c.values;
    lse[i] = weights(isa, c, i, w);
    clear(out, c.values);
    add_transposed_product(isa, c.y, w, out);
    mean[i] = dot(isa, d, out, c.values);
    clear(dq, c.features);
    for (std::int64_t j = 0; j < c.points; ++j) {
      check_cancelled_at(j);
      const double ds = w[j] * (dot(isa, d, c.y_row(j), c.values) - mean[i]);
      c.add_slope(i, j, ds, /*by_query=*/true, dq);
    }
    write(dq, c.features, row_at(dq_rows, i));
  });
  for_rows(context, c.points, c.features + c.values, [&](std::int64_t j, double* w) {
    double *d_x = w, *d_y = w + c.features;
    clear(w, c.features + c.values);
    for (std::int64_t i = 0; i < c.queries; ++i) {
      const double* d = up.data + i * c.values;
      const double weight = std::exp(c.log_weight(isa, i, j) - lse[i]);
      add_scaled(isa, weight, d, c.values, d_y);
      const double ds = weight * (dot(isa, d, c.y_row(j), c.values) - mean[i]);
      c.add_slope(i, j, ds, /*by_query=*/false, d_x);
    }
    write(d_x, c.features, row_at(dx_rows, j));
    write(d_y, c.values, row_at(dy_rows, j));
  });
}

}  // namespace ouzel
