// A pool of static tasks: run(n, body) calls body(0) ... body(n-1) once each, on the calling thread
// and the pool's own. Workers spin briefly after a run and then sleep.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace ouzel {

// Sets the floating-point control word for kernels (round to nearest, denormals flushed to zero and
// read as zero) and restores the caller's on destruction.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned saved_;
};

// For loops that may go on for long: ends the task that calls it, by an exception, if its run was
// cancelled or another of its tasks has failed. Does nothing outside of tasks. Some 3 nanoseconds.
void check_cancelled();
// The same for short steps: looks at every 64th.
inline void check_cancelled_at(std::int64_t step) {
  if (step % 64 == 0) check_cancelled();
}

class ThreadPool {
 public:
  // A reference to a callable (std::int64_t task, int worker); costs no allocation.
  class TaskRef {
   public:
    template <class F>
    explicit TaskRef(F& f)
        : object_(&f), call_([](void* o, std::int64_t task, int worker) {
            (*static_cast<F*>(o))(task, worker);
          }) {}
    void operator()(std::int64_t task, int worker) const { call_(object_, task, worker); }

   private:
    void* object_;
    void (*call_)(void*, std::int64_t, int);
  };

  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Throws Error(kInvalidArgument) while tasks run: a callback of theirs, or another thread, has
  // called.
  void check_idle() const;

  // Worker 0 is the calling thread. The first exception of a task is rethrown after all have
  // stopped. `cancelled` is asked on the calling thread: before and after each of its tasks, at
  // least once, and every millisecond or so by check_cancelled; true ends the run with
  // Error(kCancelled).
  void run(std::int64_t tasks, const TaskRef& body,
           const std::function<bool()>* cancelled = nullptr);

 private:
  friend void check_cancelled();
  class Watch;
  void run_all();
  void work(int worker);
  bool enter();
  bool all_left() const { return inside_.load(std::memory_order_acquire) == kClosed; }
  void take_tasks(int worker);
  void ask() const;
  void wait_for_others();
  void fail(std::exception_ptr error);

  // The current run; written by the caller before `round_` is raised, read by workers after.
  const TaskRef* body_ = nullptr;
  const std::function<bool()>* cancelled_ = nullptr;
  std::int64_t tasks_ = 0;
  alignas(64) std::atomic<std::int64_t> next_{0};
  alignas(64) std::atomic<std::uint32_t> round_{0};
  // How many workers are in the run, and whether no other may come.
  static constexpr int kClosed = 1 << 30;
  alignas(64) std::atomic<int> inside_{kClosed};
  std::atomic<bool> stop_{false};
  std::atomic<bool> failed_{false};
  std::atomic<bool> running_{false};
  std::mutex mutex_;  // of error_; whoever waits for all to leave holds it
  std::condition_variable all_done_;
  std::exception_ptr error_;
  std::vector<std::jthread> workers_;
};

}  // namespace ouzel
