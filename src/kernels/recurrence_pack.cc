// Packing of rows with their feature map, the adjoint of the map, and the vectors that go along
// with a state: the normaliser and its adjoint.
#include <utility>

#include "src/kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_pack.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/recurrence_rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using D8 = hn::CappedTag<float, 8>;

// exp(min(x, 0)), NaN for NaN: the slope of elu1.
template <class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec exp_of_negative(Tag d, Vec x) {
  x = math::at_least(d, hn::Set(d, -104.0f), math::at_most(d, hn::Zero(d), x));
  Vec r;
  const Vec n = math::reduce_by_ln2(d, x, r);
  return math::scale_by_pow2(d, hn::Add(hn::Set(d, 1.0f), math::expm1_reduced(d, r)), n);
}

// phi'(x) dy. elu1 has slope exp(x) at 0 from below and 1 from above: the same.
template <ElementMap kMap, class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec adjoint(Tag d, Vec x, Vec dy) {
  if constexpr (kMap == ElementMap::kElu1) {
    return hn::Mul(exp_of_negative(d, x), dy);
  } else if constexpr (kMap == ElementMap::kRelu) {
    return hn::IfThenElseZero(hn::Gt(x, hn::Zero(d)), dy);
  } else {
    return dy;
  }
}

// Column by column of vectors: every cache line is read once, and written in the order of tokens.
template <ElementMap kMap>
void pack(const PackArgs& a, std::int64_t token_pitch, std::int64_t slab_pitch) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < padded(a.size, kSlab); i += lanes) {
    float* out = a.out + i / kSlab * slab_pitch + i % kSlab;
    const std::int64_t left = a.size - i;
    const auto inside = hn::FirstN(d, static_cast<std::size_t>(HWY_MAX(left, 0)));
    const float* row = a.rows + (left > 0 ? i : 0);
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      // A map may turn the zeros beyond the end into something else.
      auto x = mapped<kMap>(d, load_first(d, row + t * a.stride, left));
      if (a.factor != nullptr) x = hn::Mul(x, hn::Set(d, a.factor[t]));
      if (left < lanes) x = hn::IfThenElseZero(inside, x);
      hn::Store(x, d, out + t * token_pitch);
    }
  }
}

void pack_mapped(const PackArgs& a, std::int64_t token_pitch, std::int64_t slab_pitch) {
  switch (a.map) {
    case ElementMap::kIdentity:
      return pack<ElementMap::kIdentity>(a, token_pitch, slab_pitch);
    case ElementMap::kElu1:
      return pack<ElementMap::kElu1>(a, token_pitch, slab_pitch);
    case ElementMap::kRelu:
      return pack<ElementMap::kRelu>(a, token_pitch, slab_pitch);
  }
}

// sum + residue = a + b exactly (Knuth).
template <class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec two_sum(Tag, Vec a, Vec b, Vec& residue) {
  const Vec sum = hn::Add(a, b);
  const Vec b_part = hn::Sub(sum, a);
  const Vec a_part = hn::Sub(sum, b_part);
  residue = hn::Add(hn::Sub(a, a_part), hn::Sub(b, b_part));
  return sum;
}

// The sums of kRows vectors, in lanes: of kRows neighbours each.
template <int kRows>
HWY_INLINE hn::Vec<D> sums_of(const float* rows) {
  const D d;
#if HWY_TARGET == HWY_SCALAR
  return hn::Load(d, rows);
#else
  if constexpr (kRows == 1) {
    return hn::Load(d, rows);
  } else {
    const auto a = sums_of<kRows / 2>(rows);
    const auto b = sums_of<kRows / 2>(rows + kRows / 2 * HWY_LANES(float));
    return hn::Add(hn::ConcatEven(d, b, a), hn::ConcatOdd(d, b, a));
  }
#endif
}

// den[t] = the sum of a vector's lanes, parts [64][lanes].
void sum_parts(const float* parts, float* den) {
  constexpr int kLanes = HWY_LANES(float);
  for (std::int64_t t = 0; t < kChunk; t += kLanes) {
    hn::StoreU(sums_of<kLanes>(parts + t * kLanes), D(), den + t);
  }
}

template <ElementMap kMap, bool kRead, bool kWrite, bool kNormalize>
void pack_keyed_pair(const PackKeyedArgs& a) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  // Partial sums of den over lanes: one horizontal sum a token, at the end.
  HWY_ALIGN float parts[kChunk * HWY_LANES(float)];
  if constexpr (kNormalize && kRead) {
    for (std::int64_t i = 0; i < kChunk * lanes; i += lanes) hn::Store(hn::Zero(d), d, parts + i);
  }
  for (std::int64_t i = 0; i < padded(a.size, HWY_MAX(kKeyBlock, lanes)); i += lanes) {
    float* out = a.out + i / kKeyBlock * kKeyedBlockPitch + i % kKeyBlock;
    const std::int64_t left = a.size - i;
    const auto inside = hn::FirstN(d, static_cast<std::size_t>(HWY_MAX(left, 0)));
    const std::int64_t column = left > 0 ? i : 0;
    auto z = hn::Zero(d), recent = z;
    if constexpr (kNormalize) {
      z = hn::Load(d, a.z + i);
      recent = hn::Load(d, a.z_residue + i);
    }
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      auto q = hn::Zero(d), k = q;
      if constexpr (kRead) {
        q = mapped<kMap>(d, load_first(d, a.q + column + t * a.q_stride, left));
        if (left < lanes) q = hn::IfThenElseZero(inside, q);
      }
      if constexpr (kWrite) {
        k = mapped<kMap>(d, load_first(d, a.k + column + t * a.k_stride, left));
        if (a.k_factor != nullptr) k = hn::Mul(k, hn::Set(d, a.k_factor[t]));
        if (left < lanes) k = hn::IfThenElseZero(inside, k);
      }
      store_keyed<kRead, kWrite>(d, q, k, out + t * kKeyedPitch);
      if constexpr (kNormalize) {
        if constexpr (kWrite) recent = hn::Add(recent, k);
        if constexpr (kRead) {
          float* part = parts + t * lanes;
          hn::Store(hn::MulAdd(q, hn::Add(z, recent), hn::Load(d, part)), d, part);
        }
      }
    }
    if constexpr (kNormalize) {
      auto residue = recent;
      hn::Store(two_sum(d, z, recent, residue), d, a.z + i);
      hn::Store(residue, d, a.z_residue + i);
    }
  }
  if constexpr (kNormalize && kRead) {
    HWY_ALIGN float den[kChunk];
    sum_parts(parts, den);
    for (std::int64_t t = 0; t < a.tokens; ++t) a.den[t] = den[t];
  }
}

template <ElementMap kMap, bool kNormalize>
void pack_keyed_halves(const PackKeyedArgs& a) {
  if (a.q != nullptr && a.k != nullptr) return pack_keyed_pair<kMap, true, true, kNormalize>(a);
  if (a.q != nullptr) return pack_keyed_pair<kMap, true, false, kNormalize>(a);
  pack_keyed_pair<kMap, false, true, kNormalize>(a);
}

template <ElementMap kMap>
void pack_keyed_mapped(const PackKeyedArgs& a) {
  a.z != nullptr ? pack_keyed_halves<kMap, true>(a) : pack_keyed_halves<kMap, false>(a);
}

template <ElementMap kMap>
void map_adjoint(const MapAdjointArgs& a) {
  const D d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    const float* x = a.x + t * a.x_stride;
    const float* dy = a.dy + t * a.dy_stride;
    float* dx = a.dx + t * a.dx_stride;
    for (std::int64_t i = 0; i < a.size; i += lanes) {
      const std::int64_t left = a.size - i;
      auto g = adjoint<kMap>(d, load_first(d, x + i, left), load_first(d, dy + i, left));
      if (a.add) g = hn::Add(load_first(d, dx + i, left), g);
      store_first(d, g, dx + i, left);
    }
  }
}

template <TileMode kMode>
void normalizer(const NormalizerArgs& a) {
  const D8 d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  // Partial sums over lanes, reduced at the end: one horizontal sum a token.
  HWY_ALIGN float parts[kChunk * 8];
  if constexpr (kMode != TileMode::kWrite) {
    for (std::int64_t i = 0; i < a.tokens * lanes; ++i) parts[i] = 0;
  }
  for (std::int64_t i = 0; i < a.blocks * kKeyBlock; i += lanes) {
    const auto z = hn::Load(d, a.z + i);
    auto recent = hn::Load(d, a.z_residue + i);
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      if constexpr (kMode != TileMode::kRead) {
        recent = hn::Add(recent, hn::Load(d, a.k + i + t * a.pitch));
      }
      const auto now = hn::Add(z, recent);
      if constexpr (kMode != TileMode::kWrite) {
        const auto q = hn::Load(d, a.q + i + t * a.pitch);
        hn::Store(hn::MulAdd(q, now, hn::Load(d, parts + t * lanes)), d, parts + t * lanes);
      }
      if (a.z_rows != nullptr) hn::Store(now, d, a.z_rows + t * a.pitch + i);
    }
    auto residue = recent;
    hn::Store(two_sum(d, z, recent, residue), d, a.z + i);
    hn::Store(residue, d, a.z_residue + i);
  }
  if constexpr (kMode != TileMode::kWrite) {
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      a.den[t] = hn::GetLane(hn::SumOfLanes(d, hn::Load(d, parts + t * lanes)));
    }
  }
}

template <TileMode kMode>
void vector_scan(const VectorScanArgs& a) {
  const D8 d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < a.blocks * kKeyBlock; i += lanes) {
    const auto sum = hn::Load(d, a.sum + i);
    auto recent = hn::Load(d, a.sum_residue + i);
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      if constexpr (kMode != TileMode::kRead) {
        recent = hn::MulAdd(hn::Set(d, a.a[t]), hn::Load(d, a.x + t * a.pitch + i), recent);
      }
      if constexpr (kMode != TileMode::kWrite) {
        float* y = a.y + t * a.pitch + i;
        hn::Store(hn::MulAdd(hn::Set(d, a.b[t]), hn::Add(sum, recent), hn::Load(d, y)), d, y);
      }
    }
    auto residue = recent;
    hn::Store(two_sum(d, sum, recent, residue), d, a.sum + i);
    hn::Store(residue, d, a.sum_residue + i);
  }
}

}  // namespace

void PackKeyed(const PackKeyedArgs& a) {
  switch (a.map) {
    case ElementMap::kIdentity:
      return pack_keyed_mapped<ElementMap::kIdentity>(a);
    case ElementMap::kElu1:
      return pack_keyed_mapped<ElementMap::kElu1>(a);
    case ElementMap::kRelu:
      return pack_keyed_mapped<ElementMap::kRelu>(a);
  }
}

void FinishPackAhead(PackAhead& p) {
  const D d;
  Meanwhile m;
  std::swap(m.pack, p);
  while (m.pack.key_token < m.pack.tokens || m.pack.value_token < m.pack.tokens) {
    with_beside(&m, [&]<Beside kBeside>() HWY_ATTR {
      Pieces<kBeside> pieces(&m, kChunk);
      for (std::int64_t n = pieces.count; n > 0; --n) pieces.next();
    });
  }
  std::swap(m.pack, p);
  if (p.z == nullptr) return;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < p.heads * p.key_pieces * kKeyedPitch; i += lanes) {
    auto residue = hn::Load(d, p.z_residue + i);
    hn::Store(two_sum(d, hn::Load(d, p.z + i), residue, residue), d, p.z + i);
    hn::Store(residue, d, p.z_residue + i);
  }
  for (std::int64_t head = 0; head < p.heads; ++head) {
    sum_parts(p.den_parts + head * kChunk * lanes, p.den + head * kChunk);
  }
}

void PackSlabs(const PackArgs& a) { pack_mapped(a, kSlab, kSlabPitch); }
void PackDense(const PackArgs& a) { pack_mapped(a, a.token_pitch, kSlab); }

void MapAdjoint(const MapAdjointArgs& a) {
  switch (a.map) {
    case ElementMap::kIdentity:
      return map_adjoint<ElementMap::kIdentity>(a);
    case ElementMap::kElu1:
      return map_adjoint<ElementMap::kElu1>(a);
    case ElementMap::kRelu:
      return map_adjoint<ElementMap::kRelu>(a);
  }
}

void NormalizerScan(const NormalizerArgs& a) {
  switch (a.mode) {
    case TileMode::kScan:
      return normalizer<TileMode::kScan>(a);
    case TileMode::kWrite:
      return normalizer<TileMode::kWrite>(a);
    case TileMode::kRead:
      return normalizer<TileMode::kRead>(a);
  }
}

void VectorScan(const VectorScanArgs& a) {
  switch (a.mode) {
    case TileMode::kScan:
      return vector_scan<TileMode::kScan>(a);
    case TileMode::kWrite:
      return vector_scan<TileMode::kWrite>(a);
    case TileMode::kRead:
      return vector_scan<TileMode::kRead>(a);
  }
}

void RowDots(std::int64_t tokens, std::int64_t size, const float* x, std::int64_t x_pitch,
             const float* w, std::int64_t w_pitch, float* y) {
  const D8 d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < tokens; ++t) {
    auto sum = hn::Zero(d);
    for (std::int64_t i = 0; i < size; i += lanes) {
      sum = hn::MulAdd(hn::Load(d, x + t * x_pitch + i), hn::Load(d, w + t * w_pitch + i), sum);
    }
    y[t] = hn::GetLane(hn::SumOfLanes(d, sum));
  }
}

void RowAdd(std::int64_t tokens, std::int64_t size, const float* c, const float* z,
            std::int64_t z_pitch, float* x, std::int64_t x_pitch) {
  const D8 d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t t = 0; t < tokens; ++t) {
    const auto factor = hn::Set(d, c[t]);
    for (std::int64_t i = 0; i < size; i += lanes) {
      float* at = x + t * x_pitch + i;
      hn::Store(hn::MulAdd(factor, hn::Load(d, z + t * z_pitch + i), hn::Load(d, at)), d, at);
    }
  }
}

void Multiply(std::int64_t count, const float* a, const float* b, float* out) {
  const D8 d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t i = 0; i < count; i += lanes) {
    hn::Store(hn::Mul(hn::Load(d, a + i), hn::Load(d, b + i)), d, out + i);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(PackKeyed);
HWY_EXPORT(FinishPackAhead);
HWY_EXPORT(PackSlabs);
HWY_EXPORT(PackDense);
HWY_EXPORT(MapAdjoint);
HWY_EXPORT(NormalizerScan);
HWY_EXPORT(VectorScan);
HWY_EXPORT(RowDots);
HWY_EXPORT(RowAdd);
HWY_EXPORT(Multiply);

void pack_keyed(Isa isa, const PackKeyedArgs& args) { OUZEL_DISPATCH(isa, PackKeyed)(args); }
void finish_pack_ahead(Isa isa, PackAhead& pack) { OUZEL_DISPATCH(isa, FinishPackAhead)(pack); }
void pack_slabs(Isa isa, const PackArgs& args) { OUZEL_DISPATCH(isa, PackSlabs)(args); }
void pack_dense(Isa isa, const PackArgs& args) { OUZEL_DISPATCH(isa, PackDense)(args); }
void map_adjoint(Isa isa, const MapAdjointArgs& args) { OUZEL_DISPATCH(isa, MapAdjoint)(args); }
void normalizer_scan(Isa isa, const NormalizerArgs& args) {
  OUZEL_DISPATCH(isa, NormalizerScan)(args);
}
void vector_scan(Isa isa, const VectorScanArgs& args) { OUZEL_DISPATCH(isa, VectorScan)(args); }
void row_dots(Isa isa, std::int64_t tokens, std::int64_t size, const float* x, std::int64_t x_pitch,
              const float* w, std::int64_t w_pitch, float* y) {
  OUZEL_DISPATCH(isa, RowDots)(tokens, size, x, x_pitch, w, w_pitch, y);
}
void row_add(Isa isa, std::int64_t tokens, std::int64_t size, const float* c, const float* z,
             std::int64_t z_pitch, float* x, std::int64_t x_pitch) {
  OUZEL_DISPATCH(isa, RowAdd)(tokens, size, c, z, z_pitch, x, x_pitch);
}
void multiply(Isa isa, std::int64_t count, const float* a, const float* b, float* out) {
  OUZEL_DISPATCH(isa, Multiply)(count, a, b, out);
}
}  // namespace ouzel
#endif
