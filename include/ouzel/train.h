// Training of a language model on the bytes of a file: AdamW (arXiv:1711.05101), linear warm-up and
// cosine decay, gradient clipping; checkpoints that hold everything, so that a run that was stopped
// at any moment continues bit for bit as if it had not been.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "ouzel/context.h"
#include "ouzel/export.h"
#include "ouzel/model.h"

namespace ouzel {

struct TrainOptions {
  ModelConfig model = {};
  std::string data = {};  // any file; its bytes are the tokens
  // Receives config.json and model.safetensors (the weights as they are at each checkpoint, after
  // the last iteration in the end, whatever the validation loss was before: Model::load reads the
  // folder), training.safetensors (all else that a resumed run needs) and metrics.jsonl.
  std::string out = {};
  std::int64_t context = 256;          // tokens of a window
  std::int64_t batch = 16;             // windows of a micro-batch
  std::int64_t grad_accumulation = 1;  // micro-batches of an iteration
  std::int64_t iterations = 1000;
  double lr = 3e-3;     // the peak, reached after `warmup` iterations
  double min_lr = 0.1;  // of the peak, at the last iteration
  std::int64_t warmup = 20;
  double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
  double weight_decay = 0.1;  // decoupled; none on norms, biases and gates
  double clip = 1;            // of the gradient's norm; 0: none
  std::uint64_t seed = 1;     // of the weights and of the windows
  // The last part of the data is held back for validation, this share of it; 0: none.
  double validation = 0.05;
  std::int64_t validate_every = 100;    // iterations; also after the last
  std::int64_t checkpoint_every = 100;  // iterations; also after the last and when cancelled
  // Keep of each layer its input only, and compute the rest again in the backward pass: the same
  // numbers, less memory.
  bool recompute = false;
  // Each row of the batch reads its own part of the data in order, and states pass from one window
  // to the next (gradients do not): truncated back-propagation through time.
  bool carry = false;
  // Go on from `out`, if a run has begun there; the other options must be those of its start, but
  // there may be more iterations. What is left then has the learning rates of a run of that length,
  // which are higher than where the shorter one ended: the result is not that of such a run from
  // its start. From there on a stop changes nothing again.
  bool resume = false;
  // Replace what a run has left in `out`. Without either, a folder that holds a run or a model is
  // refused.
  bool overwrite = false;
};

struct TrainProgress {
  std::int64_t iteration = 0, iterations = 0;  // done, of
  double loss = 0;                             // mean of the iteration, nats per token
  double validation_loss = -1;                 // nats per token; -1: not measured in this iteration
  double lr = 0, grad_norm = 0;                // the norm before clipping
  double tokens_per_second = 0;
  double share_of_peak =
      0;  // 6 * (parameters without embeddings) * tokens/s over the measured FMA peak
  double seconds_left = 0;
};

struct TrainResult {
  std::int64_t iteration = 0;  // done; less than asked for: cancelled
  double loss = 0;
  double validation_loss = -1;
  double best_validation_loss = -1;
};

struct TrainPlan {
  std::int64_t parameters = 0;
  std::int64_t parameters_without_embeddings = 0;  // nor lm_head
  std::size_t weight_bytes = 0;                    // weights in their plain and packed form
  std::size_t optimizer_bytes = 0;                 // gradients and moments
  std::size_t activation_bytes = 0;                // frames, logits, carried states
  std::size_t other_bytes = 0;                     // data, operators' scratch, the program itself
  std::size_t peak_bytes = 0;                      // their sum: the run stays below
};

// What `train` would take. Reads the size of the data, allocates nothing large.
OUZEL_EXPORT TrainPlan plan_training(Context& context, const TrainOptions& options);

// Trains. `progress` is told after every iteration. When the context is cancelled the run saves the
// last finished iteration and returns. Throws Error: kInvalidArgument (options that do not fit;
// data too small for a window), kBadFile (a checkpoint that is damaged or of other options), kIo
// (as well: another run is writing to `out`).
OUZEL_EXPORT TrainResult train(Context& context, const TrainOptions& options,
                               const std::function<void(const TrainProgress&)>& progress = {});

}  // namespace ouzel
