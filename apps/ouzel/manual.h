// Help, man page and completions, all generated from the verbs' parsers.
#pragma once

#include <memory>
#include <span>
#include <string>

#include <CLI/CLI.hpp>

#include "apps/ouzel/program.h"

namespace ouzel::app {

// A parser of a verb's options and the action to take after parsing.
struct ParsedVerb {
  std::unique_ptr<CLI::App> parser;
  Action action;
};
ParsedVerb make_parser(const Verb& verb);

std::string program_help(std::span<const Verb* const> verbs);
std::string verb_help(const Verb& verb, const CLI::App& parser);
std::string man_page(std::span<const Verb* const> verbs);         // roff
std::string bash_completion(std::span<const Verb* const> verbs);  // a script

// "--output", "-o": every name of the parser's options.
std::vector<std::string> flag_names(const CLI::App& parser);

}  // namespace ouzel::app
