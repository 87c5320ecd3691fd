// A Context as Python holds it: calls run without the GIL and one at a time, Ctrl-C ends them and
// their wait for their turn, and a process that was forked gets threads of its own.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "ouzel/context.h"
#include "ouzel/error.h"
#include "ouzel/model.h"

namespace ouzel::python {

namespace nb = nanobind;

// Lets other threads of Python run while it lives. A thread of Python that would get the GIL back
// when the interpreter is at its end stays here for good: Python would unwind its stack through
// C++, which ends the process.
class WithoutGil {
 public:
  WithoutGil();
  ~WithoutGil() noexcept(false);
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

class PyContext {
 public:
  PyContext(int threads, const std::optional<std::string>& isa);
  ~PyContext();
  PyContext(const PyContext&) = delete;
  PyContext& operator=(const PyContext&) = delete;

  int threads() const { return live_->context.threads(); }
  std::string isa() const { return name_of(live_->context.isa()); }

  // body(context, workspace), without the GIL.
  template <class Body>
  void run(Body&& body) {
    Live& live = this->live();
    try {
      const WithoutGil without_gil;
      const Turn turn(live);
      body(live.context, live.workspace);
    } catch (const Error&) {
      if (PyErr_Occurred() != nullptr) throw nb::python_error();  // a signal's exception
      throw;
    }
  }
  // Grows with every fork of the process: what referred to the context before refers to nothing.
  static std::uint64_t generation();
  Context& context() { return live().context; }

 private:
  struct Live {
    explicit Live(const ContextOptions& options)
        : context(options), generation(PyContext::generation()) {}
    std::recursive_timed_mutex mutex;
    bool busy = false;
    Context context;
    Workspace workspace;
    std::uint64_t generation;
  };
  // The calls of other threads wait for their turn; one from inside a call (a signal handler's)
  // never gets it.
  class Turn {
   public:
    explicit Turn(Live& live);
    ~Turn() { live_.busy = false; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

   private:
    std::unique_lock<std::recursive_timed_mutex> lock_;
    Live& live_;
  };
  Live& live();

  ContextOptions options_;
  std::unique_ptr<Live> live_;
};

// `given`, or for None the one that all calls without a context share. Raises TypeError for what is
// no context.
PyContext& context_of(const std::string& call, nb::handle given);

// Raises TypeError for the first of the keywords that a method of `type` does not have, with the
// nearest of those in its signature.
void refuse_keywords(nb::handle type, const char* method, const nb::kwargs& unknown);

void bind_context(nb::module_& module);

}  // namespace ouzel::python
