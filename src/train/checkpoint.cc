#include "src/train/checkpoint.h"

#include <charconv>
#include <filesystem>
#include <type_traits>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/text.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "src/models/checkpoint.h"
#include "src/train/metrics.h"

namespace ouzel {
namespace {

constexpr const char* kFormat = "ouzel-training-1";
constexpr const char* kCarried = "carried";
constexpr const char* kOption = "option.";
constexpr const char* kIterations = "option.iterations";

// What an option was, and is not now; of a model, the keys of its configuration that differ.
void add_differences(const std::string& path, const std::string& name, const std::string& was,
                     const std::string& now, std::vector<std::string>& differences) {
  if (name == "data") {
    differences.emplace_back("other text");
  } else if (name == "model") {
    const Json before = parse_json(was, path), after = parse_json(now, path);
    const auto value_of = [](const Json& config, const std::string& key) {
      return config.is_object() && config.contains(key) ? config[key].dump() : "(absent)";
    };
    Json keys = after;
    if (before.is_object()) keys.update(before);
    for (const auto& [key, ignored] : keys.items()) {
      const std::string old = value_of(before, key), other = value_of(after, key);
      if (old != other) differences.push_back(fmt::format("{} = {}, not {}", key, old, other));
    }
  } else {
    differences.push_back(fmt::format("{} = {}, not {}", name, was, now));
  }
}

std::vector<std::pair<const char*, std::span<float>>> sections(const TrainingArrays& arrays) {
  return {{"weight/", arrays.weights},
          {"first_moment/", arrays.first_moment},
          {"second_moment/", arrays.second_moment}};
}

// A number of the metadata; whole ones are counts.
template <class T>
T parse(const std::string& path, const std::map<std::string, std::string>& metadata,
        const char* key) {
  const auto found = metadata.find(key);
  const std::string text = found == metadata.end() ? "" : found->second;
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool negative = std::is_integral_v<T> && value < 0;
  if (error != std::errc() || end != text.data() + text.size() || negative) {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: '{}' is no value of {}", path, text, key));
  }
  return value;
}

}  // namespace

void save_training(const std::string& path, const ParameterTable& table,
                   const TrainingArrays& arrays, const TrainingNumbers& numbers,
                   const std::map<std::string, std::string>& identity) {
  std::vector<TensorToWrite> tensors;
  for (const auto& [prefix, values] : sections(arrays)) {
    for (TensorToWrite& tensor : tensors_of(table, values.data(), prefix)) {
      tensors.push_back(std::move(tensor));
    }
  }
  if (!arrays.carried.empty()) {
    tensors.push_back(
        {kCarried, View<const float, 1>(arrays.carried.data(), {std::ssize(arrays.carried)})});
  }
  std::map<std::string, std::string> metadata = {
      {"format", kFormat},
      {"iteration", std::to_string(numbers.iteration)},
      {"random_position", std::to_string(numbers.random_position)},
      {"metrics_bytes", std::to_string(numbers.metrics_bytes)},
      {"loss", fmt::format("{}", numbers.loss)},
      {"validation_loss", fmt::format("{}", numbers.validation_loss)},
      {"best_validation_loss", fmt::format("{}", numbers.best_validation_loss)}};
  for (const auto& [name, value] : identity) metadata[kOption + name] = value;
  write_safetensors(path, tensors, metadata);
}

TrainingNumbers load_training(const std::string& path, const ParameterTable& table,
                              const TrainingArrays& arrays,
                              const std::map<std::string, std::string>& identity) {
  const SafetensorsReader file(path);
  const std::map<std::string, std::string>& metadata = file.metadata();
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: {}", path, why));
  };
  const auto format = metadata.find("format");
  if (format == metadata.end() || format->second != kFormat) {
    fail(fmt::format("not a training checkpoint of format {}", kFormat));
  }
  std::vector<std::string> others;
  for (const auto& [name, value] : identity) {
    const auto found = metadata.find(kOption + name);
    const std::string was = found == metadata.end() ? "\"(absent)\"" : found->second;
    const bool longer = kOption + name == kIterations &&
                        parse<std::int64_t>(path, metadata, kIterations) < std::stoll(value);
    if (was != value && !longer) add_differences(path, name, was, value, others);
  }
  if (!others.empty()) {
    fail(
        fmt::format("this run was started with {}: its data and learning rates follow from its "
                    "start, and only more iterations may be asked for; give the options of its "
                    "start again, or start anew in another folder",
                    joined(others)));
  }
  const auto read = [&](const std::string& name, std::int64_t size, float* to) {
    const NamedTensor* tensor = file.find(name);
    if (tensor == nullptr || tensor->dtype != DType::kF32 || tensor->size() != size) {
      fail(fmt::format("tensor {} (F32, {} elements) is missing", name, size));
    }
    file.read_f32(*tensor, to);
  };
  for (const auto& [prefix, values] : sections(arrays)) {
    for (const ParameterInfo& info : table.list()) {
      read(prefix + info.name, info.size, values.data() + info.offset);
    }
  }
  if (!arrays.carried.empty()) read(kCarried, std::ssize(arrays.carried), arrays.carried.data());
  TrainingNumbers numbers;
  numbers.iteration = parse<std::int64_t>(path, metadata, "iteration");
  numbers.random_position = parse<std::uint64_t>(path, metadata, "random_position");
  numbers.metrics_bytes = parse<std::int64_t>(path, metadata, "metrics_bytes");
  numbers.loss = parse<double>(path, metadata, "loss");
  numbers.validation_loss = parse<double>(path, metadata, "validation_loss");
  numbers.best_validation_loss = parse<double>(path, metadata, "best_validation_loss");
  return numbers;
}

RunLength length_of_run(const std::string& folder) {
  const std::string checkpoint = folder + "/" + kTrainingFile;
  try {
    const SafetensorsReader file(checkpoint);
    return {parse<std::int64_t>(checkpoint, file.metadata(), "iteration"),
            parse<std::int64_t>(checkpoint, file.metadata(), kIterations)};
  } catch (const Error&) {
    return {};
  }
}

void refuse_used(const TrainOptions& options, const std::string& resume,
                 const std::string& overwrite) {
  target_of(options.out);  // links in a circle hold nothing, though all in them seems to be there
  if (options.overwrite || (options.resume && is_there(options.out + "/" + kTrainingFile))) return;
  const auto [iteration, iterations] = length_of_run(options.out);
  if (iteration != 0 && iteration < iterations) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{} holds a run that stopped after {} of {} iterations: go on with it "
                            "({}), replace it with a run from the start ({}), or choose another "
                            "folder",
                            options.out, iteration, iterations, resume, overwrite));
  }
  if (!holds_model(options.out)) {
    const std::string config = options.out + "/config.json";
    const std::string metrics = options.out + "/metrics.jsonl";
    constexpr std::uint64_t kMost = UINT64_C(1) << 26;
    const bool configured = is_there(config) && read_file(config, kMost) != options.model.to_json();
    if (!configured && !is_foreign_metrics(metrics)) return;
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{} is there without a model, and the run would replace it: choose "
                            "another folder, move it away, or replace it ({})",
                            configured ? config : metrics, overwrite));
  }
  if (options.resume) {
    throw Error(
        ErrorKind::kInvalidArgument,
        fmt::format("{} holds a trained model and no checkpoint to go on from. If a run that "
                    "replaces the model was stopped before its first checkpoint, start it "
                    "again ({} without {}); else choose another folder",
                    options.out, overwrite, resume));
  }
  throw Error(
      ErrorKind::kInvalidArgument,
      fmt::format("{} holds a trained model: choose another folder{}, or replace it ({})",
                  options.out,
                  iteration == 0 ? "" : fmt::format(", train it on ({}, more iterations)", resume),
                  overwrite));
}

}  // namespace ouzel
