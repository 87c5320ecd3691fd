// Models, states and generation.
#include "python/src/models.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "ouzel/model.h"
#include "python/src/arguments.h"
#include "python/src/arrays.h"
#include "python/src/context.h"
#include "src/infer/bytes_model.h"
#include "src/infer/session.h"

namespace ouzel::python {
namespace {

[[noreturn]] void refuse(const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, sentence);
}

// What one thread of Python works on while others may run: a second one gets an error.
class InUse {
 public:
  InUse(bool& flag, const char* what) : flag_(flag) {
    if (flag) refuse(std::string("this ") + what + " is being used by another thread");
    flag = true;
  }
  ~InUse() { flag_ = false; }
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;

 private:
  bool& flag_;
};

struct PyState {
  State state;
  bool busy = false;
};

// As `ouzel info` shows the file that `save` writes.
std::string described(const State& state) {
  const std::int64_t processed = state.position();
  std::string tokens = std::to_string(processed) + " tokens";
  try {
    const Session session = Session::decode(state.sampler, processed);
    if (!session.waiting.empty()) {
      tokens = fmt::format("{} tokens ({} processed, {} waiting)", session.position, processed,
                           session.waiting.size());
    }
  } catch (const Error&) {
    tokens += ", its sampler damaged";  // generate says how
  }
  return fmt::format("<ouzel.State after {}, {} bytes>", tokens, state.bytes());
}

// For a class whose objects are made by functions only.
template <class T>
void refuse_construction(nb::class_<T>& type, const char* sentence) {
  type.def(
      "__init__",
      [sentence](T*, const nb::args&, const nb::kwargs&) { throw nb::type_error(sentence); },
      nb::sig("def __init__(self) -> None"), sentence);
}

void warn_of(const ModelConfig& config) {
  for (const std::string& warning : config.warnings) {
    if (PyErr_WarnEx(PyExc_UserWarning, warning.c_str(), 1) != 0) {
      throw nb::python_error();
    }
  }
}

PyState copy_of(PyState& self) {
  const InUse use(self.busy, "state");
  return {self.state};
}

struct Tokens {
  std::vector<std::int32_t> ids;
  std::int64_t batch = 1, length = 0;
  bool batched = false;
};

void append_text(nb::handle text, std::vector<std::int32_t>& ids) {
  std::string_view bytes;
  if (PyUnicode_Check(text.ptr())) {
    Py_ssize_t size = 0;
    const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
    if (data == nullptr) throw nb::python_error();
    bytes = {data, static_cast<std::size_t>(size)};
  } else {
    bytes = {PyBytes_AS_STRING(text.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(text.ptr()))};
  }
  for (const char c : bytes) ids.push_back(static_cast<unsigned char>(c));
}

std::int32_t checked_id(std::int64_t id) {
  if (id < 0 || id > INT32_MAX) refuse("the token " + std::to_string(id) + " is in no vocabulary");
  return static_cast<std::int32_t>(id);
}

// Text, an array [T] or [B, T] of integers, or a sequence of them.
Tokens tokens_of(nb::handle given) {
  Tokens tokens;
  if (PyUnicode_Check(given.ptr()) || PyBytes_Check(given.ptr())) {
    append_text(given, tokens.ids);
  } else if (PyList_Check(given.ptr()) || PyTuple_Check(given.ptr())) {
    for (const nb::handle id : nb::iter(given)) {
      const Py_ssize_t value = PyNumber_AsSsize_t(id.ptr(), PyExc_OverflowError);
      if (value == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
      tokens.ids.push_back(checked_id(value));
    }
  } else {
    const GivenArray array(given, "forward", "tokens");
    const ConstTensor& ids = array.tensor();
    tokens.batched = ids.rank == 2;
    const auto at = [&](std::int64_t b, std::int64_t t) -> std::int64_t {
      const std::int64_t i =
          tokens.batched ? b * ids.stride[0] + t * ids.stride[1] : t * ids.stride[0];
      return ids.dtype == DType::kI64   ? static_cast<const std::int64_t*>(ids.data)[i]
             : ids.dtype == DType::kI32 ? static_cast<const std::int32_t*>(ids.data)[i]
                                        : static_cast<const std::uint8_t*>(ids.data)[i];
    };
    const bool whole =
        ids.dtype == DType::kI64 || ids.dtype == DType::kI32 || ids.dtype == DType::kU8;
    if (ids.rank < 1 || ids.rank > 2 || !whole) {
      refuse("tokens are " + std::string(name_of(ids.dtype)) + " " + shape_string(ids) +
             "; an array [T] or [B, T] of int32, int64 or uint8 was expected");
    }
    if (tokens.batched) tokens.batch = ids.extent[0];
    tokens.length = ids.extent[static_cast<std::size_t>(ids.rank - 1)];
    for (std::int64_t b = 0; b < tokens.batch; ++b) {
      for (std::int64_t t = 0; t < tokens.length; ++t) tokens.ids.push_back(checked_id(at(b, t)));
    }
  }
  if (!tokens.batched) tokens.length = std::ssize(tokens.ids);
  return tokens;
}

// Held for the call: nobody else may have a reference to what an iterator gave.
std::vector<nb::object> states_of(nb::handle given, const Tokens& tokens) {
  std::vector<nb::object> states;
  const auto append = [&](nb::handle state) {
    if (!nb::isinstance<PyState>(state)) {
      throw nb::type_error(
          "forward: state must be an ouzel.State, for tokens [B, T] a sequence of B");
    }
    for (std::size_t i = 0; i < states.size(); ++i) {
      if (!states[i].is(state)) continue;
      refuse("forward: sequences " + std::to_string(i) + " and " + std::to_string(states.size()) +
             " were given the same state: give each its own");
    }
    states.push_back(nb::borrow(state));
  };
  if (given.is_none()) return states;
  if (!tokens.batched) {
    append(given);
  } else {
    for (const nb::handle state : nb::iter(given)) append(state);
  }
  return states;
}

nb::object forward(const Model& model, nb::handle token_ids, nb::handle state,
                   nb::handle every_token_given, nb::handle context, const nb::kwargs& unknown) {
  refuse_keywords(nb::type<Model>(), "forward", unknown);
  if (token_ids.is_none()) throw nb::type_error("Model.forward() needs tokens");
  const bool every_token = flag_of("forward", "every_token", every_token_given);
  PyContext& with_context = context_of("forward", context);
  const Tokens tokens = tokens_of(token_ids);
  if (tokens.length == 0 && !every_token) {
    refuse("forward: there are no tokens, and so no last one whose logits could be returned");
  }
  const std::vector<nb::object> given = states_of(state, tokens);
  std::vector<std::unique_ptr<InUse>> use;
  std::vector<State*> states;
  for (const nb::object& object : given) {
    auto* one = nb::inst_ptr<PyState>(object);
    use.push_back(std::make_unique<InUse>(one->busy, "state"));
    states.push_back(&one->state);
  }
  const std::int64_t vocabulary = model.config().vocab_size;
  std::vector<std::int64_t> shape;
  if (tokens.batched) shape.push_back(tokens.batch);
  if (every_token) shape.push_back(tokens.length);
  shape.push_back(vocabulary);
  ResultArray logits(shape, DType::kF32);
  with_context.run([&](Context& with, Workspace& workspace) {
    for (State* one : states) make_room(*one, tokens.length);
    model.forward(with, workspace, {tokens.ids.data(), {tokens.batch, tokens.length}}, states,
                  {static_cast<float*>(logits.tensor().data),
                   {logits.tensor().size() / vocabulary, vocabulary}},
                  every_token ? LogitRows::kAll : LogitRows::kLast);
  });
  return logits.release(token_ids);
}

// An iterator over the text that a model goes on with.
class Generation {
 public:
  Generation(const Model& model, State state, const SamplingOptions& options, bool of_text,
             std::optional<std::int64_t> tokens, nb::object context, bool fresh)
      : model_(model), context_(std::move(context)), left_(tokens), of_text_(of_text) {
    if (tokens && *tokens < 0) refuse("generate: tokens must be at least 0");
    Context& with = py_context().context();
    generator_ = fresh ? std::make_unique<Generator>(with, model, options)
                       : std::make_unique<Generator>(with, model, std::move(state), options);
  }
  ~Generation() {
    if (born_ != PyContext::generation()) static_cast<void>(generator_.release());
  }
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  void read(const std::string& text) {
    const InUse use(busy_, "generation");
    py_context().run([&](Context&, Workspace&) { stream().read(text); });
  }

  // The next piece of text, at least one byte or character.
  nb::object next() {
    const InUse use(busy_, "generation");
    for (;;) {
      if (nb::object piece = certain(); piece.is_valid()) return piece;
      if (finish_) throw nb::stop_iteration();
      step();
    }
  }

  PyState state() {
    const InUse use(busy_, "generation");
    return {generator_->state()};
  }
  std::int64_t position() const { return generator_->position(); }
  nb::object finish() const {
    if (!finish_) return nb::none();
    return nb::str(*finish_ == Finish::kStop ? "stop" : "length");
  }

 private:
  PyContext& py_context() const { return context_of("generate", context_); }
  // After a fork the context's threads are gone: the stream goes on with new ones.
  Generator& stream() {
    if (born_ != PyContext::generation()) {
      State state = generator_->state();
      static_cast<void>(generator_.release());
      generator_ = std::make_unique<Generator>(py_context().context(), model_, std::move(state));
      born_ = PyContext::generation();
    }
    return *generator_;
  }

  void step() {
    if (left_ && *left_ == 0) {
      finish_ = Finish::kLength;
      pending_ += generator_->take_held_text();
      return;
    }
    if (left_) --*left_;
    Generator& generator = stream();
    py_context().run([&](Context&, Workspace&) {
      const Finish finish = generator.generate(1, [&](std::string_view text) {
        pending_ += text;
        return true;
      });
      if (finish == Finish::kStop) finish_ = finish;
    });
  }

  // What of the pending bytes can be given: whole characters, at the end all. Invalid if nothing.
  nb::object certain() {
    if (pending_.empty()) return {};
    Py_ssize_t used = std::ssize(pending_);
    const nb::object piece =
        nb::steal(of_text_ ? PyUnicode_DecodeUTF8Stateful(pending_.data(), used, "replace",
                                                          finish_ ? nullptr : &used)
                           : PyBytes_FromStringAndSize(pending_.data(), used));
    if (!piece.is_valid()) throw nb::python_error();
    pending_.erase(0, static_cast<std::size_t>(used));
    return used == 0 ? nb::object() : piece;
  }

  Model model_;
  nb::object context_;
  std::unique_ptr<Generator> generator_;
  std::uint64_t born_ = PyContext::generation();
  std::optional<std::int64_t> left_;  // none: without end
  bool of_text_;
  bool busy_ = false;
  std::string pending_;
  std::optional<Finish> finish_;
};

PyState& state_of(const char* call, nb::handle given) {
  PyState* state = nullptr;
  if (!nb::try_cast(given, state) || state == nullptr) {
    throw nb::type_error(
        fmt::format("{}: state is of type {}, not ouzel.State", call, type_of(given)).c_str());
  }
  return *state;
}

// A text, or several.
std::vector<std::string> stops_of(nb::handle given) {
  const auto text = [](nb::handle one) { return string_of("generate", "stop", one); };
  if (PyUnicode_Check(given.ptr())) return {text(given)};
  const nb::object list = converted("generate", "stop", "str or a sequence of str", [&] {
    nb::object iterated = nb::steal(PySequence_List(given.ptr()));
    if (!iterated.is_valid()) throw nb::python_error();
    return iterated;
  });
  std::vector<std::string> texts;
  for (const nb::handle one : list) texts.push_back(text(one));
  return texts;
}

// The caller owns what is returned.
Generation* generate(const Model& model, nb::handle prompt, nb::handle tokens, nb::handle state,
                     nb::handle temperature, nb::handle top_k, nb::handle top_p, nb::handle min_p,
                     nb::handle repetition_penalty, nb::handle repetition_window, nb::handle seed,
                     nb::handle stop, nb::handle context, const nb::kwargs& unknown) {
  refuse_keywords(nb::type<Model>(), "generate", unknown);
  const bool of_text = PyUnicode_Check(prompt.ptr());
  if (!of_text && !PyBytes_Check(prompt.ptr())) {
    throw nb::type_error("generate: the prompt must be str or bytes");
  }
  std::vector<std::int32_t> ids;
  append_text(prompt, ids);
  constexpr const char* kCall = "generate";
  const auto count = optional_of(whole_of<std::int64_t>, kCall, "tokens", tokens);
  State start = state.is_none() ? model.new_state() : copy_of(state_of(kCall, state)).state;
  SamplingOptions options = Generator::sampling_of(start);
  const auto set = [](auto& option, auto&& read, const char* name, nb::handle value) {
    option = optional_of(read, kCall, name, value).value_or(option);
  };
  set(options.temperature, number_of, "temperature", temperature);
  set(options.top_k, whole_of<std::int64_t>, "top_k", top_k);
  set(options.top_p, number_of, "top_p", top_p);
  set(options.min_p, number_of, "min_p", min_p);
  set(options.repetition_penalty, number_of, "repetition_penalty", repetition_penalty);
  set(options.repetition_window, whole_of<std::int64_t>, "repetition_window", repetition_window);
  set(options.seed, whole_of<std::uint64_t>, "seed", seed);
  if (!stop.is_none()) options.stop = stops_of(stop);
  context_of(kCall, context);
  auto generation = std::make_unique<Generation>(model, std::move(start), options, of_text, count,
                                                 nb::borrow(context), state.is_none());
  if (!ids.empty()) generation->read(std::string(ids.begin(), ids.end()));
  return generation.release();
}

void bind_state(nb::module_& module) {
  nb::class_<PyState> state(
      module, "State",
      "All that a model needs to go on after some tokens: a value that is copied, "
      "compared, saved and\nloaded. Made by Model.new_state, Model.load_state and "
      "Generation.state.");
  refuse_construction(state,
                      "a State is made by Model.new_state, Model.load_state or Generation.state");
  state
      .def_prop_ro(
          "position", [](const PyState& self) { return self.state.position(); },
          "Tokens that the model has processed; those of a generation may be ahead by what waits "
          "for the next.")
      .def_prop_ro(
          "nbytes", [](const PyState& self) { return self.state.bytes(); },
          "Bytes of memory, reserved capacity included.")
      .def_prop_ro(
          "capacity", [](const PyState& self) { return self.state.capacity(); },
          "Tokens that softmax layers without a window have room for; it grows by itself.")
      .def_prop_ro(
          "fingerprint", [](const PyState& self) { return self.state.fingerprint(); },
          "Of the model and of the format of states.")
      .def(
          "save",
          [](PyState& self, nb::handle path, const nb::kwargs& unknown) {
            refuse_keywords(nb::type<PyState>(), "save", unknown);
            const std::string file = path_of("State.save", "path", path);
            const InUse use(self.busy, "state");
            const WithoutGil without_gil;
            self.state.save(file);
          },
          nb::arg("path").none(), nb::arg("unknown"),
          nb::sig("def save(self, path: str | os.PathLike) -> None"),
          "Writes one file, whole or not at all.")
      .def(
          "clear",
          [](PyState& self) {
            const InUse use(self.busy, "state");
            self.state.clear();
          },
          "Back to the zero state.")
      .def("copy", copy_of)
      .def("__copy__", copy_of)
      .def(
          "__deepcopy__", [](PyState& self, nb::handle) { return copy_of(self); }, nb::arg("memo"))
      .def(
          "__eq__",
          [](PyState& self, nb::handle other) -> nb::object {
            PyState* that = nullptr;
            if (!nb::try_cast(other, that) || that == nullptr) {
              return nb::borrow(Py_NotImplemented);
            }
            if (that == &self) return nb::bool_(true);
            const InUse use(self.busy, "state"), use_that(that->busy, "state");
            return nb::bool_(self.state == that->state);
          },
          nb::arg("other").none(), nb::sig("def __eq__(self, other: object, /) -> bool"))
      .def("__repr__", [](const PyState& self) { return described(self.state); });
}

void bind_generation(nb::module_& module) {
  nb::class_<Generation> generation(
      module, "Generation",
      "An iterator over pieces of generated text: str if the prompt was str, "
      "else bytes.");
  refuse_construction(generation, "a Generation is made by Model.generate");
  generation
      .def(
          "__iter__", [](nb::handle self) { return nb::borrow(self); },
          nb::sig("def __iter__(self) -> Generation"))
      .def("__next__", &Generation::next, nb::sig("def __next__(self) -> str | bytes"))
      .def_prop_ro("state", &Generation::state,
                   "A copy of all that is needed to go on, to save or to generate from.")
      .def_prop_ro("position", &Generation::position, "Tokens of the stream: read and generated.")
      .def_prop_ro("finish", &Generation::finish, "None while it goes on, then 'length' or 'stop'.",
                   nb::sig("def finish(self) -> str | None"));
}

}  // namespace

void bind_models(nb::module_& module) {
  bind_state(module);
  bind_generation(module);
  nb::class_<Model> model(
      module, "Model",
      "A language model: configuration and weights, immutable and shared by any "
      "number of threads.");
  refuse_construction(model, "a Model is made by Model.load(folder) or Model.random(config)");
  model
      .def_static(
          "load",
          [](nb::handle folder, nb::handle context, const nb::kwargs& unknown) {
            refuse_keywords(nb::type<Model>(), "load", unknown);
            const std::string path = path_of("Model.load", "folder", folder);
            std::optional<Model> model;
            context_of("Model.load", context).run([&](Context& with, Workspace&) {
              model = Model::load(with, path);
            });
            warn_of(model->config());
            return *std::move(model);
          },
          nb::arg("folder").none(), nb::kw_only(), nb::arg("context").none() = nb::none(),
          nb::arg("unknown"),
          "Reads FOLDER/config.json and its safetensors. Warns of keys that look misspelt.",
          nb::sig(
              "def load(folder: str | os.PathLike, *, context: Context | None = None) -> Model"))
      .def_static(
          "random",
          [](nb::handle config, nb::handle seed, nb::handle context, const nb::kwargs& unknown) {
            constexpr const char* kCall = "Model.random";
            refuse_keywords(nb::type<Model>(), "random", unknown);
            if (!nb::isinstance<nb::dict>(config)) {
              throw nb::type_error(
                  fmt::format("{}: config is of type {}; a dict was expected, as config.json has "
                              "it: {{\"model_type\": \"retnet\", \"vocab_size\": 256, "
                              "\"hidden_size\": 64, \"num_hidden_layers\": 2, \"num_heads\": 4}}",
                              kCall, type_of(config))
                      .c_str());
            }
            const auto number = whole_of<std::uint64_t>(kCall, "seed", seed);
            const auto text =
                nb::cast<std::string>(nb::module_::import_("json").attr("dumps")(config));
            std::optional<Model> model;
            context_of(kCall, context).run([&](Context& with, Workspace&) {
              const bool strict = true;  // the caller wrote it
              model.emplace(with, ModelConfig::from_json(text, "the configuration", strict),
                            number);
            });
            return *std::move(model);
          },
          nb::arg("config").none(), nb::arg("seed").none() = 1, nb::kw_only(),
          nb::arg("context").none() = nb::none(), nb::arg("unknown"),
          "Random weights, from the seed alone. config: a dict, as config.json has it.",
          nb::sig("def random(config: dict[str, object], seed: int = 1, *, context: Context | None "
                  "= None) -> Model"))
      .def(
          "save",
          [](const Model& self, nb::handle folder, const nb::kwargs& unknown) {
            refuse_keywords(nb::type<Model>(), "save", unknown);
            const std::string path = path_of("Model.save", "folder", folder);
            const WithoutGil without_gil;
            self.save(path);
          },
          nb::arg("folder").none(), nb::arg("unknown"),
          nb::sig("def save(self, folder: str | os.PathLike) -> None"),
          "Writes config.json and model.safetensors, float32; not into the folder of a training "
          "run.")
      .def_prop_ro("vocab_size", [](const Model& self) { return self.config().vocab_size; })
      .def_prop_ro("parameter_count", &Model::parameter_count)
      .def_prop_ro("fingerprint", &Model::fingerprint,
                   "Of configuration and weights, 16 hexadecimal digits.")
      .def_prop_ro(
          "config",
          [](const Model& self) {
            return nb::module_::import_("json").attr("loads")(self.config().to_json());
          },
          "As config.json has it.", nb::sig("def config(self) -> dict[str, object]"))
      .def(
          "new_state", [](const Model& self) { return PyState{self.new_state()}; },
          "The zero state.")
      .def(
          "load_state",
          [](const Model& self, nb::handle path, const nb::kwargs& unknown) {
            refuse_keywords(nb::type<Model>(), "load_state", unknown);
            const std::string file = path_of("Model.load_state", "path", path);
            const WithoutGil without_gil;
            return PyState{self.load_state(file)};
          },
          nb::arg("path").none(), nb::arg("unknown"),
          nb::sig("def load_state(self, path: str | os.PathLike) -> State"),
          "Reads what State.save wrote. Raises ouzel.BadFileError if it is another model's.")
      .def("forward", forward, nb::arg("tokens").none() = nb::none(),
           nb::arg("state").none() = nb::none(), nb::kw_only(),
           nb::arg("every_token").none() = false, nb::arg("context").none() = nb::none(),
           nb::arg("unknown"),
           "Processes tokens and returns logits, float32.\n\n"
           "tokens: integers [T] or [B, T], or a text whose bytes they are. state: a State (of "
           "[B, T]: a sequence of\nB), which is advanced; None: from zero, and nothing is kept. "
           "Returns the logits of the last token,\n[vocab_size] or [B, vocab_size]; with "
           "every_token of all, [T, vocab_size] or [B, T, vocab_size].",
           nb::sig("def forward(self, tokens: object, state: State | "
                   "collections.abc.Sequence[State] | None = "
                   "None, *, every_token: bool = False, context: Context | None = None) -> "
                   "typing.Any"))
      .def("generate", generate, nb::rv_policy::take_ownership, nb::arg("prompt").none() = "",
           nb::arg("tokens").none() = nb::none(), nb::kw_only(),
           nb::arg("state").none() = nb::none(), nb::arg("temperature").none() = nb::none(),
           nb::arg("top_k").none() = nb::none(), nb::arg("top_p").none() = nb::none(),
           nb::arg("min_p").none() = nb::none(), nb::arg("repetition_penalty").none() = nb::none(),
           nb::arg("repetition_window").none() = nb::none(), nb::arg("seed").none() = nb::none(),
           nb::arg("stop").none() = nb::none(), nb::arg("context").none() = nb::none(),
           nb::arg("unknown"),
           "Reads the prompt and returns an iterator over the text that follows.\n\n"
           "tokens: how many; None: without end. state: where to go on from, which is copied; "
           "None: the zero\nstate. Sampling options that are not given are those that the state "
           "was saved with, else\ntemperature 0.8 (0: the most likely token), top_k 0 (all), top_p "
           "1, min_p 0, repetition_penalty 1 over a\nrepetition_window of 64, seed 1, stop (): "
           "a text or several that end the generation.",
           nb::sig(
               "def generate(self, prompt: str | bytes = '', tokens: int | None = None, *, "
               "state: State | None = None, temperature: float | None = None, top_k: int | "
               "None = None, top_p: float | None = None, min_p: float | None = None, "
               "repetition_penalty: float | None = None, repetition_window: int | None = None, "
               "seed: int | None = None, stop: str | collections.abc.Sequence[str] | None = None, "
               "context: Context | None = None) -> Generation"))
      .def("__repr__", [](const Model& self) {
        return "<ouzel.Model of " + std::to_string(self.parameter_count()) + " parameters, " +
               self.fingerprint() + ">";
      });
}

}  // namespace ouzel::python
