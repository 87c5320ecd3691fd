// The mixers, made from a model's configuration: one file each.
#pragma once

#include <memory>
#include <string>

#include "src/layers/builder.h"
#include "src/layers/layer.h"

namespace ouzel {

// `prefix`: "model.layers.0.attn".
std::unique_ptr<Mixer> make_softmax_mixer(const Builder& builder, const std::string& prefix,
                                          const MixerConfig& config);
std::unique_ptr<Mixer> make_linear_mixer(const Builder& builder, const std::string& prefix,
                                         const MixerConfig& config);
std::unique_ptr<Mixer> make_retention_mixer(const Builder& builder, const std::string& prefix,
                                            const MixerConfig& config);

}  // namespace ouzel
