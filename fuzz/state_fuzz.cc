// Files of states: any bytes give a state that the model goes on from, or an Error.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "fuzz/framed_mutator.h"
#include "fuzz/input_file.h"
#include "ouzel/error.h"
#include "ouzel/model.h"

namespace {

// A layer of each mixer, as small as they come.
struct Tiny {
  Tiny() : context({.threads = 1}), model(context, config(), 1) {}
  static ouzel::ModelConfig config() {
    auto config = ouzel::ModelConfig::defaults("retnet");
    config.hidden_size = 16;
    config.num_hidden_layers = 3;
    config.intermediate_size = 16;
    config.mixer.num_heads = 2;
    config.vocab_size = 8;
    for (const char* type : {"transformer", "linear_attn"}) {
      auto mixer = ouzel::ModelConfig::defaults(type).mixer;
      mixer.num_heads = 2;
      config.attn.push_back({{static_cast<std::int64_t>(config.attn.size()) + 1}, mixer});
    }
    return config;
  }
  void advance(ouzel::State& state) {
    const std::int32_t tokens[] = {1, 2, 3};
    float logits[8];
    model.forward(context, workspace, tokens, state, {logits, {1, 8}});
  }

  ouzel::Context context;
  ouzel::Model model;
  ouzel::Workspace workspace;
};

Tiny& tiny() {
  static Tiny instance;
  return instance;
}

}  // namespace

// A state of the model is the seed: the corpus is the first argument that is no flag.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  char** end = *argv + *argc;
  char** corpus = std::find_if(*argv + 1, end, [](const char* a) { return a[0] != '-'; });
  if (corpus != end && std::filesystem::is_directory(*corpus)) {
    ouzel::State state = tiny().model.new_state(8);
    tiny().advance(state);
    state.save(std::string(*corpus) + "/valid.state");
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ouzel::InputFile file(data, size);
  try {
    ouzel::State state = tiny().model.load_state(file.path(), 8);
    if (state.position() < 1'000'000) tiny().advance(state);
  } catch (const ouzel::Error&) {
  }
  return 0;
}
