// Softmax attention backward by recomputation: with p_ij = exp(scale S_ij - lse_i), dP = dO V^T and
// D_i = do_i . o_i, dS = p (dP - D), dv_j = sum_i p_ij do_i, dk_j = scale sum_i dS_ij q_i and
// dq_i = scale sum_j dS_ij k_j (arXiv:2205.14135). Spans of 256 keys, whose dk and dv stay in
// cache, meet every tile of queries in turn; within a span, blocks of 64 keys.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/softmax_backward.cc"
#include "src/kernels/targets.h"
// targets.h comes first
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "src/base/threads.h"
#include "src/kernels/softmax_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ouzel {
namespace HWY_NAMESPACE {
namespace softmax {

// One tile of queries of one head.
struct BackwardTile {
  std::int64_t first = 0, count = 0;
  float* q = nullptr;          // [K][kTile]
  float* d_o = nullptr;        // [V][kTile]
  float* o = nullptr;          // [V][kTile]
  float* q_rows = nullptr;     // [kTile][K rounded up to lanes]
  float* do_rows = nullptr;    // [kTile][V rounded up to lanes]
  bool finite = false;         // all of q_rows and do_rows
  float* dq = nullptr;         // [K rounded up to kPanel][kTile]
  float* reference = nullptr;  // [kTile] the score whose weight is about 1: lse / scale
  float* rest = nullptr;       // [kTile] its weight
  float* dot = nullptr;        // [kTile] D
};

// to[r][c] = rows[r][c], filled up with zeros to `ld`, a multiple of kLanes. Returns whether all
// are finite.
HWY_INLINE bool pack_rows(const float* const* rows, std::int64_t count, std::int64_t cols,
                          float* HWY_RESTRICT to, std::int64_t ld) {
  const D d;
  V nothing = hn::Zero(d);  // 0 x, which is NaN for an x of infinity or NaN
  for (std::int64_t r = 0; r < count; ++r) {
    std::fill_n(to + r * ld + cols, ld - cols, 0.0f);
    std::copy_n(rows[r], cols, to + r * ld);
    for (std::int64_t c = 0; c < ld; c += kLanes) {
      nothing = hn::MulAdd(hn::LoadU(d, to + r * ld + c), hn::Zero(d), nothing);
    }
  }
  return hn::AllTrue(d, hn::Eq(nothing, hn::Zero(d)));
}

HWY_INLINE void load_tile(const SoftmaxBackwardArgs& args, const Scale& scale, std::int64_t head,
                          float* wide, BackwardTile& tile) {
  const D d;
  const std::int64_t features = args.shape.key_size, values = args.shape.value_size;
  const void* given[kTile];
  const float* rows[kTile];
  const std::int64_t lanes = round_up(tile.count, kLanes);
  // Lanes beyond the last query repeat it.
  for (std::int64_t i = 0; i < kTile; ++i) {
    given[i] = args.q.row(tile.first + std::min(i, tile.count - 1), head);
  }
  as_floats(args.q.dtype, given, lanes, features, wide, rows);
  pack_transposed(rows, lanes, features, scale.pack, tile.q, kTile);
  tile.finite = pack_rows(rows, tile.count, features, tile.q_rows, round_up(features, kLanes));
  for (std::int64_t i = 0; i < kTile; ++i) {
    given[i] = args.d_o.row(tile.first + std::min(i, tile.count - 1), head);
  }
  as_floats(args.d_o.dtype, given, lanes, values, wide, rows);
  pack_transposed(rows, lanes, values, 1.0f, tile.d_o, kTile);
  const bool do_finite =
      pack_rows(rows, tile.count, values, tile.do_rows, round_up(values, kLanes));
  tile.finite = tile.finite && do_finite;
  for (std::int64_t i = 0; i < kTile; ++i) {
    const std::int64_t query = tile.first + std::min(i, tile.count - 1);
    rows[i] = args.o.row(query, head);
    const double lse = *args.lse.row(query, head);
    // Where every score is -inf, exp(-inf - inf) = 0; a NaN stays.
    tile.reference[i] = lse == -kInf ? kInf : static_cast<float>(lse / scale.natural);
    tile.rest[i] = std::isfinite(tile.reference[i])
                       ? static_cast<float>(std::exp(tile.reference[i] * scale.natural - lse))
                       : 1.0f;
  }
  pack_transposed(rows, lanes, values, 1.0f, tile.o, kTile);
  // In the order of dP, so that dP - D is 0 where a query sees one key.
  for (std::int64_t i = 0; i < lanes; i += kLanes) {
    V sum = hn::Zero(d);
    for (std::int64_t f = 0; f < values; ++f) {
      sum = hn::MulAdd(hn::LoadU(d, tile.o + f * kTile + i), hn::LoadU(d, tile.d_o + f * kTile + i),
                       sum);
    }
    hn::StoreU(sum, d, tile.dot + i);
  }
}

// p in place of the scores and, unless ds is null, dS in place of dP, where some lane sees the key.
HWY_INLINE void differentiate(const Sight& s, const Scale& scale, const BackwardTile& tile,
                              float* p, float* ds) {
  const D d;
  const V to_base2 = hn::Set(d, scale.to_base2);
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    const V reference = hn::LoadU(d, tile.reference + v * kLanes);
    const V rest = hn::LoadU(d, tile.rest + v * kLanes);
    const V dot = hn::LoadU(d, tile.dot + v * kLanes);
    for (std::int64_t j = s.any_begin[v]; j < s.any_end[v]; ++j) {
      float* at_p = p + j * kTile + v * kLanes;
      const V x = hn::Sub(hn::LoadU(d, at_p), reference);
      const V w = hn::Mul(weight(d, hn::Mul(x, to_base2)), rest);
      hn::StoreU(w, d, at_p);
      if (ds == nullptr) continue;
      float* at_ds = ds + j * kTile + v * kLanes;
      hn::StoreU(hn::Mul(w, hn::Sub(hn::LoadU(d, at_ds), dot)), d, at_ds);
    }
    if (s.whole) continue;
    clear_unseen(s, v, p);
    if (ds != nullptr) clear_unseen(s, v, ds);
  }
}

// acc[j][f] += sum over the queries i that see key j, in order, of weights[j][i] rows[i][f]. `ld`
// (a multiple of kLanes) is the row length of rows and acc. Weights of what is not seen are 0.
HWY_INLINE void scatter(const SoftmaxShape& shape, const BackwardTile& tile, std::int64_t begin,
                        std::int64_t keys, const float* weights, const float* rows, std::int64_t ld,
                        float* acc) {
  const D d;
  const auto query = [&](std::int64_t i) {
    return std::clamp<std::int64_t>(i - tile.first, 0, tile.count);
  };
  for (std::int64_t j = 0; j < keys; j += kPanel) {
    const std::int64_t a = begin + j, z = begin + std::min(j + kPanel, keys) - 1;
    const std::int64_t from = query(a - shape.offset - shape.after);
    const std::int64_t to = query(z - shape.offset + shape.before + 1);
    if (from >= to) continue;
    if (tile.finite) {
      for (std::int64_t f = 0; f < ld;) {
        const std::int64_t left = (ld - f) / kLanes;
        const std::int64_t vecs = left == 4 ? 2 : std::min<std::int64_t>(left, 3);
        multiply_vecs<Into::kAdd, 1, kTile>(vecs, weights + j * kTile + from, rows + from * ld + f,
                                            ld, to - from, acc + j * ld + f, ld, nullptr);
        f += vecs * kLanes;
      }
      continue;
    }
    // Infinities and NaN must not meet keys that do not see them.
    for (std::int64_t r = a; r <= z; ++r) {
      for (std::int64_t f = 0; f < ld; f += kLanes) {
        V sum = hn::Zero(d);
        for (std::int64_t i = from; i < to; ++i) {
          const std::int64_t distance = tile.first + i + shape.offset - r;
          if (distance > shape.before || -distance > shape.after) continue;
          sum = hn::MulAdd(hn::Set(d, weights[(r - begin) * kTile + i]),
                           hn::LoadU(d, rows + i * ld + f), sum);
        }
        float* at = acc + (r - begin) * ld + f;
        hn::StoreU(hn::Add(hn::LoadU(d, at), sum), d, at);
      }
    }
  }
}

// dq[f][i] += sum over the keys j that query i sees, in order, of panels[f][j] ds[j][i].
HWY_INLINE void gather_dq(const Sight& s, const float* panels, std::int64_t panel_count,
                          bool finite, const float* ds, std::int64_t keys, float* dq) {
  if (s.whole) {
    for (std::int64_t p = 0; p < panel_count; ++p) {
      multiply_vecs<Into::kContinue, kPanel, 1>(s.vecs, panels + p * kSoftmaxBlock * kPanel, ds,
                                                kTile, keys, dq + p * kPanel * kTile, kTile,
                                                nullptr);
    }
    return;
  }
  (finite ? gather_finite : gather_careful)(s, panels, panel_count, ds, dq);
}

void SoftmaxBackwardKernel(const SoftmaxBackwardArgs& args) {
  const D d;
  const SoftmaxShape& shape = args.shape;
  const Scale scale(shape.scale);
  const std::int64_t features = shape.key_size, values = shape.value_size;
  const std::int64_t feature_panels = (features + kPanel - 1) / kPanel;
  const std::int64_t feature_ld = round_up(features, kLanes);
  const std::int64_t value_ld = round_up(values, kLanes);
  const bool want_ds = args.dq.data != nullptr || args.dk.data != nullptr;

  float* next = args.scratch;
  const auto take = [&](std::int64_t floats) {
    float* at = next;
    next += round_up(floats, 16);
    return at;
  };
  constexpr std::int64_t kBlocks = kSoftmaxSpan / kSoftmaxBlock;
  float* key_panels = take(kSoftmaxSpan * features);                   // for the scores
  float* value_panels = take(kSoftmaxSpan * values);                   // for dP
  float* key_features = take(kSoftmaxSpan * feature_panels * kPanel);  // for dq
  float* dk = take(kSoftmaxSpan * feature_ld);
  float* dv = take(kSoftmaxSpan * value_ld);
  float* p = take(kSoftmaxBlock * kTile);
  float* ds = take(kSoftmaxBlock * kTile);
  BackwardTile tile;
  tile.q = take(features * kTile);
  tile.d_o = take(values * kTile);
  tile.o = take(values * kTile);
  tile.q_rows = take(kTile * feature_ld);
  tile.do_rows = take(kTile * value_ld);
  tile.dq = take(feature_panels * kPanel * kTile);
  tile.reference = take(kTile);
  tile.rest = take(kTile);
  tile.dot = take(kTile);
  float* wide = take(kSoftmaxBlock * std::max(features, values));  // rows of 16 bits on their way

  if (args.dq.data != nullptr) {
    const SoftmaxRange range = softmax_seeing(shape, args.begin, args.end);
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      for (std::int64_t i = range.begin; i < range.end; ++i) {
        check_cancelled_at(i);
        std::fill_n(args.dq.row(i, h), features, 0.0f);
      }
    }
  }
  bool finite[kBlocks];
  const void* k_rows[kSoftmaxBlock];
  const void* v_rows[kSoftmaxBlock];
  const float* rows[kSoftmaxBlock];
  for (std::int64_t span = args.begin; span < args.end; span += kSoftmaxSpan) {
    const std::int64_t span_end = std::min(span + kSoftmaxSpan, args.end);
    for (std::int64_t b = 0; b < kBlocks && span + b * kSoftmaxBlock < span_end; ++b) {
      const std::int64_t begin = span + b * kSoftmaxBlock;
      const std::int64_t keys = std::min(kSoftmaxBlock, span_end - begin);
      find_rows(&args.kv, 1, args.types, begin, k_rows, v_rows);
      as_floats(args.types.v, v_rows, round_up(keys, kPanel), values, wide, rows);
      pack_key_panels(rows, round_up(keys, kPanel), values,
                      value_panels + b * kSoftmaxBlock * values);
      as_floats(args.types.k, k_rows, round_up(keys, kPanel), features, wide, rows);
      pack_key_panels(rows, round_up(keys, kPanel), features,
                      key_panels + b * kSoftmaxBlock * features);
      finite[b] = pack_feature_panels(rows, keys, features,
                                      key_features + b * kSoftmaxBlock * feature_panels * kPanel);
    }
    std::fill_n(dk, kSoftmaxSpan * feature_ld, 0.0f);
    std::fill_n(dv, kSoftmaxSpan * value_ld, 0.0f);

    const SoftmaxRange range = softmax_seeing(shape, span, span_end);
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      for (tile.first = range.begin; tile.first < range.end; tile.first += kTile) {
        check_cancelled();
        tile.count = std::min(kTile, range.end - tile.first);
        load_tile(args, scale, h, wide, tile);
        if (args.dq.data != nullptr) std::fill_n(tile.dq, feature_panels * kPanel * kTile, 0.0f);
        for (std::int64_t b = 0; b < kBlocks; ++b) {
          const std::int64_t begin = span + b * kSoftmaxBlock;
          if (begin >= span_end) break;
          const std::int64_t end = std::min(begin + kSoftmaxBlock, span_end);
          const Sight s = see(shape, tile.first, tile.count, begin, end);
          if (s.none) continue;
          score<Into::kAssign>(s, key_panels + b * kSoftmaxBlock * features, tile.q, features,
                               end - begin, p, nullptr);
          if (want_ds) {
            score<Into::kAssign>(s, value_panels + b * kSoftmaxBlock * values, tile.d_o, values,
                                 end - begin, ds, nullptr);
          }
          differentiate(s, scale, tile, p, want_ds ? ds : nullptr);
          if (args.dv.data != nullptr) {
            scatter(shape, tile, begin, end - begin, p, tile.do_rows, value_ld,
                    dv + b * kSoftmaxBlock * value_ld);
          }
          if (args.dk.data != nullptr) {
            scatter(shape, tile, begin, end - begin, ds, tile.q_rows, feature_ld,
                    dk + b * kSoftmaxBlock * feature_ld);
          }
          if (args.dq.data != nullptr) {
            gather_dq(s, key_features + b * kSoftmaxBlock * feature_panels * kPanel, feature_panels,
                      finite[b], ds, end - begin, tile.dq);
          }
        }
        if (args.dq.data != nullptr) {
          const V factor = hn::Set(d, shape.scale);
          for (std::int64_t i = 0; i < feature_panels * kPanel * kTile; i += kLanes) {
            hn::StoreU(hn::Mul(factor, hn::LoadU(d, tile.dq + i)), d, tile.dq + i);
          }
          float* rows[kTile];
          for (std::int64_t i = 0; i < tile.count; ++i) rows[i] = args.dq.row(tile.first + i, h);
          unpack_transposed<true>(tile.dq, kTile, tile.count, features, rows);
        }
      }
    }
    for (std::int64_t j = span; j < span_end; ++j) {
      if (args.dk.data != nullptr) {
        const bool narrow = args.dk.dtype != DType::kF32;
        const float* from = dk + (j - span) * feature_ld;
        float* to = narrow ? wide : static_cast<float*>(args.dk.row(j, 0));
        for (std::int64_t f = 0; f < features; ++f) to[f] = shape.scale * from[f];
        if (narrow) put_row(args.dk.dtype, wide, features, args.dk.row(j, 0));
      }
      if (args.dv.data != nullptr) {
        const float* from = dv + (j - span) * value_ld;
        if (args.dv.dtype != DType::kF32) {
          put_row(args.dv.dtype, from, values, args.dv.row(j, 0));
        } else {
          std::copy_n(from, values, static_cast<float*>(args.dv.row(j, 0)));
        }
      }
    }
  }
}

}  // namespace softmax
using softmax::SoftmaxBackwardKernel;
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(SoftmaxBackwardKernel);

void softmax_backward(Isa isa, const SoftmaxBackwardArgs& args) {
  OUZEL_DISPATCH(isa, SoftmaxBackwardKernel)(args);
}

std::int64_t softmax_backward_scratch(const SoftmaxShape& shape) {
  const auto up = [](std::int64_t n) { return (n + 15) / 16 * 16; };
  constexpr std::int64_t kWidest = kSoftmaxWidestTile;
  const std::int64_t k = up(shape.key_size), v = up(shape.value_size);
  return kSoftmaxSpan * (3 * k + 2 * v) + 2 * kSoftmaxBlock * kWidest +
         kWidest * (3 * k + 3 * v + 3) + kSoftmaxBlock * std::max(k, v) + 16 * 16;
}

SoftmaxRange softmax_seeing(const SoftmaxShape& shape, std::int64_t begin, std::int64_t end) {
  SoftmaxRange range;
  range.begin = std::clamp<std::int64_t>(begin - shape.offset - shape.after, 0, shape.queries);
  range.end =
      std::clamp<std::int64_t>(end - shape.offset + shape.before, range.begin, shape.queries);
  return range;
}

}  // namespace ouzel
#endif  // HWY_ONCE
