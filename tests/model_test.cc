// Models: prefill against steps and splits, batches, packed sequences, checkpoints in other
// people's types, errors that name every wrong tensor, shared models.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/model.h"
#include "src/base/half.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "tests/compare.h"
#include "tests/count_allocations.h"
#include "tests/model_cases.h"
#include "tests/model_runs.h"
#include "tests/temp_folder.h"

namespace ouzel::test {
namespace {

TEST(Model, LogitsAgreeWithFloat64) {
  for (const Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const auto& [name, config] : model_cases()) {
      SCOPED_TRACE(std::string(name_of(isa)) + " " + name);
      const Model model(context, config, 5);
      const auto tokens = random_tokens(70, config.vocab_size, 1);
      const ReferenceModel twin(config, model.parameters());
      std::vector<float> truth;
      for (const auto& row : twin.logits(tokens)) {
        for (double value : row) truth.push_back(static_cast<float>(value));
      }
      EXPECT_LT(error(run_whole(model, context, tokens), truth), 2e-5);
    }
  }
}

TEST(Model, PiecesAndStepsAgreeWithTheWhole) {
  for (const Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const auto& [name, config] : model_cases()) {
      SCOPED_TRACE(std::string(name_of(isa)) + " " + name);
      const Model model(context, config, 5);
      const std::int64_t length = 90;
      const auto tokens = random_tokens(length, config.vocab_size, 1);
      const std::vector<float> whole = run_whole(model, context, tokens);
      const std::vector<std::vector<std::int64_t>> splits = {
          std::vector<std::int64_t>(90, 1), {1, 89}, {89, 1}, {0, 3, 4, 5, 6, 72}, {64, 26}};
      for (const auto& pieces : splits) {
        State state = model.new_state(length);
        EXPECT_LT(error(run_pieces(model, context, tokens, pieces, state), whole), 5e-6);
        EXPECT_EQ(state.position(), length);
      }
      // Bit for bit where the split is a multiple of 64 tokens.
      State state = model.new_state(length);
      EXPECT_EQ(run_pieces(model, context, tokens, {64, 26}, state), whole);
    }
  }
}

TEST(Model, BatchesAndPackedSequencesGiveTheBitsOfSingleOnes) {
  Context context({.threads = 3, .poison_scratch = true});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const Model model(context, config, 5);
    const std::int64_t vocab = config.vocab_size, length = 21;
    const auto tokens = random_tokens(2 * length, vocab, 1);
    const std::vector<std::int32_t> first(tokens.begin(), tokens.begin() + length),
        second(tokens.begin() + length, tokens.end());
    State a = model.new_state(64), b = model.new_state(64);
    std::vector<float> expected = run_pieces(model, context, first, {length}, a);
    const std::vector<float> more = run_pieces(model, context, second, {length}, b);
    expected.insert(expected.end(), more.begin(), more.end());

    Workspace workspace;
    State c = model.new_state(64), d = model.new_state(64), empty = model.new_state(64);
    State* const pair[] = {&c, &d};
    std::vector<float> logits(expected.size());
    model.forward(context, workspace, {tokens.data(), {2, length}}, pair,
                  {logits.data(), {2 * length, vocab}}, LogitRows::kAll);
    EXPECT_EQ(logits, expected);
    EXPECT_TRUE(a == c && b == d);

    // Packed behind and between padding that is no token at all, with an empty sequence.
    std::vector<std::int32_t> packed(static_cast<std::size_t>(2 * length + 5), -1);
    std::copy(first.begin(), first.end(), packed.begin() + 2);
    std::copy(second.begin(), second.end(), packed.begin() + 4 + length);
    const Segments segments{{{0, 2, length}, {0, 2 + length, 0}, {0, 4 + length, length}}};
    c = model.new_state(64);
    d = model.new_state(64);
    State* const three[] = {&c, &empty, &d};
    std::vector<float> rows(packed.size() * static_cast<std::size_t>(vocab), 1.0f);
    model.forward(context, workspace, {packed.data(), {1, std::ssize(packed)}}, three,
                  {rows.data(), {std::ssize(packed), vocab}}, LogitRows::kAll, &segments);
    EXPECT_EQ(std::vector<float>(rows.begin() + 2 * vocab, rows.begin() + (2 + length) * vocab),
              std::vector<float>(expected.begin(), expected.begin() + length * vocab));
    EXPECT_EQ(std::vector<float>(rows.begin() + (4 + length) * vocab,
                                 rows.begin() + (4 + 2 * length) * vocab),
              more);
    for (std::int64_t i = 0; i < 2 * vocab; ++i) EXPECT_EQ(rows[static_cast<std::size_t>(i)], 0);
    EXPECT_TRUE(a == c && b == d && empty == model.new_state());

    // The last rows alone, and the next token of each as a step.
    State e = model.new_state(64), f = model.new_state(64);
    State* const two[] = {&e, &f};
    std::vector<float> last(static_cast<std::size_t>(2 * vocab)), alone = last, both = last;
    model.forward(context, workspace, {tokens.data(), {2, length}}, two, {last.data(), {2, vocab}});
    EXPECT_EQ(std::vector<float>(last.begin(), last.begin() + vocab),
              std::vector<float>(expected.begin() + (length - 1) * vocab,
                                 expected.begin() + length * vocab));
    const std::int32_t next[] = {3, 4};
    model.forward(context, workspace, {next, {2, 1}}, two, {both.data(), {2, vocab}});
    model.forward(context, workspace, std::span(next, 1), a, {alone.data(), {1, vocab}});
    model.forward(context, workspace, std::span(next + 1, 1), b,
                  {alone.data() + vocab, {1, vocab}});
    EXPECT_EQ(both, alone);
    EXPECT_TRUE(a == e && b == f);
  }
}

TEST(Model, StepsAllocateNothing) {
  Context context({.threads = 2});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const Model model(context, config, 5);
    State state = model.new_state(64);
    Workspace workspace;
    std::vector<float> logits(static_cast<std::size_t>(config.vocab_size));
    const std::int32_t token[] = {7};
    std::int64_t before = 0;
    for (int i = 0; i < 40; ++i) {
      if (i == 10) before = allocations;
      model.forward(context, workspace, token, state, {logits.data(), {1, config.vocab_size}});
    }
    EXPECT_EQ(allocations - before, 0);
  }
}

TEST(Model, SavesAndLoads) {
  Context context({.threads = 2});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const TempFolder folder;
    const Model model(context, config, 5);
    model.save(folder / "model");
    const Model again = Model::load(context, folder / "model");
    EXPECT_EQ(again.config().to_json(), config.to_json());
    EXPECT_EQ(again.fingerprint(), model.fingerprint());
    EXPECT_EQ(again.parameter_count(), model.parameter_count());
    const auto tokens = random_tokens(20, config.vocab_size, 1);
    EXPECT_EQ(run_whole(again, context, tokens), run_whole(model, context, tokens));
    EXPECT_NE(Model(context, config, 6).fingerprint(), model.fingerprint());
  }
}

TEST(Model, CarriesTheNamesOfFlashLinearAttention) {
  Context context({.threads = 1});
  const auto names = [&](const ModelConfig& config) {
    std::string text;
    for (const Parameter& p : Model(context, config, 1).parameters()) {
      text += p.name + " " + shape_string(p.tensor) + "\n";
    }
    return text;
  };
  const auto cases = model_cases();
  EXPECT_EQ(names(cases[6].config),  // retnet_gqa_conv_ungated
            [] {
              std::string text = "model.embeddings.weight [19, 16]\n";
              for (const char* layer : {"model.layers.0.", "model.layers.1."}) {
                for (const char* tensor :
                     {"attn_norm.weight [16]", "attn.q_proj.weight [16, 16]",
                      "attn.k_proj.weight [8, 16]", "attn.v_proj.weight [16, 16]",
                      "attn.q_conv1d.weight [16, 1, 4]", "attn.k_conv1d.weight [8, 1, 4]",
                      "attn.v_conv1d.weight [16, 1, 4]", "attn.g_norm.weight [8]",
                      "attn.o_proj.weight [16, 32]", "mlp_norm.weight [16]",
                      "mlp.gate_proj.weight [29, 16]", "mlp.up_proj.weight [29, 16]",
                      "mlp.down_proj.weight [16, 29]"}) {
                  text += layer + std::string(tensor) + "\n";
                }
              }
              return text + "model.norm.weight [16]\nlm_head.weight [19, 16]\n";
            }());
  expect_contains(names(cases[2].config),
                  {"attn.feature_map_q.layer1.weight [6, 6]", "attn.feature_map_q.layer1.bias [6]",
                   "attn.feature_map_k.layer2.weight [6, 6]", "attn.norm.weight [6]"});
  expect_contains(names(cases[5].config),
                  {"attn.g_norm_swish_gate.weight [12]", "attn.g_proj.weight [36, 18]"});
  expect_contains(names(cases[1].config), {"attn.q_norm.weight [6]", "attn.k_proj.bias [12]"});
  EXPECT_EQ(names(cases[1].config).find("lm_head"), std::string::npos);
}

// Files by other writers: half types, a double, foreign metadata, shards and their index.
TEST(Model, LoadsFilesOfOtherWriters) {
  Context context({.threads = 2});
  const ModelConfig config = model_cases()[1].config;
  const Model model(context, config, 5);
  const TempFolder folder;
  model.save(folder.path());
  std::filesystem::remove(folder / "model.safetensors");

  std::vector<std::vector<std::uint16_t>> halves;
  std::vector<double> doubles;
  std::vector<TensorToWrite> shards[2];
  Json index;
  int number = 0;
  const std::vector<Parameter> parameters = model.parameters();
  for (const Parameter& p : parameters) {
    const float* values = static_cast<const float*>(p.tensor.data);
    ConstTensor tensor = p.tensor;
    const int type = number % 4;
    if (type == 3) {
      doubles.assign(values, values + p.tensor.size());
    } else if (type != 0) {
      halves.emplace_back();
      for (std::int64_t i = 0; i < p.tensor.size(); ++i) {
        halves.back().push_back(type == 1 ? to_bf16(values[i]).bits : to_f16(values[i]).bits);
      }
      tensor.dtype = type == 1 ? DType::kBF16 : DType::kF16;
      tensor.data = halves.back().data();
    }
    shards[number % 2].push_back({p.name, tensor});
    index["weight_map"][p.name] = number % 2 == 0 ? "a.safetensors" : "b.safetensors";
    ++number;
  }
  // A tied head may stand in the file too.
  std::vector<float> head(static_cast<std::size_t>(config.vocab_size * config.hidden_size));
  shards[1].push_back(
      {"lm_head.weight", View<float, 2>(head.data(), {config.vocab_size, config.hidden_size})});
  write_safetensors(folder / "a.safetensors", shards[0], {{"format", "pt"}, {"who", "else"}});
  write_safetensors(folder / "b.safetensors", shards[1], {});
  write_file(folder / "model.safetensors.index.json", index.dump());

  const Model loaded = Model::load(context, folder.path());
  const std::vector<Parameter> got = loaded.parameters();
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const float* was = static_cast<const float*>(parameters[i].tensor.data);
    const float* is = static_cast<const float*>(got[i].tensor.data);
    for (std::int64_t j = 0; j < parameters[i].tensor.size(); ++j) {
      const float expected = i % 4 == 1   ? to_float(to_bf16(was[j]))
                             : i % 4 == 2 ? to_float(to_f16(was[j]))
                                          : was[j];
      ASSERT_EQ(is[j], expected) << parameters[i].name;
    }
  }

  index["weight_map"]["model.norm.weight"] = "../a.safetensors";
  write_file(folder / "model.safetensors.index.json", index.dump());
  expect_contains(message_of([&] { Model::load(context, folder.path()); }, ErrorKind::kBadFile),
                  {"../a.safetensors"});
  write_file(folder / "model.safetensors.index.json", R"({"weight_map": {}})");
  expect_contains(message_of([&] { Model::load(context, folder.path()); }, ErrorKind::kBadFile),
                  {"'weight_map' names no files"});
}

TEST(Model, NamesEveryWrongTensor) {
  Context context({.threads = 1});
  const Model model(context, model_cases()[0].config, 5);
  const TempFolder folder;
  model.save(folder.path());
  std::vector<TensorToWrite> tensors;
  const std::vector<std::int32_t> numbers(200, 1);
  for (const Parameter& p : model.parameters()) {
    ConstTensor tensor = p.tensor;
    if (p.name == "model.norm.weight") continue;
    if (p.name == "model.layers.0.mlp.up_proj.weight")
      std::swap(tensor.extent[0], tensor.extent[1]);
    if (p.name == "model.layers.0.mlp.up_proj.weight") tensor.stride[0] = tensor.extent[1];
    if (p.name == "model.layers.1.attn_norm.weight") {
      tensor.dtype = DType::kI32;
      tensor.data = numbers.data();
    }
    tensors.push_back({p.name, tensor});
  }
  const float extra[] = {1, 2};
  tensors.push_back({"model.layers.2.attn_norm.weight", View<const float, 1>(extra, {2})});
  write_safetensors(folder / "model.safetensors", tensors, {});
  expect_contains(message_of([&] { Model::load(context, folder.path()); }, ErrorKind::kBadFile),
                  {"model.norm.weight [18] is missing",
                   "model.layers.0.mlp.up_proj.weight should be [29, 18] and is [18, 29]",
                   "model.layers.1.attn_norm.weight is of type I32",
                   "model.layers.2.attn_norm.weight [2] is not used"});
}

// A model of another size has thousands of them.
TEST(Model, NamesAHundredWrongTensors) {
  Context context({.threads = 1});
  const Model model(context, model_cases()[0].config, 5);
  const TempFolder folder;
  model.save(folder.path());
  std::vector<TensorToWrite> tensors;
  for (const Parameter& p : model.parameters()) tensors.push_back({p.name, p.tensor});
  const float extra[] = {1};
  for (const int count : {100, 101, 250}) {
    while (std::ssize(tensors) < std::ssize(model.parameters()) + count) {
      tensors.push_back(
          {fmt::format("extra.{}", tensors.size()), View<const float, 1>(extra, {1})});
    }
    write_safetensors(folder / "model.safetensors", tensors, {});
    const std::string sentence =
        message_of([&] { Model::load(context, folder.path()); }, ErrorKind::kBadFile);
    EXPECT_EQ(std::ranges::count(sentence, '\n'), 100 + (count > 100)) << sentence;
    const bool more = sentence.find(fmt::format("and {} more", count - 100)) != std::string::npos;
    EXPECT_EQ(more, count > 100) << sentence;
  }
}

TEST(Model, RefusesFeatureMapsThatStatesCannotHold) {
  for (FeatureMapKind kind : {FeatureMapKind::kExp, FeatureMapKind::kFavorPositive}) {
    ModelConfig config = ModelConfig::defaults("linear_attn");
    config.check();
    config.mixer.feature_map = kind;
    EXPECT_NE(message_of([&] { config.check(); }, ErrorKind::kInvalidArgument).find("feature_map"),
              std::string::npos);
  }
}

TEST(Model, RefusesConfigurations) {
  const auto refused = [](const char* text, const std::vector<std::string>& parts) {
    expect_contains(
        message_of([&] { ModelConfig::from_json(text, "config.json"); }, ErrorKind::kBadFile),
        parts);
  };
  refused("[1]", {"config.json"});
  refused(R"({"model_type": "llama"})", {"config.json", "llama"});
  refused(R"({"hidden_size": 9})", {"'model_type' is missing; it is one of transformer, linear"});
  refused(R"({"model_typ": "retnet"})", {"'model_type' is missing (is 'model_typ' meant?); it is"});
  refused(R"({"model_type": "retnet"})", {"num_heads", "missing"});
  const auto with = [](const std::string& more) {
    return R"({"model_type": "linear_attn", "vocab_size": 9, "hidden_size": 12,
               "num_hidden_layers": 2, "num_heads": 3)" +
           more + "}";
  };
  EXPECT_EQ(ModelConfig::from_json(with(""), "x").mlp_size(), 256);
  refused(with(R"(, "feature_map": "hedgehog")").c_str(), {"feature_map", "hedgehog"});
  refused(with(R"(, "norm_q": true)").c_str(), {"norm_q"});
  refused(with(R"(, "hidden_act": "gelu")").c_str(), {"hidden_act", "gelu"});
  refused(with(R"(, "expand_k": 0.9)").c_str(), {"key size 10", "3 heads"});
  refused(with(R"(, "norm_eps": "small")").c_str(), {"norm_eps", "small"});
  refused(with(R"(, "attn": {"layers": [2], "num_heads": 3})").c_str(), {"layer 2"});
  refused(with(R"(, "attn": [{"layers": [0], "num_heads": 3},
                            {"layers": [0], "num_heads": 3}])")
              .c_str(),
          {"layer 0 twice"});
  refused(with(R"(, "attn": {"layers": [0], "num_heads": 4})").c_str(), {"even head size"});
  refused(R"({"model_type": "retnet", "vocab_size": 9, "hidden_size": 99999999999,
              "num_hidden_layers": 2, "num_heads": 3})",
          {"hidden_size"});
}

TEST(Model, NamesKeysThatLookMisspelt) {
  const auto warnings = [](const std::string& type, const std::string& more) {
    return ModelConfig::from_json(R"({"vocab_size": 9, "hidden_size": 12, "num_hidden_layers": 2,
                                     "num_heads": 3, "model_type": ")" +
                                      type + "\"" + more + "}",
                                  "config.json")
        .warnings;
  };
  using Sentences = std::vector<std::string>;
  EXPECT_EQ(
      warnings("transformer", R"(, "num_kv_head": 1, "windowsize": 3)"),
      (Sentences{"config.json: there is no key 'num_kv_head'; did you mean 'num_kv_heads'? It "
                 "is ignored",
                 "config.json: there is no key 'windowsize'; did you mean 'window_size'? It is "
                 "ignored"}));
  // Beside num_heads it is another's, and no misspelling of a key that is further away.
  EXPECT_EQ(warnings("transformer", R"(, "num_head": 1)"), Sentences{});
  EXPECT_EQ(warnings("retnet", R"(, "attn": {"layers": [1], "num_heads": 2, "window_sise": 4})"),
            Sentences{"config.json: there is no key 'attn.window_sise'; did you mean "
                      "'attn.window_size'? It is ignored"});
  // The list ends.
  std::string many;
  for (int i = 0; i < 150; ++i) many += fmt::format(", \"norm_e{:02x}\": 1", i);
  const Sentences first = warnings("retnet", many);
  ASSERT_EQ(first.size(), 101u);
  EXPECT_EQ(first.back(), "config.json: and so on with 50 more keys");
  // A required key is missed for itself.
  expect_contains(message_of(
                      [] {
                        ModelConfig::from_json(R"({"model_type": "retnet", "num_head": 3,
                                                  "vocabsize": 9})",
                                               "config.json");
                      },
                      ErrorKind::kBadFile),
                  {"'num_heads' is missing (is 'num_head' meant?)",
                   "'vocab_size' is missing (is 'vocabsize' meant?)", "'hidden_size' is missing"});
  // Keys of other writers: flash-linear-attention's and all that transformers puts into a file.
  std::string others;
  for (const char* key : {"_name_or_path",
                          "add_cross_attention",
                          "architectures",
                          "attention_dropout",
                          "attn_mode",
                          "auto_map",
                          "bad_words_ids",
                          "begin_suppress_tokens",
                          "bos_token_id",
                          "chunk_size_feed_forward",
                          "cross_attention_hidden_size",
                          "decoder_start_token_id",
                          "diversity_penalty",
                          "do_sample",
                          "dtype",
                          "early_stopping",
                          "encoder_no_repeat_ngram_size",
                          "eos_token_id",
                          "exponential_decay_length_penalty",
                          "finetuning_task",
                          "forced_bos_token_id",
                          "forced_eos_token_id",
                          "fuse_cross_entropy",
                          "fuse_linear_cross_entropy",
                          "fuse_norm",
                          "fuse_swiglu",
                          "head_dim",
                          "id2label",
                          "is_decoder",
                          "is_encoder_decoder",
                          "label2id",
                          "length_penalty",
                          "max_length",
                          "max_position_embeddings",
                          "max_window_layers",
                          "min_length",
                          "no_repeat_ngram_size",
                          "num_beam_groups",
                          "num_beams",
                          "num_return_sequences",
                          "output_attentions",
                          "output_hidden_states",
                          "output_scores",
                          "pad_token_id",
                          "prefix",
                          "pretraining_tp",
                          "problem_type",
                          "pruned_heads",
                          "quantization_config",
                          "remove_invalid_values",
                          "repetition_penalty",
                          "residual_in_fp32",
                          "return_dict",
                          "return_dict_in_generate",
                          "sep_token_id",
                          "suppress_tokens",
                          "task_specific_params",
                          "temperature",
                          "tf_legacy_loss",
                          "tie_encoder_decoder",
                          "tokenizer_class",
                          "top_k",
                          "top_p",
                          "torch_dtype",
                          "torchscript",
                          "transformers_version",
                          "typical_p",
                          "unsloth_version",
                          "use_bfloat16",
                          "use_cache",
                          "use_l2warp",
                          "use_sliding_window"}) {
    others += ", \"" + std::string(key) + "\": 1";
  }
  for (const char* type : {"transformer", "linear_attn", "retnet"}) {
    EXPECT_EQ(warnings(type, others), Sentences{}) << type;
  }
}

TEST(Model, RefusesUnknownKeysOfConfigurationsWrittenForUs) {
  const auto read = [](const std::string& more) {
    return ModelConfig::from_json(
        R"({"model_type": "retnet", "vocab_size": 9, "hidden_size": 12, "num_hidden_layers": 2,
            "num_heads": 3)" +
            more + "}",
        "config.json", true);
  };
  const auto refused = [&](const std::string& more, const std::vector<std::string>& parts) {
    expect_contains(message_of([&] { read(more); }, ErrorKind::kBadFile), parts);
  };
  refused(R"(, "attention": {"layers": [1], "num_heads": 3})",
          {"config.json: there is no key 'attention'; leave it out"});
  refused(R"(, "num_head": 3, "head_dim": 4, "norm_esp": 1)",
          {"'num_head'; did you mean 'num_heads'?", "'head_dim'; leave it out\n",
           "'norm_esp'; did you mean 'norm_eps'?\n"});
  refused(R"(, "attn": {"layers": [1], "num_heads": 3, "window": 4})", {"no key 'attn.window'"});
  refused(R"(, "attn": [{"layers": [0], "num_heads": 2},
                       {"layers": [1], "num_heads": 2, "windows": 4}])",
          {"no key 'attn[1].windows'"});
  refused(R"(, "attn": {"layers": [1], "num_head": 3})",
          {"'attn.num_heads' is missing (is 'num_head' meant?)"});
  std::string many;
  for (int i = 0; i < 1000; ++i) many += fmt::format(", \"key_{}\": 1", i);
  const std::string sentence = message_of([&] { read(many); }, ErrorKind::kBadFile);
  EXPECT_EQ(std::ranges::count(sentence, '\n'), 100);
  expect_contains(sentence, {"config.json: and so on with 900 more keys"});
  // What we and flash-linear-attention write is taken.
  for (const ModelCase& model : model_cases()) {
    ModelConfig::from_json(model.config.to_json(), "config.json", true);
  }
  read(R"(, "torch_dtype": "bfloat16", "use_cache": true, "fuse_norm": true, "attn_mode": "chunk",
          "max_position_embeddings": 2048, "transformers_version": "5", "attn": null,
          "id2label": {"0": "A"}, "label2id": {"A": 0})");
  const auto transformer = [](const std::string& affine) {
    return ModelConfig::from_json(
        R"({"model_type": "transformer", "vocab_size": 9, "hidden_size": 12,
            "num_hidden_layers": 2, "num_heads": 3, "elementwise_affine": )" +
            affine + "}",
        "config.json", true);
  };
  transformer("true");
  expect_contains(message_of([&] { transformer("false"); }, ErrorKind::kBadFile),
                  {"'elementwise_affine'", "norms have weights"});
}

TEST(Model, RefusesCallsThatDoNotFit) {
  Context context({.threads = 1});
  const ModelConfig config = model_cases()[0].config;
  const Model model(context, config, 5), other(context, config, 6);
  Workspace workspace;
  std::vector<float> logits(static_cast<std::size_t>(3 * config.vocab_size));
  const View<float, 2> one{logits.data(), {1, config.vocab_size}};
  const std::int32_t tokens[] = {1, 2, 19}, good[] = {1, 2, 3};
  State state = model.new_state(2), roomy = model.new_state(3), foreign = other.new_state(3), none;
  const auto refused = [&](const std::function<void()>& call,
                           const std::vector<std::string>& parts) {
    expect_contains(message_of(call, ErrorKind::kInvalidArgument), parts);
  };
  refused([&] { model.forward(context, workspace, tokens, roomy, one); }, {"token 2", "19"});
  refused([&] { model.forward(context, workspace, good, state, one); }, {"room for 2", "reserve"});
  refused([&] { model.forward(context, workspace, good, foreign, one); },
          {model.fingerprint(), other.fingerprint()});
  refused([&] { model.forward(context, workspace, good, none, one); }, {model.fingerprint()});
  refused([&] { model.forward(context, workspace, good, roomy, one, LogitRows::kAll); },
          {"[3, 19]", "[1, 19]"});
  refused([&] { none.save("/dev/null"); }, {"no model"});
  EXPECT_TRUE(state == model.new_state(2));
  state.reserve(3);
  model.forward(context, workspace, good, state, one);
  EXPECT_EQ(state.position(), 3);
}

TEST(Model, IsSharedByConcurrentSessions) {
  Context context({.threads = 1});
  for (const auto& [name, config] : model_cases()) {
    SCOPED_TRACE(name);
    const Model model(context, config, 5);
    std::vector<std::vector<float>> expected, found(4);
    for (std::uint64_t i = 0; i < 4; ++i) {
      expected.push_back(run_whole(model, context, random_tokens(50, config.vocab_size, i)));
    }
    {
      std::vector<std::jthread> sessions;
      for (std::size_t i = 0; i < 4; ++i) {
        sessions.emplace_back([&, i] {
          Context own({.threads = 2});
          found[i] = run_whole(model, own, random_tokens(50, config.vocab_size, i));
        });
      }
    }
    EXPECT_EQ(found, expected);
  }
}

}  // namespace
}  // namespace ouzel::test
