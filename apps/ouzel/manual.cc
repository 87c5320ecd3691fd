#include "apps/ouzel/manual.h"

#include <string_view>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "ouzel/version.h"
#include "src/base/text.h"

namespace ouzel::app {
namespace {

constexpr const char* kPurpose = "linear attention for CPUs";
constexpr const char* kExitCodes =
    "0 done, or the reader of stdout has gone; 1 failed: a file, what it holds, or a command line "
    "that does not fit it; 2 wrong use: a command line that no file would make right; 130 "
    "interrupted.";

struct Entry {
  std::string left;   // "-t, --threads N", "IN.safetensors"
  std::string right;  // the description and default
  bool positional = false;
};

// The name of an option's value: "N" of "N:INT in [1 - 1024]". Empty for flags.
std::string value_name(const CLI::Option& option) {
  if (option.get_items_expected_max() == 0) return "";
  const std::string type = option.get_type_name();
  return type.substr(0, type.find(':'));
}

// The values that an option may take, if it takes one of a few: "a,b" of "NAME:{a,b}".
std::string choices(const CLI::Option& option) {
  const std::string type = option.get_type_name();
  const std::size_t open = type.find(":{");
  return open == std::string::npos ? "" : type.substr(open + 2, type.find('}') - open - 2);
}

std::string replaced(std::string text, std::string_view from, std::string_view to) {
  for (std::size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size()) {
    text.replace(at, from.size(), to);
  }
  return text;
}

std::vector<const CLI::Option*> visible_options(const CLI::App& parser) {
  return parser.get_options([](const CLI::Option* option) { return !option->get_group().empty(); });
}

std::string describe(const CLI::Option& option) {
  std::string text = option.get_description();
  if (const std::string list = choices(option); !list.empty()) {
    text += ": " + replaced(list, ",", ", ");
  }
  if (option.get_required() && !option.get_positional()) {
    text += " [required]";
  } else if (const std::string value = option.get_default_str();
             !value.empty() && value != "[]" && !value_name(option).empty()) {
    text += " [default: " + value + "]";
  }
  return text;
}

std::vector<Entry> entries(const CLI::App& parser) {
  std::vector<Entry> list;
  for (const CLI::Option* option : visible_options(parser)) {
    const bool positional = option->get_positional();
    std::string left = positional ? option->get_name(true, false) : "";
    if (!positional) {
      for (const std::string& name : option->get_snames()) left += "-" + name + ", ";
      for (const std::string& name : option->get_lnames()) left += "--" + name + ", ";
      left.resize(left.size() - 2);
      if (const std::string value = value_name(*option); !value.empty()) left += " " + value;
    }
    list.push_back({left, describe(*option), positional});
  }
  return list;
}

// Without dashes; "" for an option of one letter.
std::string long_name(const CLI::Option& option) {
  return option.get_lnames().empty() ? "" : option.get_lnames().front();
}

std::string usage_line(const Verb& verb, const CLI::App& parser) {
  std::string line = fmt::format("ouzel {}", verb.name);
  for (const CLI::Option* option : visible_options(parser)) {
    std::string part = option->get_name(true, false);
    if (!option->get_positional()) {
      if (!option->get_required()) continue;
      part = fmt::format("--{} {}", option->get_lnames().front(), value_name(*option));
    }
    line += option->get_required() ? " " + part : " [" + part + "]";
  }
  return line + " [options]";
}

// `text` in lines of at most `width` characters, each after the first indented.
std::string wrapped(std::string_view text, std::size_t width, std::size_t indent) {
  std::string out;
  std::size_t column = 0;
  while (!text.empty()) {
    const std::string_view word = text.substr(0, text.find(' '));
    text.remove_prefix(std::min(text.size(), word.size() + 1));
    if (column != 0 && column + 1 + word.size() > width) {
      out += '\n' + std::string(indent, ' ');
      column = 0;
    }
    if (column != 0) out += ' ', ++column;
    out += word;
    column += word.size();
  }
  return out;
}

std::string table(const std::vector<std::pair<std::string, std::string>>& rows) {
  constexpr std::size_t kLeft = 28, kWidth = 100;
  std::string out;
  for (const auto& [left, right] : rows) {
    out += "  " + left;
    out += left.size() + 4 > kLeft ? '\n' + std::string(kLeft, ' ')
                                   : std::string(kLeft - 2 - left.size(), ' ');
    out += wrapped(right, kWidth - kLeft, kLeft) + '\n';
  }
  return out;
}

std::string indented_lines(std::string_view lines) {
  return "  " + replaced(std::string(lines), "\n", "\n  ") + "\n";
}

// Text in roff: a backslash, a hyphen that must stay one, and a leading dot are special.
std::string roff(std::string_view text) {
  std::string out = replaced(replaced(std::string(text), "\\", "\\e"), "-", "\\-");
  out = replaced(out, "\n.", "\n\\&.");
  return out.starts_with('.') || out.starts_with('\'') ? "\\&" + out : out;
}

}  // namespace

ParsedVerb make_parser(const Verb& verb) {
  auto parser = std::make_unique<CLI::App>(verb.summary, std::string("ouzel ") + verb.name);
  parser->option_defaults()->always_capture_default();
  parser->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  parser->set_help_flag("-h,--help", "Print this help");
  parser->allow_extras();  // main names them with their nearest relatives
  Action action = verb.declare(*parser);
  return {std::move(parser), std::move(action)};
}

std::vector<std::string> flag_names(const CLI::App& parser) {
  std::vector<std::string> names;
  for (const CLI::Option* option : visible_options(parser)) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) names.push_back("-" + name);
  }
  return names;
}

std::string program_help(std::span<const Verb* const> verbs) {
  std::vector<std::pair<std::string, std::string>> rows;
  for (const Verb* verb : verbs) rows.emplace_back(verb->name, verb->summary);
  std::string out = fmt::format("ouzel: {}\n\nusage: ouzel VERB [options]\n\nverbs:\n", kPurpose);
  out += table(rows);
  out += "\nother options:\n";
  out += table({{"-h, --help", "Print this help; 'ouzel VERB --help' explains a verb"},
                {"--version", "Print the version"},
                {"--completion-bash", "Print a completion script for bash"},
                {"--man", "Print the manual page in roff"}});
  out += "\nenvironment:\n";
  out += table({{"OUZEL_THREADS", "Threads to compute with where --threads is not given"},
                {"OUZEL_ISA", "Instruction set to compute with: avx512, avx2 or portable"}});
  out += "\nexit codes:\n  " + wrapped(kExitCodes, 98, 2) + "\n\nexamples:\n";
  for (const Verb* verb : verbs) {
    const std::string_view examples = verb->examples;
    out += indented_lines(examples.substr(0, examples.find('\n')));
  }
  return out;
}

std::string verb_help(const Verb& verb, const CLI::App& parser) {
  std::vector<std::pair<std::string, std::string>> arguments, options;
  for (const Entry& entry : entries(parser)) {
    (entry.positional ? arguments : options).emplace_back(entry.left, entry.right);
  }
  std::string out = fmt::format("{}\n\nusage: {}\n", verb.summary, usage_line(verb, parser));
  if (!arguments.empty()) out += "\narguments:\n" + table(arguments);
  out += "\noptions:\n" + table(options);
  return out + "\nexamples:\n" + indented_lines(verb.examples);
}

std::string man_page(std::span<const Verb* const> verbs) {
  std::string out = fmt::format(".TH OUZEL 1 \"\" \"ouzel {}\" \"User Commands\"\n", version());
  out += fmt::format(".SH NAME\nouzel \\- {}\n", roff(kPurpose));
  out += ".SH SYNOPSIS\n.B ouzel\n.I VERB\n[options]\n.SH DESCRIPTION\n";
  out += roff(
             "Computes, trains and runs sequence models whose memory of the past is a state of "
             "fixed size. stdout carries only the product of a verb, everything else goes to "
             "stderr.") +
         "\n";
  for (const Verb* verb : verbs) {
    const ParsedVerb parsed = make_parser(*verb);
    out += fmt::format(".SH \"ouzel {}\"\n{}.\n.PP\n.B {}\n", verb->name, roff(verb->summary),
                       roff(usage_line(*verb, *parsed.parser)));
    for (const Entry& entry : entries(*parsed.parser)) {
      out += fmt::format(".TP\n.B {}\n{}\n", roff(entry.left), roff(entry.right));
    }
    out += fmt::format(".PP\nExamples:\n.PP\n.nf\n.RS\n{}\n.RE\n.fi\n", roff(verb->examples));
  }
  out +=
      ".SH ENVIRONMENT\n.TP\n.B OUZEL_THREADS\nThreads to compute with where "
      "\\-\\-threads is not given.\n.TP\n.B OUZEL_ISA\nInstruction set to compute with: avx512, "
      "avx2 or portable.\n";
  return out + ".SH \"EXIT STATUS\"\n" + roff(kExitCodes) + "\n";
}

std::string bash_completion(std::span<const Verb* const> verbs) {
  std::string names, flags, values;
  for (const Verb* verb : verbs) {
    const ParsedVerb parsed = make_parser(*verb);
    names += fmt::format("{}{}", names.empty() ? "" : " ", verb->name);
    std::string arguments;
    for (const CLI::Option* option : visible_options(*parsed.parser)) {
      std::string words = replaced(choices(*option), ",", " ");
      if (words.empty() && verb->words != nullptr) {
        words = joined(verb->words(option->get_positional() ? option->get_name(true, false)
                                                            : "--" + long_name(*option)),
                       " ");
      }
      if (words.empty()) continue;
      if (option->get_positional()) arguments = words;
      for (const std::string& name : option->get_snames()) {
        values += fmt::format("    {}:-{}) words='{}' ;;\n", verb->name, name, words);
      }
      for (const std::string& name : option->get_lnames()) {
        values += fmt::format("    {}:--{}) words='{}' ;;\n", verb->name, name, words);
      }
    }
    flags += fmt::format("    {}) flags='{}' arguments='{}' ;;\n", verb->name,
                         joined(flag_names(*parsed.parser), " "), arguments);
  }
  return fmt::format(R"(# Completion of `ouzel` for bash.
_ouzel() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}}
  local verb=${{COMP_WORDS[1]}} flags='' arguments='' words=''
  if ((COMP_CWORD == 1)); then
    COMPREPLY=($(compgen -W '{0} --help --version --completion-bash --man' -- "$current"))
    return
  fi
  case $verb in
{1}  esac
  case $verb:$previous in
{2}  esac
  if [[ -n $words ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$current"))
  elif [[ $current == -* ]]; then
    COMPREPLY=($(compgen -W "$flags" -- "$current"))
  elif ((COMP_CWORD == 2)); then
    COMPREPLY=($(compgen -W "$arguments" -- "$current"))
  fi
}}
complete -o default -F _ouzel ouzel
)",
                     names, flags, values);
}

}  // namespace ouzel::app
