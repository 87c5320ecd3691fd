// Sums of what rows write to a state in key lanes (rows_backward.h), formed from zero and added in
// two parts.
#include "src/kernels/rows_backward.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_accumulate.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/math-inl.h"
#include "src/kernels/rows_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace {

// Rows in order, or backwards; a row's decay comes before its write, or after.
template <bool kReverse, bool kDecayFirst, int kM>
HWY_INLINE void accumulate(D d, const AccumulateArgs& a, const TileJob& job, Tile<kValues, kM>& s) {
  const TileDecay& decay = job.decay;
  const std::int64_t rows = a.rows;
  const float *keys = a.x + job.place.key, *values = a.a + job.place.value;
  const float* near = job.next.first;
  for (std::int64_t n = 0; n < rows; ++n, near += job.next.stride) {
    __builtin_prefetch(near, 0, 2);
    const std::int64_t t = kReverse ? rows - 1 - n : n;
    if (kDecayFirst && HWY_UNLIKELY(decay.of_rows())) decay_row(d, s, decay, t);
    for (std::int64_t i = 0; i < a.writes; ++i) {
      write(d, s, keys + (i * rows + t) * a.key_pitch, values + (i * rows + t) * a.value_pitch);
    }
    if (!kDecayFirst && HWY_UNLIKELY(decay.of_rows())) decay_row(d, s, decay, t);
  }
}

template <int kM>
HWY_NOINLINE void accumulate_tile(const AccumulateArgs& a, const TileJob& job) {
  const D d;
  const Place p = job.place;
  const TileDecay& decay = job.decay;
  Tile<kValues, kM> s;
  OUZEL_UNROLL
  for (int i = 0; i < kValues; ++i) {
    OUZEL_UNROLL
    for (int j = 0; j < kM; ++j) s[i][j] = hn::Zero(d);
  }
  if (!a.reverse) {
    accumulate<false, true>(d, a, job, s);
    if (decay.lambda != nullptr) multiply_keys(d, s, decay.lambda);
  } else if (a.before) {
    accumulate<true, true>(d, a, job, s);
  } else {
    accumulate<true, false>(d, a, job, s);
  }

  const float* state = a.state + p.state(a);
  float *state_out = a.state_out + p.state(a), *low = a.low + p.state(a);
  const V least = hn::Set(d, -80.0f);
  OUZEL_UNROLL
  for (int j = 0; j < kM; ++j) {
    const V total = decay.total == nullptr ? hn::Zero(d) : hn::Load(d, decay.total + j * kLanes);
    V shrink = math::expm1(d, total);
    OUZEL_UNROLL
    for (int i = 0; i < kValues; ++i) {
      const std::int64_t at = i * a.keys + j * kLanes;
      // Below e^-80 nothing is left, not even of NaN.
      auto dropped = hn::Lt(total, least);
      if (a.value_total != nullptr) {
        const V values = hn::Set(d, a.value_total[p.value + i]);
        const V sum = hn::Add(total, values);
        dropped = hn::Or(dropped, hn::Or(hn::Lt(values, least), hn::Lt(sum, least)));
        shrink = math::expm1(d, sum);
      }
      const V before = hn::IfThenZeroElse(dropped, hn::Load(d, state + at));
      V lost = hn::Load(d, low + at);
      lost = hn::MulAdd(before, shrink, hn::MulAdd(lost, shrink, lost));
      // Fast two-sum (Dekker): exact where S is the larger, which is where long sums are lost.
      const V change = hn::Add(s[i][j], hn::IfThenZeroElse(dropped, lost));
      const V after = hn::Add(before, change);
      hn::Store(after, d, state_out + at);
      hn::Store(hn::Sub(change, hn::Sub(after, before)), d, low + at);
    }
  }
}

}  // namespace

void AccumulateRows(const AccumulateArgs& a) {
  const std::int64_t tiles = tiles_of<kValues, kVectors>(a);
  Columns columns{tiles, std::min(tiles, a.prefetch_count)};
  for_tiles<kValues, kVectors>(a, [&](auto vectors, const Place& p) HWY_ATTR {
    accumulate_tile<decltype(vectors)::value>(a, TileJob(a, p, columns.next()));
  });
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(AccumulateRows);
void accumulate_rows(Isa isa, const AccumulateArgs& args) {
  OUZEL_DISPATCH(isa, AccumulateRows)(args);
}
}  // namespace ouzel
#endif
