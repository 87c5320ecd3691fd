// Steps of softmax attention against a cache: they give the forward's bits, allocate nothing, and
// refuse what a cache cannot hold.
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "tests/count_allocations.h"
#include "tests/softmax_case.h"

namespace ouzel::test::softmax {
namespace {

struct Cache {
  std::vector<float> k, v;
  KvCache view(std::int64_t capacity) { return {k.data(), v.data(), capacity, 0}; }
};

// Steps of one token and of many, over ring wrap-around, give the forward's bits.
TEST(SoftmaxStep, GivesTheForwardsBits) {
  Random random(8);
  for (Isa isa : supported_isas()) {
    Context context({.threads = 1, .isa = isa, .poison_scratch = true});
    for (const auto& [window, capacity] : {std::pair<std::int64_t, std::int64_t>{0, 400},
                                           {0, 300},
                                           {1, 1},
                                           {7, 7},
                                           {40, 40},
                                           {64, 64},
                                           {50, 77},
                                           {100, 333}}) {
      for (const auto& [key_size, value_size] :
           {std::pair<std::int64_t, std::int64_t>{16, 16}, {7, 100}, {64, 20}}) {
        SCOPED_TRACE(std::string(name_of(isa)) + " window " + std::to_string(window) +
                     " capacity " + std::to_string(capacity) + " K " + std::to_string(key_size));
        const std::int64_t tokens = 300, n = 2, hq = 4, hk = 2;
        Arguments a = arguments(random, {n, tokens, tokens, hq, hk, key_size, value_size});
        a.window = window;
        const Results all = run(a, upstream(random, a), {isa});
        for (const std::vector<std::int64_t>& cuts :
             {std::vector<std::int64_t>{1}, {64}, {1, 1, 90, 1, 2, 17}, {300}}) {
          Strided q(a.q, 3), k(a.k, 3), v(a.v, 3), o({n, tokens, hq, value_size}, 0);
          std::vector<Cache> memory(static_cast<std::size_t>(n));
          std::vector<KvCache> caches;
          for (Cache& c : memory) {
            c.k.assign(static_cast<std::size_t>(capacity * hk * key_size), kNaN);
            c.v.assign(static_cast<std::size_t>(capacity * hk * value_size), kNaN);
            caches.push_back(c.view(capacity));
          }
          std::size_t turn = 0;
          for (std::int64_t t = 0; t < tokens; ++turn) {
            const std::int64_t end = std::min(tokens, t + cuts[turn % cuts.size()]);
            softmax_attention_step(context, options_of(a), q.tokens(t, end), k.tokens(t, end),
                                   v.tokens(t, end), caches, o.tokens(t, end));
            t = end;
            ASSERT_EQ(caches[0].position, t);
          }
          EXPECT_TRUE(same_bits(o.array(), all.o)) << cuts[0];
        }
      }
    }
  }
}

TEST(SoftmaxStep, AllocatesNothingAndRefusesAFullCache) {
  Random random(9);
  Context context({.threads = 2, .poison_scratch = true});
  Arguments a = arguments(random, {1, 6, 6, 2, 1, 8, 8});
  Strided q(a.q), k(a.k), v(a.v), o({1, 6, 2, 8}, 0);
  Cache memory{std::vector<float>(5 * 8), std::vector<float>(5 * 8)};
  std::vector<KvCache> caches = {memory.view(5)};
  const auto step = [&](std::int64_t t, std::int64_t window) {
    SoftmaxAttentionOptions options = options_of(a);
    options.window = window;
    softmax_attention_step(context, options, q.tokens(t, t + 1), k.tokens(t, t + 1),
                           v.tokens(t, t + 1), caches, o.tokens(t, t + 1));
  };
  step(0, 0);
  const std::int64_t before = allocations.load();
  for (std::int64_t t = 1; t < 5; ++t) step(t, 0);
  EXPECT_EQ(allocations.load(), before);
  const std::vector<float> kept = memory.k;
  EXPECT_THROW(step(5, 0), Error);
  EXPECT_THROW(step(5, 6), Error);
  EXPECT_EQ(caches[0].position, 5);
  EXPECT_EQ(memory.k, kept);
  step(5, 5);
  EXPECT_EQ(caches[0].position, 6);
  EXPECT_NE(memory.k, kept);
}

}  // namespace
}  // namespace ouzel::test::softmax
