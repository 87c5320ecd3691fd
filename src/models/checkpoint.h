// Models in folders: config.json and safetensors, as Hugging Face's tools write them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "src/formats/safetensors.h"
#include "src/models/network.h"

namespace ouzel {

// In a folder that a run trains in: all that it needs to go on, weights too (src/train).
inline constexpr const char* kTrainingFile = "training.safetensors";

// Whether weights are in a folder: those that load_network reads.
bool holds_model(const std::string& folder);
// Throws Error(kIo) that says what is missing and what to do, if a folder has no config.json or is
// none.
void check_holds_config(const std::string& folder);
// The files that hold a model's tensors: one, or those that an index names. Throws Error(kIo) if
// there are none, Error(kBadFile) for an index that names no files of the folder.
std::vector<std::string> weight_files(const std::string& folder);
// See Model::load; the weights are not packed yet.
std::unique_ptr<Network> load_network(const std::string& folder);
// See Model::save.
void save_network(const Network& network, const std::string& folder);

// `values` has the layout of the table: its tensors, each name preceded by `prefix`.
std::vector<TensorToWrite> tensors_of(const ParameterTable& table, const float* values,
                                      const std::string& prefix = "");

}  // namespace ouzel
