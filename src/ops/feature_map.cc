#include "src/ops/feature_map.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/dense_tensor.h"

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
  refuse(op, fmt::format("the feature map's {} must be a contiguous float32 array [{}]{}, not {}",
                         name, one, each, described(x)));
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
  const FeatureMapOptions& o = map.options;
  if (o.kernel_scale && !(std::isfinite(*o.kernel_scale) && *o.kernel_scale >= 0)) {
    refuse(op, fmt::format("the scale s of the feature map {} must be at least 0, since features "
                           "hold its root; found {}",
                           shown(map.kind), *o.kernel_scale));
  }
  if (!(o.kernel_eps >= 0) || !(o.l2norm_eps >= 0)) {
    refuse(op, "kernel_eps and l2norm_eps must be at least 0");
  }
  if (map.kind == kDpfp && (o.nu < 1 || o.nu > kMostDpfpProducts)) {
    refuse(op, fmt::format("nu of the feature map dpfp must be from 1 to {}, not {}",
                           kMostDpfpProducts, o.nu));
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
        refuse(op, fmt::format("the feature map's {} must be a contiguous float32 array {}, not {}",
                               name, shape_string(w), described(d)));
      }
    }
  };
  check("q", grads.q, map.q);
  check("k", grads.k, map.k);
}

}  // namespace ouzel
