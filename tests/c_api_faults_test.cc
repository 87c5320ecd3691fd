// The C ABI under attack: what cannot be right is refused with a code and a sentence, whatever it
// is.
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/c.h"
#include "tests/c_api.h"

namespace ouzel::test {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 62, kLeast = INT64_MIN, kMost = INT64_MAX;

void expect_refused(ouzel_context* context, const char* part,
                    const std::function<void(RetentionCall&)>& spoil) {
  RetentionCall call;
  spoil(call);
  expect_failure(call.run(context), OUZEL_INVALID_ARGUMENT, part);
}

TEST(CApiFaults, ResultsAreGivenOnceAndApart) {
  const ContextHandle context;
  expect_refused(context.handle, "'o' is given twice",
                 [](RetentionCall& call) { call.results.push_back(call.results[0]); });
  RetentionCall twice;
  twice.results.push_back(twice.results[0]);
  const ouzel_call given = twice.call();
  expect_failure(ouzel_infer_results(&given), OUZEL_INVALID_ARGUMENT, "'o' is given twice");

  // Into an input, into half of another result, in memory that a result shares with itself.
  expect_refused(context.handle, "the memory for o overlaps that of v",
                 [](RetentionCall& call) { call.results[0].data = call.v.data(); });
  expect_refused(context.handle, "the memory for final_state overlaps that of o",
                 [](RetentionCall& call) {
                   call.results.push_back(named("final_state", call.o, {1, 2, 4, 3}));
                   call.results.back().data = call.o.data() + 12;
                 });
  expect_refused(context.handle, "overwrite each other", [](RetentionCall& call) {
    const std::int64_t strides[] = {36, 3, 3, 1};
    std::copy_n(strides, 4, call.results[0].strides);
  });
  expect_refused(context.handle, "overwrite each other", [](RetentionCall& call) {
    const std::int64_t strides[] = {36, -6, 3, 2};
    std::copy_n(strides, 4, call.results[0].strides);
    call.results[0].data = call.o.data() + 30;
  });
}

TEST(CApiFaults, AttributesAreGivenOnce) {
  const ContextHandle context;
  for (const char* again : {"0.5", "0.25"}) {
    expect_refused(context.handle, "attribute 'scale' is given twice", [&](RetentionCall& call) {
      call.attributes = {"scale", "0.5", "scale", again, nullptr};
    });
  }
}

TEST(CApiFaults, AStateMayBeWrittenOverAndResultsMayInterleave) {
  const ContextHandle context;
  RetentionCall apart;
  std::vector<float> before = pattern(24, 4), state = before;
  apart.inputs.push_back(named("initial_state", before, {1, 2, 4, 3}));
  apart.results.push_back(named("final_state", apart.s, {1, 2, 4, 3}));
  ASSERT_EQ(apart.run(context.handle), OUZEL_OK) << ouzel_last_error();
  RetentionCall over;
  over.inputs.push_back(named("initial_state", state, {1, 2, 4, 3}));
  over.results.push_back(named("final_state", state, {1, 2, 4, 3}));
  ASSERT_EQ(over.run(context.handle), OUZEL_OK) << ouzel_last_error();
  EXPECT_EQ(over.o, apart.o);
  EXPECT_EQ(state, apart.s);

  // The gradients of q and k beside each other, as of one projection.
  RetentionCall split;
  std::vector<float> both(96), dq(48), dk(48);
  split.inputs.push_back(named("do", split.d_o, {1, 6, 2, 3}));
  split.results = {named("dq", dq, {1, 6, 2, 4}), named("dk", dk, {1, 6, 2, 4})};
  ASSERT_EQ(split.run(context.handle), OUZEL_OK) << ouzel_last_error();
  const std::int64_t strides[] = {96, 16, 4, 1};
  for (std::size_t i = 0; i < 2; ++i) {
    split.results[i].data = both.data() + 8 * i;
    std::copy_n(strides, 4, split.results[i].strides);
  }
  ASSERT_EQ(split.run(context.handle), OUZEL_OK) << ouzel_last_error();
  for (std::size_t i = 0; i < 48; ++i) {
    EXPECT_EQ(both[i / 8 * 16 + i % 8], dq[i]);
    EXPECT_EQ(both[i / 8 * 16 + 8 + i % 8], dk[i]);
  }
}

TEST(CApiFaults, SizesAndStridesThatWrap) {
  const ContextHandle context;
  for (const std::int64_t extent : {kHuge, kMost, kLeast, std::int64_t{-1}}) {
    for (std::size_t axis = 0; axis < 4; ++axis) {
      expect_refused(context.handle, "",
                     [&](RetentionCall& call) { call.inputs[1].shape[axis] = extent; });
      expect_refused(context.handle, "",
                     [&](RetentionCall& call) { call.results[0].shape[axis] = extent; });
    }
  }
  // 2^62 elements are more than 2^63 bytes; so are 0 of them times 2^62, which no loop may meet.
  expect_refused(context.handle, "larger than 2^63 bytes", [](RetentionCall& call) {
    for (ouzel_tensor& input : call.inputs) input.shape[1] = kHuge;
  });
  expect_refused(context.handle, "", [](RetentionCall& call) {
    call.inputs[0].shape[0] = kHuge;
    call.inputs[0].shape[1] = 0;
  });
  for (const std::int64_t stride : {kHuge, -kHuge, kMost, kLeast}) {
    expect_refused(context.handle, "leads beyond 2^63 bytes", [&](RetentionCall& call) {
      const std::int64_t strides[] = {48, stride, 4, 1};
      std::copy_n(strides, 4, call.inputs[1].strides);
    });
    expect_refused(context.handle, "leads beyond 2^63 bytes", [&](RetentionCall& call) {
      const std::int64_t strides[] = {36, stride, 3, 1};
      std::copy_n(strides, 4, call.results[0].strides);
    });
  }
}

TEST(CApiFaults, StructsAndNamesThatAreNone) {
  const ContextHandle context;
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{9}, std::size_t{4097},
                                 std::numeric_limits<std::size_t>::max()}) {
    expect_refused(context.handle, "set it to sizeof(ouzel_tensor)",
                   [&](RetentionCall& call) { call.inputs[0].size = size; });
    expect_refused(context.handle, "set it to sizeof(ouzel_call)",
                   [&](RetentionCall& call) { call.call_size = size; });
    ouzel_context_options options{};
    options.size = size;
    ouzel_context* none = nullptr;
    expect_failure(ouzel_context_create(&options, &none), OUZEL_INVALID_ARGUMENT,
                   "set it to sizeof(ouzel_context_options)");
  }
  // Elements of an array are as far apart as the first says.
  expect_refused(context.handle, "another size than the first of its array",
                 [](RetentionCall& call) { call.inputs[1].size -= 8; });
  // A struct of a version without shapes, even without a name, is a tensor of rank 0 without one.
  expect_refused(context.handle, "", [](RetentionCall& call) {
    for (ouzel_tensor& input : call.inputs) input.size = 8;
  });

  // Names from strangers: long, and not printable.
  const std::string longest(1 << 20, 'x'), rude = "q\x1b[2J\n\xff";
  for (const std::string& name : {longest, rude, std::string()}) {
    for (const auto& spoil : std::vector<std::function<void(RetentionCall&)>>{
             [&](RetentionCall& call) { call.inputs[0].name = name.c_str(); },
             [&](RetentionCall& call) {
               call.inputs[0].name = name.c_str();
               call.inputs[0].rank = 99;
             },
             [&](RetentionCall& call) { call.results[0].name = name.c_str(); },
             [&](RetentionCall& call) {
               call.attributes = {name.c_str(), "1", nullptr};
             },
             [&](RetentionCall& call) {
               call.attributes = {"form", name.c_str(), nullptr};
             },
             [&](RetentionCall& call) {
               call.attributes = {"cu_seqlens", name.c_str(), nullptr};
             }}) {
      RetentionCall call;
      spoil(call);
      if (call.run(context.handle) == OUZEL_OK) continue;  // "" is an attribute's default
      const std::string sentence = ouzel_last_error();
      EXPECT_LT(sentence.size(), 2000u);
      EXPECT_EQ(sentence.find_first_of("\x1b\n\xff"), std::string::npos) << sentence;
    }
    ouzel_call call = RetentionCall().call();
    call.op = name.c_str();
    expect_failure(ouzel_run(context.handle, &call), OUZEL_INVALID_ARGUMENT, "no operator");
    EXPECT_LT(std::strlen(ouzel_last_error()), 2000u);
  }
  ouzel_call call = RetentionCall().call();
  call.op = nullptr;
  expect_failure(ouzel_run(context.handle, &call), OUZEL_INVALID_ARGUMENT, "ouzel_call.op");
  RetentionCall whole;
  call = whole.call();
  call.inputs = nullptr;
  expect_failure(ouzel_run(context.handle, &call), OUZEL_INVALID_ARGUMENT, "ouzel_call.inputs");
  call = whole.call();
  call.results = nullptr;
  expect_failure(ouzel_run(context.handle, &call), OUZEL_INVALID_ARGUMENT, "ouzel_call.results");
}

TEST(CApiFaults, NullHandlesAndPlaces) {
  const ContextHandle context;
  const ModelHandle model(context.handle);
  ouzel_state* state = nullptr;
  ASSERT_EQ(ouzel_state_create(model.handle, 4, &state), OUZEL_OK);
  ouzel_generator* generator = nullptr;
  ASSERT_EQ(ouzel_generator_create(context.handle, model.handle, nullptr, nullptr, &generator),
            OUZEL_OK);
  const auto write = [](void*, const char*, std::size_t) { return std::int32_t{1}; };
  const std::int32_t token = 72;
  std::int32_t equal = 0;
  std::array<float, 256> logits;
  const std::string folder = model.folder, path = model.temporary / "null.state";
  ouzel_model* no_model = nullptr;
  ouzel_state* no_state = nullptr;
  ouzel_generator* no_generator = nullptr;
  const ouzel_status all[] = {
      ouzel_context_create(nullptr, nullptr),
      ouzel_infer_results(nullptr),
      ouzel_model_load(nullptr, folder.c_str(), &no_model),
      ouzel_model_load(context.handle, nullptr, &no_model),
      ouzel_model_load(context.handle, folder.c_str(), nullptr),
      ouzel_model_forward(nullptr, context.handle, &token, 1, 1, nullptr, 0, logits.data()),
      ouzel_model_forward(model.handle, nullptr, &token, 1, 1, nullptr, 0, logits.data()),
      ouzel_model_forward(model.handle, context.handle, nullptr, 1, 1, nullptr, 0, logits.data()),
      ouzel_model_forward(model.handle, context.handle, &token, 1, 1, nullptr, 0, nullptr),
      ouzel_model_step(model.handle, context.handle, token, nullptr, logits.data()),
      ouzel_model_step(model.handle, context.handle, token, state, nullptr),
      ouzel_state_create(nullptr, 0, &no_state),
      ouzel_state_create(model.handle, 0, nullptr),
      ouzel_state_copy(nullptr, &no_state),
      ouzel_state_copy(state, nullptr),
      ouzel_state_load(nullptr, path.c_str(), 0, &no_state),
      ouzel_state_load(model.handle, nullptr, 0, &no_state),
      ouzel_state_load(model.handle, path.c_str(), 0, nullptr),
      ouzel_state_save(nullptr, path.c_str()),
      ouzel_state_save(state, nullptr),
      ouzel_state_equal(nullptr, state, &equal),
      ouzel_state_equal(state, nullptr, &equal),
      ouzel_state_equal(state, state, nullptr),
      ouzel_state_reserve(nullptr, 1),
      ouzel_sampling_defaults(nullptr),
      ouzel_generator_create(nullptr, model.handle, nullptr, nullptr, &no_generator),
      ouzel_generator_create(context.handle, nullptr, nullptr, nullptr, &no_generator),
      ouzel_generator_create(context.handle, model.handle, nullptr, nullptr, nullptr),
      ouzel_generator_read(nullptr, "x", 1),
      ouzel_generator_read(generator, nullptr, 1),
      ouzel_generator_generate(nullptr, 1, write, nullptr, nullptr),
      ouzel_generator_generate(generator, 1, nullptr, nullptr, nullptr),
      ouzel_generator_state(nullptr, &no_state),
      ouzel_generator_state(generator, nullptr),
  };
  for (std::size_t i = 0; i < std::size(all); ++i) {
    EXPECT_EQ(all[i], OUZEL_INVALID_ARGUMENT) << "call " << i;
  }
  EXPECT_TRUE(no_model == nullptr && no_state == nullptr && no_generator == nullptr);
  ouzel_context_destroy(nullptr);
  ouzel_model_destroy(nullptr);
  ouzel_state_destroy(nullptr);
  ouzel_generator_destroy(nullptr);
  ouzel_generator_destroy(generator);
  ouzel_state_destroy(state);
}

TEST(CApiFaults, StatesAndTokensOfModels) {
  const ContextHandle context;
  const ModelHandle model(context.handle);
  std::array<ouzel_state*, 2> states{};
  for (ouzel_state*& state : states) {
    ASSERT_EQ(ouzel_state_create(model.handle, 4, &state), OUZEL_OK);
  }
  std::array<float, 512> logits{};
  const std::array<std::int32_t, 4> tokens = {72, 101, 108, 108};
  const auto forward = [&](const std::int32_t* ids, std::int64_t batch, std::int64_t length) {
    return ouzel_model_forward(model.handle, context.handle, ids, batch, length, states.data(), 0,
                               logits.data());
  };
  // One state in two rows.
  ouzel_state* const second = std::exchange(states[1], states[0]);
  expect_failure(forward(tokens.data(), 2, 2), OUZEL_INVALID_ARGUMENT,
                 "sequences 0 and 1 were given the same state");
  states[1] = nullptr;
  expect_failure(forward(tokens.data(), 2, 2), OUZEL_INVALID_ARGUMENT, "a state must not be NULL");
  states[1] = second;
  for (const std::int32_t id : {-1, 256, INT32_MAX, INT32_MIN}) {
    const std::int32_t ids[] = {72, id};
    expect_failure(forward(ids, 2, 1), OUZEL_INVALID_ARGUMENT, "the vocabulary has 256");
  }
  const std::int64_t sizes[][2] = {{-1, 1},          {1, -1},        {kHuge, 2},
                                   {2, kHuge},       {kHuge, kHuge}, {kMost, kMost},
                                   {kLeast, kLeast}, {1, kHuge / 2}, {kHuge / 512, 1}};
  for (const auto& [batch, length] : sizes) {
    expect_failure(ouzel_model_forward(model.handle, context.handle, tokens.data(), batch, length,
                                       nullptr, 1, logits.data()),
                   OUZEL_INVALID_ARGUMENT, "must not be negative, nor their logits beyond");
  }
  for (const ouzel_state* state : states) EXPECT_EQ(ouzel_state_position(state), 0);

  // Capacities.
  ouzel_state* none = nullptr;
  for (const std::int64_t capacity : {kHuge, kMost, kLeast, std::int64_t{-1}}) {
    const char* part = capacity < 0 ? "negative; give 0 or more" : "ask for room for fewer";
    expect_failure(ouzel_state_create(model.handle, capacity, &none), OUZEL_INVALID_ARGUMENT, part);
    EXPECT_EQ(none, nullptr);
    expect_failure(ouzel_state_reserve(states[0], capacity), OUZEL_INVALID_ARGUMENT, part);
  }
  ASSERT_EQ(ouzel_state_reserve(states[0], 1), OUZEL_OK);  // there is room for more
  EXPECT_EQ(ouzel_state_capacity(states[0]), 4);
  expect_failure(ouzel_state_create(model.handle, std::int64_t{1} << 50, &none),
                 OUZEL_OUT_OF_MEMORY, "ask for room for fewer");
  const std::string path = model.temporary / "saved.state";
  ASSERT_EQ(ouzel_state_save(states[0], path.c_str()), OUZEL_OK);
  for (const std::int64_t capacity : {kHuge, kMost, kLeast, std::int64_t{-1}}) {
    expect_failure(ouzel_state_load(model.handle, path.c_str(), capacity, &none),
                   OUZEL_INVALID_ARGUMENT,
                   capacity < 0 ? "negative; give 0 or more" : "ask for room for fewer");
    EXPECT_EQ(none, nullptr);
  }
  for (ouzel_state* state : states) ouzel_state_destroy(state);
}

TEST(CApiFaults, SamplingAndGeneration) {
  const ContextHandle context;
  const ModelHandle model(context.handle);
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = HUGE_VAL;
  const auto create = [&](const std::function<void(ouzel_sampling&)>& spoil) {
    ouzel_sampling sampling{};
    sampling.size = sizeof(sampling);
    EXPECT_EQ(ouzel_sampling_defaults(&sampling), OUZEL_OK);
    spoil(sampling);
    ouzel_generator* none = nullptr;
    const ouzel_status status =
        ouzel_generator_create(context.handle, model.handle, nullptr, &sampling, &none);
    EXPECT_EQ(none, nullptr);
    return status;
  };
  for (const double x : {nan, infinite, -infinite, -1.0}) {
    expect_failure(create([&](auto& s) { s.temperature = x; }), OUZEL_INVALID_ARGUMENT, "temper");
    expect_failure(create([&](auto& s) { s.top_p = x; }), OUZEL_INVALID_ARGUMENT, "top-p");
    expect_failure(create([&](auto& s) { s.min_p = x; }), OUZEL_INVALID_ARGUMENT, "min-p");
    expect_failure(create([&](auto& s) { s.repetition_penalty = x; }), OUZEL_INVALID_ARGUMENT,
                   "penalty");
  }
  expect_failure(create([](auto& s) { s.top_k = kLeast; }), OUZEL_INVALID_ARGUMENT, "top-k");
  for (const std::int64_t x : {kHuge, kMost, kLeast}) {
    expect_failure(create([&](auto& s) { s.repetition_window = x; }), OUZEL_INVALID_ARGUMENT,
                   "window");
  }
  const char* const empty[] = {"", nullptr};
  expect_failure(create([&](auto& s) { s.stop = empty; }), OUZEL_INVALID_ARGUMENT, "stop text");
  const std::vector<const char*> many(100, "x");
  std::vector<const char*> ended = many;
  ended.push_back(nullptr);
  expect_failure(create([&](auto& s) { s.stop = ended.data(); }), OUZEL_INVALID_ARGUMENT,
                 "stop texts");

  ouzel_generator* generator = nullptr;
  ASSERT_EQ(ouzel_generator_create(context.handle, model.handle, nullptr, nullptr, &generator),
            OUZEL_OK);
  const auto write = [](void*, const char*, std::size_t) { return std::int32_t{0}; };
  expect_failure(ouzel_generator_generate(generator, -1, write, nullptr, nullptr),
                 OUZEL_INVALID_ARGUMENT, "0 or more");
  EXPECT_EQ(ouzel_generator_generate(generator, kMost, write, nullptr, nullptr), OUZEL_OK);
  ouzel_generator_destroy(generator);
}

// Callbacks that call back, and callbacks that throw.
TEST(CApiFaults, Callbacks) {
  static ouzel_context* inner = nullptr;
  static ouzel_status seen = OUZEL_OK;
  ouzel_context_options options{};
  options.size = sizeof(options);
  options.threads = 2;
  options.cancelled = [](void*) {
    seen = RetentionCall().run(inner);
    return std::int32_t{0};
  };
  const ContextHandle context(&options);
  inner = context.handle;
  EXPECT_EQ(RetentionCall().run(context.handle), OUZEL_OK) << ouzel_last_error();
  EXPECT_EQ(seen, OUZEL_INVALID_ARGUMENT);
  EXPECT_NE(std::string(ouzel_last_error()).find("in the middle of a call"), std::string::npos);
  const ContextHandle other;
  inner = other.handle;
  EXPECT_EQ(RetentionCall().run(context.handle), OUZEL_OK) << ouzel_last_error();
  EXPECT_EQ(seen, OUZEL_OK);

  options.cancelled = [](void*) -> std::int32_t { throw 1; };
  const ContextHandle throws(&options);
  expect_failure(RetentionCall().run(throws.handle), OUZEL_INTERNAL, "exception");
}

}  // namespace
}  // namespace ouzel::test
