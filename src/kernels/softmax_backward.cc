// Softmax attention backward by recomputation: with p_ij = exp(scale S_ij - lse_i), dP = dO V^T and
// D_i = do_i . o_i, dS = p (dP - D), dv_j = sum_i p_ij do_i, dk_j = scale sum_i dS_ij q_i and
// dq_i = scale sum_j dS_ij k_j (arXiv:2205.14135). Spans of 256 keys, whose dk and dv stay in
// cache, meet every strip of queries in turn; within a span, blocks of 64 keys.
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
  float* dq = nullptr;         // [K rounded up to kPanel][kTile]
  float* reference = nullptr;  // [kTile] the score whose weight is about 1: lse / scale
  float* rest = nullptr;       // [kTile] its weight
  float* dot = nullptr;        // [kTile] D
};

// As many queries as the widest tile holds, in tiles side by side. They are summed together into dk
// and dv, which are read and written once for all of them.
inline constexpr std::int64_t kStrip = kSoftmaxWidestTile;
inline constexpr std::int64_t kStripTiles = kStrip / kTile;
static_assert(kStrip % kTile == 0);
struct Strip {
  std::int64_t first = 0, count = 0;
  std::int64_t tile_count = 0;
  BackwardTile tiles[kStripTiles];
  float* q_rows = nullptr;   // [kStrip][K rounded up to lanes]
  float* do_rows = nullptr;  // [kStrip][V rounded up to lanes]
  bool finite = false;       // all of q_rows and do_rows
};

// to[r][c] = rows[r][c], filled up with zeros to `ld`, a multiple of kLanes. Returns whether all
// are finite.
HWY_INLINE bool pack_rows(const float* const* rows, std::int64_t count, std::int64_t cols,
                          float* HWY_RESTRICT to, std::int64_t ld) {
  const D d;
  V nothing = hn::Zero(d);  // 0 x, which is NaN for an x of infinity or NaN
  for (std::int64_t r = 0; r < count; ++r) {
    for (std::int64_t c = 0; c < ld; c += kLanes) {
      const V x =
          cols - c < kLanes ? load_first(d, rows[r] + c, cols - c) : hn::LoadU(d, rows[r] + c);
      nothing = hn::MulAdd(x, hn::Zero(d), nothing);
      hn::StoreU(x, d, to + r * ld + c);
    }
  }
  return hn::AllTrue(d, hn::Eq(nothing, hn::Zero(d)));
}

HWY_INLINE void load_tile(const SoftmaxBackwardArgs& args, const Scale& scale, std::int64_t head,
                          float* wide, float* o, Strip& strip, std::int64_t index) {
  const D d;
  const BackwardTile& tile = strip.tiles[index];
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
  const std::int64_t feature_ld = round_up(features, kLanes), value_ld = round_up(values, kLanes);
  const bool q_finite =
      pack_rows(rows, tile.count, features, strip.q_rows + index * kTile * feature_ld, feature_ld);
  for (std::int64_t i = 0; i < kTile; ++i) {
    given[i] = args.d_o.row(tile.first + std::min(i, tile.count - 1), head);
  }
  as_floats(args.d_o.dtype, given, lanes, values, wide, rows);
  pack_transposed(rows, lanes, values, 1.0f, tile.d_o, kTile);
  const bool do_finite =
      pack_rows(rows, tile.count, values, strip.do_rows + index * kTile * value_ld, value_ld);
  strip.finite = strip.finite && q_finite && do_finite;
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
  pack_transposed(rows, lanes, values, 1.0f, o, kTile);
  // In the order of dP, so that dP - D is 0 where a query sees one key.
  for (std::int64_t i = 0; i < lanes; i += kLanes) {
    V sum = hn::Zero(d);
    for (std::int64_t f = 0; f < values; ++f) {
      sum =
          hn::MulAdd(hn::LoadU(d, o + f * kTile + i), hn::LoadU(d, tile.d_o + f * kTile + i), sum);
    }
    hn::StoreU(sum, d, tile.dot + i);
  }
}

// Asks for rows [begin, end) of what load_tile reads for the next strip, and of the dq of this one.
HWY_INLINE void prefetch_strip(const SoftmaxBackwardArgs& args, const Strip& strip,
                               std::int64_t head, std::int64_t queries, std::int64_t begin,
                               std::int64_t end) {
  const std::int64_t features = args.shape.key_size, values = args.shape.value_size;
  for (std::int64_t i = strip.first + begin; i < strip.first + end && i < queries; ++i) {
    if (args.dq.data != nullptr) prefetch_row(args.dq.row(i, head), DType::kF32, features);
    const std::int64_t next = i + kStrip;
    if (next >= queries) continue;
    prefetch_row(args.q.row(next, head), args.q.dtype, features);
    prefetch_row(args.d_o.row(next, head), args.d_o.dtype, values);
    prefetch_row(args.o.row(next, head), DType::kF32, values);
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
      float* at_p = p + j * kStrip + v * kLanes;
      const V x = hn::Sub(hn::LoadU(d, at_p), reference);
      const V w = hn::Mul(weight(d, hn::Mul(x, to_base2)), rest);
      hn::StoreU(w, d, at_p);
      if (ds == nullptr) continue;
      float* at_ds = ds + j * kStrip + v * kLanes;
      hn::StoreU(hn::Mul(w, hn::Sub(hn::LoadU(d, at_ds), dot)), d, at_ds);
    }
    if (s.whole) continue;
    clear_unseen<kStrip>(s, v, p);
    if (ds != nullptr) clear_unseen<kStrip>(s, v, ds);
  }
}

// acc[j][f] += sum over the queries i that see key j, in order, of weights[j][i] rows[i][f]. `ld`
// (a multiple of kLanes) is the row length of rows and acc. Weights of what is not seen are 0.
HWY_INLINE void scatter(const SoftmaxShape& shape, const Strip& strip, std::int64_t begin,
                        std::int64_t keys, const float* weights, const float* rows, std::int64_t ld,
                        float* acc) {
  const D d;
  const auto query = [&](std::int64_t i) {
    return std::clamp<std::int64_t>(i - strip.first, 0, strip.count);
  };
  for (std::int64_t j = 0; j < keys; j += kPanel) {
    const std::int64_t a = begin + j, z = begin + std::min(j + kPanel, keys) - 1;
    const std::int64_t from = query(a - shape.offset - shape.after);
    const std::int64_t to = query(z - shape.offset + shape.before + 1);
    if (from >= to) continue;
    if (strip.finite) {
      for (std::int64_t f = 0; f < ld;) {
        const std::int64_t left = (ld - f) / kLanes;
        const std::int64_t vecs = left == 4 ? 2 : std::min<std::int64_t>(left, 3);
        multiply_vecs<Into::kAdd, 1, kStrip>(vecs, weights + j * kStrip + from,
                                             rows + from * ld + f, ld, to - from, acc + j * ld + f,
                                             ld, nullptr);
        f += vecs * kLanes;
      }
      continue;
    }
    // Infinities and NaN must not meet keys that do not see them.
    for (std::int64_t r = a; r <= z; ++r) {
      for (std::int64_t f = 0; f < ld; f += kLanes) {
        V sum = hn::Zero(d);
        for (std::int64_t i = from; i < to; ++i) {
          const std::int64_t distance = strip.first + i + shape.offset - r;
          if (distance > shape.before || -distance > shape.after) continue;
          sum = hn::MulAdd(hn::Set(d, weights[(r - begin) * kStrip + i]),
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
                                                kStrip, keys, dq + p * kPanel * kTile, kTile,
                                                nullptr);
    }
    return;
  }
  (finite ? gather_finite<kStrip> : gather_careful<kStrip>)(s, panels, panel_count, ds, dq);
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
  float* p = take(kSoftmaxBlock * kStrip);
  float* ds = take(kSoftmaxBlock * kStrip);
  float* o = take(values * kTile);
  Strip strip;
  for (BackwardTile& tile : strip.tiles) {
    tile.q = take(features * kTile);
    tile.d_o = take(values * kTile);
    tile.dq = take(feature_panels * kPanel * kTile);
    tile.reference = take(kTile);
    tile.rest = take(kTile);
    tile.dot = take(kTile);
  }
  strip.q_rows = take(kStrip * feature_ld);
  strip.do_rows = take(kStrip * value_ld);
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
      for (strip.first = range.begin; strip.first < range.end; strip.first += kStrip) {
        check_cancelled();
        strip.count = std::min(kStrip, range.end - strip.first);
        strip.tile_count = (strip.count + kTile - 1) / kTile;
        strip.finite = true;
        for (std::int64_t t = 0; t < strip.tile_count; ++t) {
          BackwardTile& tile = strip.tiles[t];
          tile.first = strip.first + t * kTile;
          tile.count = std::min(kTile, range.end - tile.first);
          load_tile(args, scale, h, wide, o, strip, t);
          if (args.dq.data != nullptr) std::fill_n(tile.dq, feature_panels * kPanel * kTile, 0.0f);
        }
        for (std::int64_t b = 0; b < kBlocks; ++b) {
          const std::int64_t begin = span + b * kSoftmaxBlock;
          if (begin >= span_end) break;
          prefetch_strip(args, strip, h, range.end, b * kStrip / kBlocks,
                         (b + 1) * kStrip / kBlocks);
          const std::int64_t end = std::min(begin + kSoftmaxBlock, span_end);
          Sight sights[kStripTiles];
          for (std::int64_t t = 0; t < strip.tile_count; ++t) {
            const BackwardTile& tile = strip.tiles[t];
            const Sight& s = sights[t] = see(shape, tile.first, tile.count, begin, end);
            if (s.none) continue;
            float* tile_p = p + t * kTile;
            float* tile_ds = want_ds ? ds + t * kTile : nullptr;
            score<Into::kAssign, kStrip>(s, key_panels + b * kSoftmaxBlock * features, tile.q,
                                         features, end - begin, tile_p, nullptr);
            if (want_ds) {
              score<Into::kAssign, kStrip>(s, value_panels + b * kSoftmaxBlock * values, tile.d_o,
                                           values, end - begin, tile_ds, nullptr);
            }
            differentiate(s, scale, tile, tile_p, tile_ds);
          }
          if (args.dv.data != nullptr) {
            scatter(shape, strip, begin, end - begin, p, strip.do_rows, value_ld,
                    dv + b * kSoftmaxBlock * value_ld);
          }
          if (args.dk.data != nullptr) {
            scatter(shape, strip, begin, end - begin, ds, strip.q_rows, feature_ld,
                    dk + b * kSoftmaxBlock * feature_ld);
          }
          for (std::int64_t t = 0; t < strip.tile_count && args.dq.data != nullptr; ++t) {
            if (sights[t].none) continue;
            gather_dq(sights[t], key_features + b * kSoftmaxBlock * feature_panels * kPanel,
                      feature_panels, finite[b], ds + t * kTile, end - begin, strip.tiles[t].dq);
          }
        }
        for (std::int64_t t = 0; t < strip.tile_count && args.dq.data != nullptr; ++t) {
          const BackwardTile& tile = strip.tiles[t];
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
