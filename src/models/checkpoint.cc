#include "src/models/checkpoint.h"

#include <filesystem>
#include <map>
#include <set>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/dense_tensor.h"
#include "src/base/text.h"
#include "src/formats/files.h"
#include "src/formats/json.h"

namespace ouzel {
namespace {

constexpr std::uint64_t kMostJson = std::uint64_t{64} << 20;
constexpr const char* kConfig = "config.json";
constexpr const char* kWeights = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

[[noreturn]] void not_there(const std::string& folder, const std::string& why) {
  throw Error(ErrorKind::kIo, fmt::format("{}: {}", folder, why));
}

void check_weights(const std::string& folder) {
  if (holds_model(folder)) return;
  const bool pickled =
      is_there(folder + "/pytorch_model.bin") || is_there(folder + "/pytorch_model.bin.index.json");
  not_there(folder, std::string("config.json without weights: ") +
                        (pickled ? "those of pytorch_model.bin are not read; save them as "
                                   "safetensors"
                                 : "model.safetensors is missing; were all files copied or "
                                   "downloaded, and the model saved to its end?"));
}

struct Source {
  const SafetensorsReader* file = nullptr;
  const NamedTensor* tensor = nullptr;
};

bool is_real(std::optional<DType> dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 ||
         dtype == DType::kF64;
}

}  // namespace

bool holds_model(const std::string& folder) {
  return is_there(folder + "/" + kWeights) || is_there(folder + "/" + kIndex);
}

void check_holds_config(const std::string& folder) {
  std::error_code error;
  if (!is_there(folder)) {
    not_there(folder,
              "there is no such folder; a model is a folder on this machine with config.json and "
              "model.safetensors (names on a hub are not looked up: download the model first)");
  }
  if (std::filesystem::exists(folder, error) && !std::filesystem::is_directory(folder, error)) {
    not_there(folder,
              "not a folder; name the one that holds a model's config.json and model.safetensors");
  }
  if (is_there(folder + "/" + kConfig)) return;
  not_there(folder,
            holds_model(folder)
                ? "weights without their config.json: they were not copied together, or a save "
                  "into this folder was interrupted; copy it, save the model again, or resume its "
                  "training"
                : "no model is in this folder: config.json and model.safetensors are missing; name "
                  "the folder that holds them");
}

std::vector<std::string> weight_files(const std::string& folder) {
  check_weights(folder);
  const std::string index = folder + "/" + kIndex, single = folder + "/" + kWeights;
  if (is_there(single)) return {single};
  const Json json = parse_json(read_file(index, kMostJson), index);
  const auto fail = [&](const std::string& why) {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: {}", index, why));
  };
  const auto map = json.is_object() ? json.find("weight_map") : json.end();
  if (map == json.end() || !map->is_object()) fail("'weight_map' is missing");
  std::set<std::string> files;
  for (const Json& file : *map) {
    if (!file.is_string()) fail("'weight_map' should map names of tensors to names of files");
    const auto& name = file.get_ref<const std::string&>();
    if (name.empty() || name.find('/') != std::string::npos || name.front() == '.') {
      fail(fmt::format("'{}' is the name of no file of this folder", printable(name)));
    }
    files.insert(folder + "/" + name);
  }
  if (files.empty()) fail("'weight_map' names no files");
  return {files.begin(), files.end()};
}

std::unique_ptr<Network> load_network(const std::string& folder) {
  check_holds_config(folder);
  const std::string config = folder + "/" + kConfig;
  auto network =
      std::make_unique<Network>(ModelConfig::from_json(read_file(config, kMostJson), config));

  std::vector<SafetensorsReader> files;
  for (const std::string& file : weight_files(folder)) files.emplace_back(file);
  std::map<std::string, Source> sources;
  std::string faults;
  std::size_t fault_count = 0;
  // A model of another size would fill a terminal.
  constexpr std::size_t kMostNamed = 100;
  const auto fault = [&](const std::string& text) {
    if (fault_count++ < kMostNamed) faults += "\n  " + text;
  };
  for (const SafetensorsReader& file : files) {
    for (const NamedTensor& tensor : file.tensors()) {
      if (!sources.emplace(tensor.name, Source{&file, &tensor}).second) {
        fault(fmt::format("{} is in two files", tensor.name));
      }
    }
  }
  std::vector<Source> found;
  for (const ParameterInfo& info : network->table().list()) {
    const auto at = sources.find(info.name);
    if (at == sources.end()) {
      fault(fmt::format("{} {} is missing", info.name, shape_string(info.shape)));
      continue;
    }
    found.push_back(at->second);
    sources.erase(at);
    const NamedTensor& tensor = *found.back().tensor;
    if (tensor.shape != info.shape) {
      fault(fmt::format("{} should be {} and is {}", info.name, shape_string(info.shape),
                        shape_string(tensor.shape)));
    } else if (!is_real(tensor.dtype)) {
      fault(fmt::format("{} is of type {}, not F32, F16 or BF16", info.name, tensor.type));
    }
  }
  for (const std::string& alias : network->table().aliases()) sources.erase(alias);
  for (const auto& [name, source] : sources) {
    fault(fmt::format("{} {} is not used by this model", name, shape_string(source.tensor->shape)));
  }
  if (fault_count > kMostNamed) faults += fmt::format("\n  and {} more", fault_count - kMostNamed);
  if (!faults.empty()) {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: the tensors do not fit {}:{}",
                                                 files.front().path(), config, faults));
  }

  network->allocate();
  for (std::size_t i = 0; i < found.size(); ++i) {
    found[i].file->read_f32(*found[i].tensor,
                            network->weights() + network->table().list()[i].offset);
  }
  return network;
}

std::vector<TensorToWrite> tensors_of(const ParameterTable& table, const float* values,
                                      const std::string& prefix) {
  std::vector<TensorToWrite> tensors;
  for (const ParameterInfo& info : table.list()) {
    tensors.push_back(
        {prefix + info.name, dense_tensor(values + info.offset, DType::kF32, info.shape)});
  }
  return tensors;
}

void save_network(const Network& network, const std::string& folder) {
  make_folder(folder);
  const std::string config = network.config().to_json(), config_path = folder + "/" + kConfig;
  AtomicFile weights_file(folder + "/" + kWeights), config_file(config_path);
  write_safetensors(weights_file, tensors_of(network.table(), network.weights()),
                    {{"format", "pt"}});
  config_file.write(config);
  weights_file.finish();
  config_file.finish();
  // Whenever this ends, new weights must not stand beside a configuration of others: it would fit
  // them unseen. A folder without one is refused by all that load models.
  std::error_code error;
  const bool same = std::filesystem::file_size(config_path, error) == config.size() && !error &&
                    read_file(config_path) == config;
  if (!holds_model(folder)) {
    config_file.commit();
  } else if (!same) {
    config_file.remove_old();
  }
  weights_file.commit();
  config_file.commit();
}

}  // namespace ouzel
