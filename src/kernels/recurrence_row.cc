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
  return hn::IfThenElseZero(hn::Ne(factor, hn::Zero(d)), hn::Mul(s, factor));
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

// kVectors vectors of columns, `width` of them valid.
template <Erase kErase, bool kValueDecay, bool kResidue, int kVectors>
void row_columns(const RowArgs& a, std::int64_t column, std::int64_t width) {
  const D d;
  V v[kVectors], r[kVectors], value_decay[kVectors], value_decay_minus_1[kVectors];
  OUZEL_UNROLL
  for (int j = 0; j < kVectors; ++j) {
    const std::int64_t at = column + j * kLanes, left = width - j * kLanes;
    v[j] = load_first(d, a.v + at, left);
    r[j] = hn::Zero(d);
    if constexpr (kValueDecay) {
      value_decay[j] = load_first(d, a.value_decay + at, left);
      if constexpr (kResidue) {
        value_decay_minus_1[j] = load_first(d, a.value_decay_minus_1 + at, left);
      }
    }
  }
  if constexpr (kErase != Erase::kNone) {
    for (std::int64_t i = 0; i < a.keys; ++i) {
      const V e = hn::Set(d, a.e[i]);
      const V factor = hn::Set(d, a.decay[i * a.decay_stride]);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        V s = load_first(d, a.s + i * a.key_stride + column + j * kLanes, width - j * kLanes);
        if (a.erase_decayed) s = decayed(d, s, factor);
        r[j] = hn::MulAdd(e, s, r[j]);
      }
    }
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      if constexpr (kValueDecay) {
        if (a.erase_decayed) r[j] = decayed(d, r[j], value_decay[j]);
      }
      if constexpr (kErase == Erase::kCollinear) {
        const V c = a.strength_stride == 0
                        ? hn::Set(d, *a.c)
                        : load_first(d, a.c + column + j * kLanes, width - j * kLanes);
        v[j] = hn::NegMulAdd(c, r[j], v[j]);
      }
    }
  }
  // The first pass changes S and reads it for the first query.
  const std::int64_t passes = HWY_MAX(a.queries, 1);
  for (std::int64_t pass = passes; pass-- > 0;) {
    // Before the write all queries read the same S: the pass that changes it is the last.
    const std::int64_t query = a.u != nullptr ? pass : passes - 1 - pass;
    const bool change = query == 0, read = a.queries > 0;
    const float* q = a.q + query * a.q_stride;
    V o[kVectors];
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      o[j] = hn::Zero(d);
      if (a.u != nullptr && read) o[j] = hn::Mul(hn::Set(d, bonus(a, q)), v[j]);
    }
    for (std::int64_t i = 0; i < a.keys; ++i) {
      const V k = hn::Set(d, a.k[i]);
      const V factor = hn::Set(d, a.decay[i * a.decay_stride]);
      const V q_i = read ? hn::Set(d, q[i]) : hn::Zero(d);
      OUZEL_UNROLL
      for (int j = 0; j < kVectors; ++j) {
        const std::int64_t left = width - j * kLanes;
        const std::int64_t at = i * a.key_stride + column + j * kLanes;
        V s = load_first(d, a.s + at, left);
        if (read && a.u != nullptr) o[j] = hn::MulAdd(q_i, s, o[j]);
        if (change) {
          if constexpr (kResidue) {
            V low = load_first(d, a.residue + at, left);
            V minus_1 = hn::Set(d, a.decay_minus_1[i * a.decay_stride]);
            V both = factor;
            if constexpr (kValueDecay) {
              const V other = value_decay_minus_1[j];
              minus_1 = hn::MulAdd(minus_1, other, hn::Add(minus_1, other));
              both = hn::Mul(both, value_decay[j]);
            }
            s = two_part_sum(d, s, low, both, minus_1, hn::Mul(k, v[j]));
            store_first(d, low, a.residue + at, left);
          } else {
            s = decayed(d, s, factor);
            if constexpr (kValueDecay) s = decayed(d, s, value_decay[j]);
            s = hn::MulAdd(k, v[j], s);
            if constexpr (kErase == Erase::kGeneral) {
              s = hn::MulAdd(hn::Set(d, a.b[i]), r[j], s);
            }
          }
          store_first(d, s, a.s + at, left);
        }
        if (read && a.u == nullptr) o[j] = hn::MulAdd(q_i, s, o[j]);
      }
    }
    if (!read) continue;
    OUZEL_UNROLL
    for (int j = 0; j < kVectors; ++j) {
      store_first(d, o[j], a.o + query * a.o_stride + column + j * kLanes, width - j * kLanes);
    }
  }
}

template <Erase kErase, bool kValueDecay, bool kResidue>
void row(const RowArgs& a) {
  constexpr int kVectors = 2;
  for (std::int64_t column = 0; column < a.columns; column += kVectors * kLanes) {
    row_columns<kErase, kValueDecay, kResidue, kVectors>(a, column, a.columns - column);
  }
}

template <bool kValueDecay>
void row_of(const RowArgs& a) {
  if (a.e == nullptr) {
    a.residue != nullptr ? row<Erase::kNone, kValueDecay, true>(a)
                         : row<Erase::kNone, kValueDecay, false>(a);
  } else if (a.b == nullptr) {
    row<Erase::kCollinear, kValueDecay, false>(a);
  } else {
    row<Erase::kGeneral, kValueDecay, false>(a);
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
