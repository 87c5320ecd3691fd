// Softmax attention forward: for each block of 64 keys and tile of queries, scores S = K Q^T, then
// with the running maximum m and sum l of each query m' = max(m, max S), alpha = exp(scale (m -
// m')), p = exp(scale (S - m')), l' = l alpha + sum p, o' = o alpha + p V, and o / l in the end.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/softmax_forward.cc"
#include "src/kernels/targets.h"
// targets.h comes first
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
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

// p in place of the scores, and the step of m and l.
HWY_INLINE void weigh(const Sight& s, const Scale& scale, float* scores, const Tile& tile,
                      float* alpha) {
  const D d;
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    const std::int64_t begin = s.any_begin[v], end = s.any_end[v];
    float* column = scores + v * kLanes;
    const auto mask_out = [&](std::int64_t from, std::int64_t to) HWY_ATTR {
      for (std::int64_t j = from; j < to; ++j) {
        const V x = hn::LoadU(d, column + j * kTile);
        hn::StoreU(hn::IfThenElse(seeing_lanes(s, j, v), x, hn::Set(d, -kInf)), d,
                   column + j * kTile);
      }
    };
    const std::int64_t full_begin = std::clamp(s.full_begin[v], begin, end);
    const std::int64_t full_end = std::clamp(s.full_end[v], full_begin, end);
    mask_out(begin, full_begin);
    mask_out(full_end, end);

    const V old = hn::LoadU(d, tile.m + v * kLanes);
    V m = old;
    for (std::int64_t j = begin; j < end; ++j) m = hn::Max(m, hn::LoadU(d, column + j * kTile));
    // A query that has seen no score above -inf keeps weights of 2^-inf = 0.
    const V shift = hn::IfThenElse(hn::Eq(m, hn::Set(d, -kInf)), hn::Zero(d), m);
    const V to_base2 = hn::Set(d, scale.to_base2);
    V sum = hn::Zero(d);
    for (std::int64_t j = begin; j < end; ++j) {
      const V x = hn::Sub(hn::LoadU(d, column + j * kTile), shift);
      const V p = math::exp2(d, hn::Mul(x, to_base2));
      sum = hn::Add(sum, p);
      hn::StoreU(p, d, column + j * kTile);
    }
    const V a = math::exp2(d, hn::Mul(hn::Sub(old, shift), to_base2));
    hn::StoreU(m, d, tile.m + v * kLanes);
    hn::StoreU(a, d, alpha + v * kLanes);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, tile.l + v * kLanes), a, sum), d, tile.l + v * kLanes);
  }
}

// o = o alpha + V^T p, the sum over the block formed from zero: long sums lose little.
HWY_INLINE void gather(const Sight& s, const float* value_panels, std::int64_t panel_count,
                       const float* weights, std::int64_t keys, const Tile& tile,
                       const float* alpha, float* part) {
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
  for (std::int64_t v = 0; v < s.vecs; ++v) {
    gather_vector(s, v, value_panels, panel_count, weights, part);
    const V a = hn::LoadU(d, alpha + v * kLanes);
    for (std::int64_t f = 0; f < panel_count * kPanel; ++f) {
      float* to = tile.o + f * kTile + v * kLanes;
      const V sum = hn::LoadU(d, part + f * kTile + v * kLanes);
      hn::StoreU(hn::MulAdd(hn::LoadU(d, to), a, sum), d, to);
    }
  }
}

HWY_INLINE void finish(const SoftmaxForwardArgs& args, const Scale& scale, const Tile& tile) {
  const D d;
  const std::int64_t vecs = (tile.count + kLanes - 1) / kLanes;
  for (std::int64_t v = 0; v < vecs; ++v) {
    const V l = hn::LoadU(d, tile.l + v * kLanes);
    const V inverse = hn::IfThenElse(hn::Eq(l, hn::Zero(d)), l, hn::Div(hn::Set(d, 1.0f), l));
    for (std::int64_t f = 0; f < args.shape.value_size; ++f) {
      float* o = tile.o + f * kTile + v * kLanes;
      hn::StoreU(hn::Mul(hn::LoadU(d, o), inverse), d, o);
    }
    if (args.lse.data != nullptr) {
      hn::StoreU(math::log(d, l), d, tile.l + v * kLanes);
    }
  }
  float* rows[kTile];
  for (std::int64_t i = 0; i < tile.count; ++i) {
    rows[i] = args.o.row(tile.first + i, tile.head);
    if (args.lse.data == nullptr) continue;
    // -inf where nothing was seen.
    *args.lse.row(tile.first + i, tile.head) =
        static_cast<double>(tile.m[i]) * scale.natural + static_cast<double>(tile.l[i]);
  }
  unpack_transposed<false>(tile.o, kTile, tile.count, args.shape.value_size, rows);
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
    const float* rows[kTile];
    for (std::int64_t i = 0; i < kTile; ++i) {
      rows[i] = args.q.row(tile.first + std::min(i, tile.count - 1), tile.head);
    }
    const std::int64_t lanes = round_up(tile.count, kLanes);
    pack_transposed(rows, lanes, features, scale.pack, tile.q, kTile);
    std::fill_n(tile.o, panel_count * kPanel * kTile, 0.0f);
    std::fill_n(tile.m, kTile, -kInf);
    std::fill_n(tile.l, kTile, 0.0f);
  }

  const std::int64_t first_key =
      std::clamp<std::int64_t>(args.begin + shape.offset - shape.before, 0, shape.keys);
  const std::int64_t last_key =
      std::clamp<std::int64_t>(args.end + shape.offset + shape.after, first_key, shape.keys);
  const float* k_rows[kSoftmaxBlock];
  const float* v_rows[kSoftmaxBlock];
  for (std::int64_t begin = first_key / kSoftmaxBlock * kSoftmaxBlock; begin < last_key;
       begin += kSoftmaxBlock) {
    const std::int64_t end = std::min(begin + kSoftmaxBlock, shape.keys);
    const std::int64_t keys = end - begin;
    find_rows(args.pieces, args.piece_count, begin, k_rows, v_rows);
    pack_key_panels(k_rows, round_up(keys, kPanel), features, key_panels);
    pack_feature_panels(v_rows, keys, shape.value_size, value_panels);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const Tile tile = tile_at(t);
      const Sight s = see(shape, tile.first, tile.count, begin, end);
      if (s.none) continue;
      score(s, key_panels, tile.q, features, keys, scores);
      weigh(s, scale, scores, tile, alpha);
      gather(s, value_panels, panel_count, scores, keys, tile, alpha, part);
    }
  }
  for (std::int64_t t = 0; t < tiles; ++t) finish(args, scale, tile_at(t));
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
  return kSoftmaxBlock * (shape.key_size + values + kWidest) + kWidest * (values + 1) +
         shape.heads * (lanes * (shape.key_size + values + 2) + 16 * lanes / 3);
}

}  // namespace ouzel
#endif  // HWY_ONCE
