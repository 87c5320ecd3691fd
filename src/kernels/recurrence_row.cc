// One row of the engine in one pass over a state in anyone's memory; with an erase, two sweeps over
// columns few enough for the first-level cache:
//
//     P = decay * S    r = (P or S)^T e    S = P + k v^T + (erase)    o = S^T q
#include "src/kernels/recurrence_block.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/recurrence_row.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/partial-inl.h"
#include "src/kernels/reset-inl.h"
#include "src/kernels/two_part-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

using D = hn::ScalableTag<float>;
using V = hn::Vec<D>;
constexpr std::int64_t kLanes = HWY_LANES(float);

enum class Erase { kNone, kCollinear, kGeneral };

HWY_INLINE V decayed(D d, V s, V factor) {
  return hn::IfThenElseZero(is_kept(d, factor), hn::Mul(s, factor));
}

float bonus(const RowArgs& a, const float* q) {
  const D d;
  V sum = hn::Zero(d);
  for (std::int64_t i = 0; i < a.keys; i += kLanes) {
    const std::int64_t left = a.keys - i;
    const V uk = hn::Mul(load_first(d, a.u + i, left), load_first(d, a.k + i, left));
    sum = hn::MulAdd(load_first(d, q + i, left), uk, sum);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Vectors of columns that are loaded and stored: all of them, or the first `width` numbers.
template <bool kFull>
HWY_INLINE V load(const float* p, std::int64_t width) {
  const D d;
  if constexpr (kFull) return hn::LoadU(d, p);
  return load_first(d, p, width);
}
template <bool kFull>
HWY_INLINE void store(V x, float* p, std::int64_t width) {
  const D d;
  kFull ? hn::StoreU(x, d, p) : store_first(d, x, p, width);
}

template <int kVectors, bool kFull>
HWY_INLINE void erase_key(const RowArgs& a, std::int64_t i, std::int64_t column, std::int64_t width,
                          V (&r)[kVectors]) {
  const D d;
  const float* s = a.s + i * a.key_stride + column;
  const V factor = hn::Set(d, a.erase_decayed ? a.decay[i * a.decay_stride] : 1.0f);
  const V e = hn::Mul(hn::Set(d, a.e[i]), factor);
  const auto keep = is_kept(d, factor);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const V s_j = load<kFull>(s + j * kLanes, width - j * kLanes);
    r[j] = hn::IfThenElse(keep, hn::MulAdd(e, s_j, r[j]), r[j]);
  }
}

// What is erased: v loses c r (collinear), or r goes with b (general).
template <Erase kErase, bool kValueDecay, int kVectors, bool kFull>
HWY_INLINE void erase(const RowArgs& a, std::int64_t column, std::int64_t width, V (&v)[kVectors],
                      V (&r)[kVectors]) {
  const D d;
  // Odd keys have sums of their own: four do not hide the latency.
  V odd[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) odd[j] = hn::Zero(d);
  std::int64_t i = 0;
  for (; i + 1 < a.keys; i += 2) {
    erase_key<kVectors, kFull>(a, i, column, width, r);
    erase_key<kVectors, kFull>(a, i + 1, column, width, odd);
  }
  if (i < a.keys) erase_key<kVectors, kFull>(a, i, column, width, r);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const std::int64_t at = column + j * kLanes, left = width - j * kLanes;
    r[j] = hn::Add(r[j], odd[j]);
    if constexpr (kValueDecay) {
      if (a.erase_decayed) r[j] = decayed(d, r[j], load<kFull>(a.value_decay + at, left));
    }
    if constexpr (kErase == Erase::kCollinear) {
      const V c = a.strength_stride == 0 ? hn::Set(d, *a.c) : load<kFull>(a.c + at, left);
      v[j] = hn::NegMulAdd(c, r[j], v[j]);
    }
  }
}

// Changes S and reads it for the first query, before or after.
template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore, int kVectors, bool kFull>
HWY_INLINE void update(const RowArgs& a, std::int64_t column, std::int64_t width,
                       const V (&v)[kVectors], const V (&r)[kVectors], V (&o)[kVectors]) {
  const D d;
  V value_decay[kVectors], value_decay_minus_1[kVectors];
  if constexpr (kValueDecay) {
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t at = column + j * kLanes, left = width - j * kLanes;
      value_decay[j] = load<kFull>(a.value_decay + at, left);
      if constexpr (kResidue) {
        value_decay_minus_1[j] = load<kFull>(a.value_decay_minus_1 + at, left);
      }
    }
  }
  const float* q = a.queries > 0 ? a.q : a.k;  // a row that is not read: whatever
  for (std::int64_t step = 0; step < a.keys; ++step) {
    // After the sweep of the erase, the last keys are the ones that are still in the cache: rows of
    // a power of two leave room for three quarters of 128.
    const std::int64_t i = kErase == Erase::kNone ? step : a.keys - 1 - step;
    float* s_row = a.s + i * a.key_stride + column;
    float* low_row = kResidue ? a.residue + i * a.key_stride + column : nullptr;
    const V k = hn::Set(d, a.k[i]), q_i = hn::Set(d, q[i]);
    const V factor = hn::Set(d, a.decay[i * a.decay_stride]);
    const V factor_minus_1 = hn::Set(d, a.decay_minus_1[i * a.decay_stride]);
    const auto keep = is_kept(d, factor);
    const auto near_one = hn::Gt(factor_minus_1, hn::Set(d, -0.5f));
    const V shrink = hn::IfThenElse(near_one, factor_minus_1, factor);
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      const std::int64_t left = width - j * kLanes;
      V s = load<kFull>(s_row + j * kLanes, left);
      if constexpr (kReadBefore) o[j] = hn::MulAdd(q_i, s, o[j]);
      if constexpr (kResidue) {
        V low = load<kFull>(low_row + j * kLanes, left);
        V both = factor, minus_1 = factor_minus_1;
        if constexpr (kValueDecay) {
          minus_1 =
              hn::MulAdd(minus_1, value_decay_minus_1[j], hn::Add(minus_1, value_decay_minus_1[j]));
          both = hn::Mul(both, value_decay[j]);
        }
        V change = hn::Mul(k, v[j]);
        if constexpr (kErase == Erase::kGeneral) {
          change = hn::MulAdd(hn::Set(d, a.b[i]), r[j], change);
        }
        s = two_part_sum(d, s, low, both, minus_1, change);
        store<kFull>(low, low_row + j * kLanes, left);
      } else {
        // Near 1 by the difference to 1: a rounded factor, the same at every step, would drift.
        s = hn::IfThenElseZero(keep, hn::MulAdd(s, shrink, hn::IfThenElseZero(near_one, s)));
        if constexpr (kValueDecay) s = decayed(d, s, value_decay[j]);
        s = hn::MulAdd(k, v[j], s);
        if constexpr (kErase == Erase::kGeneral) s = hn::MulAdd(hn::Set(d, a.b[i]), r[j], s);
      }
      store<kFull>(s, s_row + j * kLanes, left);
      if constexpr (!kReadBefore) o[j] = hn::MulAdd(q_i, s, o[j]);
    }
  }
}

// o = the bonus, if any, and S^T q
template <int kVectors, bool kFull>
HWY_INLINE void begin_read(const RowArgs& a, std::int64_t query, const V (&v)[kVectors],
                           V (&o)[kVectors]) {
  const D d;
  const V weight =
      hn::Set(d, a.u != nullptr && a.queries > 0 ? bonus(a, a.q + query * a.q_stride) : 0.0f);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    o[j] = a.u != nullptr ? hn::Mul(weight, v[j]) : hn::Zero(d);
  }
}
template <int kVectors, bool kFull>
HWY_INLINE void end_read(const RowArgs& a, std::int64_t query, std::int64_t column,
                         std::int64_t width, const V (&o)[kVectors]) {
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    store<kFull>(o[j], a.o + query * a.o_stride + column + j * kLanes, width - j * kLanes);
  }
}
template <int kVectors, bool kFull>
HWY_INLINE void read_others(const RowArgs& a, std::int64_t column, std::int64_t width,
                            const V (&v)[kVectors]) {
  const D d;
  for (std::int64_t query = 1; query < a.queries; ++query) {
    V o[kVectors];
    begin_read<kVectors, kFull>(a, query, v, o);
    const float* s = a.s + column;
    for (std::int64_t i = 0; i < a.keys; ++i, s += a.key_stride) {
      const V q = hn::Set(d, a.q[query * a.q_stride + i]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        o[j] = hn::MulAdd(q, load<kFull>(s + j * kLanes, width - j * kLanes), o[j]);
      }
    }
    end_read<kVectors, kFull>(a, query, column, width, o);
  }
}

// kVectors vectors of columns, `width` numbers of them valid.
template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore, int kVectors, bool kFull>
void row_columns(const RowArgs& a, std::int64_t column, std::int64_t width) {
  const D d;
  V v[kVectors], r[kVectors], o[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    v[j] = load<kFull>(a.v + column + j * kLanes, width - j * kLanes);
    r[j] = hn::Zero(d);
  }
  if constexpr (kErase != Erase::kNone) {
    erase<kErase, kValueDecay, kVectors, kFull>(a, column, width, v, r);
  }
  if constexpr (kReadBefore) read_others<kVectors, kFull>(a, column, width, v);
  begin_read<kVectors, kFull>(a, 0, v, o);
  update<kErase, kValueDecay, kResidue, kReadBefore, kVectors, kFull>(a, column, width, v, r, o);
  if (a.queries > 0) end_read<kVectors, kFull>(a, 0, column, width, o);
  if constexpr (!kReadBefore) read_others<kVectors, kFull>(a, column, width, v);
}

template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore>
void row(const RowArgs& a) {
  // Of 128 keys, four vectors of AVX-512 take two thirds of the first-level cache.
  constexpr int kVectors = 4;
  std::int64_t column = 0;
  for (; column + kVectors * kLanes <= a.columns; column += kVectors * kLanes) {
    row_columns<kErase, kValueDecay, kResidue, kReadBefore, kVectors, true>(a, column, 0);
  }
  for (; column < a.columns; column += kLanes) {
    row_columns<kErase, kValueDecay, kResidue, kReadBefore, 1, false>(a, column,
                                                                      a.columns - column);
  }
}

template <Erase kErase, bool kValueDecay, bool kReadBefore = false>
void row_of(const RowArgs& a) {
  a.residue != nullptr ? row<kErase, kValueDecay, true, kReadBefore>(a)
                       : row<kErase, kValueDecay, false, kReadBefore>(a);
}

template <bool kValueDecay>
void row_of(const RowArgs& a) {
  if (a.b != nullptr) {
    row_of<Erase::kGeneral, kValueDecay>(a);
  } else if (a.e != nullptr) {
    row_of<Erase::kCollinear, kValueDecay>(a);
  } else {
    a.u == nullptr ? row_of<Erase::kNone, kValueDecay>(a)
                   : row_of<Erase::kNone, kValueDecay, true>(a);
  }
}

}  // namespace

void RecurrenceRow(const RowArgs& a) {
  a.value_decay != nullptr ? row_of<true>(a) : row_of<false>(a);
}

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(RecurrenceRow);
void recurrence_row(Isa isa, const RowArgs& args) { OUZEL_DISPATCH(isa, RecurrenceRow)(args); }
}  // namespace ouzel
#endif
