#include "src/ops/reference/softmax_attention.h"

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

namespace ouzel::reference {
namespace {

using Int = std::int64_t;

// One query row: the keys that it sees, their weights, and the log-sum-exp of their scores.
template <class Real>
struct Row {
  std::vector<Int> token;
  std::vector<Real> weight;
  Real lse = -std::numeric_limits<Real>::infinity();
};

template <class Real>
Row<Real> attend(const SoftmaxAttentionArguments<Real>& a, const Segment& queries,
                 const Segment& keys, Int i, Int head, Int key_head) {
  const Real* q = &a.q(queries.batch, queries.begin + i, head, 0);
  Row<Real> row;
  Real top = -std::numeric_limits<Real>::infinity();
  for (Int j = 0; j < keys.length; ++j) {
    const Int distance = i + a.q_offset - j;
    if ((a.causal && distance < 0) || (a.window > 0 && distance >= a.window)) continue;
    Real score = 0;
    for (Int c = 0; c < a.q.extent(3); ++c) {
      score += q[c] * a.k(keys.batch, keys.begin + j, key_head, c);
    }
    row.token.push_back(keys.begin + j);
    row.weight.push_back(a.scale * score);
    if (!(row.weight.back() <= top)) top = row.weight.back();  // a NaN gets through
  }
  if (top == -std::numeric_limits<Real>::infinity()) return {};  // no key, or only scores of -inf
  Real sum = 0;
  for (Real& w : row.weight) sum += w = std::exp(w - top);
  for (Real& w : row.weight) w /= sum;
  row.lse = top + std::log(sum);
  return row;
}

}  // namespace

template <class Real>
SoftmaxAttentionResults<Real> softmax_attention(const SoftmaxAttentionArguments<Real>& a) {
  const Int heads = a.q.extent(2), group = heads / a.k.extent(2), values = a.v.extent(3);
  SoftmaxAttentionResults<Real> r{Array<Real>({a.q.extent(0), a.q.extent(1), heads, values}),
                                  Array<Real>({a.q.extent(0), a.q.extent(1), heads})};
  for (std::size_t n = 0; n < a.query_segments.list.size(); ++n) {
    const Segment &queries = a.query_segments.list[n], &keys = a.key_segments.list[n];
    for (Int h = 0; h < heads; ++h) {
      for (Int i = 0; i < queries.length; ++i) {
        const Row<Real> row = attend(a, queries, keys, i, h, h / group);
        const Int t = queries.begin + i;
        r.lse(queries.batch, t, h) = row.lse;
        for (std::size_t j = 0; j < row.token.size(); ++j) {
          for (Int c = 0; c < values; ++c) {
            r.o(queries.batch, t, h, c) +=
                row.weight[j] * a.v(keys.batch, row.token[j], h / group, c);
          }
        }
      }
    }
  }
  return r;
}

// dv_j += p_ij do_i; dp_ij = do_i . v_j; ds_ij = p_ij (dp_ij - sum_j p_ij dp_ij); dq_i = scale
// sum_j ds_ij k_j; dk_j += scale ds_ij q_i.
template <class Real>
SoftmaxAttentionGradients<Real> softmax_attention_backward(const SoftmaxAttentionArguments<Real>& a,
                                                           const Array<Real>& d_o) {
  const Int heads = a.q.extent(2), group = heads / a.k.extent(2);
  SoftmaxAttentionGradients<Real> r{Array<Real>::like(a.q), Array<Real>::like(a.k),
                                    Array<Real>::like(a.v)};
  for (std::size_t n = 0; n < a.query_segments.list.size(); ++n) {
    const Segment &queries = a.query_segments.list[n], &keys = a.key_segments.list[n];
    for (Int h = 0; h < heads; ++h) {
      const Int hk = h / group;
      for (Int i = 0; i < queries.length; ++i) {
        const Row<Real> row = attend(a, queries, keys, i, h, hk);
        const Int t = queries.begin + i;
        std::vector<Real> dp(row.token.size());
        Real mean = 0;
        for (std::size_t j = 0; j < row.token.size(); ++j) {
          for (Int c = 0; c < a.v.extent(3); ++c) {
            dp[j] += d_o(queries.batch, t, h, c) * a.v(keys.batch, row.token[j], hk, c);
            r.v(keys.batch, row.token[j], hk, c) += row.weight[j] * d_o(queries.batch, t, h, c);
          }
          mean += row.weight[j] * dp[j];
        }
        for (std::size_t j = 0; j < row.token.size(); ++j) {
          const Real ds = a.scale * row.weight[j] * (dp[j] - mean);
          for (Int c = 0; c < a.q.extent(3); ++c) {
            r.q(queries.batch, t, h, c) += ds * a.k(keys.batch, row.token[j], hk, c);
            r.k(keys.batch, row.token[j], hk, c) += ds * a.q(queries.batch, t, h, c);
          }
        }
      }
    }
  }
  return r;
}

#define OUZEL_INSTANTIATE(Real)                                        \
  template SoftmaxAttentionResults<Real> softmax_attention(            \
      const SoftmaxAttentionArguments<Real>&);                         \
  template SoftmaxAttentionGradients<Real> softmax_attention_backward( \
      const SoftmaxAttentionArguments<Real>&, const Array<Real>&);
OUZEL_INSTANTIATE(double)
OUZEL_INSTANTIATE(long double)
#undef OUZEL_INSTANTIATE

}  // namespace ouzel::reference
