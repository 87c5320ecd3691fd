// The pool and the context: every task runs once, on more than one thread, and faults come back.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/context.h"
#include "ouzel/error.h"
#include "src/base/context_impl.h"

namespace ouzel {
namespace {

TEST(Context, RunsEveryTaskOnceForAnyThreadCount) {
  for (int threads : {1, 2, 3, 7}) {
    Context context({.threads = threads});
    for (int round = 0; round < 200; ++round) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(round));
      context.impl().run(round, [&](std::int64_t task, Scratch&) {
        seen[static_cast<std::size_t>(task)].fetch_add(1);
      });
      for (auto& count : seen) ASSERT_EQ(count.load(), 1);
    }
  }
}

TEST(Context, UsesAllItsThreads) {
  Context context({.threads = 3});
  std::mutex mutex;
  std::set<std::thread::id> ids;
  std::atomic<int> arrived{0};
  context.impl().run(3, [&](std::int64_t, Scratch&) {
    arrived.fetch_add(1);
    while (arrived.load() < 3) std::this_thread::yield();
    std::lock_guard lock(mutex);
    ids.insert(std::this_thread::get_id());
  });
  EXPECT_EQ(ids.size(), 3u);
}

TEST(Context, RethrowsAndGoesOn) {
  for (int threads : {1, 4}) {
    Context context({.threads = threads});
    EXPECT_THROW(context.impl().run(100,
                                    [](std::int64_t task, Scratch&) {
                                      if (task == 37) {
                                        throw Error(ErrorKind::kInvalidArgument, "task 37");
                                      }
                                    }),
                 Error);
    std::atomic<int> done{0};
    context.impl().run(10, [&](std::int64_t, Scratch&) { ++done; });
    EXPECT_EQ(done.load(), 10);
  }
}

TEST(Context, CancelsBetweenTasks) {
  int calls = 0;
  ContextOptions options;
  options.threads = 1;
  options.cancelled = [&] { return ++calls > 5; };
  Context context(options);
  int done = 0;
  try {
    context.impl().run(100, [&](std::int64_t, Scratch&) { ++done; });
    FAIL() << "not cancelled";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCancelled);
  }
  EXPECT_EQ(done, 5);
}

TEST(Context, ScratchIsPoisonedAlignedAndBounded) {
  Context context({.threads = 2, .poison_scratch = true});
  context.impl().reserve(4096);
  context.impl().run(8, [](std::int64_t, Scratch& scratch) {
    float* a = scratch.take<float>(3);
    float* b = scratch.take<float>(5);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(a) % 64, 0u);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(b) % 64, 0u);
    EXPECT_TRUE(a[0] != a[0]);
    a[0] = b[4] = 1;
    EXPECT_THROW(scratch.take<float>(4096), Error);
  });
}

TEST(Context, RestoresTheCallersFloatingPointMode) {
  Context context({.threads = 2});
  volatile float tiny = 1e-38f;
  context.impl().run(4, [&](std::int64_t, Scratch&) { EXPECT_EQ(tiny * 0.01f, 0.0f); });
  EXPECT_NE(tiny * 0.01f, 0.0f);
}

TEST(Isa, PortableIsAlwaysThereAndUnknownNamesAreRefused) {
  EXPECT_EQ(supported_isas().back(), Isa::kPortable);
  for (Isa isa : supported_isas()) EXPECT_EQ(isa_from_name(name_of(isa)), isa);
  EXPECT_THROW(isa_from_name("avx3"), Error);
}

}  // namespace
}  // namespace ouzel
