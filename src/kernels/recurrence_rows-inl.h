// Rows on their way into packed scratch, a vector at a time: the feature maps that act on each
// number alone, the stores into the keyed layout (recurrence.h), and the pieces of a chunk that is
// packed beside arithmetic.

// Per-target include guard.
#if defined(OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#undef OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#else
#define OUZEL_KERNELS_RECURRENCE_ROWS_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/recurrence.h"
#include "src/kernels/typed-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// elu(x) + 1: within 4e-7 for the results above 1e-8, 2e-6 below (thrice that without fused
// operations); NaN for NaN. It shares the ports of the tile's arithmetic, so it is made of few
// instructions: n = x log2(e) rounded by adding 1.5 * 2^23, and 2^f of |f| <= 1/2 from a polynomial
// (relative error 1.5e-7).
template <class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec elu1(Tag d, Vec x) {
#if HWY_TARGET == HWY_AVX3
  const Vec low = hn::Max(x, hn::Set(d, -87.0f));  // -87 for NaN
#else
  const Vec low = hn::Min(hn::Max(x, hn::Set(d, -87.0f)), hn::Zero(d));
#endif
  const Vec log2e = hn::Set(d, 1.44269504089f), round = hn::Set(d, 12582912.0f);
  const Vec rounded = hn::MulAdd(low, log2e, round), n = hn::Sub(rounded, round);
  const Vec f = hn::MulSub(low, log2e, n);
  Vec p = hn::Set(d, 1.327647217e-03f);
  p = hn::MulAdd(p, f, hn::Set(d, 9.675541331e-03f));
  p = hn::MulAdd(p, f, hn::Set(d, 5.550713273e-02f));
  p = hn::MulAdd(p, f, hn::Set(d, 2.402211972e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 6.931469671e-01f));
  p = hn::MulAdd(p, f, hn::Set(d, 1.0f));
  const Vec linear = hn::Add(x, hn::Set(d, 1.0f));
#if HWY_TARGET == HWY_AVX3
  const Vec power{_mm512_scalef_ps(p.raw, n.raw)};
  return hn::IfThenElse(hn::Le(x, hn::Zero(d)), power, linear);
#else
  // The larger one, since exp(x) >= 1 + x; 2^n comes from the bits of `rounded`.
  const hn::RebindToSigned<Tag> di;
  const auto bits = hn::Add(hn::BitCast(di, p), hn::ShiftLeft<23>(hn::BitCast(di, rounded)));
  return math::at_least(d, hn::BitCast(d, bits), linear);
#endif
}

template <ElementMap kMap, class Tag, class Vec = hn::Vec<Tag>>
HWY_INLINE Vec mapped(Tag d, Vec x) {
  if constexpr (kMap == ElementMap::kElu1) {
    return elu1(d, x);
  } else if constexpr (kMap == ElementMap::kRelu) {
    return math::at_least(d, hn::Zero(d), x);
  } else {
    return x;
  }
}

// Stores keys that are read (q) and written (k) into the keyed array at `out`.
template <bool kRead, bool kWrite, class D, class Vec = hn::Vec<D>>
HWY_INLINE void store_keyed(D d, Vec q, Vec k, float* out) {
#if HWY_TARGET == HWY_AVX3
  // Two blocks of 8. Stores of halves: joining q and k would take a port from the arithmetic.
  const hn::Half<D> dh;
  float* next = out + kKeyedBlockPitch;
  if constexpr (kRead) {
    hn::Store(hn::LowerHalf(dh, q), dh, out);
    hn::Store(hn::UpperHalf(dh, q), dh, next);
  }
  if constexpr (kWrite) {
    hn::Store(hn::LowerHalf(dh, k), dh, out + kKeyBlock);
    hn::Store(hn::UpperHalf(dh, k), dh, next + kKeyBlock);
  }
#else
  if constexpr (kRead) hn::Store(q, d, out);
  if constexpr (kWrite) hn::Store(k, d, out + kKeyBlock);
#endif
}

// What is done beside the arithmetic. kKeys copies; the others may map, multiply and normalise.
enum class Beside { kNothing, kPrefetch, kValues, kKeys, kKeysPlain, kKeysElu1, kKeysRelu };

inline constexpr ElementMap map_of(Beside beside) {
  return beside == Beside::kKeysElu1   ? ElementMap::kElu1
         : beside == Beside::kKeysRelu ? ElementMap::kRelu
                                       : ElementMap::kIdentity;
}

// Tokens of a tile to a piece, so that packing takes most of a chunk's time: in bursts it would ask
// more of the memory than that can give. Tiles of AVX2 are a quarter of the others'.
inline constexpr int kPieceTokens = HWY_TARGET == HWY_AVX3 ? 2 : 8;

// Up to `most` pieces of what is left to do; `count` calls of next() do them.
template <Beside kBeside>
class Pieces {
 public:
  HWY_INLINE Pieces(const Meanwhile*, std::int64_t) {}
  HWY_INLINE void next() {}
  static constexpr std::int64_t count = 0;
};

// Two lines a piece.
template <>
class Pieces<Beside::kPrefetch> {
 public:
  HWY_INLINE Pieces(Meanwhile* m, std::int64_t most)
      : stride_(m->prefetch->stride),
        line_(m->prefetch->first + m->prefetch_line * stride_),
        count(HWY_MIN(most, (kChunk - m->prefetch_line) / 2)) {
    m->prefetch_line += 2 * count;
    if (m->prefetch_line < kChunk) return;
    m->prefetch_line = 0;
    ++m->prefetch;
    --m->prefetch_count;
  }
  HWY_INLINE void next() {
    __builtin_prefetch(line_, 0, 2);
    __builtin_prefetch(line_ + stride_, 0, 2);
    line_ += 2 * stride_;
  }

 private:
  std::int64_t stride_;
  const float* line_;

 public:
  std::int64_t count;
};

// `pieces` of the rest of a chunk, of rows of `row` pieces, from (token, piece) on, which move on.
HWY_INLINE std::int64_t take_pieces(std::int64_t tokens, std::int64_t row, std::int64_t most,
                                    std::int64_t& token, std::int64_t& piece) {
  const std::int64_t count = HWY_MIN(most, (tokens - token) * row - piece);
  for (piece += count; piece >= row; piece -= row) ++token;
  return count;
}

// Calls body.operator()<T>() with the type of the rows that are packed.
template <class Body>
HWY_INLINE void with_type(DType dtype, const Body& body) {
  if (HWY_LIKELY(dtype == DType::kF32)) return body.template operator()<float>();
  if (dtype == DType::kBF16) return body.template operator()<BFloat16>();
  body.template operator()<Float16>();
}

// Bytes of so many numbers of such rows.
HWY_INLINE std::int64_t bytes_of(DType dtype, std::int64_t numbers) {
  return numbers * (dtype == DType::kF32 ? 4 : 2);
}
HWY_INLINE const char* row_at(const void* first, DType dtype, std::int64_t number) {
  return static_cast<const char*>(first) + bytes_of(dtype, number);
}

template <>
class Pieces<Beside::kValues> {
 public:
  HWY_INLINE Pieces(Meanwhile* m, std::int64_t most) : pack_(m->pack), token_(pack_.value_token) {
    const std::int64_t row = pack_.heads * pack_.value_pieces, piece = pack_.value_piece;
    left_ = row - piece;
    begin_row(piece);
    count = take_pieces(pack_.tokens, row, most, m->pack.value_token, m->pack.value_piece);
  }
  HWY_INLINE void next() {
    constexpr std::int64_t kLine = 64;
    __builtin_prefetch(v_ + ahead_, 0, 2);
    __builtin_prefetch(v_ + ahead_ + kLine, 0, 2);
    with_type(pack_.dtype, [&]<class T>() HWY_ATTR { piece<T>(); });
    out_ += kSlabPitch;
    if (--left_ != 0) return;
    left_ = pack_.heads * pack_.value_pieces;
    ++token_;
    begin_row(0);
  }

 private:
  template <class T>
  HWY_INLINE void piece() {
    const hn::ScalableTag<float> d;
    const T* v = reinterpret_cast<const T*>(v_);
    OUZEL_UNROLL
    for (std::int64_t i = 0; i < kSlab; i += HWY_LANES(float)) {
      hn::Store(LoadFirst(d, v + i, HWY_LANES(float)), d, out_ + i);
    }
    v_ += kSlab * sizeof(T);
  }
  HWY_INLINE void begin_row(std::int64_t piece) {
    const std::int64_t ahead = HWY_MIN(pack_.rows_ahead, pack_.rows_left - 1 - token_);
    v_ = row_at(pack_.v, pack_.dtype, token_ * pack_.v_stride + piece * kSlab);
    ahead_ = bytes_of(pack_.dtype, ahead * pack_.v_stride);
    out_ = pack_.slabbed + token_ * kSlab + piece * kSlabPitch;
  }
  const PackAhead& pack_;
  std::int64_t token_, left_, ahead_;  // ahead_: bytes
  const char* v_;
  float* out_;

 public:
  std::int64_t count;
};

template <Beside kBeside>
  requires(kBeside >= Beside::kKeys)
class Pieces<kBeside> {
 public:
  HWY_INLINE Pieces(Meanwhile* m, std::int64_t most) : pack_(m->pack), token_(pack_.key_token) {
    const std::int64_t row = pack_.heads * pack_.key_pieces, piece = pack_.key_piece;
    begin_row(piece);
    count = take_pieces(pack_.tokens, row, most, m->pack.key_token, m->pack.key_piece);
  }
  HWY_INLINE void next() {
    __builtin_prefetch(q_ + q_ahead_, 0, 2);
    __builtin_prefetch(k_ + k_ahead_, 0, 2);
    with_type(pack_.dtype, [&]<class T>() HWY_ATTR { piece<T>(); });
    out_ += 2 * kKeyedBlockPitch;
    if constexpr (kBeside != Beside::kKeys) {
      key_ += kKeyedPitch;
      if (--left_in_head_ == 0) {
        left_in_head_ = pack_.key_pieces;
        at_ += kChunk;
      }
    }
    if (--left_ != 0) return;
    ++token_;
    begin_row(0);
  }

 private:
  using D = hn::ScalableTag<float>;
  using V = hn::Vec<D>;
  template <class T>
  HWY_INLINE void piece() {
    const D d;
    const T *q = reinterpret_cast<const T*>(q_), *k = reinterpret_cast<const T*>(k_);
    OUZEL_UNROLL
    for (std::int64_t i = 0; i < kKeyedPitch; i += HWY_LANES(float)) {
      const V x = mapped<map_of(kBeside)>(d, LoadFirst(d, q + i, HWY_LANES(float)));
      V y = mapped<map_of(kBeside)>(d, LoadFirst(d, k + i, HWY_LANES(float)));
      if constexpr (kBeside != Beside::kKeys) {
        if (pack_.k_factor != nullptr) y = hn::Mul(y, hn::Set(d, pack_.k_factor[at_]));
        if (pack_.z != nullptr) add_to_normaliser(i, x, y);
      }
      store_keyed<true, true>(d, x, y, out_ + i / kKeyBlock * kKeyedBlockPitch + i % kKeyBlock);
    }
    q_ += kKeyedPitch * sizeof(T);
    k_ += kKeyedPitch * sizeof(T);
  }
  HWY_INLINE void begin_row(std::int64_t piece) {
    left_ = pack_.heads * pack_.key_pieces - piece;
    q_ = row_at(pack_.q, pack_.dtype, token_ * pack_.q_stride + piece * kKeyedPitch);
    k_ = row_at(pack_.k, pack_.dtype, token_ * pack_.k_stride + piece * kKeyedPitch);
    out_ = pack_.keyed + token_ * kKeyedPitch + piece * 2 * kKeyedBlockPitch;
    const std::int64_t ahead = HWY_MIN(pack_.rows_ahead, pack_.rows_left - 1 - token_);
    q_ahead_ = bytes_of(pack_.dtype, ahead * pack_.q_stride);
    k_ahead_ = bytes_of(pack_.dtype, ahead * pack_.k_stride);
    if constexpr (kBeside != Beside::kKeys) {
      key_ = piece * kKeyedPitch;
      left_in_head_ = pack_.key_pieces - piece % pack_.key_pieces;
      at_ = piece / pack_.key_pieces * kChunk + token_;
    }
  }
  HWY_INLINE void add_to_normaliser(std::int64_t i, V q, V k) {
    const D d;
    float* residue = pack_.z_residue + key_ + i;
    float* part = pack_.den_parts + at_ * HWY_LANES(float);
    const V recent = hn::Add(hn::Load(d, residue), k);
    hn::Store(recent, d, residue);
    const V z = hn::Add(hn::Load(d, pack_.z + key_ + i), recent);
    hn::Store(hn::MulAdd(q, z, hn::Load(d, part)), d, part);
  }
  const PackAhead& pack_;
  std::int64_t token_, left_, q_ahead_, k_ahead_;  // ahead: bytes
  const char *q_, *k_;
  float* out_;
  std::int64_t key_ = 0, left_in_head_ = 0, at_ = 0;  // at_: of [heads][64]

 public:
  std::int64_t count;
};

// Calls body.operator()<Beside>() with what is next to do: keys and values side by side, then
// prefetches.
template <class Body>
HWY_INLINE void with_beside(const Meanwhile* m, const Body& body) {
  if (m == nullptr) return body.template operator()<Beside::kNothing>();
  const PackAhead& p = m->pack;
  if (p.key_token < p.tokens && p.key_token <= p.value_token) {
    switch (p.map) {
      case ElementMap::kIdentity:
        if (p.k_factor != nullptr || p.z != nullptr) {
          return body.template operator()<Beside::kKeysPlain>();
        }
        return body.template operator()<Beside::kKeys>();
      case ElementMap::kElu1:
        return body.template operator()<Beside::kKeysElu1>();
      case ElementMap::kRelu:
        return body.template operator()<Beside::kKeysRelu>();
    }
  }
  if (p.value_token < p.tokens) return body.template operator()<Beside::kValues>();
  if (m->prefetch_count != 0) return body.template operator()<Beside::kPrefetch>();
  body.template operator()<Beside::kNothing>();
}

}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
