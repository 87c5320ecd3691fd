// Packing of rows with their feature map, the adjoint of the map, and the vectors that go along
// with a state: the normaliser and its adjoint.
#include "src/kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_pack.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/partial-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using D8 = hn::CappedTag<float, 8>;

template <ElementMap kMap, class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec mapped(Tag d, Vec x) {
  if constexpr (kMap == ElementMap::kElu1) {
    const auto positive = hn::Gt(x, hn::Zero(d));
    const Vec e = math::exp(d, hn::IfThenZeroElse(positive, x));
    return hn::IfThenElse(positive, hn::Add(x, hn::Set(d, 1.0f)), e);
  } else if constexpr (kMap == ElementMap::kRelu) {
    return hn::IfThenZeroElse(hn::Lt(x, hn::Zero(d)), x);
  } else {
    return x;
  }
}

// phi'(x) dy. elu1 has slope exp(x) at 0 from below and 1 from above: the same.
template <ElementMap kMap, class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec adjoint(Tag d, Vec x, Vec dy) {
  if constexpr (kMap == ElementMap::kElu1) {
    const auto positive = hn::Gt(x, hn::Zero(d));
    const Vec e = math::exp(d, hn::IfThenZeroElse(positive, x));
    return hn::IfThenElse(positive, dy, hn::Mul(e, dy));
  } else if constexpr (kMap == ElementMap::kRelu) {
    return hn::IfThenElseZero(hn::Gt(x, hn::Zero(d)), dy);
  } else {
    return dy;
  }
}

// Blocks of kBlock floats, block_pitch apart; tokens token_pitch apart.
template <ElementMap kMap, std::int64_t kBlock, class Tag>
void pack(const PackArgs& a, std::int64_t token_pitch, std::int64_t block_pitch) {
  const Tag d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  const std::int64_t whole = a.size / lanes * lanes;
  const std::int64_t end = padded(a.size, kBlock);
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    const float* row = a.rows + t * a.stride;
    float* out = a.out + t * token_pitch;
    const auto factor = hn::Set(d, a.factor == nullptr ? 1.0f : a.factor[t]);
    std::int64_t i = 0;
    for (; i < whole; i += lanes) {
      const auto x = hn::Mul(mapped<kMap>(d, hn::LoadU(d, row + i)), factor);
      hn::Store(x, d, out + i / kBlock * block_pitch + i % kBlock);
    }
    if (i < a.size) {
      // A map may turn the zeros beyond the end into something else.
      const auto inside = hn::FirstN(d, static_cast<std::size_t>(a.size - i));
      const auto x = hn::Mul(mapped<kMap>(d, load_first(d, row + i, a.size - i)), factor);
      hn::Store(hn::IfThenElseZero(inside, x), d, out + i / kBlock * block_pitch + i % kBlock);
      i += lanes;
    }
    for (; i < end; i += lanes) {
      hn::Store(hn::Zero(d), d, out + i / kBlock * block_pitch + i % kBlock);
    }
  }
}

template <std::int64_t kBlock, class Tag>
void pack_mapped(const PackArgs& a, std::int64_t token_pitch, std::int64_t block_pitch) {
  switch (a.map) {
    case ElementMap::kIdentity:
      return pack<ElementMap::kIdentity, kBlock, Tag>(a, token_pitch, block_pitch);
    case ElementMap::kElu1:
      return pack<ElementMap::kElu1, kBlock, Tag>(a, token_pitch, block_pitch);
    case ElementMap::kRelu:
      return pack<ElementMap::kRelu, kBlock, Tag>(a, token_pitch, block_pitch);
  }
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

// sum + residue = a + b exactly (Knuth).
template <class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec two_sum(Tag, Vec a, Vec b, Vec& residue) {
  const Vec sum = hn::Add(a, b);
  const Vec b_part = hn::Sub(sum, a);
  const Vec a_part = hn::Sub(sum, b_part);
  residue = hn::Add(hn::Sub(a, a_part), hn::Sub(b, b_part));
  return sum;
}

template <TileMode kMode>
void normalizer(const NormalizerArgs& a) {
  const D8 d;
  const std::int64_t lanes = static_cast<std::int64_t>(hn::Lanes(d));
  // Partial sums over lanes, reduced at the end: one horizontal sum a token.
  HWY_ALIGN float parts[kChunk * kKeyBlock];
  if constexpr (kMode != TileMode::kWrite) {
    for (std::int64_t i = 0; i < a.tokens * lanes; ++i) parts[i] = 0;
  }
  for (std::int64_t i = 0; i < a.blocks * kKeyBlock; i += lanes) {
    const std::int64_t offset = i / kKeyBlock * a.block_pitch + i % kKeyBlock;
    const auto z = hn::Load(d, a.z + i);
    auto recent = hn::Load(d, a.z_residue + i);
    for (std::int64_t t = 0; t < a.tokens; ++t) {
      if constexpr (kMode != TileMode::kRead) {
        recent = hn::Add(recent, hn::Load(d, a.k + offset + t * a.token_pitch));
      }
      const auto now = hn::Add(z, recent);
      if constexpr (kMode != TileMode::kWrite) {
        const auto q = hn::Load(d, a.q + offset + t * a.token_pitch);
        hn::Store(hn::MulAdd(q, now, hn::Load(d, parts + t * lanes)), d, parts + t * lanes);
      }
      if (a.z_rows != nullptr) hn::Store(now, d, a.z_rows + t * a.z_pitch + i);
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

void PackKeyed(const PackArgs& a) {
  pack_mapped<kKeyBlock, D8>(a, kKeyedPitch, kChunk * kKeyedPitch);
}
void PackSlabs(const PackArgs& a) { pack_mapped<kSlab, D>(a, kSlab, kChunk * kSlab); }
void PackDense(const PackArgs& a) { pack_mapped<kSlab, D>(a, a.token_pitch, kSlab); }

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
HWY_EXPORT(PackSlabs);
HWY_EXPORT(PackDense);
HWY_EXPORT(MapAdjoint);
HWY_EXPORT(NormalizerScan);
HWY_EXPORT(VectorScan);
HWY_EXPORT(RowDots);
HWY_EXPORT(RowAdd);
HWY_EXPORT(Multiply);

void pack_keyed(Isa isa, const PackArgs& args) { OUZEL_DISPATCH(isa, PackKeyed)(args); }
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
