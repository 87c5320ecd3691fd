// What the rows of a block do to each other (rows_backward.h), after block_sweep. With s_i what row
// i reads of the state before the block and z_i what it reads of the gradient after it, D(i, j) the
// decays of rows i + 1 to j, D(i) those since the block's begin and E(i) those to its end, and
// m_ij = do_j . w_i (of the pair e, k: dr_j . w_i; of b: r_i for w_i)
//
//     dq_j = D(j) s_j + sum over i <= j of m_ij D(i, j) k_i
//     dk_i = E(i) z_i + sum over j >= i of m_ij D(i, j) q_j
//     dg_t = F H + sum over j >= t of q_j D(j) s_j + sum over i < t of k_i E(i) z_i
//                + sum over i < t <= j of q_j m_ij D(i, j) k_i
//     dv_i += sum over j >= i of (q_j . D(i, j) k_i) do_j
//
// What reads S_(t-1) lacks the decay of its own row.
#include "src/kernels/rows_backward.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/rows_block_grads.cc"
#include "src/kernels/targets.h"
// After targets.h.
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/kernels/rows_lanes-inl.h"
#include "src/kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
namespace {

// Inner products of a block's rows x with its rows y up to theirs: out[row][4].
template <int kRows>
HWY_INLINE void inner_products(const BlockGradArgs& a, std::int64_t begin, const float* x,
                               const float* y, float* out) {
  const D d;
  V sums[kRows][kRowBlock];
  OUZEL_UNROLL
  for (int j = 0; j < kRows; ++j) {
    OUZEL_UNROLL
    for (int i = 0; i < kRowBlock; ++i) sums[j][i] = hn::Zero(d);
  }
  x += begin * a.value_pitch;
  y += begin * a.value_pitch;
  for (std::int64_t c = 0; c < a.values; c += kLanes) {
    V other[kRows];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) other[i] = hn::Load(d, y + i * a.value_pitch + c);
    OUZEL_UNROLL
    for (int j = 0; j < kRows; ++j) {
      const V row = hn::Load(d, x + j * a.value_pitch + c);
      OUZEL_UNROLL
      for (int i = 0; i <= j; ++i) sums[j][i] = hn::MulAdd(row, other[i], sums[j][i]);
    }
  }
  constexpr float kNone[kRowBlock] = {};
  OUZEL_UNROLL
  for (int j = 0; j < kRows; ++j) add_lanes(d, sums[j], kNone, out + (begin + j) * kRowBlock);
}

// A vector of keys of a block: its decays, and the gradients that several pairs add to.
template <int kRows>
struct Keys {
  V decay[kRows];
  V dg[kRows];
};

// Rows that write, and their gradients so far.
template <int kRows>
struct Writes {
  V row[kRows];
  V grad[kRows];
};

// x, its sums, and their shares of gradients of gates.
template <int kRows>
HWY_INLINE void load_writes(D d, const float* x, const float* sums, std::int64_t pitch,
                            Keys<kRows>& keys, Writes<kRows>& w) {
  V since = hn::Zero(d), product[kRows];
  OUZEL_UNROLL
  for (int i = kRows - 1; i >= 0; --i) {
    w.row[i] = hn::Load(d, x + i * pitch);
    w.grad[i] = hn::Load(d, sums + i * pitch);
    if (i < kRows - 1) {
      product[i] = i == kRows - 2 ? keys.decay[i + 1] : hn::Mul(product[i + 1], keys.decay[i + 1]);
      w.grad[i] = hn::Mul(w.grad[i], product[i]);
    }
  }
  OUZEL_UNROLL
  for (int i = 0; i + 1 < kRows; ++i) {
    since = hn::MulAdd(w.row[i], w.grad[i], since);
    keys.dg[i + 1] = hn::Add(keys.dg[i + 1], since);
  }
}

template <int kRows>
HWY_INLINE void store_rows(D d, const V (&x)[kRows], float* to, std::int64_t pitch) {
  OUZEL_UNROLL
  for (int i = 0; i < kRows; ++i) hn::Store(x[i], d, to + i * pitch);
}

// What row j reads of row i's write: its gradient, the write's and those of the decays between, of
// the rows i + 1 to `last`, whose product is `decay`.
template <int kRows>
HWY_INLINE void add_pair(V row, V decay, V inner, int i, int last, V& grad, Writes<kRows>& w,
                         Keys<kRows>& keys) {
  const V factor = hn::Mul(decay, inner), write_grad = hn::Mul(row, factor);
  grad = hn::MulAdd(factor, w.row[i], grad);
  w.grad[i] = hn::Add(w.grad[i], write_grad);
  OUZEL_UNROLL
  for (int t = i + 1; t <= last; ++t) {
    keys.dg[t] = hn::MulAdd(write_grad, w.row[i], keys.dg[t]);
  }
}

// Rows that read, S_(t-1) if kBefore, their own row's writes if kOwn. sums: in, gradients: out.
template <int kRows, bool kBefore, bool kOwn, bool kTwo>
HWY_INLINE void add_reads(D d, const float* x, float* sums, std::int64_t pitch, const float* inner,
                          const float* inner2, Keys<kRows>& keys, Writes<kRows>& w,
                          Writes<kRows>& w2) {
  // Of the gates from which on a row's read counts.
  V product[kRows], shares[kRows];
  OUZEL_UNROLL
  for (int j = 0; j < kRows; ++j) {
    const V row = hn::Load(d, x + j * pitch);
    V grad = hn::Load(d, sums + j * pitch);
    const int last = kBefore ? j - 1 : j;  // the last row whose decay it sees
    if (last == 0) {
      product[0] = keys.decay[0];
    } else if (last > 0) {
      product[last] = hn::Mul(product[last - 1], keys.decay[last]);
    }
    if (last >= 0) {
      grad = hn::Mul(grad, product[last]);
      shares[last] = hn::Mul(row, grad);
    }
    V decay = hn::Set(d, 1.0f);
    OUZEL_UNROLL
    for (int i = kOwn ? j : j - 1; i >= 0; --i) {
      if (i < last) {
        decay = i + 1 == last ? keys.decay[last] : hn::Mul(decay, keys.decay[i + 1]);
      }
      const std::int64_t pair = j * kRowBlock + i;
      add_pair(row, decay, hn::Set(d, inner[pair]), i, last, grad, w, keys);
      if constexpr (kTwo) add_pair(row, decay, hn::Set(d, inner2[pair]), i, last, grad, w2, keys);
    }
    hn::Store(grad, d, sums + j * pitch);
  }
  constexpr int kShares = kBefore ? kRows - 1 : kRows;
  V later = hn::Zero(d);
  OUZEL_UNROLL
  for (int t = kShares - 1; t >= 0; --t) {
    later = t == kShares - 1 ? shares[t] : hn::Add(later, shares[t]);
    keys.dg[t] = hn::Add(keys.dg[t], later);
  }
}

template <int kRows, bool kBefore, bool kErases, bool kGeneral>
void key_grads(const BlockGradArgs& a, std::int64_t begin) {
  const D d;
  const std::int64_t pitch = a.key_pitch, at = begin * pitch, pairs = begin * kRowBlock;
  for (std::int64_t key = at; key < at + a.keys; key += kLanes) {
    Keys<kRows> keys;
    V sum = hn::Load(d, a.gate_sums + key);
    OUZEL_UNROLL
    for (int t = 0; t < kRows; ++t) {
      keys.decay[t] = hn::Load(d, a.key_decay(begin + t) + (a.folds->per_key ? key - at : 0));
      sum = hn::Mul(sum, keys.decay[t]);
    }
    OUZEL_UNROLL
    for (int t = 0; t < kRows; ++t) keys.dg[t] = sum;
    Writes<kRows> k, b;
    load_writes(d, a.k + key, a.dk + key, pitch, keys, k);
    if constexpr (kGeneral) load_writes(d, a.b + key, a.db + key, pitch, keys, b);
    for (std::int64_t n = 0; n < a.queries; ++n) {
      const std::int64_t row = n * a.rows * pitch + key, pair = n * a.rows * kRowBlock + pairs;
      constexpr bool kReadsBefore = kBefore && !kErases;
      add_reads<kRows, kReadsBefore, !kReadsBefore, kGeneral>(
          d, a.q + row, a.dq + row, pitch, a.qw + pair, kGeneral ? a.qr + pair : nullptr, keys, k,
          b);
    }
    if constexpr (kErases) {
      add_reads<kRows, kBefore, false, kGeneral>(d, a.e + key, a.de + key, pitch, a.ew + pairs,
                                                 kGeneral ? a.er + pairs : nullptr, keys, k, b);
    }
    store_rows(d, k.grad, a.dk + key, pitch);
    if constexpr (kGeneral) store_rows(d, b.grad, a.db + key, pitch);
    store_rows(d, keys.dg, a.dg + key, pitch);
  }
}

// dv of rows without an erase.
template <int kRows, bool kBefore>
void value_grads(const BlockGradArgs& a, std::int64_t begin) {
  const D d;
  const std::int64_t pitch = a.value_pitch, at = begin * pitch;
  for (std::int64_t c = at; c < at + a.values; c += kLanes) {
    V dv[kRows];
    OUZEL_UNROLL
    for (int i = 0; i < kRows; ++i) dv[i] = hn::Load(d, a.dv + i * pitch + c);
    for (std::int64_t n = 0; n < a.queries; ++n) {
      const float *upstream = a.output_grad + n * a.rows * pitch + c,
                  *qk = a.qk + (n * a.rows + begin) * kRowBlock;
      OUZEL_UNROLL
      for (int j = 0; j < kRows; ++j) {
        const V x = hn::Load(d, upstream + j * pitch);
        OUZEL_UNROLL
        for (int i = 0; i < (kBefore ? j : j + 1); ++i) {
          dv[i] = hn::MulAdd(hn::Set(d, qk[j * kRowBlock + i]), x, dv[i]);
        }
      }
    }
    store_rows(d, dv, a.dv + c, pitch);
  }
}

template <int kRows, bool kBefore, bool kErases, bool kGeneral>
void grads(const BlockGradArgs& a, std::int64_t begin) {
  for (std::int64_t n = 0; n < a.queries; ++n) {
    const float* upstream = a.output_grad + n * a.rows * a.value_pitch;
    const std::int64_t pairs = n * a.rows * kRowBlock;
    inner_products<kRows>(a, begin, upstream, a.write, a.qw + pairs);
    if constexpr (kGeneral) inner_products<kRows>(a, begin, upstream, a.read, a.qr + pairs);
  }
  if constexpr (kErases) inner_products<kRows>(a, begin, a.read_grad, a.write, a.ew);
  if constexpr (kGeneral) inner_products<kRows>(a, begin, a.read_grad, a.read, a.er);
  key_grads<kRows, kBefore, kErases, kGeneral>(a, begin);
  if constexpr (!kErases) value_grads<kRows, kBefore>(a, begin);
}

template <bool kBefore, bool kErases, bool kGeneral>
void grads(const BlockGradArgs& a) {
  for (std::int64_t t = 0, end; t < a.rows; t = end) {
    end = block_end(a.rows, true, t);
    end - t == kRowBlock ? grads<kRowBlock, kBefore, kErases, kGeneral>(a, t)
                         : grads<1, kBefore, kErases, kGeneral>(a, t);
  }
}

template <bool kBefore>
void grads(const BlockGradArgs& a) {
  if (a.b != nullptr) {
    grads<kBefore, true, true>(a);
  } else if (a.e != nullptr) {
    grads<kBefore, true, false>(a);
  } else {
    grads<kBefore, false, false>(a);
  }
}

}  // namespace

void BlockGrads(const BlockGradArgs& a) { a.before ? grads<true>(a) : grads<false>(a); }

}  // namespace ouzel::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(BlockGrads);
void block_grads(Isa isa, const BlockGradArgs& args) { OUZEL_DISPATCH(isa, BlockGrads)(args); }
}  // namespace ouzel
#endif
