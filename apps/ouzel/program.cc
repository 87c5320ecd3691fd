#include "apps/ouzel/program.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "ouzel/error.h"
#include "src/base/text.h"
#include "src/formats/files.h"

namespace ouzel::app {

namespace fs = std::filesystem;

namespace {

volatile sig_atomic_t interrupt_flag = 0;

void on_interrupt(int) { interrupt_flag = 1; }

[[noreturn]] void fail_out() {
  const int error = errno;
  if (error == EPIPE) throw ClosedPipe();
  throw Error(ErrorKind::kIo, fmt::format("cannot write to stdout: {}", std::strerror(error)));
}

}  // namespace

void CommonOptions::declare_compute(CLI::App& parser) {
  parser.add_option("-t,--threads", threads, "Threads to compute with")
      ->type_name("N")
      ->check(whole_number(0, 1024))
      ->default_str("0: OUZEL_THREADS, or all that the process may use");
  std::vector<std::string> names;
  for (Isa set : supported_isas()) names.emplace_back(name_of(set));
  parser.add_option("--isa", isa, "Instruction set to compute with")
      ->type_name("NAME")
      ->check(one_of(names))
      ->default_str("OUZEL_ISA, or the best that the machine has");
}

void CommonOptions::declare_quiet(CLI::App& parser) {
  parser.add_flag("-q,--quiet", quiet, "Print only the result and errors");
}

void CommonOptions::declare_json(CLI::App& parser) {
  parser.add_flag("--json", json, "Print the result as one JSON object");
}

Context CommonOptions::context() const { return Context(context_options(interrupted)); }

Context CommonOptions::patient_context() const { return Context(context_options({})); }

ContextOptions CommonOptions::context_options(std::function<bool()> cancelled) const {
  return {.threads = threads,
          .isa = isa.empty() ? default_isa() : isa_from_name(isa),
          .cancelled = std::move(cancelled)};
}

CLI::Validator whole_number(std::int64_t least, std::uint64_t most) {
  const auto check = [least, most](const std::string& text) {
    const char* end = text.data() + text.size();
    std::int64_t below = 0;
    std::uint64_t above = 0;
    const bool negative = text.starts_with('-');
    const auto [stop, error] = negative ? std::from_chars(text.data(), end, below)
                                        : std::from_chars(text.data(), end, above);
    const bool octal = text.size() > 1 && text.starts_with('0');  // CLI11 would read it so
    const bool whole = error == std::errc() && stop == end && !text.empty() && !octal;
    const bool within =
        negative ? below >= least
                 : above <= most && (least <= 0 || above >= static_cast<std::uint64_t>(least));
    return whole && within
               ? std::string()
               : fmt::format("'{}' is not a whole number from {} to {}", text, least, most);
  };
  return CLI::Validator(check, "", "whole number");
}

CLI::Validator any_number() {
  const auto check = [](const std::string& text) {
    double number = 0;
    return CLI::detail::lexical_cast(text, number) ? std::string()
                                                   : fmt::format("'{}' is not a number", text);
  };
  return CLI::Validator(check, "", "number");
}

CLI::Validator one_of(const std::vector<std::string>& names) {
  CLI::Validator member = CLI::IsMember(names);  // which says what they are to help
  member.operation([names](const std::string& text) {
    return std::ranges::count(names, text) != 0
               ? std::string()
               : fmt::format("'{}' is none of {}{}", text, joined(names),
                             did_you_mean(text, names));
  });
  return member;
}

void CommonOptions::write_line(std::string line) {
  line += '\n';
  std::fwrite(line.data(), 1, line.size(), stderr);  // stderr's fate is nobody's concern
}

void write_out(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size()) fail_out();
}

void flush_out() {
  if (std::fflush(stdout) != 0) fail_out();
}

void write_json(const Json& value) {
  write_out(value.dump(2, ' ', false, Json::error_handler_t::replace) + '\n');
}

bool interrupted() { return interrupt_flag != 0; }

void check_interrupt() {
  if (interrupted()) throw Error(ErrorKind::kCancelled, "interrupted");
}

void prepare_process() {
  // A standard stream that was closed by the caller must not become the first file that we open.
  for (int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (::fcntl(fd, F_GETFD) < 0 && errno == EBADF) {
      // Opened the wrong way round, so that its use fails instead of going nowhere.
      ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
    }
  }
  ::signal(SIGPIPE, SIG_IGN);  // writes fail with EPIPE instead: files can be finished first
  ::signal(SIGXFSZ, SIG_IGN);  // and with EFBIG at a limit on file size
  struct sigaction action = {};
  action.sa_handler = on_interrupt;
  // The second signal finds the default action. Blocking reads return with EINTR.
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (int signal : {SIGINT, SIGTERM}) {
    struct sigaction before;
    // Whoever started us in the background with SIGINT ignored wants it to stay so.
    if (::sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) {
      ::sigaction(signal, &action, nullptr);
    }
  }
}

std::uint64_t peak_memory() {
  // Not getrusage, whose maximum begins with that of the process which started this one.
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::strtoull(line.c_str() + 6, nullptr, 10) * 1024;
  }
  return 0;
}

bool is_same_file(const std::string& a, const std::string& b) {
  if (a.empty() || b.empty()) return false;
  std::error_code error;  // of a file that is not there
  const auto whole = [&](const std::string& path) {
    return fs::weakly_canonical(fs::absolute(target_of(path), error), error);
  };
  const fs::path one = whole(a);
  const bool same = fs::equivalent(a, b, error) || (!one.empty() && one == whole(b));
  return same && (!fs::exists(a, error) || fs::is_regular_file(a, error));
}

std::string flag_of(const std::string& name) {
  std::string flag = "--" + name;
  std::replace(flag.begin() + 2, flag.end(), '_', '-');
  return flag;
}

void refuse_to_overwrite(std::string_view flag, const std::string& path,
                         const std::vector<std::string>& read) {
  for (const std::string& input : read) {
    if (!is_same_file(path, input)) continue;
    throw UsageError(fmt::format("{} {} would overwrite {}, which is read: write to another file",
                                 flag, path, input));
  }
}

Model load_model(Context& context, const std::string& folder, const CommonOptions& common) {
  Model model = Model::load(context, folder);
  for (const std::string& warning : model.config().warnings) {
    common.note("warning: {}", warning);
  }
  return model;
}

std::vector<std::string> files_of_model(const std::string& folder) {
  std::vector<std::string> files;
  std::error_code error;
  fs::directory_iterator entry(folder, error), end;
  for (; entry != end; entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    const bool weights = name.starts_with("model") && name.find(".safetensors") != name.npos;
    if (weights || name == "config.json") files.push_back(entry->path().string());
  }
  return files;
}

std::string human_bytes(std::uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  while (value >= 1023.95 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  return fmt::format("{:.1f} {}", value, kUnits[unit]);
}

std::string with_commas(std::uint64_t number) {
  std::string text = std::to_string(number);
  for (std::size_t i = text.size(); i > 3;) text.insert(i -= 3, ",");
  return text;
}

}  // namespace ouzel::app
