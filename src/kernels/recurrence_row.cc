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

HWY_INLINE float bonus(const RowArgs& a, const float* q) {
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

template <int kVectors>
HWY_INLINE void clear(V (&r)[kVectors]) {
  const D d;
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) r[j] = hn::Zero(d);
}

// A row of S, and what its key's decay asks for: a factor near 1 is applied by its difference to 1,
// since a rounded factor, the same at every step, would drift; one of exactly 0 drops S, even NaN.
enum class Factor { kZero, kNearOne, kOther };

struct Key {
  std::int64_t i;
  float *s, *residue;
  const float *decay, *decay_minus_1;

  Key(const RowArgs& a, std::int64_t i)
      : i(i),
        s(a.s + i * a.key_stride),
        residue(a.residue != nullptr ? a.residue + i * a.key_stride : nullptr),
        decay(a.decay + i * a.decay_stride),
        decay_minus_1(a.decay_minus_1 + i * a.decay_stride) {}
  template <bool kResidue>
  void advance(std::int64_t keys, std::int64_t key_stride, std::int64_t decay_stride) {
    i += keys;
    s += keys * key_stride;
    if constexpr (kResidue) residue += keys * key_stride;
    decay += keys * decay_stride;
    decay_minus_1 += keys * decay_stride;
  }
  Factor kind() const {
    if (*decay_minus_1 > -0.5f) return Factor::kNearOne;
    return *decay == 0 ? Factor::kZero : Factor::kOther;
  }
};

// r += e S
template <int kVectors, bool kFull>
HWY_INLINE void erase_key(const RowArgs& a, const Key& key, Factor kind, std::int64_t column,
                          std::int64_t width, V (&r)[kVectors]) {
  const D d;
  if (a.erase_decayed && kind == Factor::kZero) return;
  const V e = hn::Set(d, a.erase_decayed ? a.e[key.i] * *key.decay : a.e[key.i]);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const V s = load<kFull>(key.s + column + j * kLanes, width - j * kLanes);
    r[j] = hn::MulAdd(e, s, r[j]);
  }
}

// What is erased, from r = S^T e: v loses c r (collinear), or r goes with b (general).
template <Erase kErase, bool kValueDecay, int kVectors, bool kFull>
HWY_INLINE void erase(const RowArgs& a, std::int64_t column, std::int64_t width, V (&v)[kVectors],
                      V (&r)[kVectors]) {
  const D d;
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const std::int64_t at = column + j * kLanes, left = width - j * kLanes;
    if constexpr (kValueDecay) {
      if (a.erase_decayed) r[j] = decayed(d, r[j], load<kFull>(a.value_decay + at, left));
    }
    if constexpr (kErase == Erase::kCollinear) {
      const V c = a.strength_stride == 0 ? hn::Set(d, *a.c) : load<kFull>(a.c + at, left);
      v[j] = hn::NegMulAdd(c, r[j], v[j]);
    }
  }
}

// decay S + change, in two parts: s and low
template <Factor kFactor>
HWY_INLINE V two_part_update(D d, V s, V& low, V shrink, V change) {
  if constexpr (kFactor == Factor::kZero) return two_part_add(d, hn::Zero(d), change, low);
  if constexpr (kFactor == Factor::kNearOne) {
    change = hn::Add(change, hn::MulAdd(s, shrink, hn::MulAdd(low, shrink, low)));
    return two_part_add(d, s, change, low);
  }
  change = hn::Add(change, hn::MulAdd(s, shrink, hn::Mul(low, shrink)));
  return two_part_add(d, hn::Zero(d), change, low);
}

// Row i of S changes and is read for the first query, before or after.
template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore, Factor kFactor,
          int kVectors, bool kFull>
HWY_INLINE void update_key(const RowArgs& a, const Key& key, float q_i, std::int64_t column,
                           std::int64_t width, const V (&v)[kVectors], const V (&r)[kVectors],
                           const V (&value_decay)[kVectors],
                           const V (&value_decay_minus_1)[kVectors], V (&o)[kVectors]) {
  const D d;
  float* s_row = key.s + column;
  const V k = hn::Set(d, a.k[key.i]), q = hn::Set(d, q_i);
  const V factor = hn::Set(d, *key.decay), factor_minus_1 = hn::Set(d, *key.decay_minus_1);
  const V shrink = kFactor == Factor::kNearOne ? factor_minus_1 : factor;
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const std::int64_t left = width - j * kLanes;
    V s = hn::Zero(d);
    if constexpr (kFactor != Factor::kZero || kReadBefore)
      s = load<kFull>(s_row + j * kLanes, left);
    if constexpr (kReadBefore) o[j] = hn::MulAdd(q, s, o[j]);
    if constexpr (kResidue) {
      float* residue = key.residue + column + j * kLanes;
      V low = load<kFull>(residue, left);
      V change = hn::Mul(k, v[j]);
      if constexpr (kErase == Erase::kGeneral) {
        change = hn::MulAdd(hn::Set(d, a.b[key.i]), r[j], change);
      }
      if constexpr (kValueDecay) {
        const V minus_1 = hn::MulAdd(factor_minus_1, value_decay_minus_1[j],
                                     hn::Add(factor_minus_1, value_decay_minus_1[j]));
        s = two_part_sum(d, s, low, hn::Mul(factor, value_decay[j]), minus_1, change);
      } else {
        s = two_part_update<kFactor>(d, s, low, shrink, change);
      }
      store<kFull>(low, residue, left);
    } else {
      if constexpr (kFactor == Factor::kZero) s = hn::Zero(d);
      if constexpr (kFactor == Factor::kNearOne) s = hn::MulAdd(s, shrink, s);
      if constexpr (kFactor == Factor::kOther) s = hn::Mul(s, shrink);
      if constexpr (kValueDecay) s = decayed(d, s, value_decay[j]);
      s = hn::MulAdd(k, v[j], s);
      if constexpr (kErase == Erase::kGeneral) s = hn::MulAdd(hn::Set(d, a.b[key.i]), r[j], s);
    }
    store<kFull>(s, s_row + j * kLanes, left);
    if constexpr (!kReadBefore) o[j] = hn::MulAdd(q, s, o[j]);
  }
}

// All rows of S, from the last up where `up`; beside each, the same row of the columns from `after`
// on is swept for `next`.
template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore, bool kSweep,
          int kVectors, bool kFull>
HWY_INLINE void update(const RowArgs& a, std::int64_t column, std::int64_t width, bool up,
                       const V (&v)[kVectors], const V (&r)[kVectors], V (&o)[kVectors],
                       std::int64_t after, V (&next)[kVectors]) {
  const D d;
  V value_decay[kVectors], value_decay_minus_1[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const std::int64_t at = column + j * kLanes, left = width - j * kLanes;
    value_decay[j] = value_decay_minus_1[j] = hn::Zero(d);
    if constexpr (kValueDecay) value_decay[j] = load<kFull>(a.value_decay + at, left);
    if constexpr (kValueDecay && kResidue) {
      value_decay_minus_1[j] = load<kFull>(a.value_decay_minus_1 + at, left);
    }
  }
  const float* q = a.queries > 0 ? a.q : a.k;  // a row that is not read: whatever
  const std::int64_t step = up ? -1 : 1;
  Key key(a, up ? a.keys - 1 : 0);
  for (std::int64_t n = 0; n < a.keys; ++n) {
    const float q_i = q[key.i];
    const auto change = [&]<Factor kFactor>() HWY_ATTR {
      update_key<kErase, kValueDecay, kResidue, kReadBefore, kFactor, kVectors, kFull>(
          a, key, q_i, column, width, v, r, value_decay, value_decay_minus_1, o);
      if constexpr (kSweep) erase_key<kVectors, kFull>(a, key, kFactor, after, 0, next);
    };
    const Factor kind = key.kind();
    if (kind == Factor::kNearOne) {
      change.template operator()<Factor::kNearOne>();
    } else if (kind == Factor::kOther) {
      change.template operator()<Factor::kOther>();
    } else {
      change.template operator()<Factor::kZero>();
    }
    key.advance<kResidue>(step, a.key_stride, a.decay_stride);
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

// kVectors vectors of columns, `width` numbers of them valid; r = S^T e of them, and of those from
// `after` on afterwards.
template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore, bool kSweep,
          int kVectors, bool kFull>
HWY_INLINE void row_columns(const RowArgs& a, std::int64_t column, std::int64_t width, bool up,
                            std::int64_t after, V (&r)[kVectors]) {
  V v[kVectors], o[kVectors], next[kVectors];
  clear(next);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    v[j] = load<kFull>(a.v + column + j * kLanes, width - j * kLanes);
  }
  if constexpr (kErase != Erase::kNone) {
    erase<kErase, kValueDecay, kVectors, kFull>(a, column, width, v, r);
  }
  if constexpr (kReadBefore) read_others<kVectors, kFull>(a, column, width, v);
  begin_read<kVectors, kFull>(a, 0, v, o);
  update<kErase, kValueDecay, kResidue, kReadBefore, kSweep, kVectors, kFull>(a, column, width, up,
                                                                              v, r, o, after, next);
  if (a.queries > 0) end_read<kVectors, kFull>(a, 0, column, width, o);
  if constexpr (!kReadBefore) read_others<kVectors, kFull>(a, column, width, v);
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) r[j] = next[j];
}

// With an erase, columns are swept for r while those before them change: memory and arithmetic both
// have work. Each sweep begins where the one before ended, among keys that are still in the cache:
// where rows are a power of two of bytes it has room for 96 of 128 of them.
template <Erase kErase, bool kValueDecay, bool kResidue, bool kReadBefore>
void row(const RowArgs& args) {
  const RowArgs a = args;  // its own: what is stored to S cannot change it
  constexpr bool kErases = kErase != Erase::kNone;
  // AVX2, with an erase: more than its registers hold, since longer runs of memory come faster;
  // what does not fit is read from the first-level cache.
  constexpr int kFew = HWY_TARGET == HWY_AVX2 ? 4 : HWY_MAX(2, 8 / static_cast<int>(kLanes));
  constexpr int kVectors = kErases ? kFew : 4;
  constexpr std::int64_t kColumns = kVectors * kLanes;
  const std::int64_t whole = a.columns / kColumns * kColumns;
  bool up = false;
  const auto sweep = [&]<int kSwept, bool kFull>(std::int64_t column, V(&r)[kSwept]) HWY_ATTR {
    clear(r);
    for (std::int64_t i = 0; kErases && i < a.keys; ++i) {
      const Key key(a, i);
      erase_key<kSwept, kFull>(a, key, key.kind(), column, a.columns - column, r);
    }
    up = kErases;
  };
  if (whole > 0) {
    V r[kVectors];
    sweep.template operator()<kVectors, true>(0, r);
    std::int64_t column = 0;
    for (; column + kColumns < whole; column += kColumns) {
      row_columns<kErase, kValueDecay, kResidue, kReadBefore, kErases, kVectors, true>(
          a, column, 0, up, column + kColumns, r);
      up = kErases && !up;
    }
    row_columns<kErase, kValueDecay, kResidue, kReadBefore, false, kVectors, true>(a, column, 0, up,
                                                                                   0, r);
  }
  for (std::int64_t column = whole; column < a.columns; column += kLanes) {
    V r[1];
    sweep.template operator()<1, false>(column, r);
    row_columns<kErase, kValueDecay, kResidue, kReadBefore, false, 1, false>(
        a, column, a.columns - column, up, 0, r);
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
