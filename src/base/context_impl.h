// What a Context holds: the thread pool, scratch per worker, and the callbacks. Internal.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "ouzel/context.h"
#include "ouzel/tensor.h"
#include "src/base/threads.h"

namespace ouzel {

// Memory of one worker, handed out front to back within one task and reset before the next.
class Scratch {
 public:
  // `count` elements aligned to 64 bytes. The operator has reserved enough
  // (Context::Impl::reserve).
  template <class T>
  T* take(std::int64_t count) {
    return static_cast<T*>(take_bytes(static_cast<std::size_t>(count) * sizeof(T)));
  }
  // What was taken since `mark` is handed out again.
  std::size_t mark() const { return used_; }
  void rewind(std::size_t mark) { used_ = mark; }
  // What `take` consumes for `bytes`: for sizing a reservation.
  static std::size_t rounded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

 private:
  friend class Context::Impl;
  void* take_bytes(std::size_t bytes);
  Buffer memory_;
  std::size_t used_ = 0;
};

class Context::Impl {
 public:
  explicit Impl(ContextOptions options);

  const ContextOptions& options() const { return options_; }
  ThreadPool& pool() { return pool_; }
  // Whether heads' rows and states outgrow the second-level cache (caches.h). Tests set what other
  // machines have.
  bool small_second_level_cache() const { return small_second_level_cache_; }
  void set_small_second_level_cache(bool small) { small_second_level_cache_ = small; }
  // Makes sure that every worker has `bytes` of scratch; allocates only when it has to grow.
  void reserve(std::size_t bytes_per_worker);
  // `count` elements that all tasks of a call share (packed operands, partial sums), aligned to 64
  // bytes. One piece per operator call: the next call of `shared` takes the same memory again.
  template <class T>
  T* shared(std::int64_t count) {
    return static_cast<T*>(shared_bytes(static_cast<std::size_t>(count) * sizeof(T)));
  }

  // Runs body(task, scratch) for task in [0, tasks), on all threads, in no promised order: tasks
  // must write disjoint memory and be cut by shape, never by thread count. Denormals are flushed
  // while it runs (MXCSR is restored). Checks `cancelled` between tasks.
  template <class Body>
  void run(std::int64_t tasks, Body&& body) {
    auto call = [this, &body](std::int64_t task, int worker) { body(task, begin_task(worker)); };
    pool_.run(tasks, ThreadPool::TaskRef(call), options_.cancelled ? &options_.cancelled : nullptr);
  }
  std::size_t scratch_bytes() const;

 private:
  Scratch& begin_task(int worker);
  void* shared_bytes(std::size_t bytes);

  ContextOptions options_;
  ThreadPool pool_;
  bool small_second_level_cache_;
  std::vector<Scratch> scratch_;
  Buffer shared_;
};

}  // namespace ouzel
