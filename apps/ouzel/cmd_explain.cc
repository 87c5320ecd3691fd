// `ouzel explain`: a law's recurrence, shapes and costs, beside softmax attention of the same
// sizes.
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "apps/ouzel/program.h"
#include "apps/ouzel/signature.h"
#include "src/base/text.h"
#include "src/ops/explain.h"

namespace ouzel::app {
namespace {

struct Options {
  std::string law;
  ExplainSizes sizes;
  CommonOptions common;
};

// "12,345", or in scientific form where no one would count the digits.
std::string number(double x) {
  return x < 1e12 ? with_commas(static_cast<std::uint64_t>(std::llround(x)))
                  : fmt::format("{:.3e}", x);
}

std::string bytes(double x) {
  return x < 1e18 ? human_bytes(static_cast<std::uint64_t>(std::llround(x)))
                  : fmt::format("{:.3e} B", x);
}

Json to_json(const TokenCost& cost) {
  return {{"projections_flops", cost.projections},
          {"mixing_flops", cost.mixing},
          {"bytes", cost.bytes}};
}

Json to_json(const MechanismCost& cost) {
  return {{"training", to_json(cost.training)},
          {"prefill", to_json(cost.prefill)},
          {"decode", to_json(cost.decode)}};
}

void write_table(const std::string& name, const char* mixing, const MechanismCost& cost) {
  write_out(fmt::format("{:<34} {:>16} {:>16} {:>16}\n", name, "training", "prefill", "decode"));
  const auto line = [&](const std::string& what, auto&& value) {
    write_out(fmt::format("  {:<32} {:>16} {:>16} {:>16}\n", what, value(cost.training),
                          value(cost.prefill), value(cost.decode)));
  };
  line("projections, FLOPs", [](const TokenCost& c) { return number(c.projections); });
  line(fmt::format("{}, FLOPs", mixing), [](const TokenCost& c) { return number(c.mixing); });
  line("memory traffic", [](const TokenCost& c) { return bytes(c.bytes); });
}

void write_crossings(const Explanation& e) {
  const auto at = [](double tokens) {
    return fmt::format("{} tokens", with_commas(static_cast<std::uint64_t>(std::ceil(tokens))));
  };
  write_out(
      fmt::format("cheaper than softmax attention by count from\n"
                  "  training {}, prefill {}, decode traffic {}, memory {}\n",
                  at(e.training_crossing), at(e.prefill_crossing), at(e.decode_crossing),
                  at(e.memory_crossing)));
}

int run(const Options& options) {
  const ExplainSizes& sizes = options.sizes;
  const OperatorInfo* found = nullptr;
  Explanation e;
  as_usage([&] {
    found = &find_operator(options.law);
    try {
      e = explain(*found, sizes);
    } catch (const Error& error) {
      if (found->cost.forward != 0) throw;
      throw UsageError(fmt::format("{}; ouzel attend --list {} shows what it computes",
                                   error.what(), found->name));
    }
  });
  const OperatorInfo& law = *found;
  if (options.common.json) {
    write_json({{"name", law.name},
                {"formula", law.formula},
                {"source", law.source},
                {"T", sizes.tokens},
                {"K", sizes.keys},
                {"V", sizes.values},
                {"H", sizes.heads},
                {"state_bytes", e.state_bytes},
                {"law", to_json(e.law)},
                {"softmax", to_json(e.softmax)},
                {"softmax_bytes",
                 {{"naive", e.naive_bytes}, {"online", e.online_bytes}, {"cache", e.cache_bytes}}},
                {"crossing",
                 {{"training", e.training_crossing},
                  {"prefill", e.prefill_crossing},
                  {"decode", e.decode_crossing},
                  {"memory", e.memory_crossing}}}});
    return 0;
  }
  write_out(fmt::format("{}\n  {}\n  {}\n\n  in   {}\n  out  {}\n\n", law.name, law.formula,
                        law.source, signature(law.inputs, false), signature(law.outputs, true)));
  write_out(
      fmt::format("T = {}, K = {}, V = {}, H = {}; per token and all heads, by count, "
                  "float32\n\n",
                  sizes.tokens, sizes.keys, sizes.values, sizes.heads));
  write_table(law.name, "state", e.law);
  write_out(fmt::format("  {:<32} {:>16}   at any length\n\n", "state of a sequence",
                        bytes(e.state_bytes)));
  write_table("softmax_attention", "quadratic", e.softmax);
  write_out(fmt::format("  {:<32} {:>16}   naive: H T^2 numbers\n", "weights of a sequence",
                        bytes(e.naive_bytes)));
  write_out(
      fmt::format("  {:<32} {:>16}   online: one tile a thread\n", "", bytes(e.online_bytes)));
  write_out(fmt::format("  {:<32} {:>16}   grows with T\n\n", "cache of keys and values",
                        bytes(e.cache_bytes)));
  write_crossings(e);
  return 0;
}

Action declare(CLI::App& parser) {
  auto options = std::make_shared<Options>();
  parser.add_option("LAW", options->law, "A law with a state (ouzel attend --list shows all)")
      ->required();
  const auto size = [&](const char* flag, std::int64_t& value, const char* meaning) {
    // Counts of such sizes stay exact in double precision.
    parser.add_option(flag, value, meaning)
        ->check(whole_number(1, 1LL << 30))
        ->type_name("N")
        ->capture_default_str();
  };
  size("--T", options->sizes.tokens, "Tokens of the sequence");
  size("--K", options->sizes.keys, "Size of a key");
  size("--V", options->sizes.values, "Size of a value");
  size("--H", options->sizes.heads, "Heads");
  options->common.declare_json(parser);
  return [options] { return run(*options); };
}

std::vector<std::string> words(std::string_view option) {
  std::vector<std::string> names;
  for (const OperatorInfo& law : operators()) {
    if (option == "LAW" && law.cost.forward != 0) names.push_back(law.name);
  }
  return names;
}

}  // namespace

extern const Verb kExplainVerb = {"explain", "Show what a law computes and costs",
                                  "ouzel explain retention\n"
                                  "ouzel explain linear_attention --T 100000 --K 128 --V 128",
                                  declare, words};

}  // namespace ouzel::app
