#include "src/base/threads.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <chrono>
#include <utility>

#include "ouzel/error.h"

namespace ouzel {
namespace {

// About 20 microseconds: longer than the gap between two operators of a layer, short enough to
// leave the core to others soon.
constexpr int kSpins = 4000;
// Between two questions whether the run is cancelled, of a thread that computes and one that waits.
constexpr std::chrono::milliseconds kAskEvery(1), kAskWaitingEvery(10);
// Where work between looks at the clock is short, one look is for so many checks.
constexpr int kChecksPerLook = 16;

void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

}  // namespace

// What a thread looks at while it works for a run.
class ThreadPool::Watch {
 public:
  Watch(const ThreadPool& pool, bool asks) : pool_(pool), asks_(asks), outer_(current) {
    current = this;
  }
  ~Watch() { current = outer_; }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  void check() {
    if (pool_.failed_.load(std::memory_order_relaxed)) {
      throw Error(ErrorKind::kCancelled, "another task of the run has failed");
    }
    if (!asks_ || --checks_ > 0) return;
    const auto now = std::chrono::steady_clock::now();
    if (now - asked_ < kAskEvery) {
      checks_ = kChecksPerLook;
      return;
    }
    checks_ = 1;
    asked_ = now;
    pool_.ask();
  }

  static thread_local Watch* current;

 private:
  const ThreadPool& pool_;
  const bool asks_;
  Watch* const outer_;  // of the run in whose callback this one was started
  int checks_ = kChecksPerLook;
  std::chrono::steady_clock::time_point asked_;
};
constinit thread_local ThreadPool::Watch* ThreadPool::Watch::current = nullptr;

void check_cancelled() {
  if (ThreadPool::Watch* watch = ThreadPool::Watch::current) watch->check();
}

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
  check_idle();
  body_ = &body;
  cancelled_ = cancelled;
  tasks_ = tasks;
  running_.store(true, std::memory_order_relaxed);
  run_all();
  running_.store(false, std::memory_order_relaxed);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

void ThreadPool::check_idle() const {
  if (!running_.load(std::memory_order_relaxed)) return;
  throw Error(ErrorKind::kInvalidArgument,
              "the context is in the middle of a call; give calls from callbacks and from other "
              "threads a context of their own");
}

void ThreadPool::run_all() {
  next_.store(0, std::memory_order_relaxed);
  failed_.store(false, std::memory_order_relaxed);
  const bool alone = workers_.empty() || tasks_ == 1;
  if (!alone) {
    inside_.store(0, std::memory_order_release);
    round_.fetch_add(1, std::memory_order_release);
    round_.notify_all();
  }
  {
    FloatMode mode;
    take_tasks(0);
  }
  if (alone) return;
  // A worker that has not come yet finds the door closed: nobody waits for one that sleeps.
  inside_.fetch_or(kClosed, std::memory_order_acq_rel);
  for (int spins = 0; !all_left();) ++spins < kSpins ? relax() : wait_for_others();
}

void ThreadPool::wait_for_others() {
  std::unique_lock lock(mutex_);
  while (!all_done_.wait_for(lock, kAskWaitingEvery, [this] { return all_left(); })) {
    if (cancelled_ == nullptr || error_) continue;
    lock.unlock();
    try {
      ask();
    } catch (...) {
      fail(std::current_exception());
    }
    lock.lock();
  }
}

void ThreadPool::ask() const {
  if ((*cancelled_)()) throw Error(ErrorKind::kCancelled, "cancelled by the caller");
}

void ThreadPool::take_tasks(int worker) {
  const bool asks = worker == 0 && cancelled_ != nullptr;
  const Watch watch(*this, asks);
  while (true) {
    try {
      if (asks) ask();  // also where others take every task
      const std::int64_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= tasks_) return;
      (*body_)(task, worker);
    } catch (...) {
      fail(std::current_exception());
      return;
    }
  }
}

void ThreadPool::fail(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!error_) error_ = std::move(error);
  failed_.store(true, std::memory_order_relaxed);
  next_.store(tasks_, std::memory_order_relaxed);
}

bool ThreadPool::enter() {
  int inside = inside_.load(std::memory_order_relaxed);
  while ((inside & kClosed) == 0) {
    if (inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) return true;
  }
  return false;
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
    seen = round_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if (!enter()) continue;
    take_tasks(worker);
    if (inside_.fetch_sub(1, std::memory_order_acq_rel) == (kClosed | 1)) {
      const std::lock_guard lock(mutex_);
      all_done_.notify_one();
    }
  }
}

}  // namespace ouzel
