// Contexts of Python.
#include "python/src/context.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <pthread.h>
#include <unistd.h>

#include <fmt/format.h>

#include <atomic>
#include <chrono>
#include <string_view>
#include <utility>
#include <vector>

#include "python/src/arguments.h"
#include "src/base/text.h"

namespace ouzel::python {
namespace {

std::atomic<std::uint64_t> forks{0};

// That which runs handlers of signals; after a fork that which forked.
std::atomic<unsigned long> main_thread{0};

// Whether a signal's handler has raised an exception, which is then set.
bool is_interrupted() {
  if (PyThread_get_thread_ident() != main_thread.load()) return false;
  const nb::gil_scoped_acquire acquire;
  return PyErr_CheckSignals() != 0;
}

constexpr std::chrono::milliseconds kAskEvery(20);  // it takes the GIL

// The same, not asked too often.
class SignalCheck {
 public:
  bool operator()() {
    const auto now = Clock::now();
    if (now - last_ < kAskEvery) return false;
    last_ = now;
    return is_interrupted();
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_ = Clock::now();
};

// Threads that are without the GIL.
std::atomic<int> away{0};

// Does not let Python end the thread.
class Stay {
 public:
  ~Stay() {
    while (!may_leave) pause();
  }
  bool may_leave = false;
};

}  // namespace

WithoutGil::WithoutGil() : state_(PyEval_SaveThread()) { ++away; }

WithoutGil::~WithoutGil() noexcept(false) {
  Stay stay;
  PyEval_RestoreThread(state_);
  stay.may_leave = true;
  --away;
}

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

PyContext::Turn::Turn(Live& live) : lock_(live.mutex, std::defer_lock), live_(live) {
  while (!lock_.try_lock_for(kAskEvery)) {
    if (is_interrupted()) throw Error(ErrorKind::kCancelled, "interrupted while it waited");
  }
  if (live.busy) {
    throw Error(ErrorKind::kInvalidArgument,
                "the context is in the middle of a call of this very thread (did a signal handler "
                "call?); give the inner call a context of its own");
  }
  live.busy = true;
}

PyContext& context_of(const std::string& call, nb::handle given) {
  PyContext* context = nullptr;
  if (!given.is_none() && !nb::try_cast(given, context)) {
    throw nb::type_error(
        fmt::format("{}: context is of type {}, not ouzel.Context", call, type_of(given)).c_str());
  }
  if (context != nullptr) return *context;
  // Never destroyed: threads of Python may outlive static objects.
  static auto* const shared = new PyContext(0, std::nullopt);
  return *shared;
}

void refuse_keywords(nb::handle type, const char* method, const nb::kwargs& unknown) {
  if (unknown.size() == 0) return;
  const nb::object signature = type.attr(method).attr("__nb_signature__")[0][0];
  const auto known = nb::cast<std::vector<std::string>>(
      nb::module_::import_("re").attr("findall")(R"((\w+):)", signature));
  const auto name = printable(nb::list(unknown.keys())[0]);
  const auto owner = nb::cast<std::string>(nb::object(type.attr("__name__")));
  const std::string call = method == std::string_view("__init__") ? owner : owner + "." + method;
  const std::string near = did_you_mean(name, known);
  throw nb::type_error(fmt::format("{}() got an unexpected keyword argument '{}'{}", call, name,
                                   near.empty() ? "; it takes " + joined(known) : near)
                           .c_str());
}

void bind_context(nb::module_& module) {
  main_thread = nb::cast<unsigned long>(
      nb::module_::import_("threading").attr("main_thread")().attr("ident"));
  // What threads hold that stay where they are is not leaked.
  Py_AtExit([] {
    if (away.load() != 0) nb::set_leak_warnings(false);
  });
  pthread_atfork(nullptr, nullptr, [] {
    ++forks;
    away = 0;
    main_thread = PyThread_get_thread_ident();
  });
  nb::class_<PyContext>(module, "Context",
                        "What a call runs with: threads, instruction set, scratch memory.\n\n"
                        "Calls of one context take turns; contexts of their own let threads of "
                        "Python compute at once.\nCalls without a context share one with all "
                        "processors (OUZEL_THREADS and OUZEL_ISA are heeded).")
      .def(
          "__init__",
          [](PyContext* self, nb::handle threads, nb::handle isa, const nb::kwargs& unknown) {
            refuse_keywords(nb::type<PyContext>(), "__init__", unknown);
            new (self) PyContext(whole_of<int>("Context", "threads", threads),
                                 optional_of(string_of, "Context", "isa", isa));
          },
          nb::arg("threads").none() = 0, nb::arg("isa").none() = nb::none(), nb::arg("unknown"),
          nb::sig("def __init__(self, threads: int = 0, isa: str | None = None) -> None"),
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
