// The loop around the trainer: checkpoints, metrics, progress, cancellation; and the plan of a run.
#include "ouzel/train.h"

#include <algorithm>
#include <chrono>
#include <filesystem>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/formats/files.h"
#include "src/kernels/peak.h"
#include "src/models/checkpoint.h"
#include "src/train/checkpoint.h"
#include "src/train/metrics.h"
#include "src/train/trainer.h"

namespace ouzel {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace

TrainPlan plan_training(Context& context, const TrainOptions& options) {
  check_options(options);
  const Network network(options.model);
  const auto floats = [](std::int64_t count) {
    return static_cast<std::size_t>(count) * sizeof(float);
  };
  TrainPlan plan;
  plan.parameters = network.table().size();
  plan.parameters_without_embeddings = network.parameters_without_embeddings();
  plan.weight_bytes = floats(plan.parameters) + network.packed_bytes();
  plan.optimizer_bytes = 3 * floats(plan.parameters);
  const std::int64_t rows = options.batch * options.context;
  const std::int64_t streams = options.batch * options.grad_accumulation;
  plan.activation_bytes =
      arena_bytes(context, options, network) +
      static_cast<std::size_t>(rows) *
          (2 * sizeof(std::int32_t) + sizeof(std::int64_t) + sizeof(float)) +
      (options.carry ? 2 * floats(streams * network.state_layout().size(0)) : 0);
  // The program and its libraries, and per thread the operators' scratch.
  constexpr std::size_t kProgram = std::size_t{24} << 20, kThread = std::size_t{8} << 20;
  std::error_code error;
  const auto data = std::filesystem::file_size(options.data, error);
  if (error) {
    throw Error(ErrorKind::kIo, options.data + ": cannot be read: " + error.message());
  }
  check_data_size(options, static_cast<std::int64_t>(data));
  plan.other_bytes = data + kProgram + network.scratch_bytes() +
                     static_cast<std::size_t>(context.threads()) * kThread;
  plan.peak_bytes =
      plan.weight_bytes + plan.optimizer_bytes + plan.activation_bytes + plan.other_bytes;
  return plan;
}

TrainResult train(Context& context, const TrainOptions& options,
                  const std::function<void(const TrainProgress&)>& progress) {
  Trainer trainer(context, options);
  make_folder(options.out);
  const FolderLock lock(options.out);
  const std::string checkpoint = options.out + "/" + kTrainingFile;
  for (const char* name : {kTrainingFile, "model.safetensors", "config.json", "metrics.jsonl"}) {
    const std::string path = options.out + "/" + name;
    std::error_code error;
    if (std::filesystem::is_directory(path, error)) {
      throw Error(ErrorKind::kIo,
                  path +
                      " is a folder, where a file of that name is to be written: move it away, "
                      "or choose another folder for the run");
    }
    remove_temporaries(path);
  }
  if (options.resume && is_there(checkpoint)) {
    trainer.load(checkpoint);
    // The run may have been killed between its last checkpoint and the model of it.
    trainer.save_model(options.out);
  } else {
    refuse_used(options, "TrainOptions::resume", "TrainOptions::overwrite");
    // What a finished run left must not be taken for a checkpoint of this one.
    std::error_code error;
    std::filesystem::remove(checkpoint, error);
    if (error) throw Error(ErrorKind::kIo, checkpoint + ": cannot be removed: " + error.message());
  }
  Metrics metrics(options.out + "/metrics.jsonl", trainer.numbers().metrics_bytes);
  const double peak = fma_peak_flops(context.isa()) * static_cast<double>(context.threads());
  const auto tokens =
      static_cast<double>(options.batch * options.context * options.grad_accumulation);
  const auto flops_per_token =
      6 * static_cast<double>(trainer.network().parameters_without_embeddings());
  const auto save = [&] {
    metrics.sync();
    trainer.save(checkpoint, metrics.bytes());
    trainer.save_model(options.out);
  };
  const auto& cancelled = context.impl().options().cancelled;

  double pace = 0;  // seconds of an iteration, smoothed
  TrainProgress now;
  now.iterations = options.iterations;
  bool saved = false;
  while (trainer.numbers().iteration < options.iterations) {
    const Clock::time_point begin = Clock::now();
    try {
      if (cancelled && cancelled()) throw Error(ErrorKind::kCancelled, "cancelled by the caller");
      trainer.iterate(now);
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCancelled) throw;
      if (!saved) save();
      break;
    }
    const double seconds = seconds_since(begin);
    pace = pace == 0 ? seconds : 0.9 * pace + 0.1 * seconds;
    const bool last = now.iteration == options.iterations;
    now.validation_loss =
        last || now.iteration % options.validate_every == 0 ? trainer.validate() : -1;
    metrics.append(now);
    saved = last || now.iteration % options.checkpoint_every == 0;
    if (saved) save();
    now.tokens_per_second = tokens / seconds;
    now.share_of_peak = flops_per_token * now.tokens_per_second / peak;
    now.seconds_left = pace * static_cast<double>(options.iterations - now.iteration);
    if (progress) progress(now);
  }
  const TrainingNumbers& numbers = trainer.numbers();
  return {numbers.iteration, numbers.loss, numbers.validation_loss, numbers.best_validation_loss};
}

}  // namespace ouzel
