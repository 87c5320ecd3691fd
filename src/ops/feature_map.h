// The feature maps, and what a call may ask of them. A map is a row of the table below (what it
// takes and what its denominators are), its number of features (feature_count), and its rows and
// their adjoint in src/kernels/feature_map.cc.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "ouzel/feature_map.h"

namespace ouzel {

struct FeatureMapInfo {
  FeatureMapKind kind;
  const char* name;
  const char* variant;  // of maps of one name; else null
  const char* formula;
  int projections = 0;   // affine maps W x + b: none, w1, or w1 and w2
  bool bias = false;     // ... may have b
  bool psi = false;      // ... are followed by psi
  bool trained = false;  // parameters have gradients: random projections have none
  // Features are multiples of a power of two that grows with the keys.
  bool running_maximum = false;
  bool unit_scale = true;  // default scale 1, else K^-0.5
  double eps = 0;          // default
  bool clamp = false;      // the denominator is max(sum, eps), else sum + eps
};
std::span<const FeatureMapInfo> feature_maps();
const FeatureMapInfo& info_of(FeatureMapKind kind);

// Applied while packing: acts on each number alone.
inline bool is_elementwise(FeatureMapKind kind) {
  return kind == FeatureMapKind::kIdentity || kind == FeatureMapKind::kElu1 ||
         kind == FeatureMapKind::kRelu;
}

// nu of dpfp: its features are 2 K nu. Published models take up to 3; shifts repeat from 2 K on.
inline constexpr std::int64_t kMostDpfpProducts = 128;

// Throws Error(kInvalidArgument) for options that a map does not stand.
void check_map_options(const char* op, const FeatureMap& map);

struct MapSizes {
  std::int64_t keys = 0;                  // K
  std::int64_t rows = 0;                  // m: of W
  std::int64_t features = 0;              // F
  std::int64_t hidden = 0, channels = 0;  // J, L of psi
};
// Throws Error(kInvalidArgument), naming `op`, where parameters or options are missing, superfluous
// or misshapen.
MapSizes check_feature_map(const char* op, const FeatureMap& map, std::int64_t query_heads,
                           std::int64_t key_heads, std::int64_t keys);
void check_feature_map_grads(const char* op, const FeatureMap& map, const FeatureMapGrads& grads);
// F of a map of `rows` projections and `channels` (1 where there are none).
std::int64_t feature_count(const FeatureMap& map, std::int64_t keys, std::int64_t rows,
                           std::int64_t channels);

// The parameters that serve k.
inline const FeatureMapWeights& key_weights(const FeatureMap& map) {
  return map.k.w1.present() ? map.k : map.q;
}

// The parameters in a fixed order, with their shapes of one head (columns 0: a vector).
inline constexpr std::size_t kMapParameters = 8;
struct MapParameter {
  const char* name;
  ConstTensor FeatureMapWeights::*weight;
  Tensor FeatureMapWeightGrads::*gradient;
  std::int64_t rows = 0, columns = 0;
  bool per_head = false;  // may have a leading axis of heads
  std::int64_t size() const { return rows * (columns != 0 ? columns : 1); }
};
std::array<MapParameter, kMapParameters> map_parameters(const MapSizes& sizes);

// Sums of the gradients of one head's parameters, in double: a plain float sum of chunks would lose
// 1e-4 over a million tokens. All parameters one after the other; those that the map lacks are not
// touched.
std::int64_t weight_sums_size(const MapSizes& sizes);

}  // namespace ouzel
