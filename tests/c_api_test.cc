// The C ABI: the same results as the table's, codes and sentences instead of exceptions, structs of
// older versions, and states and streams that go on.
#include "ouzel/c.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ouzel/feature_map.h"
#include "ouzel/generate.h"
#include "ouzel/model.h"
#include "src/ops/registry.h"
#include "tests/c_api.h"

namespace ouzel::test {
namespace {

// What programs were compiled with: a change of these breaks them.
static_assert(offsetof(ouzel_tensor, name) == 8 && offsetof(ouzel_tensor, data) == 16 &&
              offsetof(ouzel_tensor, dtype) == 24 && offsetof(ouzel_tensor, rank) == 28 &&
              offsetof(ouzel_tensor, shape) == 32 && offsetof(ouzel_tensor, strides) == 96 &&
              sizeof(ouzel_tensor) >= 160);
static_assert(offsetof(ouzel_call, op) == 8 && offsetof(ouzel_call, attributes) == 16 &&
              offsetof(ouzel_call, inputs) == 24 && offsetof(ouzel_call, input_count) == 32 &&
              offsetof(ouzel_call, results) == 40 && offsetof(ouzel_call, result_count) == 48);
static_assert(offsetof(ouzel_context_options, threads) == 8 &&
              offsetof(ouzel_context_options, isa) == 16 &&
              offsetof(ouzel_context_options, cancelled) == 24 &&
              offsetof(ouzel_context_options, user) == 32);
static_assert(offsetof(ouzel_sampling, temperature) == 8 && offsetof(ouzel_sampling, top_k) == 16 &&
              offsetof(ouzel_sampling, seed) == 56 && offsetof(ouzel_sampling, stop) == 64);

TEST(CApi, RunsAnOperatorOfTheTable) {
  const ContextHandle context;
  RetentionCall call;
  call.attributes = {"scale", "0.5", nullptr};
  call.inputs.push_back(named("do", call.d_o, {1, 6, 2, 3}));
  call.results.push_back(named("final_state", call.s, {1, 2, 4, 3}));
  call.results.push_back(named("dv", call.d_v, {1, 6, 2, 3}));
  ASSERT_EQ(call.run(context.handle), OUZEL_OK) << ouzel_last_error();

  Context own;
  const OperatorInfo& info = find_operator("retention");
  const std::map<std::string, ConstTensor> tensors = {
      {"q", View<float, 4>(call.q.data(), {1, 6, 2, 4})},
      {"k", View<float, 4>(call.k.data(), {1, 6, 2, 4})},
      {"v", View<float, 4>(call.v.data(), {1, 6, 2, 3})},
      {"do", View<float, 4>(call.d_o.data(), {1, 6, 2, 3})}};
  int compared = 0;
  for (const NamedArray& result :
       run_operator(own, info, Attributes(info, {{"scale", "0.5"}}), tensors, true)) {
    for (const ouzel_tensor& got : call.results) {
      if (result.name != got.name) continue;
      ++compared;
      EXPECT_EQ(std::memcmp(got.data, result.array.memory.data(), result.array.memory.bytes()), 0)
          << result.name;
    }
  }
  EXPECT_EQ(compared, 3);
}

TEST(CApi, ListsTheTable) {
  ASSERT_EQ(ouzel_operator_count(), operators().size());
  for (std::size_t i = 0; i < operators().size(); ++i) {
    EXPECT_EQ(ouzel_operator_name(i), operators()[i].name);
  }
  EXPECT_EQ(ouzel_operator_name(operators().size()), nullptr);
}

TEST(CApi, StridesAndHalfFloatsAreTaken) {
  const ContextHandle context;
  RetentionCall dense, strided;
  ASSERT_EQ(dense.run(context.handle), OUZEL_OK);
  // v backwards in memory, and o with a gap.
  std::vector<float> turned(dense.v.rbegin(), dense.v.rend()), gaps(6 * 2 * 4);
  strided.inputs[2] = named("v", turned, {1, 6, 2, 3});
  strided.inputs[2].data = turned.data() + 35;
  const std::int64_t v_strides[] = {-36, -6, -3, -1}, o_strides[] = {48, 8, 4, 1};
  std::copy_n(v_strides, 4, strided.inputs[2].strides);
  strided.results[0] = named("o", gaps, {1, 6, 2, 3});
  std::copy_n(o_strides, 4, strided.results[0].strides);
  ASSERT_EQ(strided.run(context.handle), OUZEL_OK) << ouzel_last_error();
  for (std::size_t i = 0; i < 36; ++i) EXPECT_EQ(gaps[i / 3 * 4 + i % 3], dense.o[i]);

  // Ones in bfloat16 and the result in float16.
  RetentionCall half;
  std::vector<std::uint16_t> ones(48, 0x3f80), o(36);
  std::fill(half.k.begin(), half.k.end(), 1.f);
  ASSERT_EQ(half.run(context.handle), OUZEL_OK);
  const std::vector<float> expected = half.o;
  half.inputs[1].data = ones.data();
  half.inputs[1].dtype = OUZEL_BF16;
  ASSERT_EQ(half.run(context.handle), OUZEL_OK);
  EXPECT_EQ(half.o, expected);
  half.results[0].data = o.data();
  half.results[0].dtype = OUZEL_F16;
  ASSERT_EQ(half.run(context.handle), OUZEL_OK);
  EXPECT_EQ((o[0] & 0x8000) != 0, expected[0] < 0);
  EXPECT_NE(o[0] & 0x7fff, 0);
}

TEST(CApi, InfersWhatResultsAre) {
  RetentionCall call;
  call.results.push_back(named("final_state", call.s, {}));
  call.results.push_back(named("dv", call.d_v, {}));
  call.inputs.push_back(named("do", call.d_o, {1, 6, 2, 3}));
  call.inputs[0].dtype = OUZEL_BF16;
  for (ouzel_tensor& input : call.inputs) input.data = call.q.data();
  const ouzel_call given = call.call();
  ASSERT_EQ(ouzel_infer_results(&given), OUZEL_OK) << ouzel_last_error();
  EXPECT_EQ(call.results[0].dtype, OUZEL_BF16);
  EXPECT_EQ(call.results[1].dtype, OUZEL_F32);
  const std::vector<std::vector<std::int64_t>> shapes = {{1, 6, 2, 3}, {1, 2, 4, 3}, {1, 6, 2, 3}};
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    ASSERT_EQ(call.results[i].rank, 4);
    EXPECT_TRUE(std::equal(shapes[i].begin(), shapes[i].end(), call.results[i].shape));
  }
}

TEST(CApi, DrawsProjections) {
  for (const auto& [norms, of] : {std::pair{OUZEL_NORMS_CHI, ProjectionNorms::kChi},
                                  std::pair{OUZEL_NORMS_SQRT, ProjectionNorms::kSqrt}}) {
    std::vector<float> drawn(6 * 4), expected(6 * 4);
    EXPECT_EQ(ouzel_draw_orthogonal_projection(7, norms, 6, 4, drawn.data()), OUZEL_OK);
    draw_orthogonal_projection(7, of, View<float, 2>(expected.data(), {6, 4}));
    EXPECT_EQ(drawn, expected);
    EXPECT_EQ(ouzel_draw_orthogonal_projection(8, norms, 6, 4, drawn.data()), OUZEL_OK);
    EXPECT_NE(drawn, expected);
  }
  float w = 0;
  EXPECT_EQ(ouzel_draw_orthogonal_projection(7, 2, 1, 1, &w), OUZEL_INVALID_ARGUMENT);
  EXPECT_EQ(ouzel_draw_orthogonal_projection(7, OUZEL_NORMS_CHI, 0, 4, &w), OUZEL_INVALID_ARGUMENT);
  for (const auto& [rows, keys] : {std::pair<std::int64_t, std::int64_t>(1, INT64_C(1) << 62),
                                   {INT64_C(1) << 62, 1},
                                   {INT64_C(1) << 31, INT64_C(1) << 31}}) {
    expect_failure(ouzel_draw_orthogonal_projection(7, OUZEL_NORMS_CHI, rows, keys, &w),
                   OUZEL_INVALID_ARGUMENT, fmt::format("[{}, {}]", rows, keys).c_str());
  }
  EXPECT_EQ(ouzel_draw_orthogonal_projection(7, OUZEL_NORMS_CHI, 1, 1, nullptr),
            OUZEL_INVALID_ARGUMENT);
}

TEST(CApi, SaysWhatIsWrong) {
  const ContextHandle context;
  RetentionCall call;
  call.inputs[1].shape[3] = 2;
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT,
                 "retention: k has shape [1, 6, 2, 2]");
  call = RetentionCall();
  call.inputs[0].name = nullptr;
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "ouzel_tensor.name");
  call = RetentionCall();
  call.inputs[1].name = "q";
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "'q' is given twice");
  call = RetentionCall();
  call.inputs[1].data = nullptr;
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "its data is NULL");
  call = RetentionCall();
  call.inputs[1].rank = 6;
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "has rank 6");
  call = RetentionCall();
  call.inputs[1].dtype = 9;
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "dtype 9");
  call = RetentionCall();
  call.inputs[1].shape[1] = -6;
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "must not be negative");
  call = RetentionCall();
  call.attributes = {"scael", "1", nullptr};
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "did you mean 'scale'?");
  call.attributes = {"scale", nullptr};
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "value of an attribute");
  call = RetentionCall();
  call.results[0].name = "oo";
  expect_failure(call.run(context.handle), OUZEL_INVALID_ARGUMENT, "does not give 'oo'");
  expect_failure(RetentionCall().run(nullptr), OUZEL_INVALID_ARGUMENT, "context must not be NULL");
  expect_failure(ouzel_run(context.handle, nullptr), OUZEL_INVALID_ARGUMENT, "ouzel_call");
  ouzel_context* none = nullptr;
  ouzel_context_options options{};
  expect_failure(ouzel_context_create(&options, &none), OUZEL_INVALID_ARGUMENT,
                 "set it to sizeof(ouzel_context_options)");
  options.size = sizeof(options);
  options.isa = "mmx";
  expect_failure(ouzel_context_create(&options, &none), OUZEL_INVALID_ARGUMENT, "'mmx'");
  EXPECT_EQ(none, nullptr);
  ouzel_model* model = nullptr;
  // Sentences are UTF-8, whatever bytes a name has.
  expect_failure(ouzel_model_load(context.handle, "no\xffé\n\x1b", &model), OUZEL_IO,
                 "no\\xffé\n\\x1b: ");
  expect_failure(ouzel_model_load(context.handle, "no/such/folder", &model), OUZEL_IO,
                 "no/such/folder");
  EXPECT_EQ(model, nullptr);

  // The sentence is the thread's own.
  std::string elsewhere = "unset";
  std::thread([&] { elsewhere = ouzel_last_error(); }).join();
  EXPECT_EQ(elsewhere, "");
  EXPECT_NE(std::string(ouzel_last_error()), "");
}

TEST(CApi, StructsOfOtherVersionsAreTaken) {
  const ContextHandle context;
  RetentionCall now;
  ASSERT_EQ(now.run(context.handle), OUZEL_OK);

  // A later version: members behind those that are known, in arrays too.
  struct LaterTensor {
    ouzel_tensor known;
    std::int64_t unknown[3] = {7, 7, 7};
  };
  RetentionCall later;
  std::vector<LaterTensor> inputs;
  for (ouzel_tensor tensor : later.inputs) {
    tensor.size = sizeof(LaterTensor);
    inputs.push_back({tensor});
  }
  ouzel_call call = later.call();
  call.inputs = &inputs[0].known;
  ASSERT_EQ(ouzel_run(context.handle, &call), OUZEL_OK) << ouzel_last_error();
  EXPECT_EQ(later.o, now.o);

  // An earlier one: what lies behind its size is not looked at.
  ouzel_context_options options{};
  options.size = offsetof(ouzel_context_options, cancelled);
  options.threads = 2;
  options.cancelled = [](void*) { return std::int32_t{1}; };
  const ContextHandle earlier(&options);
  EXPECT_EQ(ouzel_context_threads(earlier.handle), 2);
  EXPECT_EQ(RetentionCall().run(earlier.handle), OUZEL_OK) << ouzel_last_error();
}

TEST(CApi, TheCallbackCancels) {
  ouzel_context_options options{};
  options.size = sizeof(options);
  options.threads = 1;
  options.isa = "portable";
  int asked = 0;
  options.user = &asked;
  options.cancelled = [](void* user) {
    ++*static_cast<int*>(user);
    return std::int32_t{1};
  };
  const ContextHandle context(&options);
  EXPECT_STREQ(ouzel_context_isa(context.handle), "portable");
  expect_failure(RetentionCall().run(context.handle), OUZEL_CANCELLED, "");
  EXPECT_GT(asked, 0);
}

TEST(CApi, ModelsAndGeneratorsAreCancelled) {
  const ContextHandle plain;
  const ModelHandle model(plain.handle);
  std::int32_t wanted = 0;
  ouzel_context_options options{};
  options.size = sizeof(options);
  options.user = &wanted;
  options.cancelled = [](void* user) { return *static_cast<std::int32_t*>(user); };
  const ContextHandle context(&options);
  ouzel_generator* generator = nullptr;
  ASSERT_EQ(ouzel_generator_create(context.handle, model.handle, nullptr, nullptr, &generator),
            OUZEL_OK);
  const std::vector<std::int32_t> tokens(64, 72);
  std::vector<float> logits(256);
  const auto forward = [&] {
    return ouzel_model_forward(model.handle, context.handle, tokens.data(), 1, 64, nullptr, 0,
                               logits.data());
  };
  const auto generate = [&] {
    const auto write = [](void*, const char*, std::size_t) { return std::int32_t{1}; };
    return ouzel_generator_generate(generator, 4, write, nullptr, nullptr);
  };
  ASSERT_EQ(forward(), OUZEL_OK) << ouzel_last_error();
  ASSERT_EQ(generate(), OUZEL_OK) << ouzel_last_error();
  wanted = 1;
  expect_failure(forward(), OUZEL_CANCELLED, "");
  expect_failure(generate(), OUZEL_CANCELLED, "");
  wanted = 0;
  EXPECT_EQ(forward(), OUZEL_OK) << ouzel_last_error();
  ouzel_generator_destroy(generator);
}

TEST(CApi, StepsGoOnWhereForwardEnded) {
  const ContextHandle context;
  const ModelHandle model(context.handle);
  EXPECT_EQ(ouzel_model_vocab_size(model.handle), 256);
  EXPECT_EQ(std::strlen(ouzel_model_fingerprint(model.handle)), 16u);
  const std::vector<std::int32_t> tokens = {72, 101, 108, 108, 111, 72, 101, 108, 108, 111};
  std::vector<float> all(10 * 256), last(2 * 256), step(256);
  ASSERT_EQ(ouzel_model_forward(model.handle, context.handle, tokens.data(), 1, 10, nullptr, 1,
                                all.data()),
            OUZEL_OK)
      << ouzel_last_error();

  // Two rows of five are the same text twice, each from zero.
  std::vector<ouzel_state*> states(2);
  for (ouzel_state*& state : states) {
    ASSERT_EQ(ouzel_state_create(model.handle, 5, &state), OUZEL_OK);
  }
  ASSERT_EQ(ouzel_model_forward(model.handle, context.handle, tokens.data(), 2, 5, states.data(), 0,
                                last.data()),
            OUZEL_OK);
  EXPECT_EQ(std::memcmp(&last[0], &all[4 * 256], 1024), 0);
  std::int32_t equal = 0;
  ASSERT_EQ(ouzel_state_equal(states[0], states[1], &equal), OUZEL_OK);
  EXPECT_EQ(equal, 1);
  EXPECT_EQ(ouzel_state_position(states[0]), 5);

  expect_failure(ouzel_model_step(model.handle, context.handle, 72, states[0], step.data()),
                 OUZEL_INVALID_ARGUMENT, "reserve");
  ASSERT_EQ(ouzel_state_reserve(states[0], 10), OUZEL_OK);
  EXPECT_EQ(ouzel_state_capacity(states[0]), 10);
  for (std::size_t t = 5; t < 10; ++t) {
    ASSERT_EQ(ouzel_model_step(model.handle, context.handle, tokens[t], states[0], step.data()),
              OUZEL_OK);
    double difference = 0;
    for (std::size_t i = 0; i < 256; ++i) {
      difference = std::max(difference, std::abs(double{step[i]} - all[t * 256 + i]));
    }
    EXPECT_LT(difference, 1e-4);
  }
  ASSERT_EQ(ouzel_state_equal(states[0], states[1], &equal), OUZEL_OK);
  EXPECT_EQ(equal, 0);
  for (ouzel_state* state : states) ouzel_state_destroy(state);
}

std::int32_t append(void* user, const char* text, std::size_t bytes) {
  static_cast<std::string*>(user)->append(text, bytes);
  return 1;
}

TEST(CApi, StreamsGoOnFromSavedStates) {
  const ContextHandle context;
  ouzel_generator *generator = nullptr, *again = nullptr;
  ouzel_state *state = nullptr, *copy = nullptr, *loaded = nullptr;
  const TempFolder folder;
  const std::string path = folder / "saved.state";
  ouzel_sampling sampling{};
  sampling.size = sizeof(sampling);
  ASSERT_EQ(ouzel_sampling_defaults(&sampling), OUZEL_OK);
  EXPECT_EQ(sampling.temperature, SamplingOptions().temperature);
  sampling.seed = 5;
  {
    const ModelHandle model(context.handle);
    ASSERT_EQ(ouzel_generator_create(context.handle, model.handle, nullptr, &sampling, &generator),
              OUZEL_OK);
    ASSERT_EQ(ouzel_generator_read(generator, "In the ", 7), OUZEL_OK);
    ASSERT_EQ(ouzel_generator_state(generator, &state), OUZEL_OK);
    ASSERT_EQ(ouzel_state_copy(state, &copy), OUZEL_OK);
    ASSERT_EQ(ouzel_state_save(copy, path.c_str()), OUZEL_OK) << ouzel_last_error();
    ASSERT_EQ(ouzel_state_load(model.handle, path.c_str(), 0, &loaded), OUZEL_OK);
    ASSERT_EQ(ouzel_generator_create(context.handle, model.handle, loaded, nullptr, &again),
              OUZEL_OK);
  }  // the generators keep what they need of the model
  std::int32_t equal = 0, finish = -1;
  ASSERT_EQ(ouzel_state_equal(state, loaded, &equal), OUZEL_OK);
  EXPECT_EQ(equal, 1);
  std::string first, second;
  ASSERT_EQ(ouzel_generator_generate(generator, 20, append, &first, &finish), OUZEL_OK);
  EXPECT_EQ(finish, OUZEL_FINISH_LENGTH);
  EXPECT_EQ(ouzel_generator_position(generator), 27);
  ASSERT_EQ(ouzel_generator_generate(again, 20, append, &second, nullptr), OUZEL_OK);
  EXPECT_EQ(first.size(), 20u);
  EXPECT_EQ(first, second);
  const auto stop = [](void*, const char*, std::size_t) { return std::int32_t{0}; };
  ASSERT_EQ(ouzel_generator_generate(again, 20, stop, nullptr, &finish), OUZEL_OK);
  EXPECT_EQ(finish, OUZEL_FINISH_CALLBACK);
  EXPECT_EQ(ouzel_generator_position(again), 28);

  // A callback of C++ that throws is a failure of the call.
  const auto throws = [](void*, const char*, std::size_t) -> std::int32_t { throw 1; };
  expect_failure(ouzel_generator_generate(again, 20, throws, nullptr, nullptr), OUZEL_INTERNAL,
                 "exception");

  // A callback may look at its generator, and not make it go on.
  struct Seen {
    ouzel_generator* self;
    std::vector<ouzel_status> codes = {};
    std::string sentence = "";
  } seen{again};
  const auto enters = [](void* user, const char*, std::size_t) -> std::int32_t {
    auto& my = *static_cast<Seen*>(user);
    const auto inner = [](void*, const char*, std::size_t) { return std::int32_t{1}; };
    my.codes.push_back(ouzel_generator_generate(my.self, 3, inner, nullptr, nullptr));
    my.sentence = ouzel_last_error();
    my.codes.push_back(ouzel_generator_read(my.self, "x", 1));
    ouzel_state* now = nullptr;
    my.codes.push_back(ouzel_generator_state(my.self, &now));
    ouzel_state_destroy(now);
    return 0;
  };
  const std::int64_t before = ouzel_generator_position(again);
  ASSERT_EQ(ouzel_generator_generate(again, 20, enters, &seen, &finish), OUZEL_OK);
  EXPECT_EQ(seen.codes,
            (std::vector<ouzel_status>{OUZEL_INVALID_ARGUMENT, OUZEL_INVALID_ARGUMENT, OUZEL_OK}));
  EXPECT_NE(seen.sentence.find("its own callback"), std::string::npos) << seen.sentence;
  EXPECT_EQ(ouzel_generator_position(again), before + 1);
  ASSERT_EQ(ouzel_generator_generate(again, 2, stop, nullptr, &finish), OUZEL_OK);  // and goes on

  for (ouzel_state* held : {state, copy, loaded}) ouzel_state_destroy(held);
  ouzel_generator_destroy(generator);
  ouzel_generator_destroy(again);
}

}  // namespace
}  // namespace ouzel::test
