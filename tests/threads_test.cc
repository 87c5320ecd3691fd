// The pool and the context: every task runs once, on more than one thread, and faults come back.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <string>
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

// Also where the other thread has taken every task before the caller comes to one.
TEST(Context, AsksInEveryCall) {
  int asked = 0;
  Context context({.threads = 2, .cancelled = [&] {
                     ++asked;
                     return false;
                   }});
  for (int call = 1; call <= 50000; ++call) {
    const int before = asked;
    context.impl().run(2, [](std::int64_t, Scratch&) {});
    ASSERT_GT(asked, before) << "call " << call;
  }
}

// Tasks that only end by being cancelled.
void wait_for_cancel() {
  while (true) {
    check_cancelled();
    std::this_thread::yield();
  }
}

void expect_cancelled(Context& context, std::int64_t tasks, void (*body)()) {
  try {
    context.impl().run(tasks, [&](std::int64_t, Scratch&) { body(); });
    FAIL() << "not cancelled";
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::kCancelled);
    EXPECT_STREQ(e.what(), "cancelled by the caller");
  }
}

TEST(Context, CancelsWithinTasksOfAllThreads) {
  for (int threads : {1, 2, 4}) {
    const auto caller = std::this_thread::get_id();
    std::atomic<bool> cancel{false};
    int asked = 0;
    Context context({.threads = threads, .cancelled = [&] {
                       EXPECT_EQ(std::this_thread::get_id(), caller);
                       ++asked;
                       return cancel.load();
                     }});
    for (int round = 0; round < 3; ++round) {
      cancel = false;
      asked = 0;
      std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        cancel = true;
      });
      expect_cancelled(context, 2 * threads, wait_for_cancel);
      later.join();
      EXPECT_GT(asked, 1);
    }
    cancel = false;
    std::atomic<int> done{0};
    context.impl().run(10, [&](std::int64_t, Scratch&) { ++done; });
    EXPECT_EQ(done.load(), 10);
  }
}

TEST(Context, AsksWhileItWaitsForTheOtherThreads) {
  static std::atomic<std::thread::id> caller;
  caller = std::this_thread::get_id();
  static std::atomic<bool> taken;
  taken = false;
  Context context({.threads = 2, .cancelled = [] { return taken.load(); }});
  // The caller's tasks end; the other thread's does not.
  expect_cancelled(context, 2, [] {
    if (std::this_thread::get_id() != caller.load()) {
      taken = true;
      wait_for_cancel();
    }
    while (!taken.load()) std::this_thread::yield();
  });
}

TEST(Context, AFailedTaskStopsTheOthers) {
  Context context({.threads = 3});
  try {
    context.impl().run(3, [](std::int64_t task, Scratch&) {
      if (task == 1) throw Error(ErrorKind::kIo, "task 1");
      wait_for_cancel();
    });
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "task 1");
  }
}

TEST(Context, CallbacksMayThrowAndRunOtherContexts) {
  Context other({.threads = 1});
  int asked = 0;
  Context context({.threads = 1, .cancelled = [&] {
                     other.impl().run(1, [](std::int64_t, Scratch&) { check_cancelled(); });
                     if (++asked == 3) throw Error(ErrorKind::kIo, "the callback's own");
                     return false;
                   }});
  try {
    context.impl().run(1, [](std::int64_t, Scratch&) { wait_for_cancel(); });
    FAIL() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "the callback's own");
  }
  check_cancelled();  // outside of tasks: nothing
}

TEST(Context, CallbacksMayNotRunTheirOwnContext) {
  Context* self = nullptr;
  const auto call = [&] {
    self->impl().run(1, [](std::int64_t, Scratch&) {});
    return false;
  };
  Context context({.threads = 2, .cancelled = call});
  self = &context;
  for (int round = 0; round < 2; ++round) {
    try {
      context.impl().run(4, [](std::int64_t, Scratch&) {});
      FAIL() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(e.what()).find("in the middle of a call"), std::string::npos);
    }
  }
  EXPECT_THROW(context.impl().run(1, [&](std::int64_t, Scratch&) { self->impl().reserve(64); }),
               Error);
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
