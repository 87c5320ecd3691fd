#include "src/ops/feature_map.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel {
namespace {

using enum FeatureMapKind;

constexpr FeatureMapInfo kMaps[] = {
    {.kind = kIdentity,
     .name = "identity",
     .variant = nullptr,
     .formula = "x",
     .unit_scale = false,
     .eps = 1e-10},
    {.kind = kElu1,
     .name = "elu1",
     .variant = nullptr,
     .formula = "x + 1 for x > 0, else exp(x)",
     .eps = 1e-6},
    {.kind = kRelu, .name = "relu", .variant = nullptr, .formula = "max(x, 0)", .eps = 1e-6},
    {.kind = kRelu2, .name = "relu2", .variant = nullptr, .formula = "max(x, 0)^2", .eps = 1e-6},
    {.kind = kExp, .name = "exp", .variant = nullptr, .formula = "exp(x)", .running_maximum = true},
    {.kind = kSoftmax,
     .name = "softmax",
     .variant = nullptr,
     .formula = "softmax over the features",
     .eps = 1e-6},
    {.kind = kTaylor1, .name = "taylor1", .variant = nullptr, .formula = "[1, sqrt(s) x]"},
    {.kind = kTaylor2,
     .name = "taylor2",
     .variant = "full",
     .formula = "[1, sqrt(s) x, s x_i x_j / sqrt(2)]",
     .eps = 1e-6},
    {.kind = kTaylor2Symmetric,
     .name = "taylor2",
     .variant = "symmetric",
     .formula = "[1, sqrt(s) x, s x_i^2 / sqrt(2), s x_i x_j (i < j)]",
     .eps = 1e-6},
    {.kind = kRebased,
     .name = "rebased",
     .variant = nullptr,
     .formula = "[s x_i^2, sqrt(2) s x_i x_j (i < j)]",
     .eps = 1e-6},
    {.kind = kFavorPositive,
     .name = "favor_positive",
     .variant = nullptr,
     .formula = "m^-1/2 exp(W y - |y|^2 / 2), y = x K^-1/4",
     .projections = 1,
     .running_maximum = true,
     .eps = 1e-6},
    {.kind = kFavorHyperbolic,
     .name = "favor_hyperbolic",
     .variant = nullptr,
     .formula = "(2m)^-1/2 [exp(W y - |y|^2 / 2), exp(-W y - |y|^2 / 2)], y = x K^-1/4",
     .projections = 1,
     .running_maximum = true,
     .eps = 1e-6},
    {.kind = kFavorRelu,
     .name = "favor_relu",
     .variant = nullptr,
     .formula = "max(W x, 0) + kernel_eps",
     .projections = 1},
    {.kind = kRandomFourier,
     .name = "rff",
     .variant = nullptr,
     .formula = "m^-1/2 [cos(W x), sin(W x)]",
     .projections = 1},
    {.kind = kCosformer,
     .name = "cosformer",
     .variant = nullptr,
     .formula = "[r cos(a), r sin(a)], r = max(x, 0), a = pi/2 position / m",
     .eps = 1e-6,
     .clamp = true},
    {.kind = kDpfp,
     .name = "dpfp",
     .variant = nullptr,
     .formula = "r_i r_(i-j mod 2K), j = 1 ... nu outer, r = [max(x, 0), max(-x, 0)]",
     .unit_scale = false,
     .eps = 1e-5},
    {.kind = kT2r,
     .name = "t2r",
     .variant = nullptr,
     .formula = "max(W x + b, 0)",
     .projections = 1,
     .bias = true,
     .trained = true,
     .eps = 1e-6},
    {.kind = kHedgehog,
     .name = "hedgehog",
     .variant = "joint",
     .formula = "softmax([y, -y]), y = 2 (W x + b)",
     .projections = 1,
     .bias = true,
     .trained = true,
     .eps = 1e-6},
    {.kind = kHedgehogSeparate,
     .name = "hedgehog",
     .variant = "separate",
     .formula = "[softmax(W x), softmax(-W x)]",
     .projections = 1,
     .trained = true,
     .eps = 1e-6},
    {.kind = kElementwiseProduct,
     .name = "elementwise_product",
     .variant = nullptr,
     .formula = "(W1 x + b1) * (W2 x + b2)",
     .projections = 2,
     .bias = true,
     .trained = true},
    {.kind = kLuna,
     .name = "luna",
     .variant = nullptr,
     .formula = "m^-1/2 psi_l(w_i . x), i outer; psi(a) = psi_w2 silu(psi_w1 a + psi_b1) + psi_b2",
     .projections = 1,
     .psi = true,
     .trained = true},
    {.kind = kL2Norm,
     .name = "l2norm",
     .variant = nullptr,
     .formula = "x / sqrt(|x|^2 + l2norm_eps)"},
};

[[noreturn]] void refuse(const char* op, const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", op, sentence));
}

std::string shown(FeatureMapKind kind) {
  const FeatureMapInfo& info = info_of(kind);
  return info.variant == nullptr ? info.name : fmt::format("{} ({})", info.name, info.variant);
}

std::int64_t extent(const ConstTensor& x, int from_last) {
  return x.rank >= from_last ? x.extent[static_cast<std::size_t>(x.rank - from_last)] : 0;
}

// Whether x is a float32 [rows, columns] or [rows] (columns 0), with `heads` of them in front if it
// may have that axis, and rows without gaps between their numbers.
bool fits(const ConstTensor& x, const MapParameter& p, std::int64_t heads) {
  const int rank = p.columns != 0 ? 2 : 1;
  const bool one_a_head = p.per_head && x.rank == rank + 1;
  const std::int64_t last = p.columns != 0 ? p.columns : p.rows;
  return x.dtype == DType::kF32 && (x.rank == rank || (one_a_head && x.extent[0] == heads)) &&
         extent(x, 1) == last && (p.columns == 0 || extent(x, 2) == p.rows) && p.rows >= 1 &&
         (last == 1 || x.stride[static_cast<std::size_t>(x.rank - 1)] == 1);
}

void check_shape(const char* op, const std::string& name, const ConstTensor& x,
                 const MapParameter& p, std::int64_t heads) {
  if (fits(x, p, heads)) return;
  const std::string one =
      p.columns != 0 ? fmt::format("{}, {}", p.rows, p.columns) : std::to_string(p.rows);
  const std::string each = p.per_head ? fmt::format(" or [{}, {}]", heads, one) : "";
  refuse(op, fmt::format("the feature map's {} must be a contiguous float32 array [{}]{}, not {} "
                         "{}",
                         name, one, each, name_of(x.dtype), shape_string(x)));
}

MapSizes check_weights(const char* op, const std::string& side, const FeatureMap& map,
                       const FeatureMapWeights& weights, std::int64_t heads, std::int64_t keys) {
  const FeatureMapInfo& info = info_of(map.kind);
  MapSizes sizes;
  sizes.keys = keys;
  if (weights.w1.present()) sizes.rows = std::max<std::int64_t>(extent(weights.w1, 2), 1);
  sizes.channels = 1;
  if (info.psi && weights.psi_w2.present()) {
    sizes.hidden = std::max<std::int64_t>(extent(weights.psi_w2, 1), 1);
    sizes.channels = std::max<std::int64_t>(extent(weights.psi_w2, 2), 1);
  }
  for (const MapParameter& p : map_parameters(sizes)) {
    const bool is_psi = std::string_view(p.name).starts_with("psi");
    const bool is_bias = !is_psi && p.columns == 0;
    const bool second = !is_psi && std::string_view(p.name).ends_with('2');
    const bool taken =
        is_psi ? info.psi : info.projections > (second ? 1 : 0) && (!is_bias || info.bias);
    const ConstTensor& x = weights.*p.weight;
    if (x.present() && !taken) {
      refuse(op, fmt::format("the feature map {} takes no parameter {}.{}; leave it out",
                             shown(map.kind), side, p.name));
    }
    if (!x.present() && taken && !is_bias) {
      refuse(op, fmt::format("the feature map {} needs the parameter {}.{}", shown(map.kind), side,
                             p.name));
    }
    if (x.present()) check_shape(op, side + "." + p.name, x, p, heads);
  }
  sizes.features = feature_count(map, keys, sizes.rows, sizes.channels);
  return sizes;
}

}  // namespace

void check_map_options(const char* op, const FeatureMap& map) {
  constexpr std::int64_t kMostProducts = 1 << 20;  // 2 K times this is a number
  const FeatureMapOptions& o = map.options;
  if (o.kernel_scale && !(std::isfinite(*o.kernel_scale) && *o.kernel_scale >= 0)) {
    refuse(op, fmt::format("the scale s of the feature map {} must be at least 0, since features "
                           "hold its root; found {}",
                           shown(map.kind), *o.kernel_scale));
  }
  if (!(o.kernel_eps >= 0) || !(o.l2norm_eps >= 0)) {
    refuse(op, "kernel_eps and l2norm_eps must be at least 0");
  }
  if (map.kind == kDpfp && (o.nu < 1 || o.nu > kMostProducts)) {
    refuse(op, fmt::format("nu of the feature map dpfp must be from 1 to {}, not {}", kMostProducts,
                           o.nu));
  }
  if (map.kind == kCosformer && o.max_length < 1) {
    refuse(op, fmt::format("the feature map cosformer needs m, the length that positions stay "
                           "below, at least 1; found {}",
                           o.max_length));
  }
}

std::span<const FeatureMapInfo> feature_maps() { return kMaps; }

const FeatureMapInfo& info_of(FeatureMapKind kind) {
  return *std::find_if(std::begin(kMaps), std::end(kMaps),
                       [kind](const FeatureMapInfo& info) { return info.kind == kind; });
}

std::int64_t feature_count(const FeatureMap& map, std::int64_t keys, std::int64_t rows,
                           std::int64_t channels) {
  const std::int64_t pairs = keys * (keys + 1) / 2;
  switch (map.kind) {
    case kIdentity:
    case kElu1:
    case kRelu:
    case kRelu2:
    case kExp:
    case kSoftmax:
    case kL2Norm:
      return keys;
    case kTaylor1:
      return 1 + keys;
    case kTaylor2:
      return 1 + keys + keys * keys;
    case kTaylor2Symmetric:
      return 1 + keys + pairs;
    case kRebased:
      return pairs;
    case kCosformer:
      return 2 * keys;
    case kDpfp:
      return 2 * keys * map.options.nu;
    case kFavorPositive:
    case kFavorRelu:
    case kT2r:
    case kElementwiseProduct:
      return rows;
    case kFavorHyperbolic:
    case kRandomFourier:
    case kHedgehog:
    case kHedgehogSeparate:
      return 2 * rows;
    case kLuna:
      return rows * channels;
  }
  return keys;
}

std::array<MapParameter, kMapParameters> map_parameters(const MapSizes& s) {
  using W = FeatureMapWeights;
  using G = FeatureMapWeightGrads;
  return {{{"w1", &W::w1, &G::w1, s.rows, s.keys, true},
           {"b1", &W::b1, &G::b1, s.rows, 0, true},
           {"w2", &W::w2, &G::w2, s.rows, s.keys, true},
           {"b2", &W::b2, &G::b2, s.rows, 0, true},
           {"psi_w1", &W::psi_w1, &G::psi_w1, s.hidden, 0},
           {"psi_b1", &W::psi_b1, &G::psi_b1, s.hidden, 0},
           {"psi_w2", &W::psi_w2, &G::psi_w2, s.channels, s.hidden},
           {"psi_b2", &W::psi_b2, &G::psi_b2, s.channels, 0}}};
}

std::int64_t weight_sums_size(const MapSizes& sizes) {
  std::int64_t size = 0;
  for (const MapParameter& p : map_parameters(sizes)) size += p.size();
  return size;
}

MapSizes check_feature_map(const char* op, const FeatureMap& map, std::int64_t query_heads,
                           std::int64_t key_heads, std::int64_t keys) {
  check_map_options(op, map);
  const MapSizes q = check_weights(op, "q", map, map.q, query_heads, keys);
  const bool tied = !map.k.w1.present();
  const MapSizes k = check_weights(op, tied ? "q" : "k", map, key_weights(map), key_heads, keys);
  if (q.features != k.features || q.rows != k.rows || q.hidden != k.hidden) {
    refuse(op,
           fmt::format("the maps of q and k have {} and {} features from {} and {} projections; "
                       "they must have as many",
                       q.features, k.features, q.rows, k.rows));
  }
  return q;
}

void check_feature_map_grads(const char* op, const FeatureMap& map, const FeatureMapGrads& grads) {
  const auto check = [&](const std::string& side, const FeatureMapWeightGrads& gradients,
                         const FeatureMapWeights& weights) {
    for (const MapParameter& p : map_parameters({})) {
      const Tensor& d = gradients.*p.gradient;
      if (!d.present()) continue;
      const ConstTensor& w = weights.*p.weight;
      const std::string name = fmt::format("d{}.{}", side, p.name);
      if (!w.present() || !info_of(map.kind).trained) {
        refuse(op, fmt::format("the feature map {} has no gradient {}", shown(map.kind), name));
      }
      bool same = d.dtype == DType::kF32 && d.rank == w.rank;
      for (std::size_t i = 0; same && i < static_cast<std::size_t>(w.rank); ++i) {
        same = d.extent[i] == w.extent[i];
      }
      const auto last = static_cast<std::size_t>(w.rank - 1);
      if (!same || (d.extent[last] > 1 && d.stride[last] != 1)) {
        refuse(op, fmt::format("the feature map's {} must be a contiguous float32 array {}, not {} "
                               "{}",
                               name, shape_string(w), name_of(d.dtype), shape_string(d)));
      }
    }
  };
  check("q", grads.q, map.q);
  check("k", grads.k, map.k);
}

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
