// `ouzel generate`: reads a prompt and streams what the model makes of it.
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "apps/ouzel/byte_source.h"
#include "apps/ouzel/program.h"
#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "ouzel/model.h"
#include "src/formats/files.h"

namespace ouzel::app {
namespace {

struct Options {
  std::string model;
  std::optional<std::string> prompt, file;
  std::int64_t tokens = 256;
  // What is not given comes from the state, or is SamplingOptions' default.
  std::optional<double> temperature, top_p, min_p, repetition_penalty;
  std::optional<std::int64_t> top_k, repetition_window;
  std::optional<std::uint64_t> seed;
  std::vector<std::string> stop;
  bool stop_given = false;
  std::string state_in, state_out;
  CommonOptions common;
};

SamplingOptions sampling(const Options& options, SamplingOptions s) {
  const auto set = [](auto& to, const auto& from) {
    if (from) to = *from;
  };
  set(s.temperature, options.temperature);
  set(s.top_k, options.top_k);
  set(s.top_p, options.top_p);
  set(s.min_p, options.min_p);
  set(s.repetition_penalty, options.repetition_penalty);
  set(s.repetition_window, options.repetition_window);
  set(s.seed, options.seed);
  if (options.stop_given) {
    s.stop = options.stop;
    std::erase(s.stop, "");  // --stop '' takes back those of the state
  }
  return s;
}

SamplingOptions saved_sampling(const Options& options, const State& state) {
  try {
    return Generator::sampling_of(state);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{}: {}", options.state_in, e.what()));
  }
}

void read_prompt(const Options& options, Generator& generator) {
  const bool piped = options.file || options.prompt == "-";
  if (!piped) {
    if (options.prompt) generator.read(*options.prompt);
    return;
  }
  ByteSource source(options.file.value_or("-"));
  std::vector<char> piece(4096);  // short enough to heed Ctrl-C soon
  while (const std::size_t got = source.read(piece)) generator.read({piece.data(), got});
}

std::string base64(std::string_view bytes) {
  constexpr char kDigits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string out;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      bits = bits << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0u);
    }
    for (std::size_t j = 0; j < 4; ++j) {
      out += i + j > bytes.size() ? '=' : kDigits[bits >> (18 - 6 * j) & 63];
    }
  }
  return out;
}

double rate(std::int64_t tokens, double seconds) {
  return seconds > 0 ? static_cast<double>(tokens) / seconds : 0;
}

struct Outcome {
  const char* finish = "length";
  std::string text;  // with --json only
  bool reader_gone = false;
};

const char* name_of(Finish finish) {
  switch (finish) {
    case Finish::kLength:
      return "length";
    case Finish::kStop:
      return "stop";
    case Finish::kCallback:
      return "interrupted";
  }
  return "";
}

// Reads and generates until done, interrupted, or stdout's reader is gone; what was reached can be
// saved in each case.
Outcome stream(const Options& options, Generator& generator) {
  Outcome outcome;
  const auto write = [&](std::string_view text) {
    if (options.common.json) {
      outcome.text += text;
    } else if (!text.empty()) {
      write_out(text);
      flush_out();
    }
    return !interrupted();
  };
  try {
    read_prompt(options, generator);
    outcome.finish = name_of(generator.generate(options.tokens, write));
    // Without a state nobody will go on from here: the text that is held back is the end.
    if (options.state_out.empty()) write(generator.take_held_text());
  } catch (const ClosedPipe&) {
    outcome.reader_gone = true;
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kCancelled) throw;
    outcome.finish = "interrupted";
  }
  return outcome;
}

void report(const Options& options, const Generator& generator, const Outcome& outcome) {
  const GenerateStatistics& s = generator.statistics();
  const double prompt_rate = rate(s.prompt_tokens, s.prompt_seconds);
  const double step_rate = rate(s.steps, s.step_seconds);
  if (options.common.json) {
    write_json({{"text", outcome.text},
                {"base64", base64(outcome.text)},
                {"finish", outcome.finish},
                {"prompt_tokens", s.prompt_tokens},
                {"prompt_tokens_per_second", prompt_rate},
                {"generated_tokens", s.generated_tokens},
                {"generated_tokens_per_second", step_rate},
                {"position", generator.position()},
                {"state_bytes", generator.state_bytes()},
                {"peak_bytes", peak_memory()}});
    return;
  }
  const CommonOptions& common = options.common;
  if (::isatty(STDOUT_FILENO) == 1) common.note("");  // the text may end within a line
  const auto note_rate = [&](const char* what, std::int64_t tokens, double tokens_per_second) {
    const auto count = static_cast<std::uint64_t>(tokens);
    const auto speed = static_cast<std::uint64_t>(tokens_per_second);
    if (tokens > 0) {
      common.note("{:<10} {} tokens, {} tokens/s", what, with_commas(count), with_commas(speed));
    }
  };
  note_rate("prompt", s.prompt_tokens, prompt_rate);
  note_rate("generated", s.generated_tokens, step_rate);
  common.note("state      {} after {} tokens", human_bytes(generator.state_bytes()),
              with_commas(generator.position()));
  common.note("memory     {} at peak", human_bytes(peak_memory()));
  if (!options.state_out.empty()) {
    common.note("saved      {}; go on with --state-in {}", options.state_out, options.state_out);
  }
}

int run(const Options& options) {
  if (!options.prompt && !options.file && options.state_in.empty()) {
    throw UsageError(
        "there is nothing to go on from: give a prompt (-p TEXT, -p - for stdin, -f FILE) or a "
        "state (--state-in FILE)");
  }
  if (options.prompt && options.file) {
    throw UsageError("-p and -f are two prompts: give one of them");
  }
  // Known now rather than after the last token. The file of --state-in may be that of --state-out:
  // it is read whole before.
  std::vector<std::string> read = files_of_model(options.model);
  if (options.file) read.push_back(*options.file);
  refuse_to_overwrite("--state-out", options.state_out, read);
  const std::filesystem::path folder =
      std::filesystem::path(target_of(options.state_out)).parent_path();
  std::error_code error;
  if (!folder.empty() && !std::filesystem::is_directory(folder, error)) {
    throw Error(ErrorKind::kIo, fmt::format("cannot save {}: there is no folder {}",
                                            options.state_out, folder.string()));
  }
  if (std::filesystem::is_directory(options.state_out, error)) {
    throw Error(ErrorKind::kIo, fmt::format("cannot save {}: it is a folder; name a file in it",
                                            options.state_out));
  }
  Context context = options.common.patient_context();
  const Model model = load_model(context, options.model, options.common);
  State state = options.state_in.empty() ? model.new_state() : model.load_state(options.state_in);
  const SamplingOptions how = sampling(options, saved_sampling(options, state));
  as_usage([&] { how.check(); });
  Generator generator(context, model, std::move(state), how);

  const Outcome outcome = stream(options, generator);
  if (!options.state_out.empty()) generator.state().save(options.state_out);
  if (!outcome.reader_gone) report(options, generator, outcome);
  return outcome.finish == std::string_view("interrupted") ? kInterrupted : 0;
}

Action declare(CLI::App& parser) {
  auto o = std::make_shared<Options>();
  const SamplingOptions defaults;
  parser.add_option("-m,--model", o->model, "Folder of the model")->type_name("DIR")->required();
  parser
      .add_option("-p,--prompt", o->prompt,
                  "Text to go on from; - reads stdin to its end, however long. An empty text is a "
                  "line break, where nothing was read before")
      ->type_name("TEXT");
  parser.add_option("-f,--file", o->file, "File to go on from")->type_name("FILE");
  parser.add_option("-n,--tokens", o->tokens, "Bytes to generate; 0 only reads the prompt")
      ->type_name("N")
      ->check(whole_number(0));
  const auto sampling_option = [&](const char* name, auto& value, const char* what,
                                   const auto& standard, const char* type) {
    using Value = std::remove_cvref_t<decltype(*value)>;
    CLI::Option* added = parser.add_option(name, value, what)
                             ->type_name(type)
                             ->default_str(fmt::format("the state's, else {}", standard));
    if constexpr (std::is_integral_v<Value>) {
      added->check(whole_number(0, std::numeric_limits<Value>::max()));
    } else {
      added->check(any_number());
    }
  };
  sampling_option("--temperature", o->temperature,
                  "Divides the logits: below 1 surer, above 1 wilder; 0 takes the most likely byte",
                  defaults.temperature, "X");
  sampling_option("--top-k", o->top_k, "Keep the N most likely bytes; 0: all", defaults.top_k, "N");
  sampling_option("--top-p", o->top_p, "Keep the most likely bytes that have this share together",
                  defaults.top_p, "X");
  sampling_option("--min-p", o->min_p, "Keep bytes at least this times as likely as the likeliest",
                  defaults.min_p, "X");
  sampling_option("--repetition-penalty", o->repetition_penalty,
                  "Makes bytes that stand in the window less likely; 1: none",
                  defaults.repetition_penalty, "X");
  sampling_option("--repetition-window", o->repetition_window,
                  "Last bytes, prompt included, that the penalty looks at",
                  defaults.repetition_window, "N");
  sampling_option("--seed", o->seed, "Of the draws: equal seeds give equal texts", defaults.seed,
                  "N");
  const CLI::Option* stop =
      parser
          .add_option("--stop", o->stop,
                      "End when this text has been generated, and leave it out; may be given "
                      "several times; '' takes back those of the state")
          ->type_name("TEXT")
          ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
          ->allow_extra_args(false);
  parser
      .add_option(
          "--state-in", o->state_in,
          "Go on from this state of this very model, as if generation had never stopped: what is "
          "not given here (sampling options, what was read) is as it was. Takes what "
          "--state-out, Python's State.save or the library wrote, not a file of tensors "
          "for ouzel attend")
      ->type_name("FILE");
  parser
      .add_option(
          "--state-out", o->state_out,
          "Save the state here at the end, also after Ctrl-C, for --state-in or Model.load_state; "
          "text that may begin a stop text then stays in the state")
      ->type_name("FILE");
  o->common.declare_compute(parser);
  o->common.declare_quiet(parser);
  o->common.declare_json(parser);
  return [o, stop] {
    o->stop_given = stop->count() != 0;
    return run(*o);
  };
}

}  // namespace

extern const Verb kGenerateVerb = {
    "generate", "Go on from a text, byte by byte",
    "ouzel generate -m model -p 'In the beginning' -n 300\n"
    "ouzel generate -m model -p - -n 0 --state-out book.state < book.txt\n"
    "ouzel generate -m model --state-in book.state -n 300 --temperature 0",
    declare};

}  // namespace ouzel::app
