// Models, their states and generation through C.
#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "src/capi/handles.h"

using namespace ouzel::capi;

namespace {

ouzel::SamplingOptions options_of(const ouzel_sampling& given) {
  const ouzel_sampling s = versioned(given, "ouzel_sampling");
  ouzel::SamplingOptions options;
  options.temperature = s.temperature;
  options.top_k = s.top_k;
  options.top_p = s.top_p;
  options.min_p = s.min_p;
  options.repetition_penalty = s.repetition_penalty;
  options.repetition_window = s.repetition_window;
  options.seed = s.seed;
  for (const char* const* text = s.stop; text != nullptr && *text != nullptr; ++text) {
    options.stop.emplace_back(*text);
  }
  return options;
}

}  // namespace

ouzel_status ouzel_model_load(ouzel_context* context, const char* folder, ouzel_model** model) {
  return guarded([&] {
    required(model, "the model") = nullptr;
    *model = new ouzel_model{ouzel::Model::load(required(context, "the context").context,
                                                &required(folder, "the folder"))};
  });
}

void ouzel_model_destroy(ouzel_model* model) { delete model; }
int64_t ouzel_model_vocab_size(const ouzel_model* model) {
  return model->model.config().vocab_size;
}
const char* ouzel_model_fingerprint(const ouzel_model* model) {
  return model->model.fingerprint().c_str();
}

ouzel_status ouzel_model_forward(const ouzel_model* model, ouzel_context* context,
                                 const int32_t* token_ids, int64_t batch, int64_t tokens,
                                 ouzel_state* const* states, int32_t every_token, float* logits) {
  return guarded([&] {
    const ouzel::Model& network = required(model, "the model").model;
    ouzel_context& with = required(context, "the context");
    int64_t count = 0;
    if (batch < 0 || tokens < 0 || __builtin_mul_overflow(batch, tokens, &count) ||
        std::max(batch, count) >
            INT64_MAX / std::max<int64_t>(network.config().vocab_size, 1) / 8) {
      throw ouzel::Error(ouzel::ErrorKind::kInvalidArgument,
                         "batch is " + std::to_string(batch) + " and tokens " +
                             std::to_string(tokens) +
                             "; they must not be negative, nor their logits beyond 2^63 bytes");
    }
    if (count != 0) required(token_ids, "the tokens");
    std::vector<ouzel::State*> list;
    for (int64_t n = 0; states != nullptr && n < batch; ++n) {
      list.push_back(&required(states[n], "a state").state);
    }
    const int64_t rows = every_token != 0 ? count : batch;
    if (rows != 0) required(logits, "the logits");
    network.forward(with.context, with.workspace, {token_ids, {batch, tokens}}, list,
                    {logits, {rows, network.config().vocab_size}},
                    every_token != 0 ? ouzel::LogitRows::kAll : ouzel::LogitRows::kLast);
  });
}

ouzel_status ouzel_model_step(const ouzel_model* model, ouzel_context* context, int32_t token_id,
                              ouzel_state* state, float* logits) {
  return ouzel_model_forward(model, context, &token_id, 1, 1, &state, 0, logits);
}

ouzel_status ouzel_state_create(const ouzel_model* model, int64_t capacity, ouzel_state** state) {
  return guarded([&] {
    required(state, "the state") = nullptr;
    *state = new ouzel_state{required(model, "the model").model.new_state(capacity)};
  });
}

ouzel_status ouzel_state_copy(const ouzel_state* state, ouzel_state** copy) {
  return guarded([&] {
    required(copy, "the copy") = nullptr;
    *copy = new ouzel_state{required(state, "the state").state};
  });
}

ouzel_status ouzel_state_load(const ouzel_model* model, const char* path, int64_t capacity,
                              ouzel_state** state) {
  return guarded([&] {
    required(state, "the state") = nullptr;
    *state = new ouzel_state{
        required(model, "the model").model.load_state(&required(path, "the path"), capacity)};
  });
}

ouzel_status ouzel_state_save(const ouzel_state* state, const char* path) {
  return guarded([&] { required(state, "the state").state.save(&required(path, "the path")); });
}

void ouzel_state_destroy(ouzel_state* state) { delete state; }

ouzel_status ouzel_state_equal(const ouzel_state* a, const ouzel_state* b, int32_t* equal) {
  return guarded([&] {
    required(equal, "the result") =
        required(a, "the first state").state == required(b, "the second state").state ? 1 : 0;
  });
}

ouzel_status ouzel_state_reserve(ouzel_state* state, int64_t tokens) {
  return guarded([&] { required(state, "the state").state.reserve(tokens); });
}

int64_t ouzel_state_capacity(const ouzel_state* state) { return state->state.capacity(); }
int64_t ouzel_state_position(const ouzel_state* state) { return state->state.position(); }
size_t ouzel_state_bytes(const ouzel_state* state) { return state->state.bytes(); }

ouzel_status ouzel_sampling_defaults(ouzel_sampling* sampling) {
  return guarded([&] {
    const size_t size = versioned(required(sampling, "the sampling"), "ouzel_sampling").size;
    const ouzel::SamplingOptions options;
    const ouzel_sampling defaults = {size,
                                     options.temperature,
                                     options.top_k,
                                     options.top_p,
                                     options.min_p,
                                     options.repetition_penalty,
                                     options.repetition_window,
                                     options.seed,
                                     nullptr};
    std::memcpy(sampling, &defaults, size < sizeof(defaults) ? size : sizeof(defaults));
  });
}

ouzel_status ouzel_generator_create(ouzel_context* context, const ouzel_model* model,
                                    const ouzel_state* state, const ouzel_sampling* sampling,
                                    ouzel_generator** generator) {
  return guarded([&] {
    required(generator, "the generator") = nullptr;
    ouzel::Context& with = required(context, "the context").context;
    const ouzel::Model& of = required(model, "the model").model;
    ouzel::State start = state != nullptr ? state->state : of.new_state();
    const ouzel::SamplingOptions options =
        sampling != nullptr ? options_of(*sampling) : ouzel::Generator::sampling_of(start);
    *generator =
        new ouzel_generator{state != nullptr ? ouzel::Generator(with, of, std::move(start), options)
                                             : ouzel::Generator(with, of, options)};
  });
}

void ouzel_generator_destroy(ouzel_generator* generator) { delete generator; }

ouzel_status ouzel_generator_read(ouzel_generator* generator, const char* text, size_t bytes) {
  return guarded([&] {
    ouzel::Generator& stream = required(generator, "the generator").generator;
    if (bytes != 0) stream.read({&required(text, "the text"), bytes});
  });
}

ouzel_status ouzel_generator_generate(ouzel_generator* generator, int64_t tokens, ouzel_write write,
                                      void* user, int32_t* finish) {
  return guarded([&] {
    required(write, "the callback");
    const ouzel::Finish why =
        required(generator, "the generator").generator.generate(tokens, [&](std::string_view text) {
          return write(user, text.data(), text.size()) != 0;
        });
    if (finish == nullptr) return;
    *finish = why == ouzel::Finish::kLength ? OUZEL_FINISH_LENGTH
              : why == ouzel::Finish::kStop ? OUZEL_FINISH_STOP
                                            : OUZEL_FINISH_CALLBACK;
  });
}

ouzel_status ouzel_generator_state(const ouzel_generator* generator, ouzel_state** state) {
  return guarded([&] {
    required(state, "the state") = nullptr;
    *state = new ouzel_state{required(generator, "the generator").generator.state()};
  });
}

int64_t ouzel_generator_position(const ouzel_generator* generator) {
  return generator->generator.position();
}
