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

HWY_INLINE V scaled(D d, V x, float factor) {
  return factor == 0.0f ? hn::Zero(d) : hn::Mul(x, hn::Set(d, factor));
}

// kFirst: the sums over keys begin here. kLast: they end here, and go out.
template <TileMode kMode, int kVectors, bool kFirst, bool kLast, bool kCopy>
void tile_of(const TileArgs& a, std::int64_t key, std::int64_t column, std::int64_t count) {
  const D d;
  float* state = a.state + key * kSlab + column;
  V s[kTileKeys][kVectors];
  OUZEL_UNROLL
  for (int i = 0; i < kTileKeys; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const V x = hn::Load(d, state + i * kSlab + j * kLanes);
      s[i][j] = a.enter == 1.0f ? x : scaled(d, x, a.enter);
    }
  }
  const float* keyed = a.keyed + key / kKeyBlock * kKeyedBlockPitch + key % kKeyBlock;
  const float* values = a.values + column;
  float* partial = a.partial + column;
  float* out = kMode == TileMode::kWrite ? nullptr : a.out + column;
  const std::int64_t rest = a.width - column;
  // Nothing left to prefetch: a line that is in the cache.
  PrefetchColumn next{a.partial, 0};
  if (count < a.prefetch_count) next = a.prefetch[count];
  CopyColumn copy;
  if constexpr (kCopy) copy = a.copy[count];
  for (std::int64_t t = 0; t < a.tokens; ++t) {
    __builtin_prefetch(next.first, 0, 2);
    next.first += next.stride;
    if constexpr (kCopy) {
      const hn::CappedTag<float, 8> d8;
      for (std::int64_t i = 0; i < 8; i += static_cast<std::int64_t>(hn::Lanes(d8))) {
        hn::Store(hn::LoadU(d8, copy.from + i), d8, copy.to[0] + i);
        hn::Store(hn::LoadU(d8, copy.from + 8 + i), d8, copy.to[1] + i);
      }
      copy.from += copy.stride;
      copy.to[0] += copy.pitch;
      copy.to[1] += copy.pitch;
    }
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
          const V y = hn::Mul(o[j], hn::Set(d, a.factor[t]));
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
  }
  if constexpr (kMode != TileMode::kRead) {
    OUZEL_UNROLL
    for (int i = 0; i < kTileKeys; ++i) {
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const V x = a.leave == 1.0f ? s[i][j] : scaled(d, s[i][j], a.leave);
        hn::Store(x, d, state + i * kSlab + j * kLanes);
      }
    }
  }
}

template <TileMode kMode, int kVectors, bool kFirst, bool kLast>
void tile(const TileArgs& a, std::int64_t key, std::int64_t column, std::int64_t& count) {
  if constexpr (kMode == TileMode::kScan) {
    if (count < a.copy_count) {
      tile_of<kMode, kVectors, kFirst, kLast, true>(a, key, column, count++);
      return;
    }
  }
  tile_of<kMode, kVectors, kFirst, kLast, false>(a, key, column, count++);
}

template <TileMode kMode, int kVectors>
void tiles(const TileArgs& a, std::int64_t column, std::int64_t& count) {
  const std::int64_t keys = a.key_blocks * kKeyBlock;
  if (keys == kTileKeys) {
    tile<kMode, kVectors, true, true>(a, 0, column, count);
    return;
  }
  tile<kMode, kVectors, true, false>(a, 0, column, count);
  std::int64_t key = kTileKeys;
  for (; key + kTileKeys < keys; key += kTileKeys) {
    tile<kMode, kVectors, false, false>(a, key, column, count);
  }
  tile<kMode, kVectors, false, true>(a, key, column, count);
}

template <TileMode kMode>
std::int64_t columns(const TileArgs& a) {
  std::int64_t column = 0, count = 0;
  for (; column + kLanes < a.width; column += 2 * kLanes) tiles<kMode, 2>(a, column, count);
  if (column < a.width) tiles<kMode, 1>(a, column, count);
  return count;
}

}  // namespace

std::int64_t RecurrenceTile(const TileArgs& a) {
  switch (a.mode) {
    case TileMode::kScan:
      return columns<TileMode::kScan>(a);
    case TileMode::kWrite:
      return columns<TileMode::kWrite>(a);
    case TileMode::kRead:
      return columns<TileMode::kRead>(a);
  }
  return 0;
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "hwy/cache_control.h"
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceTile);
std::int64_t recurrence_tile(Isa isa, const TileArgs& args) {
  return OUZEL_DISPATCH(isa, RecurrenceTile)(args);
}
void finish_streams() { hwy::FlushStream(); }
}  // namespace ouzel
#endif
