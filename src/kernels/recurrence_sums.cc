// Sums in two parts of the engine (src/kernels/recurrence_block.h): what a chunk's rows write to a
// slab of a state, four keys at a time from zero, and its addition to the two parts of the state.
#include "src/kernels/recurrence_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_sums.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/two_part-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);
constexpr int kVectors = 2;
constexpr std::int64_t kStrip = kVectors * kLanes;
constexpr int kKeys = 4;

using Tile = V[kKeys][kVectors];

// What the tile is multiplied by where a block asks for it; `factor`: the product of those of keys.
HWY_INLINE void leave_keys(const float* leave, Tile& tile, float (&factor)[kKeys]) {
  const D d;
  OUZEL_UNROLL
  for (int m = 0; m < kKeys; ++m) {
    factor[m] *= leave[m];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) tile[m][j] = hn::Mul(tile[m][j], hn::Set(d, leave[m]));
  }
}
HWY_INLINE void leave_columns(const float* leave, Tile& tile, V (&factor)[kVectors]) {
  const D d;
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const V x = hn::Load(d, leave + j * kLanes);
    factor[j] = hn::Mul(factor[j], x);
    OUZEL_UNROLL
    for (int m = 0; m < kKeys; ++m) tile[m][j] = hn::Mul(tile[m][j], x);
  }
}

// += x_i w_i^T of a block's rows, with the rows of keys 16 numbers and those of values `stride`
// apart.
HWY_INLINE void add_rows(const float* x, const float* w, std::int64_t stride, Tile& tile) {
  const D d;
  OUZEL_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    V value[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) value[j] = hn::LoadU(d, w + i * stride + j * kLanes);
    OUZEL_UNROLL
    for (int m = 0; m < kKeys; ++m) {
      const V key = hn::Set(d, x[i * kGroupKeys + m]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) tile[m][j] = hn::MulAdd(key, value[j], tile[m][j]);
    }
  }
}

// (s + low) times a decay, + change, in two parts; as two_part_sum with a factor for all columns.
HWY_INLINE V decay_and_add(V s, V& low, float factor, float minus_1, V change) {
  const D d;
  if (minus_1 > -0.5f) {
    const V shrink = hn::Set(d, minus_1);
    change = hn::Add(change, hn::MulAdd(s, shrink, hn::MulAdd(low, shrink, low)));
    return two_part_add(d, s, change, low);
  }
  const V shrink = hn::Set(d, factor);
  change = hn::Add(change, hn::MulAdd(s, shrink, hn::Mul(low, shrink)));
  low = hn::Zero(d);
  return change;
}

// Four keys and a strip of columns. NaN stays: the caller must see it where a row that a reset
// follows has read it.
template <bool kGeneral>
HWY_INLINE void sum_tile(const SumArgs& args, std::int64_t key, std::int64_t column) {
  const D d;
  const BlockArgs& a = *args.chunk;
  const BlockSlab& slab = *args.slab;
  constexpr std::int64_t kRowsOfK = kBlock * kGroupKeys, kRowsOfB = 3 * kRowsOfK;
  const std::int64_t pitch = kGroupKeys * block_rows(a.erase, kGeneral);  // of groups of keys
  const float* rows = a.rows + key / kGroupKeys * pitch + key % kGroupKeys;
  // What is written with k is the values where nothing has changed them.
  const float* w = (slab.written != nullptr ? slab.written : slab.v) + column;
  const std::int64_t w_stride = slab.written != nullptr ? kSlab : a.v_stride;
  Tile tile;
  V columns[kVectors];
  float keys[kKeys] = {1, 1, 1, 1};
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    columns[j] = hn::Set(d, 1.0f);
    OUZEL_UNROLL
    for (int m = 0; m < kKeys; ++m) tile[m][j] = hn::Zero(d);
  }
  for (std::int64_t block = 0; block < a.blocks; ++block) {
    if (a.decay && a.leaves[block]) leave_keys(a.leave + block * a.key_pitch + key, tile, keys);
    if (slab.value_decay != nullptr) {
      leave_columns(slab.column_leave + block * kSlab + column, tile, columns);
    }
    add_rows(rows + kRowsOfK, w + block * kBlock * w_stride, w_stride, tile);
    if constexpr (kGeneral) {
      add_rows(rows + kRowsOfB, slab.erased + block * kBlock * kSlab + column, kSlab, tile);
    }
    rows += a.key_pitch / kGroupKeys * pitch;
  }
  OUZEL_UNROLL
  for (int m = 0; m < kKeys; ++m) {
    const float minus_1 = a.decay ? args.key_minus_1[key + m] : 0;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = (key + m) * kSlab + column + j * kLanes;
      const V s = hn::Load(d, slab.state_in + at);
      V low = hn::Load(d, args.low_in + at), sum;
      if (slab.value_decay == nullptr) {
        sum = decay_and_add(s, low, keys[m], minus_1, tile[m][j]);
      } else {
        const V of_key = hn::Set(d, minus_1);
        const V of_column = hn::Load(d, args.column_minus_1 + column + j * kLanes);
        sum = two_part_sum<false>(d, s, low, hn::Mul(hn::Set(d, keys[m]), columns[j]),
                                  hn::MulAdd(of_key, of_column, hn::Add(of_key, of_column)),
                                  tile[m][j]);
      }
      hn::Store(sum, d, args.state + at);
      hn::Store(low, d, args.low + at);
    }
  }
}

template <bool kGeneral>
void sum_slab(const SumArgs& a) {
  for (std::int64_t column = 0; column < kSlab; column += kStrip) {
    for (std::int64_t key = 0; key < a.chunk->keys; key += kKeys) {
      sum_tile<kGeneral>(a, key, column);
    }
  }
}

}  // namespace

void RecurrenceSums(const SumArgs& a) { a.chunk->general ? sum_slab<true>(a) : sum_slab<false>(a); }

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceSums);
void recurrence_sums(Isa isa, const SumArgs& args) { OUZEL_DISPATCH(isa, RecurrenceSums)(args); }
}  // namespace ouzel
#endif
