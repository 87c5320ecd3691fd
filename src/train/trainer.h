// The training run: owns weights, gradients, moments and carried states, and takes one iteration at
// a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "ouzel/train.h"
#include "src/base/random.h"
#include "src/models/network.h"
#include "src/train/checkpoint.h"
#include "src/train/data.h"

namespace ouzel {

// An option by the name of its member, as whoever gave it knows it.
using Spelling = std::function<std::string(const std::string& option)>;
std::string spelled_as_member(const std::string& option);  // "TrainOptions::lr"

// Throws Error(kInvalidArgument) naming the option.
void check_options(const TrainOptions& options, const Spelling& spelled = spelled_as_member);

// Throws Error(kInvalidArgument) if a file of so many bytes has no window for each stream of the
// run.
void check_data_size(const TrainOptions& options, std::int64_t bytes);

// The rate of an iteration (from 0): linear over `warmup`, then half a cosine down to lr * min_lr.
double learning_rate(const TrainOptions& options, std::int64_t iteration);

// Bytes of the arena that a micro-batch, and a validation batch, take.
std::size_t arena_bytes(Context& context, const TrainOptions& options, const Network& network);

class Trainer {
 public:
  Trainer(Context& context, const TrainOptions& options);

  // Goes on from a checkpoint.
  void load(const std::string& path);
  void save(const std::string& path, std::int64_t metrics_bytes);
  void save_model(const std::string& folder) const;

  const TrainingNumbers& numbers() const { return numbers_; }
  const Network& network() const { return network_; }
  // One iteration; fills loss, lr and norm. When the context is cancelled midway nothing has
  // changed.
  void iterate(TrainProgress& progress);
  // Mean loss over evenly spaced windows of the part that is held back; -1: there is none.
  double validate();

 private:
  struct Range {
    std::int64_t offset = 0, size = 0;
    bool decays = false;
  };
  void fill_windows(Random& random, std::int64_t micro_batch);
  // The memory of a micro-batch's sequences in one of the two sets.
  std::vector<SequenceMemory> carried(std::int64_t micro_batch, int set);
  std::map<std::string, std::string> identity() const;
  TrainingArrays arrays();

  Context& context_;
  // For what must not be left half-done: the update of weights. Never cancelled.
  Context steady_;
  const TrainOptions options_;
  TokenData data_;
  Network network_;
  std::vector<Range> ranges_;  // of parameters, by weight decay
  Buffer gradients_, first_moment_, second_moment_, arena_;
  Buffer carried_[2];                   // before and after an iteration; exchanged when it is done
  std::int64_t carried_floats_ = 0;     // of one set
  std::int64_t windows_of_stream_ = 1;  // a stream of the batch starts anew after as many
  std::vector<std::int32_t> tokens_, targets_;
  std::vector<std::int64_t> positions_;
  std::vector<float> losses_;
  TrainingNumbers numbers_;
};

}  // namespace ouzel
