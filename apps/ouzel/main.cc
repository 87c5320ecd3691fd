// The program: `ouzel VERB ...`, one file per verb (cmd_VERB.cc).
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "apps/ouzel/manual.h"
#include "apps/ouzel/program.h"
#include "ouzel/error.h"
#include "ouzel/version.h"
#include "src/base/text.h"

namespace ouzel::app {

extern const Verb kAttendVerb, kBenchVerb, kEvalVerb, kExplainVerb, kGenerateVerb, kInfoVerb,
    kTrainVerb;

namespace {

// In the order in which --help lists them.
constexpr const Verb* kVerbs[] = {
    &kTrainVerb, &kGenerateVerb, &kEvalVerb, &kAttendVerb, &kExplainVerb, &kBenchVerb, &kInfoVerb,
};

// What other programs call flags that some verb has.
constexpr std::pair<std::string_view, std::string_view> kElsewhere[] = {
    {"--batch-size", "--batch"},
    {"--block-size", "--context"},
    {"--epochs", "--iterations"},
    {"--hidden-size", "--dim"},
    {"--input", "--data"},
    {"--learning-rate", "--lr"},
    {"--max-iters", "--iterations"},
    {"--max-new-tokens", "--tokens"},
    {"--max-steps", "--iterations"},
    {"--max-tokens", "--tokens"},
    {"--num-heads", "--heads"},
    {"--num-layers", "--layers"},
    {"--num-steps", "--iterations"},
    {"--num-threads", "--threads"},
    {"--output", "--out"},
    {"--output-dir", "--out"},
    {"--sequence-length", "--context"},
    {"--seq-len", "--context"},
    {"--steps", "--iterations"},
    {"--temp", "--temperature"},
};

std::string did_you_mean_flag(const std::string& flag, const std::vector<std::string>& flags) {
  // "-backward" and "--backword" both mean "--backward".
  std::string dashed = "--" + flag.substr(std::min(flag.find_first_not_of('-'), flag.size()));
  std::ranges::replace(dashed, '_', '-');
  if (dashed.size() == 3)
    return std::ranges::count(flags, dashed) != 0 ? did_you_mean(dashed, flags) : "";
  for (const auto& [elsewhere, here] : kElsewhere) {
    if (dashed == elsewhere && std::ranges::count(flags, here) != 0) {
      return fmt::format("; did you mean '{}'?", here);
    }
  }
  return did_you_mean(dashed, flags);
}

// What parsing left over: flags that the verb does not have, arguments too many.
void check_extras(const Verb& verb, const CLI::App& parser) {
  const std::vector<std::string> extras = parser.remaining();
  if (extras.empty()) return;
  const std::string& extra = extras.front();
  if (!extra.starts_with('-') || extra == "-") {
    throw UsageError(fmt::format("the argument '{}' is one too many (see 'ouzel {} --help')",
                                 printable(extra), verb.name));
  }
  const std::string flag = extra.substr(0, extra.find('='));
  throw UsageError(fmt::format("there is no flag '{}'{} (see 'ouzel {} --help')", printable(flag),
                               did_you_mean_flag(flag, flag_names(parser)), verb.name));
}

// An unset variable of a shell script is no file, nor is it a flag that was left out.
void check_file_names(const Verb& verb, const CLI::App& parser) {
  for (const CLI::Option* option : parser.get_options()) {
    const std::string kind = option->get_type_name();
    if (kind != "FILE" && kind != "DIR") continue;
    for (const std::string& value : option->results()) {
      if (!value.empty()) continue;
      throw UsageError(
          fmt::format("{} has an empty name: name a {} or leave the flag out (see "
                      "'ouzel {} --help')",
                      option->get_name(), kind == "DIR" ? "folder" : "file", verb.name));
    }
  }
}

int run_verb(const Verb& verb, std::vector<std::string> arguments) {
  const ParsedVerb parsed = make_parser(verb);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 takes them
  try {
    parsed.parser->parse(arguments);
  } catch (const CLI::CallForHelp&) {
    write_out(verb_help(verb, *parsed.parser));
    return 0;
  } catch (const CLI::ParseError& e) {
    check_extras(verb, *parsed.parser);  // an unknown flag explains more than what is then missing
    throw UsageError(fmt::format("{} (see 'ouzel {} --help')", printable(e.what()), verb.name));
  }
  check_extras(verb, *parsed.parser);
  check_file_names(verb, *parsed.parser);
  return parsed.action();
}

int run(const std::vector<std::string>& arguments, std::string& name) {
  if (arguments.empty()) {
    const std::string help = program_help(kVerbs);
    std::fwrite(help.data(), 1, help.size(), stderr);
    return kUsage;
  }
  const std::string& first = arguments[0];
  for (const Verb* verb : kVerbs) {
    if (first == verb->name) {
      name += " " + first;
      return run_verb(*verb, {arguments.begin() + 1, arguments.end()});
    }
  }
  if (first == "help" && arguments.size() > 1) return run({arguments[1], "--help"}, name);
  if (first == "--version") {
    write_out(fmt::format("ouzel {}\n", version()));
  } else if (first == "-h" || first == "--help" || first == "help") {
    write_out(program_help(kVerbs));
  } else if (first == "--man") {
    write_out(man_page(kVerbs));
  } else if (first == "--completion-bash") {
    write_out(bash_completion(kVerbs));
  } else {
    std::vector<std::string> known = {"--help", "--version", "--man", "--completion-bash", "help"};
    for (const Verb* verb : kVerbs) known.emplace_back(verb->name);
    throw UsageError(fmt::format("there is no {} '{}'{} (see 'ouzel --help')",
                                 first.starts_with('-') ? "flag" : "verb", printable(first),
                                 did_you_mean(first, known)));
  }
  return 0;
}

int run_and_report(const std::vector<std::string>& arguments) {
  std::string name = "ouzel";
  const auto report = [&](int code, std::string_view sentence) {
    // What the library calls itself may be the verb.
    const std::string own = name.substr(name.find(' ') + 1) + ": ";
    if (sentence.starts_with(own)) sentence.remove_prefix(own.size());
    const std::string line = fmt::format("{}: {}\n", name, printable_lines(sentence));
    std::fwrite(line.data(), 1, line.size(), stderr);
    return code;
  };
  try {
    const int code = run(arguments, name);
    flush_out();
    return code;
  } catch (const ClosedPipe&) {
    return 0;
  } catch (const UsageError& e) {
    return report(kUsage, e.what());
  } catch (const Error& e) {
    const bool cancelled = e.kind() == ErrorKind::kCancelled;
    return report(cancelled ? kInterrupted : kFailed, cancelled ? "interrupted" : e.what());
  } catch (const std::bad_alloc&) {
    return report(kFailed, "out of memory");
  } catch (const std::exception& e) {
    return report(kFailed, e.what());
  }
}

}  // namespace
}  // namespace ouzel::app

int main(int argc, char** argv) {
  ouzel::app::prepare_process();
  const int code = ouzel::app::run_and_report({argv + std::min(argc, 1), argv + argc});
  // What could not be written has been reported; closing stdout again must not change the code.
  return code;
}
