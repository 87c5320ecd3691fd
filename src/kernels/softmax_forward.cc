// Softmax attention forward: for each block of 64 keys and tile of queries, scores S = K Q^T, then
// with the running maximum m and sum l of each query m' = max(m, max S), alpha = exp(scale (m -
// m')), p = exp(scale (S - m')), l' = l alpha + sum p, o' = o alpha + p V, and o / l in the end.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/softmax_forward.cc"
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

// One tile of queries of one head, and what it has gathered so far.
struct Tile {
  std::int64_t first = 0, count = 0;  // queries
  std::int64_t head = 0;
  float* q = nullptr;  // [K][kTile]
  float* o = nullptr;  // [V rounded up to kPanel][kTile]
  float* m = nullptr;  // [kTile] running maximum
  float* l = nullptr;  // [kTile] running sum
};

// p in place of the scores of vectors [at, at + NV), which see keys [begin, end), and the step of m
// and l; max is the new m.
template <int NV>
HWY_INLINE void weigh_vecs(std::int64_t at, std::int64_t begin, std::int64_t end,
                           const Scale& scale, const float* max, float* scores, const Tile& tile,
                           float* alpha) {
  const D d;
  const V to_base2 = hn::Set(d, scale.to_base2);
  V shift[NV], sum[NV];
  HWY_UNROLL(3)
  for (int v = 0; v < NV; ++v) {
    const V m = hn::LoadU(d, max + at + v * kLanes);
    // A query that has seen no score above -inf keeps weights of 2^-inf = 0.
    shift[v] = hn::IfThenElse(hn::Eq(m, hn::Set(d, -kInf)), hn::Zero(d), m);
    sum[v] = hn::Zero(d);
  }
  for (std::int64_t j = begin; j < end; ++j) {
    HWY_UNROLL(3)
    for (int v = 0; v < NV; ++v) {
      float* to = scores + j * kTile + at + v * kLanes;
      const V p = weight(d, hn::Mul(hn::Sub(hn::LoadU(d, to), shift[v]), to_base2));
      sum[v] = hn::Add(sum[v], p);
      hn::StoreU(p, d, to);
    }
  }
  HWY_UNROLL(3)
  for (int v = 0; v < NV; ++v) {
    float* m = tile.m + at + v * kLanes;
    float* l = tile.l + at + v * kLanes;
    const V a = weight(d, hn::Mul(hn::Sub(hn::LoadU(d, m), shift[v]), to_base2));
    hn::StoreU(a, d, alpha + at + v * kLanes);
    hn::StoreU(hn::LoadU(d, max + at + v * kLanes), d, m);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, l), a, sum[v]), d, l);
  }
}

HWY_INLINE void weigh(const Sight& s, const Scale& scale, std::int64_t keys, float* max,
                      float* scores, const Tile& tile, float* alpha) {
  const D d;
  if (s.whole && s.vecs == kVecs) {
    weigh_vecs<kVecs>(0, 0, keys, scale, max, scores, tile, alpha);
    return;
  }
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    if (!s.whole) {
      float* column = scores + v * kLanes;
      for_partial_keys(s, v, [&](std::int64_t j) HWY_ATTR {
        float* at = column + j * kTile;
        hn::StoreU(hn::IfThenElse(seeing_lanes(s, j, v), hn::LoadU(d, at), hn::Set(d, -kInf)), d,
                   at);
      });
      V m = hn::LoadU(d, tile.m + v * kLanes);
      for (std::int64_t j = s.any_begin[v]; j < s.any_end[v]; ++j) {
        m = hn::Max(m, hn::LoadU(d, column + j * kTile));
      }
      hn::StoreU(m, d, max + v * kLanes);
    }
    weigh_vecs<1>(v * kLanes, s.any_begin[v], s.any_end[v], scale, max, scores, tile, alpha);
  }
}

// o = o alpha + V^T p, the sum over the block formed from zero: long sums lose little.
HWY_INLINE void gather(const Sight& s, const float* value_panels, std::int64_t panel_count,
                       bool finite, const float* weights, std::int64_t keys, const Tile& tile,
                       float* alpha, float* part) {
  if (s.whole) {
    for (std::int64_t p = 0; p < panel_count; ++p) {
      multiply_vecs<Into::kScaledAdd, kPanel, 1>(s.vecs, value_panels + p * kSoftmaxBlock * kPanel,
                                                 weights, kTile, keys, tile.o + p * kPanel * kTile,
                                                 kTile, alpha);
    }
    return;
  }
  const D d;
  std::fill_n(part, panel_count * kPanel * kTile, 0.0f);
  (finite ? gather_finite<kTile> : gather_careful<kTile>)(s, value_panels, panel_count, weights,
                                                          part);
  for (std::int64_t f = 0; f < panel_count * kPanel; ++f) {
    for (std::int64_t v = 0; v < s.vecs; ++v) {
      float* to = tile.o + f * kTile + v * kLanes;
      const V sum = hn::LoadU(d, part + f * kTile + v * kLanes);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, to), hn::LoadU(d, alpha + v * kLanes), sum), d, to);
    }
  }
}

HWY_INLINE void finish(const SoftmaxForwardArgs& args, const Scale& scale, const Tile& tile,
                       float* wide) {
  const D d;
  const std::int64_t vecs = (tile.count + kLanes - 1) / kLanes;
  for (std::int64_t v = 0; v < vecs; ++v) {
    const V l = hn::LoadU(d, tile.l + v * kLanes);
    const V inverse = hn::IfThenElse(hn::Eq(l, hn::Zero(d)), l, hn::Div(hn::Set(d, 1.0f), l));
    for (std::int64_t f = 0; f < args.shape.value_size; ++f) {
      float* o = tile.o + f * kTile + v * kLanes;
      // + 0: which zeros were added along the way must not show in the sign of a zero.
      hn::StoreU(hn::MulAdd(hn::LoadU(d, o), inverse, hn::Zero(d)), d, o);
    }
    if (args.lse.data != nullptr) {
      hn::StoreU(math::log(d, l), d, tile.l + v * kLanes);
    }
  }
  const bool narrow = args.o.dtype != DType::kF32;
  float* rows[kTile];
  for (std::int64_t i = 0; i < tile.count; ++i) {
    rows[i] = narrow ? wide + i * args.shape.value_size
                     : static_cast<float*>(args.o.row(tile.first + i, tile.head));
    if (args.lse.data == nullptr) continue;
    // -inf where nothing was seen.
    *args.lse.row(tile.first + i, tile.head) =
        static_cast<double>(tile.m[i]) * scale.natural + static_cast<double>(tile.l[i]);
  }
  unpack_transposed<false>(tile.o, kTile, tile.count, args.shape.value_size, rows);
  for (std::int64_t i = 0; i < tile.count && narrow; ++i) {
    put_row(args.o.dtype, rows[i], args.shape.value_size, args.o.row(tile.first + i, tile.head));
  }
}

void SoftmaxForwardKernel(const SoftmaxForwardArgs& args) {
  const SoftmaxShape& shape = args.shape;
  const Scale scale(shape.scale);
  const std::int64_t features = shape.key_size;
  const std::int64_t panel_count = (shape.value_size + kPanel - 1) / kPanel;
  float* next = args.scratch;
  const auto take = [&](std::int64_t floats) {
    float* at = next;
    next += round_up(floats, 16);
    return at;
  };
  float* key_panels = take(kSoftmaxBlock * features);
  float* value_panels = take(kSoftmaxBlock * panel_count * kPanel);
  float* scores = take(kSoftmaxBlock * kTile);
  float* part = take(panel_count * kPanel * kTile);
  float* alpha = take(kTile);
  float* max = take(kTile);
  // Rows of 16 bits on their way.
  const bool narrow = args.q.dtype != DType::kF32 || args.o.dtype != DType::kF32 ||
                      args.types.k != DType::kF32 || args.types.v != DType::kF32;
  float* wide = take(narrow ? kSoftmaxBlock * std::max(features, shape.value_size) : 0);
  const std::int64_t tiles_per_head = (args.end - args.begin + kTile - 1) / kTile;
  float* const tile_memory = next;
  const std::int64_t tile_floats = round_up((features + panel_count * kPanel + 2) * kTile, 16);

  const auto tile_at = [&](std::int64_t index) {
    Tile tile;
    tile.head = index / tiles_per_head;
    tile.first = args.begin + index % tiles_per_head * kTile;
    tile.count = std::min(kTile, args.end - tile.first);
    tile.q = tile_memory + index * tile_floats;
    tile.o = tile.q + features * kTile;
    tile.m = tile.o + panel_count * kPanel * kTile;
    tile.l = tile.m + kTile;
    return tile;
  };
  const std::int64_t tiles = shape.heads * tiles_per_head;
  for (std::int64_t t = 0; t < tiles; ++t) {
    const Tile tile = tile_at(t);
    // Lanes beyond the last query repeat it.
    const void* given[kTile];
    for (std::int64_t i = 0; i < kTile; ++i) {
      given[i] = args.q.row(tile.first + std::min(i, tile.count - 1), tile.head);
    }
    const std::int64_t lanes = round_up(tile.count, kLanes);
    const float* rows[kTile];
    as_floats(args.q.dtype, given, lanes, features, wide, rows);
    pack_transposed(rows, lanes, features, scale.pack, tile.q, kTile);
    std::fill_n(tile.o, panel_count * kPanel * kTile, 0.0f);
    std::fill_n(tile.m, kTile, -kInf);
    std::fill_n(tile.l, kTile, 0.0f);
  }

  const std::int64_t first_key =
      std::clamp<std::int64_t>(args.begin + shape.offset - shape.before, 0, shape.keys);
  const std::int64_t last_key =
      std::clamp<std::int64_t>(args.end + shape.offset + shape.after, first_key, shape.keys);
  const void* k_rows[kSoftmaxBlock];
  const void* v_rows[kSoftmaxBlock];
  const float* rows[kSoftmaxBlock];
  const std::int64_t first_block = first_key / kSoftmaxBlock * kSoftmaxBlock;
  find_rows(args.pieces, args.piece_count, args.types, first_block, k_rows, v_rows);
  for (std::int64_t begin = first_block; begin < last_key; begin += kSoftmaxBlock) {
    check_cancelled();
    const std::int64_t end = std::min(begin + kSoftmaxBlock, shape.keys);
    const std::int64_t keys = end - begin;
    as_floats(args.types.k, k_rows, round_up(keys, kPanel), features, wide, rows);
    pack_key_panels(rows, round_up(keys, kPanel), features, key_panels);
    as_floats(args.types.v, v_rows, keys, shape.value_size, wide, rows);
    const bool finite = pack_feature_panels(rows, keys, shape.value_size, value_panels);
    find_rows(args.pieces, args.piece_count, args.types, begin + kSoftmaxBlock, k_rows, v_rows);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const Tile tile = tile_at(t);
      prefetch_rows(k_rows, args.types.k, t * kSoftmaxBlock / tiles,
                    (t + 1) * kSoftmaxBlock / tiles, features);
      prefetch_rows(v_rows, args.types.v, t * kSoftmaxBlock / tiles,
                    (t + 1) * kSoftmaxBlock / tiles, shape.value_size);
      const Sight s = see(shape, tile.first, tile.count, begin, end);
      if (s.none) continue;
      if (s.whole) {
        std::copy_n(tile.m, kTile, max);
        score<Into::kAssignMax, kTile>(s, key_panels, tile.q, features, keys, scores, max);
      } else {
        score<Into::kAssign, kTile>(s, key_panels, tile.q, features, keys, scores, nullptr);
      }
      weigh(s, scale, keys, max, scores, tile, alpha);
      gather(s, value_panels, panel_count, finite, scores, keys, tile, alpha, part);
    }
  }
  for (std::int64_t t = 0; t < tiles; ++t) finish(args, scale, tile_at(t), wide);
}

}  // namespace softmax
using softmax::SoftmaxForwardKernel;
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(SoftmaxForwardKernel);

void softmax_forward(Isa isa, const SoftmaxForwardArgs& args) {
  OUZEL_DISPATCH(isa, SoftmaxForwardKernel)(args);
}

// What the kernel takes with the widest tile; narrower ones take less.
std::int64_t softmax_forward_scratch(const SoftmaxShape& shape, std::int64_t queries) {
  constexpr std::int64_t kWidest = kSoftmaxWidestTile;
  const std::int64_t values = (shape.value_size + 7) / 8 * 8;
  const std::int64_t lanes = (queries + kWidest - 1) / kWidest * kWidest;
  return kSoftmaxBlock * (shape.key_size + values + kWidest) +
         kSoftmaxBlock * std::max(shape.key_size, shape.value_size) + 16 + kWidest * (values + 2) +
         shape.heads * (lanes * (shape.key_size + values + 2) + 16 * lanes / 3);
}

}  // namespace ouzel
#endif  // HWY_ONCE
