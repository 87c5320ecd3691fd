// `ouzel eval`: how well a model predicts a file, in bits per byte.
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include <fmt/format.h>

#include "apps/ouzel/byte_source.h"
#include "apps/ouzel/program.h"
#include "apps/ouzel/progress.h"
#include "ouzel/error.h"
#include "ouzel/evaluate.h"
#include "ouzel/model.h"
#include "src/formats/files.h"

namespace ouzel::app {
namespace {

struct Options {
  std::string model, data, losses_out, logits_out;
  std::int64_t window = EvaluateOptions().window;
  bool no_carry = false;
  CommonOptions common;
};

void write_floats(AtomicFile& file, std::span<const float> values) {
  file.write(values.data(), values.size_bytes());
}

// "1.2345 bits per byte", or why there is no number.
std::string described(double bits) {
  return std::isnan(bits) ? "one byte: there is nothing to predict"
                          : fmt::format("{:.4f} bits per byte", bits);
}

Json number_or_null(double bits) { return std::isnan(bits) ? Json() : Json(bits); }

int run(const Options& options) {
  if (options.no_carry && !(options.losses_out.empty() && options.logits_out.empty())) {
    throw UsageError("--losses-out and --logits-out come from the carried run: drop --no-carry");
  }
  std::vector<std::string> read = files_of_model(options.model);
  read.push_back(options.data);
  refuse_to_overwrite("--losses-out", options.losses_out, read);
  refuse_to_overwrite("--logits-out", options.logits_out, read);
  if (is_same_file(options.losses_out, options.logits_out)) {
    throw UsageError("--losses-out and --logits-out are two files: give them two names");
  }
  ByteSource source(options.data);
  Context context = options.common.context();
  const Model model = load_model(context, options.model, options.common);
  std::optional<AtomicFile> losses, logits;
  if (!options.losses_out.empty()) losses.emplace(options.losses_out);
  if (!options.logits_out.empty()) logits.emplace(options.logits_out);

  EvaluateOptions evaluation{.window = options.window, .carried = !options.no_carry};
  if (losses) {
    evaluation.losses = [&](std::span<const float> values) { write_floats(*losses, values); };
  }
  const auto begin = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const auto total = static_cast<std::int64_t>(source.size().value_or(0));
  Evaluation result;
  {
    Progress progress(options.common.quiet);
    evaluation.progress = [&](std::int64_t tokens) {
      progress.draw(
          tokens, total,
          fmt::format("{} bytes, {:.0f} a second", with_commas(static_cast<std::uint64_t>(tokens)),
                      static_cast<double>(tokens) / seconds()));
    };
    try {
      result = evaluate(
          context, model, [&](std::span<char> to) { return source.read(to); }, evaluation);
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::kBadFile) throw;
      throw Error(e.kind(), fmt::format("{}: {}", options.data, e.what()));
    }
  }
  if (logits) write_floats(*logits, result.logits);
  // Both or neither: what can fail comes before the first is there.
  if (losses) losses->finish();
  if (logits) logits->finish();
  check_interrupt();
  if (losses) losses->commit();
  if (logits) logits->commit();

  const double rate = static_cast<double>(result.tokens) / seconds();
  if (options.common.json) {
    Json json = {{"model", options.model},
                 {"data", options.data},
                 {"tokens", result.tokens},
                 {"window", options.window},
                 {"bits_per_byte", number_or_null(result.bits_per_byte)},
                 {"tokens_per_second", rate},
                 {"peak_bytes", peak_memory()}};
    if (!options.no_carry) {
      json["bits_per_byte_carried"] = number_or_null(result.bits_per_byte_carried);
    }
    write_json(json);
    return 0;
  }
  write_out(fmt::format("windows of {:<9} {}\n", options.window, described(result.bits_per_byte)));
  if (!options.no_carry) {
    write_out(fmt::format("state carried        {}\n", described(result.bits_per_byte_carried)));
  }
  // By far more than the bytes at the beginnings of windows win from it.
  constexpr double kWorse = 1.05;
  if (!options.no_carry && result.bits_per_byte_carried > kWorse * result.bits_per_byte) {
    options.common.note(
        "with the state carried the model does worse: it has not learnt to read on after so much "
        "text, as models trained on windows from the zero state may not; train it with --carry, or "
        "with a longer --context");
  }
  options.common.note("{} bytes, {} a second; {} of memory at peak",
                      with_commas(static_cast<std::uint64_t>(result.tokens)),
                      with_commas(static_cast<std::uint64_t>(rate)), human_bytes(peak_memory()));
  return 0;
}

Action declare(CLI::App& parser) {
  auto o = std::make_shared<Options>();
  parser.add_option("-m,--model", o->model, "Folder of the model")->type_name("DIR")->required();
  parser.add_option("-d,--data", o->data, "File to predict; - reads stdin")
      ->type_name("FILE")
      ->required();
  parser
      .add_option("-w,--window", o->window,
                  "Bytes that a window reads from the zero state; windows follow each other, so "
                  "that a byte is predicted from at most N before it")
      ->type_name("N")
      ->check(whole_number(1));
  parser.add_flag("--no-carry", o->no_carry,
                  "Leave out the run whose state is carried through the whole file: of softmax "
                  "layers without a window that state grows with the file");
  parser
      .add_option("--losses-out", o->losses_out,
                  "Write the carried run's losses here: raw little-endian float32, in nats, of "
                  "every byte but the first")
      ->type_name("FILE");
  parser
      .add_option("--logits-out", o->logits_out,
                  "Write the logits after the last byte here: raw little-endian float32")
      ->type_name("FILE");
  o->common.declare_compute(parser);
  o->common.declare_quiet(parser);
  o->common.declare_json(parser);
  return [o] { return run(*o); };
}

}  // namespace

extern const Verb kEvalVerb = {"eval", "Measure how well a model predicts a file",
                               "ouzel eval -m model --data book.txt\n"
                               "ouzel eval -m model --data - --json < book.txt",
                               declare};

}  // namespace ouzel::app
