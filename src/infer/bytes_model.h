// What generation and evaluation ask of a model: that its tokens are bytes, and room for more of
// them in the states of softmax layers.
#pragma once

#include <cstdint>

#include "ouzel/model.h"

namespace ouzel {

inline constexpr std::int64_t kBytes = 256;

// Throws Error(kInvalidArgument), naming `what`, unless the model's vocabulary is the 256 bytes.
void check_bytes_model(const Model& model, const char* what);

// True if some layer keeps keys and values of every token.
bool keeps_every_token(const Model& model);

// Room for `tokens` more, by doubling, in a state of a model that keeps every token.
void make_room(State& state, std::int64_t tokens);

}  // namespace ouzel
