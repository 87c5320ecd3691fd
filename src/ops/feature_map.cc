#include "src/ops/feature_map.h"

#include <algorithm>
#include <cstring>
#include <string>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel {
namespace {

[[noreturn]] void refuse(const char* op, const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", op, sentence));
}

// w is [F, K] or [heads, F, K]; returns F.
std::int64_t check_weight(const char* op, const std::string& name, const ConstTensor& w,
                          std::int64_t heads, std::int64_t keys) {
  const bool per_head = w.rank == 3;
  const bool fits = w.dtype == DType::kF32 && (w.rank == 2 || (per_head && w.extent[0] == heads)) &&
                    w.extent[static_cast<std::size_t>(w.rank - 1)] == keys &&
                    w.extent[static_cast<std::size_t>(w.rank - 2)] >= 1 &&
                    (keys == 1 || w.stride[static_cast<std::size_t>(w.rank - 1)] == 1);
  if (!fits) {
    refuse(op,
           fmt::format("the feature map's {} must be a contiguous float32 array [F, {}] or [{}, "
                       "F, {}], not {} {}",
                       name, keys, heads, keys, name_of(w.dtype), shape_string(w)));
  }
  return w.extent[static_cast<std::size_t>(w.rank - 2)];
}

void check_same(const char* op, const std::string& name, const ConstTensor& found,
                const ConstTensor& like, int rank) {
  bool fits = found.dtype == DType::kF32 && found.rank == rank;
  for (int i = 0; i < rank && fits; ++i) {
    fits = found.extent[static_cast<std::size_t>(i)] == like.extent[static_cast<std::size_t>(i)];
  }
  const auto last = static_cast<std::size_t>(rank - 1);
  if (!fits || (found.extent[last] > 1 && found.stride[last] != 1)) {
    refuse(op, fmt::format("the feature map's {} must be a contiguous float32 array that goes with "
                           "a weight {}, not {} {}",
                           name, shape_string(like), name_of(found.dtype), shape_string(found)));
  }
}

std::int64_t check_weights(const char* op, const std::string& side, const FeatureMapWeights& w,
                           std::int64_t heads, std::int64_t keys) {
  if (!w.w1.present() || !w.w2.present()) {
    refuse(op, fmt::format("the feature map elementwise_product needs the parameters w1 and w2 of "
                           "{}",
                           side));
  }
  const std::int64_t features = check_weight(op, side + ".w1", w.w1, heads, keys);
  check_same(op, side + ".w2", w.w2, w.w1, w.w1.rank);
  for (const auto& [bias, name] : {std::pair{&w.b1, ".b1"}, std::pair{&w.b2, ".b2"}}) {
    if (bias->present()) check_same(op, side + name, *bias, w.w1, w.w1.rank - 1);
  }
  return features;
}

}  // namespace

std::int64_t check_feature_map(const char* op, const FeatureMap& map, std::int64_t query_heads,
                               std::int64_t key_heads, std::int64_t keys) {
  if (!is_learned(map)) return keys;
  const std::int64_t features = check_weights(op, "q", map.q, query_heads, keys);
  const bool tied = !map.k.w1.present();
  const std::int64_t key_features =
      check_weights(op, tied ? "q" : "k", key_weights(map), key_heads, keys);
  if (features != key_features) {
    refuse(op, fmt::format("the maps of q and k have {} and {} features; they must have as many",
                           features, key_features));
  }
  return features;
}

void check_feature_map_grads(const char* op, const FeatureMap& map, const FeatureMapGrads& grads) {
  if (!is_learned(map)) return;
  const auto check = [&](const std::string& side, const FeatureMapWeightGrads& d,
                         const FeatureMapWeights& w) {
    if (d.w1.present()) check_same(op, "d" + side + ".w1", d.w1, w.w1, w.w1.rank);
    if (d.w2.present()) check_same(op, "d" + side + ".w2", d.w2, w.w2, w.w2.rank);
    if (d.b1.present()) check_same(op, "d" + side + ".b1", d.b1, w.w1, w.w1.rank - 1);
    if (d.b2.present()) check_same(op, "d" + side + ".b2", d.b2, w.w2, w.w2.rank - 1);
  };
  check("q", grads.q, map.q);
  if (map.k.w1.present()) check("k", grads.k, map.k);
}

HeadWeights head_weights(const FeatureMapWeights& weights, std::int64_t head) {
  const auto at = [head](const ConstTensor& w, int shared_rank) -> const float* {
    if (!w.present()) return nullptr;
    return static_cast<const float*>(w.data) + (w.rank > shared_rank ? head * w.stride[0] : 0);
  };
  const auto row = [](const ConstTensor& w) {
    return w.present() ? w.stride[static_cast<std::size_t>(w.rank - 2)] : 0;
  };
  return {at(weights.w1, 2), at(weights.w2, 2), row(weights.w1),
          row(weights.w2),   at(weights.b1, 1), at(weights.b2, 1)};
}

ElementMap element_map(const FeatureMap& map) {
  switch (map.kind) {
    case FeatureMapKind::kElu1:
      return ElementMap::kElu1;
    case FeatureMapKind::kRelu:
      return ElementMap::kRelu;
    case FeatureMapKind::kIdentity:
    case FeatureMapKind::kElementwiseProduct:
      break;
  }
  return ElementMap::kIdentity;
}

void HeadMap::bind(Isa isa, const FeatureMapWeights& weights, std::int64_t head) {
  isa_ = isa;
  if (!learned_) return;
  const HeadWeights h = head_weights(weights, head);
  const auto copy = [this](const float* w, std::int64_t row, float* columns, float* rows) {
    for (std::int64_t i = 0; i < keys_; ++i) {
      for (std::int64_t f = 0; f < pitch_; ++f) {
        columns[i * pitch_ + f] = f < features_ ? w[f * row + i] : 0.0f;
      }
    }
    if (rows == nullptr) return;
    for (std::int64_t f = 0; f < features_; ++f) {
      std::memcpy(rows + f * key_pitch_, w + f * row, static_cast<std::size_t>(keys_) * 4);
      std::fill(rows + f * key_pitch_ + keys_, rows + (f + 1) * key_pitch_, 0.0f);
    }
  };
  copy(h.w1, h.w1_row, w1_columns_, w1_rows_);
  copy(h.w2, h.w2_row, w2_columns_, w2_rows_);
  for (const auto& [bias, out] : {std::pair{h.b1, b1_}, std::pair{h.b2, b2_}}) {
    std::fill(out, out + pitch_, 0.0f);
    if (bias != nullptr) std::memcpy(out, bias, static_cast<std::size_t>(features_) * 4);
  }
}

void HeadMap::affine(const float* x, std::int64_t stride, std::int64_t tokens) {
  SmallProductArgs p;
  p.rows = tokens;
  p.columns = pitch_;
  p.depth = keys_;
  p.a = x;
  p.a_row = stride;
  p.b_row = p.c_row = pitch_;
  p.b = w1_columns_;
  p.bias = b1_;
  p.c = y1_;
  small_product(isa_, p);
  p.b = w2_columns_;
  p.bias = b2_;
  p.c = y2_;
  small_product(isa_, p);
}

MappedRows HeadMap::apply(const float* x, std::int64_t stride, std::int64_t tokens) {
  if (!learned_) return {x, stride, map_};
  affine(x, stride, tokens);
  multiply(isa_, tokens * pitch_, y1_, y2_, phi_);
  return {phi_, pitch_, ElementMap::kIdentity};
}

void HeadMap::dense(const float* x, std::int64_t stride, std::int64_t tokens, float* out) {
  const MappedRows rows = apply(x, stride, tokens);
  PackArgs p;
  p.rows = rows.rows;
  p.stride = rows.stride;
  p.map = rows.map;
  p.tokens = tokens;
  p.size = features_;
  p.out = out;
  p.token_pitch = pitch_;
  pack_dense(isa_, p);
}

void HeadMap::adjoint(const float* x, std::int64_t x_stride, std::int64_t tokens, float* dphi,
                      float* dx, std::int64_t dx_stride, bool add, std::int64_t column,
                      std::int64_t count, const WeightSums* sums) {
  MapAdjointArgs m;
  m.tokens = tokens;
  m.x = x + column;
  m.x_stride = x_stride;
  m.dx_stride = dx_stride;
  m.add = add;
  if (!learned_) {
    if (dx == nullptr) return;
    m.map = map_;
    m.size = count;
    m.dy = dphi;
    m.dy_stride = pitch_;
    m.dx = dx + column;
    map_adjoint(isa_, m);
    return;
  }
  affine(x, x_stride, tokens);
  // d y1 = dphi y2 and d y2 = dphi y1, in place of y2 and y1.
  float* dy1 = y2_;
  float* dy2 = y1_;
  multiply(isa_, tokens * pitch_, dphi, y2_, dy1);
  multiply(isa_, tokens * pitch_, dphi, y1_, dy2);
  if (dx != nullptr) {
    SmallProductArgs p;
    p.rows = tokens;
    p.columns = key_pitch_;
    p.depth = features_;
    p.a_row = pitch_;
    p.b_row = p.c_row = key_pitch_;
    p.c = dx_;
    p.a = dy1;
    p.b = w1_rows_;
    small_product(isa_, p);
    p.a = dy2;
    p.b = w2_rows_;
    p.add = true;
    small_product(isa_, p);
    m.map = ElementMap::kIdentity;
    m.size = keys_;
    m.dy = dx_;
    m.dy_stride = key_pitch_;
    m.dx = dx;
    map_adjoint(isa_, m);
  }
  if (sums == nullptr) return;
  PackArgs pack;
  pack.rows = x;
  pack.stride = x_stride;
  pack.tokens = tokens;
  pack.size = keys_;
  pack.out = x_;
  pack.token_pitch = key_pitch_;
  pack_dense(isa_, pack);
  add_weight_sums(tokens, dy1, sums->w1, sums->b1);
  add_weight_sums(tokens, dy2, sums->w2, sums->b2);
}

void HeadMap::add_weight_sums(std::int64_t tokens, const float* dy, double* dw, double* db) {
  SmallProductArgs p;
  p.rows = features_;
  p.columns = key_pitch_;
  p.depth = tokens;
  p.a = dy;
  p.a_row = 1;
  p.a_column = pitch_;
  p.b = x_;
  p.b_row = key_pitch_;
  p.c = dw_;
  p.c_row = key_pitch_;
  small_product(isa_, p);
  for (std::int64_t f = 0; f < features_; ++f) {
    for (std::int64_t i = 0; i < keys_; ++i) {
      dw[f * keys_ + i] += static_cast<double>(dw_[f * key_pitch_ + i]);
    }
  }
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t f = 0; f < features_; ++f) db[f] += static_cast<double>(dy[t * pitch_ + f]);
  }
}

}  // namespace ouzel
