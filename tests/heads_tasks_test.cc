// How heads go together into tasks: every head and column in one of them, as many as the
// second-level cache says and fewer where threads would be idle.
#include "src/ops/heads_scan.h"

#include <map>
#include <utility>

#include <gtest/gtest.h>

#include "ouzel/segments.h"

namespace ouzel {
namespace {

using Int = std::int64_t;

struct Sizes {
  Int batch = 1, tokens = 1024, heads = 16, keys = 64, values = 64;
};

HeadsTasks tasks_of(const Sizes& s, bool small_cache, int threads, bool side_by_side = true) {
  RecurrenceShape shape;
  shape.batch = shape.sequences = s.batch;
  shape.tokens = s.tokens;
  Context context({.threads = threads});
  context.impl().set_small_second_level_cache(small_cache);
  return HeadsTasks(shape, s.heads, s.keys, s.values, side_by_side, true, context);
}

TEST(HeadsTasks, TheCacheSaysHowManyHeadsGoTogether) {
  // A large one holds 8 of 64 keys and values, 4 of 128; beside a small one a run of 4 KiB counts.
  EXPECT_EQ(tasks_of({}, false, 1).most_heads(), 8);
  EXPECT_EQ(tasks_of({}, true, 1).most_heads(), 16);
  EXPECT_EQ(tasks_of({.keys = 128, .values = 128}, false, 1).most_heads(), 4);
  EXPECT_EQ(tasks_of({.keys = 128, .values = 128}, true, 1).most_heads(), 8);
  // Heads that lie apart go alone.
  EXPECT_EQ(tasks_of({}, true, 1, false).most_heads(), 1);
}

TEST(HeadsTasks, EveryThreadHasItsShare) {
  for (const bool small : {false, true}) {
    for (const int threads : {1, 2, 3, 8, 16}) {
      const HeadsTasks tasks = tasks_of({}, small, threads);
      EXPECT_TRUE(tasks.count() % threads == 0 || tasks.count() >= 8 * threads)
          << tasks.count() << " tasks of " << threads << " threads";
    }
  }
}

TEST(HeadsTasks, HoldEveryHeadAndColumnOnce) {
  const Sizes all[] = {{}, {.batch = 3, .heads = 7}, {.heads = 1, .values = 256}, {.heads = 5}};
  for (const Sizes& s : all) {
    for (const bool small : {false, true}) {
      for (const int threads : {1, 2, 5}) {
        const HeadsTasks tasks = tasks_of(s, small, threads);
        std::map<std::pair<Int, Int>, Int> columns;  // of a sequence's head
        for (Int i = 0; i < tasks.count(); ++i) {
          const HeadsTask t = tasks[i];
          EXPECT_LE(t.heads, tasks.most_heads());
          EXPECT_LE(t.columns, tasks.width());
          for (Int h = 0; h < t.heads; ++h) {
            Int& next = columns[{t.n, t.first + h}];
            EXPECT_EQ(t.column, next);
            next += t.columns;
          }
        }
        EXPECT_EQ(columns.size(), static_cast<std::size_t>(s.batch * s.heads));
        for (const auto& [head, count] : columns) EXPECT_EQ(count, s.values) << head.second;
      }
    }
  }
}

}  // namespace
}  // namespace ouzel
