// training.safetensors: all that a run needs to go on, in one file that is replaced atomically:
// weights, moments, carried states, and numbers. model.safetensors beside it holds the weights for
// users.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>

#include "ouzel/train.h"
#include "src/layers/parameters.h"

namespace ouzel {

// Everything beside the large arrays.
struct TrainingNumbers {
  std::int64_t iteration = 0;         // done
  std::uint64_t random_position = 0;  // of the generator that draws windows
  std::int64_t metrics_bytes = 0;
  double loss = 0;
  double validation_loss = -1, best_validation_loss = -1;
};

// The large arrays, in memory of the caller.
struct TrainingArrays {
  std::span<float> weights, first_moment, second_moment;  // in the table's layout
  std::span<float> carried;                               // states; empty: not carried
};

// `identity`: the options that the run depends on, by name.
void save_training(const std::string& path, const ParameterTable& table,
                   const TrainingArrays& arrays, const TrainingNumbers& numbers,
                   const std::map<std::string, std::string>& identity);
// Throws Error(kBadFile) for a damaged file, or one of other options, naming those that differ;
// more iterations than the run had are taken.
TrainingNumbers load_training(const std::string& path, const ParameterTable& table,
                              const TrainingArrays& arrays,
                              const std::map<std::string, std::string>& identity);

// Iterations of the run whose checkpoint is in a folder: those that are done, and those that were
// asked for. Zeros where there is none that could be gone on with.
struct RunLength {
  std::int64_t done = 0, asked = 0;
};
RunLength length_of_run(const std::string& folder);

// Throws Error(kInvalidArgument) when the run would not go on with what is in its folder and may
// not replace it: a run before its last iteration, or a model. `resume` and `overwrite` are what
// the caller's own caller knows these options by.
void refuse_used(const TrainOptions& options, const std::string& resume,
                 const std::string& overwrite);

}  // namespace ouzel
