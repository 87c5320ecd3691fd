// `ouzel bench`: the figures of docs/performance.md, measured on this machine.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "apps/ouzel/program.h"
#include "bench/case.h"

namespace ouzel::app {
namespace {

struct Options {
  std::string what;
  std::string filter;
  int runs = bench::CaseOptions().runs;
  bool list = false;
  CommonOptions common;
};

// Whether `text` stands where one of a name's parts (between slashes) begins: "gla/" is in
// "gla/forward" and not in "hgrn2_gla/forward" or "simple_gla/forward".
bool begins_a_part(std::string_view name, std::string_view text) {
  for (std::size_t at = name.find(text); at != name.npos; at = name.find(text, at + 1)) {
    if (at == 0 || name[at - 1] == '/') return true;
  }
  return false;
}

std::vector<bench::Case> cases_of(const Options& options) {
  std::vector<bench::Case> chosen;
  for (bench::Case& c : options.what == "ops" ? bench::operator_cases() : bench::model_cases()) {
    if (begins_a_part(c.name, options.filter)) chosen.push_back(std::move(c));
  }
  if (chosen.empty()) {
    throw UsageError(
        fmt::format("no part of a case's name begins with '{}' (see 'ouzel bench {} --list')",
                    options.filter, options.what));
  }
  return chosen;
}

int run(const Options& options) {
  const std::vector<bench::Case> cases = cases_of(options);
  if (options.list) {
    for (const bench::Case& c : cases) write_out(c.name + "\n");
    return 0;
  }
  const bench::CaseOptions case_options{.runs = options.runs};
  std::vector<bench::Row> rows;
  for (std::size_t i = 0; i < cases.size(); ++i) {
    check_interrupt();
    options.common.note("[{}/{}] {}", i + 1, cases.size(), cases[i].name);
    for (bench::Row& row : cases[i].run(case_options)) rows.push_back(std::move(row));
  }
  write_out(options.common.json ? bench::as_json(rows) : bench::as_table(rows));
  int code = 0;
  for (const bench::Row& row : rows) {
    if (bench::plausible(row)) continue;
    const std::string fault =
        row.error ? fmt::format("an error of {:.1e}, beyond {:.0e}", *row.error, row.bound)
                  : fmt::format("an efficiency of {:.3f}: measured wrongly", *row.efficiency);
    std::fprintf(stderr, "ouzel bench: %s %s (%s) has %s\n", row.op.c_str(), row.pass.c_str(),
                 row.variant.c_str(), fault.c_str());
    code = 1;
  }
  return code;
}

Action declare(CLI::App& parser) {
  auto options = std::make_shared<Options>();
  parser
      .add_option("WHAT", options->what,
                  "Operators, or training, generation and start-up of models")
      ->check(one_of({"ops", "model"}))
      ->required();
  parser
      .add_option(
          "--filter", options->filter,
          "Only cases whose name, or a part of it after a /, begins so (--list shows names)")
      ->type_name("TEXT");
  parser.add_option("--runs", options->runs, "Repetitions that a median is taken of")
      ->check(whole_number(1, 1000))
      ->type_name("N");
  parser.add_flag("--list", options->list, "Print the names of the cases and end");
  options->common.declare_json(parser);
  options->common.declare_quiet(parser);
  return [options] { return run(*options); };
}

// The first parts of cases' names.
std::vector<std::string> words(std::string_view option) {
  std::vector<std::string> parts;
  if (option != "--filter") return parts;
  for (const auto& cases : {bench::operator_cases(), bench::model_cases()}) {
    for (const bench::Case& c : cases) {
      std::string part = c.name.substr(0, c.name.find('/'));
      if (std::ranges::find(parts, part) == parts.end()) parts.push_back(std::move(part));
    }
  }
  return parts;
}

}  // namespace

extern const Verb kBenchVerb = {"bench", "Measure operators or models on this machine",
                                "ouzel bench ops --filter linear_attention/forward\n"
                                "ouzel bench ops --json\n"
                                "ouzel bench model",
                                declare, words};

}  // namespace ouzel::app
