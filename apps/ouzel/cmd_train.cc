// `ouzel train`: trains a language model on the bytes of a file.
#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <new>
#include <numbers>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "apps/ouzel/program.h"
#include "apps/ouzel/progress.h"
#include "ouzel/error.h"
#include "ouzel/model.h"
#include "ouzel/train.h"
#include "src/formats/files.h"
#include "src/train/checkpoint.h"
#include "src/train/trainer.h"

namespace ouzel::app {
namespace {

constexpr std::uint64_t kMaxConfig = UINT64_C(1) << 26;
constexpr const char* kModelType = "retnet";

struct Options {
  std::optional<std::string> model_type, config;
  std::optional<std::int64_t> layers, dim, heads;
  TrainOptions train;
  bool dry_run = false, iterations_given = false;
  CommonOptions common;
  std::string command;  // that started this run
};

ModelConfig model_config(const Options& options) {
  if (options.model_type && options.config) {
    throw UsageError("--config names a model type itself: give it or --model");
  }
  ModelConfig config =
      options.config
          ? ModelConfig::from_json(read_file(*options.config, kMaxConfig), *options.config, true)
          : ModelConfig::defaults(options.model_type.value_or(kModelType));
  if (options.layers) config.num_hidden_layers = *options.layers;
  if (options.dim) config.hidden_size = *options.dim;
  if (options.heads) config.mixer.num_heads = *options.heads;
  try {
    config.check();
  } catch (const Error& e) {
    std::string flags;
    const auto add = [&](const char* flag, const char* key, std::optional<std::int64_t> value) {
      if (value) flags += fmt::format("; {} {} is its {}", flag, *value, key);
    };
    add("--layers", "num_hidden_layers", options.layers);
    add("--dim", "hidden_size", options.dim);
    add("--heads", "num_heads", options.heads);
    throw Error(e.kind(), e.what() + flags);
  }
  return config;
}

// The configuration in --out is written anew, in the library's words: one that is read from there
// must be in them already, as what another run has left.
void refuse_to_change_config(const Options& options) {
  const std::string written = options.train.out + "/config.json";
  if (!options.config || options.train.out.empty() || !is_same_file(*options.config, written) ||
      read_file(*options.config, kMaxConfig) == options.train.model.to_json()) {
    return;
  }
  throw UsageError(
      fmt::format("--out {} would overwrite {}, which --config reads: write to another folder, or "
                  "move the file out of this one",
                  options.train.out, *options.config));
}

std::string quoted(const std::string& word) {
  constexpr std::string_view kPlain =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_./=,:@%+-";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string out = "'";
  for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

// The command line that the parser has seen, as a shell takes it, to go on with.
std::string command_line(const CLI::App& parser) {
  std::string line = "ouzel train";
  for (const CLI::Option* option : parser.get_options()) {
    if (option->count() == 0 || option->check_lname("overwrite")) continue;  // not once more
    line += " --" + option->get_lnames().front();
    if (option->get_items_expected_max() == 0) continue;  // a flag
    for (const std::string& value : option->reduced_results()) line += " " + quoted(value);
  }
  return line;
}

Json to_json(const TrainPlan& plan) {
  return {{"parameters", plan.parameters},
          {"parameters_without_embeddings", plan.parameters_without_embeddings},
          {"weight_bytes", plan.weight_bytes},
          {"optimizer_bytes", plan.optimizer_bytes},
          {"activation_bytes", plan.activation_bytes},
          {"other_bytes", plan.other_bytes},
          {"peak_bytes", plan.peak_bytes}};
}

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

std::vector<std::string> described(const TrainOptions& train, const TrainPlan& plan) {
  const ModelConfig& model = train.model;
  const auto tokens = train.batch * train.context * train.grad_accumulation;
  return {
      fmt::format("model      {}{}, {} of {}, {}", ouzel::name_of(model.mixer.kind),
                  model.attn.empty() ? "" : " (hybrid)", counted(model.num_hidden_layers, "layer"),
                  model.hidden_size, counted(model.mixer.num_heads, "head")),
      fmt::format("parameters {} ({} without embeddings)", with_commas(plan.parameters),
                  with_commas(plan.parameters_without_embeddings)),
      fmt::format(
          "iteration  {} bytes: {} of {}{}", with_commas(tokens), counted(train.batch, "window"),
          train.context,
          train.grad_accumulation == 1 ? "" : fmt::format(", {} times", train.grad_accumulation)),
      fmt::format(
          "memory     at most {}: weights {}, gradients and optimiser {}, activations {}, other {}",
          human_bytes(plan.peak_bytes), human_bytes(plan.weight_bytes),
          human_bytes(plan.optimizer_bytes), human_bytes(plan.activation_bytes),
          human_bytes(plan.other_bytes))};
}

// A loss in nats a byte, as bits per byte, which eval shows.
double in_bits(double nats) { return nats / std::numbers::ln2; }

// The most important first.
std::vector<std::string> described(const TrainProgress& p) {
  std::string losses = fmt::format("{}/{}  loss {:.4f}", p.iteration, p.iterations, p.loss);
  if (p.validation_loss >= 0) losses += fmt::format("  validation {:.4f}", p.validation_loss);
  losses += fmt::format(" nats ({:.4f} bits)",
                        in_bits(p.validation_loss >= 0 ? p.validation_loss : p.loss));
  return {losses, human_seconds(p.seconds_left) + " left",
          with_commas(static_cast<std::uint64_t>(p.tokens_per_second)) + " tokens/s",
          fmt::format("{:.0f} % of peak", 100 * p.share_of_peak)};
}

// What would make a better model, where the losses tell.
std::string advised(const TrainResult& result) {
  // A byte of English costs 2.4 nats where only the byte before it is known.
  constexpr double kWords = 2;
  // Beyond what weights that have not been trained make of 256 bytes that are all as likely.
  constexpr double kNothing = 6;
  // A validation loss may be so much above the best by chance.
  constexpr double kChance = 1.02;
  const double validation = result.validation_loss, best = result.best_validation_loss;
  if (result.loss > kNothing) {
    return fmt::format(
        "above {} nats a byte the model knows less than nothing of a byte, which costs 5.55: its "
        "steps were too long; a lower --lr would do better",
        kNothing);
  }
  if (validation >= 0 && validation > kChance * best) {
    return fmt::format(
        "the validation loss was {:.4f} before it rose to {:.4f}: the model has begun to learn its "
        "data by heart; more data, fewer --iterations or a smaller model would do better (the "
        "weights that are kept are the last, not those of the lowest loss)",
        best, validation);
  }
  if (result.loss > kWords) {
    return fmt::format(
        "above {} nats a byte what a model generates is hardly words: give it more --iterations, "
        "from here on (--resume) or from the start (--overwrite)",
        kWords);
  }
  if (validation > kWords) {
    return fmt::format(
        "above {} nats a byte on text that it has not seen, what a model generates is hardly "
        "words: give it more data",
        kWords);
  }
  return "";
}

// The last words of a run.
int finish(const Options& options, const TrainPlan& plan, const TrainResult& result) {
  const TrainOptions& train = options.train;
  const bool done = result.iteration == train.iterations;
  const auto loss_or_null = [](double loss) { return loss < 0 ? Json() : Json(loss); };
  if (options.common.json) {
    write_json({{"out", train.out},
                {"model_type", ouzel::name_of(train.model.mixer.kind)},
                {"iteration", result.iteration},
                {"iterations", train.iterations},
                {"loss", result.loss},
                {"validation_loss", loss_or_null(result.validation_loss)},
                {"best_validation_loss", loss_or_null(result.best_validation_loss)},
                {"parameters", plan.parameters},
                {"planned_peak_bytes", plan.peak_bytes},
                {"peak_bytes", peak_memory()}});
  }
  const CommonOptions& common = options.common;
  if (!done) {
    common.note("interrupted after {} of {} iterations, all saved in {}; to go on:\n  {}{}",
                result.iteration, train.iterations, train.out, options.command,
                train.resume ? "" : " --resume");
    return kInterrupted;
  }
  const bool validated = result.validation_loss >= 0;
  common.note("done       loss {:.4f}{} nats a byte, {} of memory at peak", result.loss,
              validated ? fmt::format(", validation {:.4f} (best {:.4f})", result.validation_loss,
                                      result.best_validation_loss)
                        : "",
              human_bytes(peak_memory()));
  common.note("           {} {:.4f} bits per byte", validated ? "validation" : "loss",
              in_bits(validated ? result.validation_loss : result.loss));
  if (const std::string advice = advised(result); !advice.empty()) common.note("{}", advice);
  common.note(
      "the model, with the weights of the last iteration, is in {}; to generate:\n"
      "  ouzel generate -m {} -p 'The ' -n 300",
      train.out, quoted(train.out));
  return 0;
}

std::string lengthened(const RunLength& before, const TrainOptions& train) {
  return fmt::format(
      "lengthened {} of {} iterations are done, now it is to have {}: those that are left have the "
      "learning rates of a run of {}, which makes another model than such a run from the start",
      with_commas(static_cast<std::uint64_t>(before.done)),
      with_commas(static_cast<std::uint64_t>(before.asked)),
      with_commas(static_cast<std::uint64_t>(train.iterations)),
      with_commas(static_cast<std::uint64_t>(train.iterations)));
}

[[noreturn]] void out_of_memory(const std::string& sentence, const TrainPlan& plan,
                                bool recompute) {
  throw Error(
      ErrorKind::kOutOfMemory,
      fmt::format(
          "{}: the run takes up to {} of memory, {} of it for activations. Less of these is "
          "needed {}with a smaller --batch or --context (--grad-accumulation makes up for "
          "the batch), less of all with a smaller --dim or fewer --layers; --dry-run tells",
          sentence, human_bytes(plan.peak_bytes), human_bytes(plan.activation_bytes),
          recompute ? "" : "with --recompute, or "));
}

int run(Options options) {
  TrainOptions& train = options.train;
  as_usage([&] { train.model = model_config(options); });
  if (train.data == "-") {
    throw UsageError(
        "--data - is no file: training reads its data in any order and more than once; "
        "name a file");
  }
  if (train.out.empty() && !options.dry_run) {
    throw UsageError("--out is missing: the folder that receives the model");
  }
  for (const char* name :
       {"config.json", "model.safetensors", "training.safetensors", "metrics.jsonl"}) {
    refuse_to_overwrite("--out", train.out + "/" + name, {train.data});
  }
  refuse_to_change_config(options);
  Context context = options.common.context();
  const RunLength before = train.resume ? length_of_run(train.out) : RunLength();
  if (before.asked != 0 && !options.iterations_given) train.iterations = before.asked;
  as_usage([&] { check_options(train, flag_of); });
  const TrainPlan plan = plan_training(context, train);
  if (options.dry_run) {
    if (options.common.json) {
      write_json(to_json(plan));
    } else {
      for (const std::string& line : described(train, plan)) write_out(line + '\n');
    }
    return 0;
  }
  refuse_used(train, "--resume", "--overwrite");
  TrainResult result;
  try {
    Progress progress(options.common.quiet);
    for (const std::string& line : described(train, plan)) progress.line(line);
    if (train.resume && before.asked == 0) {
      progress.line("resume     nothing to go on from in " + train.out + ": from the start");
    }
    if (train.warmup >= train.iterations) {
      progress.line(fmt::format("warmup     of {} is not over in {}: the learning rate only rises",
                                counted(train.warmup, "iteration"), train.iterations));
    }
    bool tells_length = before.asked != 0 && before.asked < train.iterations;
    // Where nothing can be redrawn, about twenty lines tell of the whole run, and one of its start.
    const std::int64_t every = std::max<std::int64_t>(1, train.iterations / 20);
    result = ouzel::train(context, train, [&](const TrainProgress& p) {
      if (std::exchange(tells_length, false)) progress.line(lengthened(before, train));
      const bool due = p.iteration == 1 || p.iteration % every == 0;
      if (p.validation_loss >= 0 || (!progress.live() && due)) {
        progress.line(progress.fitted(described(p)));
      }
      progress.draw(p.iteration, p.iterations, progress.fitted(described(p)));
    });
  } catch (const std::bad_alloc&) {
    out_of_memory("out of memory", plan, train.recompute);
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kOutOfMemory) throw;
    out_of_memory(e.what(), plan, train.recompute);
  }
  return finish(options, plan, result);
}

Action declare(CLI::App& parser) {
  auto o = std::make_shared<Options>();
  TrainOptions& t = o->train;
  parser.add_option("-d,--data", t.data, "File to learn from; its bytes are the tokens")
      ->type_name("FILE")
      ->required();
  parser
      .add_option(
          "-o,--out", t.out,
          "Folder that receives config.json, model.safetensors (the weights at each checkpoint and "
          "after the last iteration, not those of the lowest validation loss), the "
          "checkpoint and metrics.jsonl [required, but for --dry-run]")
      ->type_name("DIR");
  std::vector<std::string> types;
  for (MixerKind kind :
       {MixerKind::kRetention, MixerKind::kLinearAttention, MixerKind::kSoftmaxAttention}) {
    types.emplace_back(ouzel::name_of(kind));
  }
  parser.add_option("-m,--model", o->model_type, "Type of the model")
      ->type_name("TYPE")
      ->check(one_of(types))
      ->default_str(kModelType);
  parser
      .add_option("--config", o->config,
                  "A config.json to train from new weights, in the place of --model: hybrids, and "
                  "all that has no flag")
      ->type_name("FILE");
  const ModelConfig standard = ModelConfig::defaults(kModelType);
  const auto shape_option = [&](const char* name, std::optional<std::int64_t>& value,
                                const char* what, std::int64_t usual) {
    parser.add_option(name, value, what)
        ->type_name("N")
        ->check(whole_number(1))
        ->default_str(fmt::format("that of --config or of the type, {} for {}", usual, kModelType));
  };
  shape_option("--layers", o->layers, "Layers", standard.num_hidden_layers);
  shape_option("--dim", o->dim, "Width of the model", standard.hidden_size);
  shape_option("--heads", o->heads, "Heads of a layer", standard.mixer.num_heads);
  const auto option = [&](const char* name, auto& value, const char* what, const char* type) {
    using Value = std::remove_cvref_t<decltype(value)>;
    CLI::Option* added = parser.add_option(name, value, what)->type_name(type);
    if constexpr (std::is_integral_v<Value>) {
      added->check(whole_number(0, std::numeric_limits<Value>::max()));
    } else {
      added->check(any_number());
    }
  };
  option("--context", t.context, "Bytes of a window", "N");
  option("--batch", t.batch, "Windows that are computed together", "N");
  option("--grad-accumulation", t.grad_accumulation, "Such batches in an iteration", "N");
  option("--iterations", t.iterations, "Updates of the weights", "N");
  option("--lr", t.lr, "Learning rate at its peak", "X");
  option("--min-lr", t.min_lr, "Learning rate at the end of its cosine, as a share of --lr", "X");
  option("--warmup", t.warmup, "Iterations in which the learning rate rises to --lr", "N");
  option("--weight-decay", t.weight_decay, "Decoupled; none on norms, biases and gates", "X");
  option("--beta1", t.beta1, "AdamW's memory of gradients", "X");
  option("--beta2", t.beta2, "AdamW's memory of squared gradients", "X");
  option("--clip", t.clip, "Largest norm of the gradient, which is scaled down to it; 0: any", "X");
  option("--seed", t.seed, "Of the first weights and of the windows", "N");
  option("--validation", t.validation,
         "Share of the data, at its end, that is held back to measure the loss, in nats a byte, on "
         "up to 8 batches of windows spread over it",
         "X");
  option("--validate-every", t.validate_every, "Iterations between validations", "N");
  option("--checkpoint-every", t.checkpoint_every, "Iterations between checkpoints", "N");
  parser.add_flag("--recompute", t.recompute,
                  "Compute activations again in the backward pass: the same numbers, less memory");
  parser.add_flag("--carry", t.carry,
                  "Read the data in order and pass states from one window to the next");
  parser.add_flag(
      "--resume", t.resume,
      "Go on from the checkpoint in --out, if there is one, bit for bit as if the run "
      "had not stopped (Ctrl-C saves one, a second Ctrl-C does not wait for it); the other options "
      "must be those of its start, but --iterations may be "
      "left out, or be more: the iterations that are left then have the learning rates of a run of "
      "that length, and the model differs from that of such a run from its start");
  parser.add_flag(
      "--overwrite", t.overwrite,
      "Replace what a run has left in --out; without it a folder with a model is refused");
  parser.add_flag("--dry-run", o->dry_run, "Only print the parameters and the peak of memory");
  o->common.declare_compute(parser);
  o->common.declare_quiet(parser);
  o->common.declare_json(parser);
  return [o, &parser] {
    o->command = command_line(parser);
    o->iterations_given = parser.count("--iterations") != 0;
    return run(*o);
  };
}

}  // namespace

extern const Verb kTrainVerb = {
    "train", "Train a language model on the bytes of a file",
    "ouzel train --data book.txt --out model\n"
    "ouzel train --data book.txt --model linear_attn --layers 6 --dim 384 --heads 6 --out model\n"
    "ouzel train --data book.txt --out model --dry-run",
    declare};

}  // namespace ouzel::app
