#include "src/ops/head_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace ouzel {

using enum FeatureMapKind;

ElementMap element_map(FeatureMapKind kind) {
  return kind == kElu1   ? ElementMap::kElu1
         : kind == kRelu ? ElementMap::kRelu
                         : ElementMap::kIdentity;
}

void HeadMap::bind(Isa isa, const FeatureMapWeights& weights, std::int64_t head,
                   const MapPath& path) {
  isa_ = isa;
  path_ = path;
  if (is_elementwise(map_.kind)) return;
  const bool favor = map_.kind == kFavorPositive || map_.kind == kFavorHyperbolic;
  factor_ = favor ? static_cast<float>(std::pow(static_cast<double>(sizes_.keys), -0.25)) : 1;
  const std::pair<const ConstTensor*, const ConstTensor*> all[] = {{&weights.w1, &weights.b1},
                                                                   {&weights.w2, &weights.b2}};
  const auto of_head = [head](const ConstTensor& x, int rank) {
    return static_cast<const float*>(x.data) + (x.rank > rank ? head * x.stride[0] : 0);
  };
  for (int i = 0; i < info_.projections; ++i) {
    Projection& p = projection_[i];
    const ConstTensor &w = *all[i].first, &b = *all[i].second;
    p.w = of_head(w, 2);
    p.w_row = w.stride[static_cast<std::size_t>(w.rank - 2)];
    std::fill(p.bias, p.bias + row_pitch_, 0.0f);
    if (b.present()) {
      std::memcpy(p.bias, of_head(b, 1), static_cast<std::size_t>(sizes_.rows) * sizeof(float));
    }
    for (std::int64_t k = 0; p.columns != nullptr && k < sizes_.keys; ++k) {
      for (std::int64_t f = 0; f < row_pitch_; ++f) {
        p.columns[k * row_pitch_ + f] = f < sizes_.rows ? factor_ * p.w[f * p.w_row + k] : 0.0f;
      }
    }
    for (std::int64_t f = 0; p.by_rows != nullptr && f < sizes_.rows; ++f) {
      for (std::int64_t k = 0; k < key_pitch_; ++k) {
        p.by_rows[f * key_pitch_ + k] = k < sizes_.keys ? factor_ * p.w[f * p.w_row + k] : 0.0f;
      }
    }
  }
  if (!info_.psi) return;
  float* to = psi_;
  for (const MapParameter& p : map_parameters(sizes_)) {
    if (p.per_head) continue;
    const ConstTensor& x = weights.*p.weight;
    const std::int64_t width = p.columns != 0 ? p.columns : p.rows;
    for (std::int64_t r = 0; r < (p.columns != 0 ? p.rows : 1); ++r, to += width) {
      std::memcpy(to, static_cast<const float*>(x.data) + r * x.stride[0],
                  static_cast<std::size_t>(width) * sizeof(float));
    }
  }
}

// The rows and their affine maps, in scratch.
FeatureRowsArgs HeadMap::project(const Rows<const float>& x, std::int64_t t, std::int64_t tokens) {
  PackArgs pack;
  pack.rows = x.at(t);
  pack.stride = x.stride;
  pack.tokens = tokens;
  pack.size = sizes_.keys;
  pack.out = x_;
  pack.token_pitch = key_pitch_;
  pack_dense(isa_, pack);
  for (int i = 0; i < info_.projections; ++i) {
    const Projection& p = projection_[i];
    if (use_ == MapUse::kStep) {
      std::fill(p.y, p.y + row_pitch_, 0.0f);
      matrix_vector(isa_, sizes_.rows, sizes_.keys, p.w, p.w_row, x_, p.bias, p.y);
      for (std::int64_t f = 0; factor_ != 1 && f < sizes_.rows; ++f) p.y[f] *= factor_;
      continue;
    }
    SmallProductArgs product;
    product.rows = tokens;
    product.columns = row_pitch_;
    product.depth = sizes_.keys;
    product.a = x_;
    product.a_row = key_pitch_;
    product.b = p.columns;
    product.b_row = product.c_row = row_pitch_;
    product.bias = p.bias;
    product.c = p.y;
    small_product(isa_, product);
  }
  FeatureRowsArgs a;
  a.kind = map_.kind;
  a.tokens = tokens;
  a.keys = sizes_.keys;
  a.rows = sizes_.rows;
  a.features = sizes_.features;
  a.key_pitch = key_pitch_;
  a.row_pitch = row_pitch_;
  a.pitch = pitch_;
  a.x = x_;
  a.y1 = projection_[0].y;
  a.y2 = projection_[1].y;
  a.phi = phi_;
  a.exponent = exponent_;
  const double scale = 1 / std::sqrt(static_cast<double>(sizes_.keys));
  a.kernel_scale = static_cast<float>(map_.options.kernel_scale.value_or(scale));
  a.kernel_eps = static_cast<float>(map_.options.kernel_eps);
  a.l2norm_eps = static_cast<float>(map_.options.l2norm_eps);
  a.nu = map_.options.nu;
  a.cosine = cosine_;
  a.sine = sine_;
  a.psi = psi_;
  a.hidden = sizes_.hidden;
  a.channels = sizes_.channels;
  if (info_.running_maximum) {
    if (path_.exponent) {
      for (std::int64_t i = 0; i < tokens; ++i) exponent_[i] = path_.exponent[t + i];
    } else {
      feature_exponents(isa_, a, exponent_);
    }
  }
  if (map_.kind == kCosformer) {
    const double step = std::acos(0.0) / static_cast<double>(map_.options.max_length);
    for (std::int64_t i = 0; i < tokens; ++i) {
      const double angle = step * static_cast<double>(path_.position + (t + i) * path_.step);
      cosine_[i] = static_cast<float>(std::cos(angle));
      sine_[i] = static_cast<float>(std::sin(angle));
    }
  }
  return a;
}

MappedRows HeadMap::apply(const Rows<const float>& x, std::int64_t t, std::int64_t tokens) {
  if (is_elementwise(map_.kind)) return {x.at(t), x.stride, element_map(map_.kind)};
  feature_rows(isa_, project(x, t, tokens));
  return {phi_, pitch_, ElementMap::kIdentity};
}

const float* HeadMap::own_exponents(const Rows<const float>& x, std::int64_t t,
                                    std::int64_t tokens) {
  project(x, t, tokens);
  return exponent_;
}

void HeadMap::dense(const Rows<const float>& x, std::int64_t t, std::int64_t tokens, float* out) {
  const MappedRows rows = apply(x, t, tokens);
  PackArgs p;
  p.rows = rows.rows;
  p.stride = rows.stride;
  p.map = rows.map;
  p.tokens = tokens;
  p.size = sizes_.features;
  p.out = out;
  p.token_pitch = pitch_;
  pack_dense(isa_, p);
}

void HeadMap::adjoint(const Rows<const float>& x, std::int64_t t, std::int64_t tokens,
                      const float* dphi, const Rows<float>& dx, bool add, std::int64_t column,
                      std::int64_t count, double* sums) {
  MapAdjointArgs out;
  out.tokens = tokens;
  out.size = count;
  out.add = add;
  if (is_elementwise(map_.kind)) {
    if (!dx) return;
    out.map = element_map(map_.kind);
    out.x = x.at(t) + column;
    out.x_stride = x.stride;
    out.dy = dphi;
    out.dy_stride = pitch_;
    out.dx = dx.at(t) + column;
    out.dx_stride = dx.stride;
    return map_adjoint(isa_, out);
  }
  const FeatureRowsArgs a = project(x, t, tokens);
  feature_rows(isa_, a);
  for (int i = 0; i < info_.projections; ++i) {
    std::fill(projection_[i].dy, projection_[i].dy + tokens * row_pitch_, 0.0f);
  }
  std::fill(dx_, dx_ + tokens * key_pitch_, 0.0f);
  if (info_.psi) std::fill(dpsi_, dpsi_ + psi_size(), 0.0f);
  FeatureRowsGrads g;
  g.dphi = dphi;
  g.dy1 = projection_[0].dy;
  g.dy2 = projection_[1].dy;
  g.dx = dx_;
  g.psi = dpsi_;
  feature_rows_adjoint(isa_, a, g);
  if (dx) {
    for (int i = 0; i < info_.projections; ++i) {
      SmallProductArgs product;
      product.rows = tokens;
      product.columns = key_pitch_;
      product.depth = sizes_.rows;
      product.a = projection_[i].dy;
      product.a_row = row_pitch_;
      product.b = projection_[i].by_rows;
      product.b_row = product.c_row = key_pitch_;
      product.c = dx_;
      product.add = true;
      small_product(isa_, product);
    }
    out.size = sizes_.keys;
    out.x = out.dy = dx_;
    out.x_stride = out.dy_stride = key_pitch_;
    out.dx = dx.at(t);
    out.dx_stride = dx.stride;
    map_adjoint(isa_, out);
  }
  if (sums == nullptr) return;
  for (const Projection& p : projection_) {
    if (p.dy != nullptr) add_weight_sums(tokens, p, sums, sums + sizes_.rows * sizes_.keys);
    sums += sizes_.rows * (sizes_.keys + 1);
  }
  for (std::int64_t i = 0; info_.psi && i < psi_size(); ++i) {
    sums[i] += static_cast<double>(dpsi_[i]);
  }
}

void HeadMap::add_weight_sums(std::int64_t tokens, const Projection& p, double* dw, double* db) {
  SmallProductArgs product;
  product.rows = sizes_.rows;
  product.columns = key_pitch_;
  product.depth = tokens;
  product.a = p.dy;
  product.a_row = 1;
  product.a_column = row_pitch_;
  product.b = x_;
  product.b_row = product.c_row = key_pitch_;
  product.c = dw_;
  small_product(isa_, product);
  for (std::int64_t f = 0; f < sizes_.rows; ++f) {
    for (std::int64_t k = 0; k < sizes_.keys; ++k) {
      dw[f * sizes_.keys + k] += static_cast<double>(dw_[f * key_pitch_ + k]);
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t f = 0; f < sizes_.rows; ++f) {
      db[f] += static_cast<double>(p.dy[t * row_pitch_ + f]);
    }
  }
}

}  // namespace ouzel
