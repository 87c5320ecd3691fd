// Softmax attention of one token against a cache: keys in lanes for the scores, values in lanes for
// the output, in the order of operations of softmax_forward.cc, so that both give the same bits.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "src/kernels/softmax_step.cc"
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

// Keys side by side in the scores of a block.
inline constexpr std::int64_t kKeyVecs = kSoftmaxBlock / kLanes;

// scores[j] = sum over f of keys[f][j] * q[f] for a block of keys [K][kSoftmaxBlock].
HWY_INLINE void score_block(const float* keys, const float* q, std::int64_t features,
                            float* scores) {
  const D d;
  constexpr std::int64_t kTogether = kKeyVecs < 4 ? kKeyVecs : 4;
  for (std::int64_t j = 0; j < kSoftmaxBlock; j += kTogether * kLanes) {
    V acc[kTogether];
    HWY_UNROLL(4)
    for (std::int64_t v = 0; v < kTogether; ++v) acc[v] = hn::Zero(d);
    for (std::int64_t f = 0; f < features; ++f) {
      const V qv = hn::Set(d, q[f]);
      HWY_UNROLL(4)
      for (std::int64_t v = 0; v < kTogether; ++v) {
        acc[v] = hn::MulAdd(hn::LoadU(d, keys + f * kSoftmaxBlock + j + v * kLanes), qv, acc[v]);
      }
    }
    HWY_UNROLL(4)
    for (std::int64_t v = 0; v < kTogether; ++v) hn::StoreU(acc[v], d, scores + j + v * kLanes);
  }
}

// o = o alpha + sum over j in [begin, end), in order, of weights[j] values[j][at ...], NV vectors.
template <int NV>
HWY_INLINE void gather_features(const float* const* values, std::int64_t at, const float* weights,
                                std::int64_t begin, std::int64_t end, float alpha, float* o) {
  const D d;
  V acc[NV];
  HWY_UNROLL(4)
  for (int v = 0; v < NV; ++v) acc[v] = hn::Zero(d);
  for (std::int64_t j = begin; j < end; ++j) {
    const V w = hn::Set(d, weights[j]);
    HWY_UNROLL(4)
    for (int v = 0; v < NV; ++v) {
      acc[v] = hn::MulAdd(hn::LoadU(d, values[j] + at + v * kLanes), w, acc[v]);
    }
  }
  HWY_UNROLL(4)
  for (int v = 0; v < NV; ++v) {
    const V old = hn::LoadU(d, o + v * kLanes);
    hn::StoreU(hn::MulAdd(old, hn::Set(d, alpha), acc[v]), d, o + v * kLanes);
  }
}

void SoftmaxStepKernel(const SoftmaxStepArgs& args) {
  const D d;
  const SoftmaxShape& shape = args.shape;
  const std::int64_t features = shape.key_size, values = shape.value_size;
  const std::int64_t value_room = round_up(values, 16);
  float* keys = args.scratch;  // [K][kSoftmaxBlock]
  float* scores = keys + kSoftmaxBlock * features;
  float* tail = scores + kSoftmaxBlock;  // [kSoftmaxBlock][16]: the last features of the values
  float* q = tail + kSoftmaxBlock * 16;  // [heads][K]
  float* o = q + shape.heads * round_up(features, 16);
  float* m = o + shape.heads * value_room;
  float* l = m + shape.heads;
  const Scale scale(shape.scale);
  const V to_base2 = hn::Set(d, scale.to_base2);
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    for (std::int64_t f = 0; f < features; ++f)
      q[h * features + f] = scale.pack * args.q.row(0, h)[f];
    std::fill_n(o + h * value_room, value_room, 0.0f);
    m[h] = -kInf;
    l[h] = 0;
  }
  const std::int64_t first_key = std::max<std::int64_t>(0, shape.offset - shape.before);
  const void* given_k[kSoftmaxBlock];
  const void* given_v[kSoftmaxBlock];
  const float* k_rows[kSoftmaxBlock];
  const float* v_rows[kSoftmaxBlock];
  const float* tail_rows[kSoftmaxBlock];
  for (std::int64_t block = first_key / kSoftmaxBlock * kSoftmaxBlock; block < shape.keys;
       block += kSoftmaxBlock) {
    check_cancelled();
    const std::int64_t begin = std::max(first_key, block) - block;
    const std::int64_t end = std::min(shape.keys - block, kSoftmaxBlock);
    find_rows(args.pieces, args.piece_count, {}, block, given_k, given_v);
    as_floats(DType::kF32, given_k, kSoftmaxBlock, features, nullptr, k_rows);
    as_floats(DType::kF32, given_v, kSoftmaxBlock, values, nullptr, v_rows);
    pack_transposed(k_rows, kSoftmaxBlock, features, 1.0f, keys, kSoftmaxBlock);
    const std::int64_t whole = values / kLanes * kLanes;
    if (whole < values) {
      for (std::int64_t j = begin; j < end; ++j) {
        std::copy_n(v_rows[j] + whole, values - whole, tail + j * 16);
        std::fill_n(tail + j * 16 + values - whole, 16 - (values - whole), 0.0f);
        tail_rows[j] = tail + j * 16;
      }
    }
    for (std::int64_t h = 0; h < shape.heads; ++h) {
      score_block(keys, q + h * features, features, scores);
      std::fill_n(scores, begin, -kInf);
      std::fill_n(scores + end, kSoftmaxBlock - end, -kInf);
      V lane_max = hn::Set(d, m[h]);
      for (std::int64_t j = 0; j < kSoftmaxBlock; j += kLanes) {
        lane_max = hn::Max(lane_max, hn::LoadU(d, scores + j));
      }
      const V max = hn::MaxOfLanes(d, lane_max);
      const V shift = hn::IfThenElse(hn::Eq(max, hn::Set(d, -kInf)), hn::Zero(d), max);
      for (std::int64_t j = 0; j < kSoftmaxBlock; j += kLanes) {
        const V x = hn::Sub(hn::LoadU(d, scores + j), shift);
        hn::StoreU(weight(d, hn::Mul(x, to_base2)), d, scores + j);
      }
      float sum = 0;
      for (std::int64_t j = begin; j < end; ++j) sum += scores[j];
      const V alpha = weight(d, hn::Mul(hn::Sub(hn::Set(d, m[h]), shift), to_base2));
      m[h] = hn::GetLane(max);
      l[h] = hn::GetLane(hn::MulAdd(hn::Set(d, l[h]), alpha, hn::Set(d, sum)));
      const float a = hn::GetLane(alpha);
      float* to = o + h * value_room;
      std::int64_t f = 0;
      for (; f + 4 * kLanes <= whole; f += 4 * kLanes) {
        gather_features<4>(v_rows, f, scores, begin, end, a, to + f);
      }
      for (; f < whole; f += kLanes) gather_features<1>(v_rows, f, scores, begin, end, a, to + f);
      if (whole < values) gather_features<1>(tail_rows, 0, scores, begin, end, a, to + f);
    }
  }
  for (std::int64_t h = 0; h < shape.heads; ++h) {
    const float inverse = l[h] == 0 ? 0.0f : 1.0f / l[h];
    float* to = args.o.row(0, h);
    for (std::int64_t f = 0; f < values; ++f) to[f] = o[h * value_room + f] * inverse + 0.0f;
  }
}

}  // namespace softmax
using softmax::SoftmaxStepKernel;
}  // namespace HWY_NAMESPACE
}  // namespace ouzel
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include "src/kernels/dispatch.h"

namespace ouzel {
HWY_EXPORT(SoftmaxStepKernel);

void softmax_step(Isa isa, const SoftmaxStepArgs& args) {
  OUZEL_DISPATCH(isa, SoftmaxStepKernel)(args);
}

std::int64_t softmax_step_scratch(const SoftmaxShape& shape) {
  const auto up = [](std::int64_t n) { return (n + 15) / 16 * 16; };
  return kSoftmaxBlock * (shape.key_size + 1 + 16) +
         shape.heads * (up(shape.key_size) + up(shape.value_size) + 2);
}

}  // namespace ouzel
#endif  // HWY_ONCE
