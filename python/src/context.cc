// Contexts of Python.
#include "python/src/context.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <utility>
#include <vector>

namespace ouzel::python {
namespace {

std::atomic<std::uint64_t> forks{0};

// Asks Python for signals, at most every 20 ms: asking takes the GIL.
class SignalCheck {
 public:
  bool operator()() {
    const auto now = Clock::now();
    if (now - last_ < std::chrono::milliseconds(20)) return false;
    last_ = now;
    const nb::gil_scoped_acquire acquire;
    return PyErr_CheckSignals() != 0;
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

}  // namespace

std::uint64_t PyContext::generation() { return forks.load(); }

PyContext::PyContext(int threads, const std::optional<std::string>& isa) {
  options_.threads = threads;
  if (isa) options_.isa = isa_from_name(*isa);
  options_.cancelled = SignalCheck();
  live_ = std::make_unique<Live>(options_);
}

PyContext::~PyContext() {
  // The threads of a process before its fork cannot be joined.
  if (live_->generation != generation()) static_cast<void>(live_.release());
}

PyContext::Live& PyContext::live() {
  if (live_->generation != generation()) {
    static_cast<void>(live_.release());
    live_ = std::make_unique<Live>(options_);
  }
  return *live_;
}

PyContext::Turn::Turn(Live& live) : lock_(live.mutex), live_(live) {
  if (live.busy) {
    throw Error(ErrorKind::kInvalidArgument,
                "the context is in the middle of a call of this very thread (did a signal handler "
                "call?); give the inner call a context of its own");
  }
  live.busy = true;
}

PyContext& context_or_default(PyContext* given) {
  if (given != nullptr) return *given;
  // Never destroyed: threads of Python may outlive static objects.
  static auto* const shared = new PyContext(0, std::nullopt);
  return *shared;
}

void bind_context(nb::module_& module) {
  pthread_atfork(nullptr, nullptr, [] { ++forks; });
  nb::class_<PyContext>(module, "Context",
                        "What a call runs with: threads, instruction set, scratch memory.\n\n"
                        "Calls of one context take turns; contexts of their own let threads of "
                        "Python compute at once.\nCalls without a context share one with all "
                        "processors (OUZEL_THREADS and OUZEL_ISA are heeded).")
      .def(nb::init<int, const std::optional<std::string>&>(), nb::arg("threads") = 0,
           nb::arg("isa") = nb::none(),
           "threads: 0 for OUZEL_THREADS or all that are free. isa: 'avx512', 'avx2', 'portable' "
           "or None\nfor OUZEL_ISA or the best.")
      .def_prop_ro("threads", &PyContext::threads)
      .def_prop_ro("isa", &PyContext::isa)
      .def("__repr__", [](const PyContext& self) {
        return "ouzel.Context(threads=" + std::to_string(self.threads()) + ", isa='" + self.isa() +
               "')";
      });
  module.def(
      "isas",
      [] {
        std::vector<std::string> names;
        for (const Isa isa : supported_isas()) names.emplace_back(name_of(isa));
        return names;
      },
      "The instruction sets that this machine runs, best first.");
}

}  // namespace ouzel::python
