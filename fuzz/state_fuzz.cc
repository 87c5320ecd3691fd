// State files: any bytes give a state of the model that can go on, or an Error. Inputs too short to
// be a file are replaced by a good one, from which the mutations start.
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <string>
#include <vector>

#include "fuzz/framed_mutator.h"
#include "fuzz/input_file.h"
#include "ouzel/error.h"
#include "ouzel/model.h"
#include "src/formats/files.h"

namespace {

using namespace ouzel;

// Layers of all three kinds, as small as they can be.
struct Fixture {
  Context context{ContextOptions{.threads = 1}};
  Model model{context, config(), 1};
  Workspace workspace;
  std::string good;  // the bytes of a state after some tokens

  static ModelConfig config() {
    ModelConfig config = ModelConfig::defaults("retnet");
    config.vocab_size = 16;
    config.hidden_size = 8;
    config.num_hidden_layers = 3;
    config.intermediate_size = 8;
    config.mixer.num_heads = 2;
    config.attn = {{{1}, MixerConfig::defaults(MixerKind::kSoftmaxAttention)},
                   {{2}, MixerConfig::defaults(MixerKind::kLinearAttention)}};
    for (ModelConfig::Hybrid& hybrid : config.attn) hybrid.mixer.num_heads = 2;
    config.attn[1].mixer.use_short_conv = true;
    return config;
  }

  Fixture() {
    State state = model.new_state(4);
    advance(state);
    state.sampler = {1, 2, 3};
    const auto path =
        std::filesystem::temp_directory_path() / ("ouzel-state-fuzz-" + std::to_string(::getpid()));
    state.save(path.string());
    good = read_file(path.string());
    std::filesystem::remove(path);
  }

  void advance(State& state) {
    const std::vector<std::int32_t> tokens = {1, 2, 3};
    std::vector<float> logits(16);
    model.forward(context, workspace, tokens, state, {logits.data(), {1, 16}});
  }
};

Fixture& fixture() {
  static Fixture one;
  return one;
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  const std::string& good = fixture().good;
  if (size < 8 && good.size() <= max_size) {
    std::memcpy(data, good.data(), good.size());
    return good.size();
  }
  return mutate_framed(data, size, max_size, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const InputFile file(data, size);
  try {
    State state = fixture().model.load_state(file.path(), 1);
    if (state.position() > 1000) return 0;  // room for so many tokens is a matter of memory
    state.reserve(state.position() + 3);
    fixture().advance(state);
  } catch (const Error&) {
  }
  return 0;
}
