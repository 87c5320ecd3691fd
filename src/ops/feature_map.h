// Feature maps inside an operator: applied to a chunk of at most 64 rows at a time on the way into
// packed scratch, and their adjoint on the way back. No tensor of features is ever formed.
#pragma once

#include <cstdint>

#include "ouzel/feature_map.h"
#include "src/kernels/recurrence.h"

namespace ouzel {

// Features F of a map of K inputs. Throws Error(kInvalidArgument), naming `op`, where parameters
// are missing or misshapen.
std::int64_t check_feature_map(const char* op, const FeatureMap& map, std::int64_t query_heads,
                               std::int64_t key_heads, std::int64_t keys);
void check_feature_map_grads(const char* op, const FeatureMap& map, const FeatureMapGrads& grads);

inline bool is_learned(const FeatureMap& map) {
  return map.kind == FeatureMapKind::kElementwiseProduct;
}
// The parameters that serve k.
inline const FeatureMapWeights& key_weights(const FeatureMap& map) {
  return map.k.w1.present() ? map.k : map.q;
}

// The parameters of one head, and phi of one row of K numbers (the step).
struct HeadWeights {
  const float* w1 = nullptr;
  const float* w2 = nullptr;
  std::int64_t w1_row = 0, w2_row = 0;
  const float* b1 = nullptr;
  const float* b2 = nullptr;
};
HeadWeights head_weights(const FeatureMapWeights& weights, std::int64_t head);
ElementMap element_map(const FeatureMap& map);

// Rows that wait to be packed: `map` is still to be applied.
struct MappedRows {
  const float* rows = nullptr;
  std::int64_t stride = 0;
  ElementMap map = ElementMap::kIdentity;
};

// Sums of the gradients of one head's parameters, in double: a plain float sum of chunks would lose
// 1e-4 over a million tokens.
struct WeightSums {
  double* w1 = nullptr;  // [F, K]
  double* w2 = nullptr;
  double* b1 = nullptr;  // [F]
  double* b2 = nullptr;

  static std::int64_t size(std::int64_t features, std::int64_t keys) {
    return 2 * features * (keys + 1);
  }
  WeightSums() = default;
  WeightSums(double* memory, std::int64_t features, std::int64_t keys)
      : w1(memory), w2(w1 + features * keys), b1(w2 + features * keys), b2(b1 + features) {}
};

// The map of one head with its scratch (none for maps without parameters).
class HeadMap {
 public:
  // `Memory` hands out scratch, or only counts it. Without `adjoint` the second method is not used.
  template <class Memory>
  HeadMap(Memory& memory, const FeatureMap& map, std::int64_t keys, std::int64_t features,
          bool adjoint)
      : keys_(keys),
        features_(features),
        key_pitch_(padded(keys, kSlab)),
        pitch_(padded(features, kSlab)),
        map_(element_map(map)),
        learned_(is_learned(map)) {
    if (!learned_) return;
    for (float** p : {&w1_columns_, &w2_columns_}) *p = memory.template take<float>(keys * pitch_);
    for (float** p : {&b1_, &b2_}) *p = memory.template take<float>(pitch_);
    for (float** p : {&y1_, &y2_, &phi_}) *p = memory.template take<float>(kChunk * pitch_);
    if (!adjoint) return;
    for (float** p : {&w1_rows_, &w2_rows_, &dw_}) {
      *p = memory.template take<float>(features * key_pitch_);
    }
    for (float** p : {&x_, &dx_}) *p = memory.template take<float>(kChunk * key_pitch_);
  }

  void bind(Isa isa, const FeatureMapWeights& weights, std::int64_t head);
  // Valid until the next call.
  MappedRows apply(const float* x, std::int64_t stride, std::int64_t tokens);
  // phi(x) as dense rows of `pitch` floats.
  void dense(const float* x, std::int64_t stride, std::int64_t tokens, float* out);
  // dx (+)= J(x)^T dphi, for columns [column, column + count) of a map without parameters or all of
  // them of a learned one; dphi has rows of pitch() floats and begins at `column`. Gradients of
  // parameters are added to `sums`. dx may be null: only the parameters.
  void adjoint(const float* x, std::int64_t x_stride, std::int64_t tokens, float* dphi, float* dx,
               std::int64_t dx_stride, bool add, std::int64_t column, std::int64_t count,
               const WeightSums* sums);
  std::int64_t pitch() const { return pitch_; }

 private:
  void affine(const float* x, std::int64_t stride, std::int64_t tokens);
  void add_weight_sums(std::int64_t tokens, const float* dy, double* dw, double* db);

  std::int64_t keys_, features_, key_pitch_, pitch_;
  ElementMap map_;
  bool learned_;
  Isa isa_ = Isa::kPortable;
  float *w1_columns_ = nullptr, *w2_columns_ = nullptr;   // [K][pitch]
  float *w1_rows_ = nullptr, *w2_rows_ = nullptr;         // [F][key pitch]
  float *b1_ = nullptr, *b2_ = nullptr;                   // [pitch]
  float *y1_ = nullptr, *y2_ = nullptr, *phi_ = nullptr;  // [64][pitch]
  float *x_ = nullptr, *dx_ = nullptr;                    // [64][key pitch]
  float* dw_ = nullptr;                                   // [F][key pitch]
};

}  // namespace ouzel
