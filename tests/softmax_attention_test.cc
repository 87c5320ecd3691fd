// Softmax attention against its float64 reference, and what it promises beyond: bits that depend on
// nothing but what a query sees.
#include "ouzel/softmax_attention.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "tests/softmax_case.h"

namespace ouzel::test::softmax {
namespace {

// Every length with sizes, heads, windows, masks and offsets that go round at their own pace, so
// that each pair of values meets.
TEST(SoftmaxAttention, AgreesWithTheReferenceAtEveryCorner) {
  const std::vector<std::int64_t> lengths = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 200};
  const std::vector<std::int64_t> sizes = {1, 3, 16, 24, 60, 64, 100, 128};
  const std::vector<std::int64_t> windows = {0, 1, 7, 64, 1000};
  const std::vector<std::int64_t> offsets = {0, 5, -3, 64};
  const std::vector<std::pair<std::int64_t, std::int64_t>> heads = {{1, 1}, {4, 2}, {3, 1}};
  Random random(1);
  std::size_t round = 0;
  for (std::int64_t queries : lengths) {
    for (int repeat = 0; repeat < 10; ++repeat, ++round) {
      Shape s;
      s.batch = round % 4 == 3 ? 2 : 1;
      s.queries = queries;
      s.keys = repeat % 3 == 2 ? lengths[(round * 7 + 3) % lengths.size()] : queries;
      s.query_heads = heads[round % heads.size()].first;
      s.key_heads = heads[round % heads.size()].second;
      s.key_size = sizes[(round * 3) % sizes.size()];
      s.value_size = sizes[(round * 5 + round / 8) % sizes.size()];
      Arguments a = arguments(random, s);
      a.window = windows[round % windows.size()];
      a.causal = round % 7 != 6 && round % 7 != 2;
      a.q_offset = offsets[(round / 3) % offsets.size()];
      const Array<double> d_o = upstream(random, a);
      SCOPED_TRACE("TQ " + std::to_string(s.queries) + " TK " + std::to_string(s.keys) + " HQ " +
                   std::to_string(s.query_heads) + " HK " + std::to_string(s.key_heads) + " K " +
                   std::to_string(s.key_size) + " V " + std::to_string(s.value_size) + " window " +
                   std::to_string(a.window) + " causal " + std::to_string(a.causal) + " offset " +
                   std::to_string(a.q_offset));
      expect_right(a, d_o, every_isa(1, static_cast<std::int64_t>(round % 2) * 5));
    }
  }
}

TEST(SoftmaxAttention, AgreesWithTheReferenceAtLength) {
  Random random(2);
  // From 1,024 keys on a head has several tasks, whose parts of dq are added up.
  for (const auto& [tokens, key_size, window] :
       {std::tuple<std::int64_t, std::int64_t, std::int64_t>{1000, 64, 0},
        {1100, 16, 0},
        {1600, 8, 700}}) {
    Arguments a = arguments(random, {1, tokens, tokens, 2, 1, key_size, 20});
    a.window = window;
    const Array<double> d_o = upstream(random, a);
    SCOPED_TRACE("T " + std::to_string(tokens));
    expect_right(a, d_o, every_isa(2, 0));
  }
}

TEST(SoftmaxAttention, KeepsItsDigitsOnNarrowPositiveData) {
  Random random(3);
  Arguments a = arguments(random, {1, 3000, 3000, 1, 1, 8, 4});
  a.q = random_array<double>(random, a.q.shape, 0.33, 0.34);
  a.k = random_array<double>(random, a.k.shape, 0.33, 0.34);
  a.v = random_array<double>(random, a.v.shape, 0.33, 0.34);
  const auto truth = reference::softmax_attention(a);
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    Comparison comparison;
    comparison.output("o", run(a, truth.o, {isa}).o, truth.o);
    comparison.expect_within(kFloat32);
  }
}

TEST(SoftmaxAttention, TakesSegmentsOfQueriesAndKeys) {
  Random random(4);
  // Packed, with lengths of 0 and 1.
  Arguments a = arguments(random, {1, 150, 150, 4, 2, 16, 12});
  a.query_segments = a.key_segments =
      Segments::packed(std::vector<std::int64_t>{0, 0, 17, 18, 18, 120, 150});
  Array<double> d_o = upstream(random, a);
  expect_right(a, d_o, every_isa(2, 3));

  // Padded, NaN in the padding; queries and keys of different lengths.
  a = arguments(random, {3, 40, 70, 2, 2, 16, 12});
  a.query_segments = Segments::padded(std::vector<std::int64_t>{40, 0, 13}, 40, true);
  a.key_segments = Segments::padded(std::vector<std::int64_t>{70, 5, 1}, 70);
  a.causal = false;
  d_o = upstream(random, a);
  const auto spoil = [](Array<double>& x, const Segments& segments) {
    std::vector<bool> inside(static_cast<std::size_t>(x.extent(0) * x.extent(1)), false);
    for (const Segment& s : segments.list) {
      for (std::int64_t t = 0; t < s.length; ++t) {
        inside[static_cast<std::size_t>(s.batch * x.extent(1) + s.begin + t)] = true;
      }
    }
    const std::size_t row = static_cast<std::size_t>(x.extent(2) * x.extent(3));
    for (std::size_t i = 0; i < x.data.size(); ++i) {
      if (!inside[i / row]) x.data[i] = kNaN;
    }
  };
  spoil(a.q, a.query_segments);
  spoil(d_o, a.query_segments);
  spoil(a.k, a.key_segments);
  spoil(a.v, a.key_segments);
  expect_right(a, d_o, every_isa(2, 3));
}

TEST(SoftmaxAttention, GivesTheSameBitsForAnyThreadsStridesAndCompany) {
  Random random(5);
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    for (std::int64_t tokens : {130, 1100}) {
      const Arguments both = arguments(random, {2, tokens, tokens, 2, 1, 24, 16});
      const Array<double> d_o = upstream(random, both);
      const Results batch = run(both, d_o, {isa, 1});
      for (int threads : {2, 3, 5})
        EXPECT_TRUE(same_bits(batch, run(both, d_o, {isa, threads, threads})));

      // The second row alone, and packed behind the first.
      const auto rows = [](const Array<double>& x, std::int64_t begin, std::int64_t count,
                           std::vector<std::int64_t> shape) {
        const auto n = x.data.size() / static_cast<std::size_t>(x.extent(0));
        Array<double> part(std::move(shape));
        std::copy_n(x.data.begin() + static_cast<std::ptrdiff_t>(n) * begin,
                    n * static_cast<std::size_t>(count), part.data.begin());
        return part;
      };
      const auto cut = [&](std::int64_t begin, std::int64_t count, std::int64_t length) {
        Arguments a = both;
        a.q = rows(both.q, begin, count, {1, length, 2, 24});
        a.k = rows(both.k, begin, count, {1, length, 1, 24});
        a.v = rows(both.v, begin, count, {1, length, 1, 16});
        return a;
      };
      Arguments alone = cut(1, 1, tokens);
      alone.query_segments = alone.key_segments = Segments::whole(1, tokens);
      Arguments packed = cut(0, 2, 2 * tokens);
      packed.query_segments = packed.key_segments =
          Segments::packed(std::vector<std::int64_t>{0, tokens, 2 * tokens});
      const Results a = run(alone, rows(d_o, 1, 1, {1, tokens, 2, 16}), {isa, 2});
      const Results p = run(packed, rows(d_o, 0, 2, {1, 2 * tokens, 2, 16}), {isa, 2});
      const auto tail = [](const auto& all, const auto& one) {
        return std::memcmp(all.data.data() + (all.data.size() - one.data.size()), one.data.data(),
                           one.data.size() * sizeof(one.data[0])) == 0;
      };
      for (const Results* r : {&batch, &p}) {
        EXPECT_TRUE(tail(r->o, a.o) && tail(r->lse, a.lse) && tail(r->dq, a.dq) &&
                    tail(r->dk, a.dk) && tail(r->dv, a.dv));
      }
    }
  }
}

// Keys and values behind a position are replaced by other numbers, infinities and NaN: nothing
// before it changes, not by a bit. Likewise queries and upstream gradients before a key.
TEST(SoftmaxAttention, NeverLetsInWhatIsNotSeen) {
  Random random(6);
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    for (std::int64_t window : {0, 20}) {
      for (std::int64_t at : {1, 15, 16, 50, 64, 99}) {
        const std::int64_t tokens = 150, size = 12;
        const Arguments a = arguments(random, {1, tokens, tokens, 1, 1, size, size});
        Arguments b = a;
        b.window = window;
        Array<double> d_o = upstream(random, a);
        const Results before = run(b, d_o, {isa});
        for (double value : {5.0, static_cast<double>(kInf), static_cast<double>(kNaN)}) {
          Arguments c = b;
          for (std::int64_t i = at * size; i < tokens * size; ++i) {
            c.k.data[static_cast<std::size_t>(i)] = c.v.data[static_cast<std::size_t>(i)] = value;
          }
          const Results after = run(c, d_o, {isa});
          const auto n = static_cast<std::size_t>(at * size) * sizeof(float);
          EXPECT_EQ(std::memcmp(before.o.data.data(), after.o.data.data(), n), 0);
          EXPECT_EQ(std::memcmp(before.dq.data.data(), after.dq.data.data(), n), 0);
          EXPECT_EQ(std::memcmp(before.lse.data.data(), after.lse.data.data(),
                                static_cast<std::size_t>(at) * sizeof(double)),
                    0);

          // Queries before `at` see no key from it on.
          Arguments e = b;
          Array<double> d_e = d_o;
          for (std::int64_t i = 0; i < at * size; ++i) {
            e.q.data[static_cast<std::size_t>(i)] = d_e.data[static_cast<std::size_t>(i)] = value;
          }
          const Results later = run(e, d_e, {isa});
          const auto rest = static_cast<std::size_t>((tokens - at) * size) * sizeof(float);
          const auto from = static_cast<std::size_t>(at * size);
          EXPECT_EQ(std::memcmp(&before.dk.data[from], &later.dk.data[from], rest), 0);
          EXPECT_EQ(std::memcmp(&before.dv.data[from], &later.dv.data[from], rest), 0);
          if (window > 0 && at + window <= tokens) {
            // Keys that the window has left behind.
            Arguments w = b;
            for (std::int64_t i = 0; i < at * size; ++i) {
              w.k.data[static_cast<std::size_t>(i)] = w.v.data[static_cast<std::size_t>(i)] = value;
            }
            const Results far = run(w, d_o, {isa});
            const auto first = static_cast<std::size_t>((at + window - 1) * size);
            const auto left = (static_cast<std::size_t>(tokens * size) - first) * sizeof(float);
            EXPECT_EQ(std::memcmp(&before.o.data[first], &far.o.data[first], left), 0);
            EXPECT_EQ(std::memcmp(&before.dq.data[first], &far.dq.data[first], left), 0);
          }
        }
      }
    }
  }
}

// Any part of the queries, asked alone at its offset, gets the bits that it gets among the others.
TEST(SoftmaxAttention, GivesAQueryTheSameBitsWhoeverStandsBesideIt) {
  Random random(7);
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (std::int64_t window : {0, 33}) {
      const std::int64_t tokens = 300;
      Arguments a = arguments(random, {1, tokens, tokens, 4, 2, 20, 28});
      a.window = window;
      const Results all = run(a, upstream(random, a), {isa});
      Strided q(a.q), k(a.k), v(a.v);
      for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 1},
                                       {17, 18},
                                       {63, 129},
                                       {140, 300},
                                       {299, 300}}) {
        Strided o({1, end - begin, 4, 28}, 0);
        SoftmaxAttentionOptions options = options_of(a);
        options.q_offset = begin;
        softmax_attention(context, options, {q.tokens(begin, end), k.tensor(), v.tensor()},
                          {o.tensor(), {}});
        EXPECT_EQ(std::memcmp(o.array().data.data(),
                              &all.o.data[static_cast<std::size_t>(begin * 4 * 28)],
                              o.array().data.size() * sizeof(float)),
                  0)
            << begin << " to " << end;
      }
    }
  }
}

TEST(SoftmaxAttention, DefinesInfinitiesAndNaN) {
  const auto attend = [](std::vector<float> scores, std::vector<float> values, Isa isa) {
    const auto n = static_cast<std::int64_t>(scores.size());
    Context context({.threads = 1, .isa = isa});
    std::vector<float> q = {1}, o = {7};
    std::vector<double> lse = {7};
    SoftmaxAttentionOptions options;
    options.scale = 1;
    options.causal = false;
    softmax_attention(
        context, options,
        {ConstTensor(q.data(), DType::kF32, {1, 1, 1, 1}),
         ConstTensor(scores.data(), DType::kF32, {1, n, 1, 1}),
         ConstTensor(values.data(), DType::kF32, {1, n, 1, 1})},
        {Tensor(o.data(), DType::kF32, {1, 1, 1, 1}), Tensor(lse.data(), DType::kF64, {1, 1, 1})});
    return std::pair<float, double>{o[0], lse[0]};
  };
  using Pair = std::pair<float, double>;
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    EXPECT_EQ(attend({}, {}, isa), Pair(0, -kInf));
    EXPECT_EQ(attend({-kInf, -kInf}, {1, 2}, isa), Pair(0, -kInf));
    EXPECT_EQ(attend({3}, {5}, isa).first, 5);
    EXPECT_EQ(attend({-kInf, 3}, {1, 5}, isa).first, 5);
    EXPECT_EQ(attend({-2e38f, 2e38f}, {1, 5}, isa).first, 5);
    EXPECT_TRUE(std::isnan(attend({kNaN, 3}, {1, 5}, isa).first));
    EXPECT_TRUE(std::isnan(attend({3, kNaN}, {1, 5}, isa).first));
    EXPECT_TRUE(std::isnan(attend({kInf, 3}, {1, 5}, isa).first));
    EXPECT_TRUE(std::isnan(attend({1, 3}, {1, kNaN}, isa).first));
    // The published toy: scores 1, 2, 3, 0 and values 10, 20, 30, 40.
    EXPECT_NEAR(attend({1, 2, 3, 0}, {10, 20, 30, 40}, isa).first, 26.2089, 1e-4);
    EXPECT_NEAR(attend({1, 2, 3, 0}, {10, 20, 30, 40}, isa).second, 3 + std::log(1.5530), 1e-4);
  }
}

// The recurrence of the published toy, in blocks of two: what the kernels do in blocks of 64.
TEST(SoftmaxAttention, OnlineRecurrenceOfThePublishedToy) {
  const double scores[] = {1, 2, 3, 0}, values[] = {10, 20, 30, 40};
  double m = -kInf, l = 0, a = 0;
  const auto block = [&](int begin) {
    const double next = std::max({m, scores[begin], scores[begin + 1]});
    const double alpha = std::exp(m - next);
    l *= alpha;
    a *= alpha;
    for (int j = begin; j < begin + 2; ++j) {
      l += std::exp(scores[j] - next);
      a += std::exp(scores[j] - next) * values[j];
    }
    m = next;
  };
  block(0);
  EXPECT_EQ(m, 2);
  EXPECT_NEAR(l, 1.3679, 5e-5);
  EXPECT_NEAR(a, 23.6788, 5e-5);
  block(2);
  EXPECT_EQ(m, 3);
  EXPECT_NEAR(l, 1.5530, 5e-5);
  EXPECT_NEAR(a, 40.7024, 5e-5);
  EXPECT_NEAR(a / l, 26.2089, 5e-5);
}

// softmax(Q K^T) V is not Q (K^T V): the softmax does not associate.
TEST(SoftmaxAttention, IsNotLinear) {
  Random random(10);
  Arguments a = arguments(random, {1, 4, 4, 1, 1, 3, 3});
  a.causal = false;
  const Results got = run(a, upstream(random, a));
  double difference = 0;
  for (std::int64_t i = 0; i < 4; ++i) {
    for (std::int64_t c = 0; c < 3; ++c) {
      double linear = 0;
      for (std::int64_t j = 0; j < 4; ++j) {
        double score = 0;
        for (std::int64_t f = 0; f < 3; ++f) score += a.q(0, i, 0, f) * a.k(0, j, 0, f);
        linear += a.scale * score * a.v(0, j, 0, c);
      }
      difference = std::max(difference, std::abs(linear - static_cast<double>(got.o(0, i, 0, c))));
    }
  }
  EXPECT_GT(difference, 0.1);
}

TEST(SoftmaxAttention, ComputesOnlyTheGradientsAskedFor) {
  Random random(11);
  const Arguments a = arguments(random, {1, 70, 70, 2, 1, 16, 8});
  const Array<double> d_o = upstream(random, a);
  const Results all = run(a, d_o);
  Context context({.threads = 1, .isa = supported_isas().front(), .poison_scratch = true});
  Strided q(a.q), k(a.k), v(a.v), g(d_o);
  Strided o(d_o.shape, 0);
  StridedOf<double> lse({1, 70, 2}, 0);
  const SoftmaxAttentionInputs inputs{q.tensor(), k.tensor(), v.tensor()};
  softmax_attention(context, options_of(a), inputs, {o.tensor(), lse.tensor()});
  for (int which = 0; which < 3; ++which) {
    Strided d(which == 0 ? a.q.shape : which == 1 ? a.k.shape : a.v.shape, 0);
    softmax_attention_backward(context, options_of(a), inputs, o.tensor(), lse.tensor(), g.tensor(),
                               which == 0 ? d.tensor() : Tensor(),
                               which == 1 ? d.tensor() : Tensor(),
                               which == 2 ? d.tensor() : Tensor());
    EXPECT_TRUE(same_bits(d.array(), which == 0 ? all.dq : which == 1 ? all.dk : all.dv));
  }
}

TEST(SoftmaxAttention, NamesWhatDoesNotFit) {
  Context context({.threads = 1});
  std::vector<float> memory(4096);
  const auto tensor = [&](std::initializer_list<std::int64_t> shape) {
    return Tensor(memory.data(), DType::kF32, shape);
  };
  const auto message = [&](const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o,
                           const SoftmaxAttentionOptions& options = {}) -> std::string {
    try {
      softmax_attention(context, options, {q, k, v}, {o, {}});
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      return e.what();
    }
    return "";
  };
  const Tensor q = tensor({1, 3, 4, 8}), k = tensor({1, 5, 2, 8}), v = tensor({1, 5, 2, 6}),
               o = tensor({1, 3, 4, 6});
  EXPECT_EQ(message(q, k, v, o), "");
  EXPECT_NE(message(q, tensor({1, 5, 2, 7}), v, o).find("k is [1, 5, 2, 7]"), std::string::npos);
  EXPECT_NE(message(q, k, tensor({1, 4, 2, 6}), o).find("v is [1, 4, 2, 6]"), std::string::npos);
  EXPECT_NE(message(q, k, v, tensor({1, 3, 4, 8})).find("o is [1, 3, 4, 8]"), std::string::npos);
  EXPECT_NE(message(q, tensor({1, 5, 3, 8}), tensor({1, 5, 3, 6}), o).find("multiple"),
            std::string::npos);
  EXPECT_NE(message({}, k, v, o).find("q is missing"), std::string::npos);
  EXPECT_NE(message(Tensor(memory.data(), DType::kF64, {1, 3, 4, 8}), k, v, o).find("F64"),
            std::string::npos);
  Tensor wide = q;
  wide.stride[3] = 2;
  EXPECT_NE(message(wide, k, v, o).find("last stride"), std::string::npos);
  EXPECT_NE(message(q, k, v, o, {.window = -1}).find("window"), std::string::npos);
  EXPECT_NE(message(q, k, v, o, {.scale = kInf}).find("scale"), std::string::npos);
  for (const std::int64_t offset : {INT64_MIN, -INT64_MAX, INT64_MAX}) {
    EXPECT_NE(message(q, k, v, o, {.q_offset = offset}).find("q_offset"), std::string::npos);
  }
}

}  // namespace
}  // namespace ouzel::test::softmax
