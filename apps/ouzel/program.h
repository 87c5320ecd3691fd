// What the verbs of the program share: their table entry, common options, output that notices a
// closed pipe, and Ctrl-C.
//
// Manners: stdout carries only the product (write_out), everything else goes to stderr (note). Exit
// codes: 0 done, or stdout's reader has gone; 1 failed; 2 usage; 130 interrupted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "ouzel/context.h"
#include "ouzel/error.h"
#include "ouzel/model.h"
#include "src/formats/json.h"

namespace ouzel::app {

inline constexpr int kFailed = 1, kUsage = 2, kInterrupted = 130;  // exit codes

// What a verb does once its arguments are parsed; the value is the program's exit code.
using Action = std::function<int()>;

// A row of the table in main.cc.
struct Verb {
  const char* name;
  const char* summary;   // one line, without a full stop
  const char* examples;  // commands that work as pasted, one a line
  // Declares options and arguments; the action is called after parsing. Memory that options parse
  // into lives in the action (a shared_ptr that its lambda holds).
  Action (*declare)(CLI::App& parser);
  // For the completion of a shell: what an option ("--op") or argument ("LAW") that takes any text
  // is mostly given. Null: nothing to offer.
  std::vector<std::string> (*words)(std::string_view option) = nullptr;
};

// Options that several verbs have. A verb declares those that it heeds.
struct CommonOptions {
  int threads = 0;  // 0: default_threads()
  std::string isa;  // empty: default_isa()
  bool quiet = false;
  bool json = false;

  void declare_compute(CLI::App& parser);  // -t, --threads; --isa
  void declare_quiet(CLI::App& parser);    // -q, --quiet
  void declare_json(CLI::App& parser);     // --json

  // A context of these options that Ctrl-C cancels.
  Context context() const;
  // One that it does not: for a verb whose calls must end whole and that asks `interrupted` between
  // them.
  Context patient_context() const;

  // A line for people on stderr, unless quiet.
  template <class... Args>
  void note(fmt::format_string<Args...> format, Args&&... args) const {
    if (!quiet) write_line(fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  ContextOptions context_options(std::function<bool()> cancelled) const;
  static void write_line(std::string line);
};

// Accepts whole numbers in decimal from `least` to `most`. Integer options need it: CLI11 alone
// would take -1 and 99999999999999999999 for the largest number, and 010 for 8.
CLI::Validator whole_number(std::int64_t least,
                            std::uint64_t most = std::numeric_limits<std::int64_t>::max());

// Accepts numbers.
CLI::Validator any_number();
// Accepts one of the names.
CLI::Validator one_of(const std::vector<std::string>& names);

// Wrong use of the command line, found by a verb after parsing: exit code 2.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Runs `call`, which checks what the command line said: an argument that it refuses is wrong use.
template <class Call>
void as_usage(Call&& call) {
  try {
    call();
  } catch (const Error& e) {
    if (e.kind() != ErrorKind::kInvalidArgument) throw;
    throw UsageError(e.what());
  }
}

// Whether two names, neither of them "", are of one file, which need not be there yet: devices and
// pipes take several.
bool is_same_file(const std::string& a, const std::string& b);

// A name of the library as a flag: "window_size" is "--window-size".
std::string flag_of(const std::string& name);

// Throws UsageError if `path`, which `flag` says to write (or ""), is one of the files that the
// call reads.
void refuse_to_overwrite(std::string_view flag, const std::string& path,
                         const std::vector<std::string>& read);
// Loads a model; what its configuration makes one doubt is noted, unless quiet.
Model load_model(Context& context, const std::string& folder, const CommonOptions& common);
// What a model is loaded from: those files of its folder.
std::vector<std::string> files_of_model(const std::string& folder);

// Whoever read our stdout has gone: the program ends quietly.
class ClosedPipe : public std::exception {};

// To stdout, buffered. Throw ClosedPipe, or Error(kIo) when stdout cannot take it (a full disk).
void write_out(std::string_view text);
void flush_out();
// One JSON object to stdout; text that is not UTF-8 (a file's name) is mended.
void write_json(const Json& value);

// True after the first SIGINT or SIGTERM; a second one ends the process at once.
bool interrupted();
// Throws Error(kCancelled) if interrupted.
void check_interrupt();

// Makes the process ready: open standard streams, signals. Called first by main.
void prepare_process();

// The largest resident memory of the process so far, in bytes.
std::uint64_t peak_memory();

// "1.5 MiB", "17 B".
std::string human_bytes(std::uint64_t bytes);
// "1,234,567".
std::string with_commas(std::uint64_t number);

}  // namespace ouzel::app
