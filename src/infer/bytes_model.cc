#include "src/infer/bytes_model.h"

#include <algorithm>

#include <fmt/format.h>

#include "ouzel/error.h"

namespace ouzel {

void check_bytes_model(const Model& model, const char* what) {
  const std::int64_t vocabulary = model.config().vocab_size;
  if (vocabulary == kBytes) return;
  throw Error(ErrorKind::kInvalidArgument,
              fmt::format("{}: the model has a vocabulary of {} tokens; only models of bytes "
                          "(vocab_size {}) can read and write text without a tokenizer",
                          what, vocabulary, kBytes));
}

bool keeps_every_token(const Model& model) {
  const ModelConfig& config = model.config();
  for (std::int64_t layer = 0; layer < config.num_hidden_layers; ++layer) {
    const MixerConfig& mixer = config.mixer_of(layer);
    if (mixer.kind == MixerKind::kSoftmaxAttention && mixer.window_size == 0) return true;
  }
  return false;
}

void make_room(State& state, std::int64_t tokens) {
  constexpr std::int64_t kLeast = 1024;
  const std::int64_t needed = state.position() + tokens;
  if (needed > state.capacity()) {
    state.reserve(std::max({needed, 2 * state.capacity(), kLeast}));
  }
}

}  // namespace ouzel
