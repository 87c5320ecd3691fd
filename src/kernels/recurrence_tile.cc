// The state tile: a tile of S stays in registers while the packed tokens of a chunk pass by,
// S += k v^T, o += S^T q, in token order. No matrix of the chunk is formed.
#include "src/kernels/recurrence.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_tile.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/recurrence_rows-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);
// Keys of a tile: 16 accumulators of the 32 registers of AVX-512, 8 of the 16 of AVX2.
constexpr int kTileKeys = HWY_TARGET == HWY_AVX3 ? 8 : 4;

// x * factor for a whole tile; a factor of exactly 0 clears it, even of NaN.
template <int kVectors>
HWY_INLINE void scale_tile(V (&s)[kTileKeys][kVectors], float factor) {
  if (factor == 1.0f) return;
  const D d;
  const V f = hn::Set(d, factor);
  OUZEL_UNROLL
  for (int i = 0; i < kTileKeys; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      s[i][j] = factor == 0.0f ? hn::Zero(d) : hn::Mul(s[i][j], f);
    }
  }
}

// kFirst: the sums over keys begin here. kLast: they end here, and go out.
template <TileMode kMode, int kVectors, bool kFirst, bool kLast, Beside kBeside>
void tile_of(const TileArgs& a, std::int64_t key, std::int64_t column) {
  const D d;
  float* state = a.state + key * kSlab + column;
  V s[kTileKeys][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kTileKeys; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      s[i][j] = hn::Load(d, state + i * kSlab + j * kLanes);
    }
  }
  const float* keyed = a.keyed + key / kKeyBlock * kKeyedBlockPitch + key % kKeyBlock;
  const float* values = a.values + column;
  float* partial = a.partial + column;
  float* out = kMode == TileMode::kWrite ? nullptr : a.out + column;
  const std::int64_t rest = a.width - column;
  std::int64_t t = 0;
  const auto token = [&]() HWY_ATTR __attribute__((always_inline)) {
    V v[kVectors], o[kVectors];
    if constexpr (kMode != TileMode::kRead) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) v[j] = hn::Load(d, values + j * kLanes);
    }
    if constexpr (kMode != TileMode::kWrite) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        o[j] = kFirst ? hn::Zero(d) : hn::Load(d, partial + j * kLanes);
      }
    }
    OUZEL_UNROLL
    for (int i = 0; i < kTileKeys; ++i) {
      if constexpr (kMode != TileMode::kRead) {
        const V k = hn::Set(d, keyed[kKeyBlock + i]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) s[i][j] = hn::MulAdd(k, v[j], s[i][j]);
      }
      if constexpr (kMode != TileMode::kWrite) {
        const V q = hn::Set(d, keyed[i]);
        OUZEL_UNROLL
        for (int j = 0; j < kVectors; ++j) o[j] = hn::MulAdd(q, s[i][j], o[j]);
      }
    }
    if constexpr (kMode != TileMode::kWrite) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        if constexpr (kLast) {
          V y = hn::Mul(o[j], hn::Set(d, a.factor[t]));
          if constexpr (kMode == TileMode::kScan) {
            if (a.skip != 0.0f) y = hn::MulAdd(v[j], hn::Set(d, a.skip), y);
          }
          if (a.stream) {
            hn::Stream(y, d, out + j * kLanes);
          } else {
            store_first(d, y, out + j * kLanes, rest - j * kLanes);
          }
        } else {
          hn::Store(o[j], d, partial + j * kLanes);
        }
      }
    }
    keyed += kKeyedPitch;
    values += kSlab;
    partial += kSlab;
    if constexpr (kLast && kMode != TileMode::kWrite) out += a.out_stride;
    ++t;
  };
  const auto group = [&]() HWY_ATTR __attribute__((always_inline)) {
    OUZEL_UNROLL
    for (int u = 0; u < kPieceTokens; ++u) token();
  };
  // Nothing but the pieces is counted: a counter more a token costs 3 points of efficiency.
  Pieces<kBeside> pieces(a.meanwhile, a.tokens / kPieceTokens);
  std::int64_t left = pieces.count;
  for (const TileBlock* block = a.blocks; t < a.tokens; ++block) {
    scale_tile(s, block->enter);
    const std::int64_t end = t + block->tokens;
    const std::int64_t groups = HWY_MIN(left, block->tokens / kPieceTokens);
    left -= groups;
    for (std::int64_t n = groups; n > 0; --n) {
      pieces.next();
      group();
    }
    if constexpr (kPieceTokens > 2) {
      while (t + kPieceTokens <= end) group();
    }
    while (t < end) token();
  }
  for (; left > 0; --left) pieces.next();
  if constexpr (kMode != TileMode::kRead) {
    scale_tile(s, a.leave);
    OUZEL_UNROLL
    for (int i = 0; i < kTileKeys; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        hn::Store(s[i][j], d, state + i * kSlab + j * kLanes);
      }
    }
  }
}

template <TileMode kMode, int kVectors, bool kFirst, bool kLast>
void tile(const TileArgs& a, std::int64_t key, std::int64_t column) {
  if constexpr (kMode == TileMode::kScan && kVectors == 2 && !(kFirst && kLast)) {
    with_beside(a.meanwhile, [&]<Beside kBeside>() HWY_ATTR {
      tile_of<kMode, kVectors, kFirst, kLast, kBeside>(a, key, column);
    });
  } else if (a.meanwhile != nullptr && a.meanwhile->prefetch_count != 0) {
    tile_of<kMode, kVectors, kFirst, kLast, Beside::kPrefetch>(a, key, column);
  } else {
    tile_of<kMode, kVectors, kFirst, kLast, Beside::kNothing>(a, key, column);
  }
}

template <TileMode kMode, int kVectors>
void tiles(const TileArgs& a, std::int64_t column) {
  const std::int64_t keys = a.key_blocks * kKeyBlock;
  if (keys == kTileKeys) {
    tile<kMode, kVectors, true, true>(a, 0, column);
    return;
  }
  tile<kMode, kVectors, true, false>(a, 0, column);
  std::int64_t key = kTileKeys;
  for (; key + kTileKeys < keys; key += kTileKeys) {
    tile<kMode, kVectors, false, false>(a, key, column);
  }
  tile<kMode, kVectors, false, true>(a, key, column);
}

template <TileMode kMode>
void columns(const TileArgs& a) {
  std::int64_t column = 0;
  for (; column + kLanes < a.width; column += 2 * kLanes) tiles<kMode, 2>(a, column);
  if (column < a.width) tiles<kMode, 1>(a, column);
}

}  // namespace

void RecurrenceTile(const TileArgs& a) {
  switch (a.mode) {
    case TileMode::kScan:
      return columns<TileMode::kScan>(a);
    case TileMode::kWrite:
      return columns<TileMode::kWrite>(a);
    case TileMode::kRead:
      return columns<TileMode::kRead>(a);
  }
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "hwy/cache_control.h"
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceTile);
void recurrence_tile(Isa isa, const TileArgs& args) { OUZEL_DISPATCH(isa, RecurrenceTile)(args); }
void finish_streams() { hwy::FlushStream(); }
}  // namespace ouzel
#endif
