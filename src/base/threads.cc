#include "src/base/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <utility>

#include "ouzel/error.h"

namespace ouzel {
namespace {

// About 20 microseconds: longer than the gap between two operators of a layer, short enough to
// leave the core to others soon.
constexpr int kSpins = 4000;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

#if defined(__x86_64__)
FloatMode::FloatMode() : saved_(_mm_getcsr()) {
  // Exceptions masked (0x1f80), flush-to-zero (0x8000), denormals-are-zero (0x0040).
  _mm_setcsr(0x1f80u | 0x8000u | 0x0040u);
}
FloatMode::~FloatMode() { _mm_setcsr(saved_); }
#else
FloatMode::FloatMode() : saved_(0) {}
FloatMode::~FloatMode() = default;
#endif

ThreadPool::ThreadPool(int threads) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  round_.fetch_add(1, std::memory_order_release);
  round_.notify_all();
}

void ThreadPool::run(std::int64_t tasks, const TaskRef& body,
                     const std::function<bool()>* cancelled) {
  if (tasks <= 0) return;
  body_ = &body;
  cancelled_ = cancelled;
  tasks_ = tasks;
  next_.store(0, std::memory_order_relaxed);
  const bool alone = workers_.empty() || tasks == 1;
  if (!alone) {
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  {
    FloatMode mode;
    take_tasks(0);
  }
  if (!alone) {
    for (int spins = 0;;) {
      const int left = busy_.load(std::memory_order_acquire);
      if (left == 0) break;
      if (++spins < kSpins) {
        relax();
      } else {
        busy_.wait(left, std::memory_order_acquire);
      }
    }
  }
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::take_tasks(int worker) {
  while (true) {
    const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
    if (task >= tasks_) return;
    try {
      if (worker == 0 && cancelled_ != nullptr && (*cancelled_)()) {
        throw Error(ErrorKind::kCancelled, "cancelled by the caller");
      }
      (*body_)(task, worker);
    } catch (...) {
      fail(std::current_exception());
      return;
    }
  }
}

void ThreadPool::fail(std::exception_ptr error) {
  std::lock_guard lock(error_mutex_);
  if (!error_) error_ = std::move(error);
  next_.store(tasks_, std::memory_order_relaxed);
}

void ThreadPool::work(int worker) {
  FloatMode mode;
  std::uint32_t seen = 0;
  while (true) {
    for (int spins = 0; round_.load(std::memory_order_acquire) == seen;) {
      if (++spins < kSpins) {
        relax();
      } else {
        round_.wait(seen, std::memory_order_acquire);
      }
    }
    ++seen;
    if (stop_.load(std::memory_order_relaxed)) return;
    take_tasks(worker);
    if (busy_.fetch_sub(1, std::memory_order_acq_rel) == 1) busy_.notify_one();
  }
}

}  // namespace ouzel
