#include "src/train/trainer.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numbers>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/base/hash.h"
#include "src/models/checkpoint.h"
#include "src/ops/adamw.h"

namespace ouzel {
namespace {

// Streams of the generator: the weights use those of their tensors' numbers.
constexpr std::uint64_t kWindows = std::uint64_t{1} << 32;
constexpr std::int64_t kValidationBatches = 8;

Context without_callbacks(const Context& context) {
  return Context({.threads = context.threads(),
                  .isa = context.isa(),
                  .poison_scratch = context.impl().options().poison_scratch});
}

std::size_t bytes_of(std::int64_t floats) {
  return static_cast<std::size_t>(floats) * sizeof(float);
}

}  // namespace

std::string spelled_as_member(const std::string& option) { return "TrainOptions::" + option; }

void check_options(const TrainOptions& options, const Spelling& spelled) {
  const auto refuse = [](const std::string& sentence) {
    throw Error(ErrorKind::kInvalidArgument, sentence);
  };
  const auto check_range = [&](const char* name, auto value, double least, double most) {
    if (const auto x = static_cast<double>(value); x >= least && x <= most) return;
    refuse(fmt::format("{} is {}, which is not in [{}, {}]", spelled(name), value, least, most));
  };
  options.model.check();
  constexpr double kMany = 1e9;
  check_range("context", options.context, 1, kMany);
  check_range("batch", options.batch, 1, kMany);
  check_range("grad_accumulation", options.grad_accumulation, 1, kMany);
  check_range("iterations", options.iterations, 1, 1e15);
  check_range("warmup", options.warmup, 0, 1e15);
  check_range("lr", options.lr, 0, 1e6);
  check_range("min_lr", options.min_lr, 0, 1);
  check_range("beta1", options.beta1, 0, 1 - 1e-9);
  check_range("beta2", options.beta2, 0, 1 - 1e-9);
  check_range("eps", options.eps, 1e-30, 1);
  check_range("weight_decay", options.weight_decay, 0, 1e6);
  check_range("clip", options.clip, 0, 1e30);
  check_range("validation", options.validation, 0, 0.9);
  check_range("validate_every", options.validate_every, 1, 1e15);
  check_range("checkpoint_every", options.checkpoint_every, 1, 1e15);
  if (options.resume && options.overwrite) {
    refuse(fmt::format("{} goes on with what is in the folder and {} replaces it; give one",
                       spelled("resume"), spelled("overwrite")));
  }
  if (options.model.vocab_size != 256) {
    refuse(fmt::format("models are trained on bytes: vocab_size is {} and should be 256",
                       options.model.vocab_size));
  }
  for (std::int64_t layer = 0; options.carry && layer < options.model.num_hidden_layers; ++layer) {
    const MixerConfig& mixer = options.model.mixer_of(layer);
    if (mixer.kind == MixerKind::kSoftmaxAttention && mixer.window_size == 0) {
      refuse(
          fmt::format("{}: the state of layer {}, softmax attention without a window, would "
                      "grow without end; give it a window_size",
                      spelled("carry"), layer));
    }
  }
}

void check_data_size(const TrainOptions& options, std::int64_t bytes) {
  const std::int64_t training = training_bytes(bytes, options.validation);
  const auto refuse = [&](const std::string& sentence) {
    throw Error(ErrorKind::kInvalidArgument, sentence);
  };
  if (training < options.context + 1) {
    refuse(
        fmt::format("{}: {} bytes are for training, fewer than one window of {} and the byte after "
                    "it; take more text or a shorter context",
                    options.data, training, options.context));
  }
  const std::int64_t streams = options.carry ? options.batch * options.grad_accumulation : 1;
  if ((training - 1) / streams < options.context) {
    refuse(fmt::format(
        "{}: to carry states, {} streams of at least one window of {} need {} bytes; "
        "{} are for training",
        options.data, streams, options.context, streams * options.context + 1, training));
  }
}

double learning_rate(const TrainOptions& options, std::int64_t iteration) {
  const auto i = static_cast<double>(iteration), warmup = static_cast<double>(options.warmup);
  if (i < warmup) return options.lr * (i + 1) / warmup;
  const double span = std::max(1.0, static_cast<double>(options.iterations) - 1 - warmup);
  const double done = std::min(1.0, (i - warmup) / span);
  const double cosine = 0.5 * (1 + std::cos(std::numbers::pi * done));
  return options.lr * (options.min_lr + (1 - options.min_lr) * cosine);
}

std::size_t arena_bytes(Context& context, const TrainOptions& options, const Network& network) {
  const std::vector<SequenceMemory> sequences(
      options.carry ? static_cast<std::size_t>(options.batch) : 0,
      SequenceMemory{&network.state_layout(), nullptr, 0, 0});
  Arena arena;
  Run run{.context = context,
          .arena = arena,
          .batch = options.batch,
          .tokens = options.context,
          .initial = sequences,
          .final = sequences,
          .training = true};
  network.backward(run, {}, {}, 1, nullptr, options.recompute);
  run.initial = run.final = {};
  run.training = false;
  network.losses(run, {}, {}, nullptr);
  return arena.peak();  // of the larger
}

Trainer::Trainer(Context& context, const TrainOptions& options)
    : context_(context),
      steady_(without_callbacks(context)),
      options_((check_options(options), options)),
      data_(options.data, options.validation),
      network_(options.model) {
  check_data_size(options_, data_.bytes());
  const std::int64_t size = network_.table().size();
  const std::int64_t rows = options_.batch * options_.context;
  const std::int64_t streams = options_.batch * options_.grad_accumulation;
  if (options_.carry) {
    windows_of_stream_ = (data_.training_size() - 1) / streams / options_.context;
    carried_floats_ = streams * network_.state_layout().size(0);
    for (Buffer& set : carried_) set = Buffer::zeros(bytes_of(carried_floats_));
  }
  for (const ParameterInfo& info : network_.table().list()) {
    if (ranges_.empty() || ranges_.back().decays != info.decays()) {
      ranges_.push_back({info.offset, 0, info.decays()});
    }
    ranges_.back().size += info.size;
  }
  network_.allocate();
  network_.initialise(steady_, options_.seed);
  network_.pack(steady_);
  gradients_ = Buffer(bytes_of(size));
  first_moment_ = Buffer::zeros(bytes_of(size));
  second_moment_ = Buffer::zeros(bytes_of(size));
  arena_ = Buffer(arena_bytes(context, options_, network_));
  tokens_.resize(static_cast<std::size_t>(rows));
  targets_.resize(static_cast<std::size_t>(rows));
  positions_.resize(static_cast<std::size_t>(rows));
  losses_.resize(static_cast<std::size_t>(rows));
}

TrainingArrays Trainer::arrays() {
  const auto size = static_cast<std::size_t>(network_.table().size());
  return {.weights = {network_.weights(), size},
          .first_moment = {first_moment_.f32(), size},
          .second_moment = {second_moment_.f32(), size},
          .carried = {carried_[0].f32(), static_cast<std::size_t>(carried_floats_)}};
}

// What a run's numbers depend on. Not: threads, recomputation, how often it is saved.
std::map<std::string, std::string> Trainer::identity() const {
  const TrainOptions& o = options_;
  return {{"model", o.model.to_json()},
          {"data", hash_string(data_.hash())},
          {"context", std::to_string(o.context)},
          {"batch", std::to_string(o.batch)},
          {"grad-accumulation", std::to_string(o.grad_accumulation)},
          {"iterations", std::to_string(o.iterations)},
          {"lr", fmt::format("{}", o.lr)},
          {"min-lr", fmt::format("{}", o.min_lr)},
          {"warmup", std::to_string(o.warmup)},
          {"beta1", fmt::format("{}", o.beta1)},
          {"beta2", fmt::format("{}", o.beta2)},
          {"eps", fmt::format("{}", o.eps)},
          {"weight-decay", fmt::format("{}", o.weight_decay)},
          {"clip", fmt::format("{}", o.clip)},
          {"seed", std::to_string(o.seed)},
          {"validation", fmt::format("{}", o.validation)},
          {"validate-every", std::to_string(o.validate_every)},
          {"carry", o.carry ? "true" : "false"}};
}

void Trainer::load(const std::string& path) {
  numbers_ = load_training(path, network_.table(), arrays(), identity());
  if (numbers_.iteration > options_.iterations) {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: iteration {} of a run of {}", path,
                                                 numbers_.iteration, options_.iterations));
  }
  network_.pack(steady_);
}

void Trainer::save(const std::string& path, std::int64_t metrics_bytes) {
  numbers_.metrics_bytes = metrics_bytes;
  save_training(path, network_.table(), arrays(), numbers_, identity());
}

void Trainer::save_model(const std::string& folder) const { save_network(network_, folder); }

std::vector<SequenceMemory> Trainer::carried(std::int64_t micro_batch, int set) {
  std::vector<SequenceMemory> sequences;
  if (!options_.carry) return sequences;
  const std::int64_t floats = network_.state_layout().size(0);
  const std::int64_t position = numbers_.iteration % windows_of_stream_ * options_.context;
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    sequences.push_back({&network_.state_layout(),
                         carried_[set].f32() + (micro_batch * options_.batch + b) * floats, 0,
                         position});
  }
  return sequences;
}

void Trainer::fill_windows(Random& random, std::int64_t micro_batch) {
  const auto context = static_cast<std::size_t>(options_.context);
  const std::int64_t streams = options_.batch * options_.grad_accumulation;
  const std::int64_t window = numbers_.iteration % windows_of_stream_;
  for (std::int64_t b = 0; b < options_.batch; ++b) {
    std::int64_t begin = 0;
    if (options_.carry) {
      const std::int64_t stream = micro_batch * options_.batch + b;
      begin = stream * ((data_.training_size() - 1) / streams) + window * options_.context;
    } else {
      begin = static_cast<std::int64_t>(
          random.below(static_cast<std::uint64_t>(data_.training_size() - options_.context)));
    }
    const std::size_t row = static_cast<std::size_t>(b) * context;
    data_.window(begin, std::span(tokens_).subspan(row, context),
                 std::span(targets_).subspan(row, context));
    const std::int64_t position = options_.carry ? window * options_.context : 0;
    for (std::size_t t = 0; t < context; ++t) {
      positions_[row + t] = position + static_cast<std::int64_t>(t);
    }
  }
}

void Trainer::iterate(TrainProgress& progress) {
  const std::int64_t micro_batches = options_.grad_accumulation;
  const auto rows = static_cast<double>(options_.batch * options_.context);
  const auto weight = static_cast<float>(1 / (rows * static_cast<double>(micro_batches)));
  if (options_.carry && numbers_.iteration % windows_of_stream_ == 0) {
    std::memset(carried_[0].data(), 0, carried_[0].bytes());
  }
  std::memset(gradients_.data(), 0, gradients_.bytes());
  Random random(options_.seed, kWindows, numbers_.random_position);
  double loss = 0;
  for (std::int64_t m = 0; m < micro_batches; ++m) {
    fill_windows(random, m);
    const std::vector<SequenceMemory> before = carried(m, 0), after = carried(m, 1);
    Arena arena(arena_);
    Run run{.context = context_,
            .arena = arena,
            .gradients = gradients_.f32(),
            .batch = options_.batch,
            .tokens = options_.context,
            .positions = positions_,
            .initial = before,
            .final = after,
            .training = true};
    network_.backward(run, tokens_, targets_, weight, losses_.data(), options_.recompute);
    for (float value : losses_) loss += static_cast<double>(value);
  }

  const std::span<float> gradients(gradients_.f32(),
                                   static_cast<std::size_t>(network_.table().size()));
  progress.loss = loss / (rows * static_cast<double>(micro_batches));
  progress.grad_norm = std::sqrt(sum_of_squares(steady_, gradients));
  if (!std::isfinite(progress.loss) || !std::isfinite(progress.grad_norm)) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("the loss is {} and the gradient's norm {} in iteration {}: the "
                    "run has diverged; start anew with a smaller lr or a longer warmup",
                    std::abs(progress.loss), std::abs(progress.grad_norm), numbers_.iteration + 1));
  }
  progress.lr = learning_rate(options_, numbers_.iteration);
  AdamWOptions adamw{.learning_rate = progress.lr,
                     .beta1 = options_.beta1,
                     .beta2 = options_.beta2,
                     .epsilon = options_.eps};
  if (options_.clip > 0 && progress.grad_norm > options_.clip) {
    adamw.gradient_scale = options_.clip / progress.grad_norm;
  }
  const TrainingArrays all = arrays();
  for (const Range& range : ranges_) {
    const auto part = [&](std::span<float> values) {
      return values.subspan(static_cast<std::size_t>(range.offset),
                            static_cast<std::size_t>(range.size));
    };
    adamw.weight_decay = range.decays ? options_.weight_decay : 0;
    adamw_step(steady_, adamw, numbers_.iteration + 1, part(all.weights), part(gradients),
               part(all.first_moment), part(all.second_moment));
  }
  network_.pack(steady_);
  std::swap(carried_[0], carried_[1]);
  numbers_.random_position = random.position();
  numbers_.loss = progress.loss;
  progress.iteration = ++numbers_.iteration;
}

double Trainer::validate() {
  const std::int64_t size = data_.validation_size();
  const std::int64_t length = std::min(options_.context, size - 1);
  if (length < 1) return -1;
  const std::int64_t windows = std::min(kValidationBatches * options_.batch, (size - 1) / length);
  const auto count = static_cast<std::size_t>(length);
  for (std::int64_t r = 0; r < options_.batch * length; ++r) {
    positions_[static_cast<std::size_t>(r)] = r % length;
  }
  double loss = 0;
  for (std::int64_t first = 0; first < windows; first += options_.batch) {
    const std::int64_t batch = std::min(options_.batch, windows - first);
    const auto rows = static_cast<std::size_t>(batch * length);
    for (std::int64_t b = 0; b < batch; ++b) {
      // Evenly spaced; the last one ends with the data.
      const std::int64_t begin =
          windows == 1 ? 0 : (size - 1 - length) * (first + b) / (windows - 1);
      data_.window(data_.training_size() + begin,
                   std::span(tokens_).subspan(static_cast<std::size_t>(b) * count, count),
                   std::span(targets_).subspan(static_cast<std::size_t>(b) * count, count));
    }
    Arena arena(arena_);
    Run run{.context = steady_,
            .arena = arena,
            .batch = batch,
            .tokens = length,
            .positions = std::span(positions_).first(rows)};
    network_.losses(run, std::span(tokens_).first(rows), std::span(targets_).first(rows),
                    losses_.data());
    for (float value : std::span(losses_).first(rows)) loss += static_cast<double>(value);
  }
  numbers_.validation_loss = loss / static_cast<double>(windows * length);
  if (numbers_.best_validation_loss < 0 ||
      numbers_.validation_loss < numbers_.best_validation_loss) {
    numbers_.best_validation_loss = numbers_.validation_loss;
  }
  return numbers_.validation_loss;
}

}  // namespace ouzel
