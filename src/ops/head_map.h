// Feature maps inside an operator: applied to a chunk of at most 64 rows at a time on the way into
// packed scratch, and their adjoint on the way back. No tensor of features is ever formed.
#pragma once

#include <cstdint>

#include "src/kernels/feature_map.h"
#include "src/kernels/recurrence.h"
#include "src/ops/feature_map.h"
#include "src/ops/token_rows.h"

namespace ouzel {

// Of an elementwise map.
ElementMap element_map(FeatureMapKind kind);

// Rows that wait to be packed: `map` is still to be applied.
struct MappedRows {
  const float* rows = nullptr;
  std::int64_t stride = 0;
  ElementMap map = ElementMap::kIdentity;
};

// Where a pass is: the position of its row 0 and the step to that of the next, and exponents for
// maps with a running maximum (absent: each row its own, which is what queries have).
struct MapPath {
  std::int64_t position = 0, step = 1;
  TokenValues exponent;
};

enum class MapUse {
  kForward,
  kAdjoint,  // has scratch for `adjoint` too
  kStep,     // single rows: weights are read where they are
};

// The map of one head with its scratch (none for elementwise maps).
class HeadMap {
 public:
  // `Memory` hands out scratch, or only counts it.
  template <class Memory>
  HeadMap(Memory& memory, const FeatureMap& map, const MapSizes& sizes, MapUse use)
      : map_(map),
        info_(info_of(map.kind)),
        sizes_(sizes),
        use_(use),
        key_pitch_(padded(sizes.keys, kSlab)),
        row_pitch_(padded(sizes.rows, kSlab)),
        pitch_(padded(sizes.features, kSlab)) {
    if (is_elementwise(map.kind)) return;
    const std::int64_t tokens = use == MapUse::kStep ? 1 : kChunk;
    const auto take = [&memory](float*& p, std::int64_t size) {
      p = memory.template take<float>(size);
    };
    take(x_, tokens * key_pitch_);
    take(phi_, tokens * pitch_);
    for (float** p : {&exponent_, &cosine_, &sine_}) take(*p, tokens);
    if (info_.psi) take(psi_, psi_size());
    for (int i = 0; i < info_.projections; ++i) {
      Projection& p = projection_[i];
      if (use != MapUse::kStep) take(p.columns, sizes.keys * row_pitch_);
      take(p.bias, row_pitch_);
      take(p.y, tokens * row_pitch_);
      if (use != MapUse::kAdjoint) continue;
      take(p.by_rows, sizes.rows * key_pitch_);
      take(p.dy, tokens * row_pitch_);
    }
    if (use != MapUse::kAdjoint) return;
    take(dx_, kChunk * key_pitch_);
    take(dw_, sizes.rows * key_pitch_);
    if (info_.psi) take(dpsi_, psi_size());
  }

  void bind(Isa isa, const FeatureMapWeights& weights, std::int64_t head, const MapPath& path);
  void follow(const MapPath& path) { path_ = path; }
  // phi of rows [t, t + tokens). Valid until the next call.
  MappedRows apply(const Rows<const float>& x, std::int64_t t, std::int64_t tokens);
  // The exponents of the rows that were applied last; null where the map has none.
  const float* exponents() const { return info_.running_maximum ? exponent_ : nullptr; }
  // The exponents that rows [t, t + tokens) would have of their own.
  const float* own_exponents(const Rows<const float>& x, std::int64_t t, std::int64_t tokens);
  // phi as dense rows of pitch() floats.
  void dense(const Rows<const float>& x, std::int64_t t, std::int64_t tokens, float* out);
  // dx (+)= J(x)^T dphi, for columns [column, column + count) of an elementwise map or all of them
  // of others; dphi has rows of pitch() floats and begins at `column`. Gradients of parameters are
  // added to `sums`. dx may be absent: only the parameters.
  void adjoint(const Rows<const float>& x, std::int64_t t, std::int64_t tokens, const float* dphi,
               const Rows<float>& dx, bool add, std::int64_t column, std::int64_t count,
               double* sums);
  std::int64_t pitch() const { return pitch_; }

 private:
  struct Projection {
    const float* w = nullptr;  // of the caller
    std::int64_t w_row = 0;
    float* columns = nullptr;  // [K][row pitch]
    float* by_rows = nullptr;  // [m][key pitch]
    float* bias = nullptr;     // [row pitch]
    float* y = nullptr;        // [64][row pitch]
    float* dy = nullptr;
  };
  std::int64_t psi_size() const { return sizes_.hidden * (2 + sizes_.channels) + sizes_.channels; }
  FeatureRowsArgs project(const Rows<const float>& x, std::int64_t t, std::int64_t tokens);
  void add_weight_sums(std::int64_t tokens, const Projection& p, double* dw, double* db);

  const FeatureMap& map_;
  const FeatureMapInfo& info_;
  MapSizes sizes_;
  MapUse use_;
  std::int64_t key_pitch_, row_pitch_, pitch_;
  Isa isa_ = Isa::kPortable;
  MapPath path_;
  float factor_ = 1;  // on x, before it is projected
  Projection projection_[2];
  float *x_ = nullptr, *phi_ = nullptr;                              // [64][pitch of each]
  float *exponent_ = nullptr, *cosine_ = nullptr, *sine_ = nullptr;  // [64]
  float *psi_ = nullptr, *dpsi_ = nullptr;
  float *dx_ = nullptr, *dw_ = nullptr;
};

}  // namespace ouzel
