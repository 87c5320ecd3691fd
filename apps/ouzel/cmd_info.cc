// `ouzel info`: what this build and machine are, or what a file or model folder holds.
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "apps/ouzel/program.h"
#include "ouzel/context.h"
#include "ouzel/error.h"
#include "ouzel/version.h"
#include "src/base/caches.h"
#include "src/base/text.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "src/infer/session.h"
#include "src/models/checkpoint.h"
#include "src/models/state_file.h"

namespace ouzel::app {
namespace {

namespace fs = std::filesystem;

constexpr const char* kConfig = "config.json";
constexpr std::uint64_t kMaxConfig = UINT64_C(1) << 26;

struct Options {
  std::string path;
  CommonOptions common;
};

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string processor() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      const std::size_t at = line.find(": ");
      return at == std::string::npos ? "" : line.substr(at + 2);
    }
  }
  return "";
}

void show_machine(const CommonOptions& common) {
  const Isa in_use = common.isa.empty() ? default_isa() : isa_from_name(common.isa);
  const int threads = common.threads != 0 ? common.threads : default_threads();
  const std::vector<std::pair<std::string, std::int64_t>> caches = {
      {"L1d", cache_bytes(1)}, {"L2", cache_bytes(2)}, {"L3", cache_bytes(3)}};
  std::vector<std::string> sets;
  for (Isa isa : supported_isas()) sets.emplace_back(name_of(isa));

  if (common.json) {
    Json cache_sizes = Json::object();
    for (const auto& [name, bytes] : caches) cache_sizes[name] = bytes;
    write_json({{"version", version()},
                {"compiler", compiler()},
                {"processor", processor()},
                {"isa", name_of(in_use)},
                {"isas", sets},
                {"threads", threads},
                {"processors", ::sysconf(_SC_NPROCESSORS_ONLN)},
                {"cache_bytes", cache_sizes}});
    return;
  }
  std::vector<std::string> cache_sizes;
  for (const auto& [name, bytes] : caches) {
    if (bytes != 0)
      cache_sizes.push_back(name + " " + human_bytes(static_cast<std::uint64_t>(bytes)));
  }
  write_out(
      fmt::format("ouzel            {}\n"
                  "compiler         {}\n"
                  "processor        {}\n"
                  "instruction set  {} (of {})\n"
                  "threads          {} (of {} processors)\n"
                  "caches           {}\n",
                  version(), compiler(), processor(), name_of(in_use), joined(sets), threads,
                  ::sysconf(_SC_NPROCESSORS_ONLN), joined(cache_sizes)));
}

struct Summary {
  std::uint64_t elements = 0, bytes = 0;
  std::map<std::string, std::uint64_t> elements_of_type;
};

Summary summarise(const std::vector<NamedTensor>& tensors) {
  Summary sum;
  for (const NamedTensor& tensor : tensors) {
    const auto n = static_cast<std::uint64_t>(tensor.size());
    sum.elements += n;
    sum.bytes += tensor.bytes;
    sum.elements_of_type[tensor.type] += n;
  }
  return sum;
}

Json to_json(const std::vector<NamedTensor>& tensors) {
  Json list = Json::array();
  for (const NamedTensor& tensor : tensors) {
    list.push_back({{"name", tensor.name},
                    {"dtype", tensor.type},
                    {"shape", tensor.shape},
                    {"bytes", tensor.bytes}});
  }
  return list;
}

void write_tensors(const std::vector<NamedTensor>& tensors) {
  std::size_t name_width = 0, type_width = 0;
  for (const NamedTensor& tensor : tensors) {
    name_width = std::max(name_width, printable(tensor.name).size());
    type_width = std::max(type_width, printable(tensor.type, 16).size());
  }
  for (const NamedTensor& tensor : tensors) {
    write_out(fmt::format("  {:<{}}  {:<{}}  {}\n", printable(tensor.name), name_width,
                          printable(tensor.type, 16), type_width, shape_string(tensor.shape)));
  }
}

std::string described(const Summary& sum, std::size_t tensors, const char* what) {
  std::vector<std::string> types;
  for (const auto& [type, n] : sum.elements_of_type) types.push_back(printable(type, 16));
  return fmt::format("{} tensor{}, {} {} ({}), {}", with_commas(tensors), tensors == 1 ? "" : "s",
                     with_commas(sum.elements), what, types.empty() ? "none" : joined(types),
                     human_bytes(sum.bytes));
}

// A state file says so in its metadata; what a generator left there is in the tensor "sampler".
struct StateInfo {
  std::string fingerprint;  // of the model
  std::int64_t processed = 0;
  Session session;
};

std::optional<StateInfo> state_info(const SafetensorsReader& reader) {
  const auto& metadata = reader.metadata();
  const auto format = metadata.find("format"), fingerprint = metadata.find("fingerprint"),
             position = metadata.find("position");
  if (format == metadata.end() || !format->second.starts_with("ouzel-state-")) return std::nullopt;
  if (fingerprint == metadata.end() || position == metadata.end()) return std::nullopt;
  StateInfo info{.fingerprint = fingerprint->second,
                 .processed = position_in_file(reader.path(), position->second)};
  std::vector<std::uint8_t> bytes;
  if (const NamedTensor* sampler = reader.find("sampler")) {
    bytes.resize(sampler->bytes);
    reader.read(*sampler, bytes.data());
  }
  try {
    info.session = Session::decode(bytes, info.processed);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{}: {}", reader.path(), e.what()));
  }
  return info;
}

Json to_json(const StateInfo& info) {
  const SamplingOptions& o = info.session.options;
  return {{"fingerprint", info.fingerprint},
          {"position", info.session.position},
          {"processed", info.processed},
          {"waiting", info.session.waiting.size()},
          {"sampling",
           {{"temperature", o.temperature},
            {"top_k", o.top_k},
            {"top_p", o.top_p},
            {"min_p", o.min_p},
            {"repetition_penalty", o.repetition_penalty},
            {"repetition_window", o.repetition_window},
            {"seed", o.seed},
            {"stop", o.stop}}}};
}

void write_state(const StateInfo& info) {
  const SamplingOptions& o = info.session.options;
  write_out(fmt::format(
      "state of model {} after {} tokens ({} processed, {} waiting)\n", printable(info.fingerprint),
      with_commas(static_cast<std::uint64_t>(info.session.position)),
      with_commas(static_cast<std::uint64_t>(info.processed)), info.session.waiting.size()));
  write_out(fmt::format(
      "sampling: temperature {}, top-k {}, top-p {}, min-p {}, repetition penalty "
      "{} over {}, seed {}\n",
      o.temperature, o.top_k, o.top_p, o.min_p, o.repetition_penalty, o.repetition_window, o.seed));
  for (const std::string& stop : o.stop) write_out(fmt::format("  stop '{}'\n", printable(stop)));
}

void show_file(const std::string& path, const CommonOptions& common) {
  const SafetensorsReader reader(path);
  const Summary sum = summarise(reader.tensors());
  const std::optional<StateInfo> state = state_info(reader);
  if (common.json) {
    Json json = {{"file", path},
                 {"metadata", reader.metadata()},
                 {"tensors", to_json(reader.tensors())},
                 {"elements", sum.elements},
                 {"bytes", sum.bytes}};
    if (state) json["state"] = to_json(*state);
    write_json(json);
    return;
  }
  write_out(fmt::format("{}: {}\n", path, described(sum, reader.tensors().size(), "elements")));
  if (state) write_state(*state);
  if (!reader.metadata().empty()) write_out("metadata\n");
  for (const auto& [key, value] : reader.metadata()) {
    write_out(fmt::format("  {}: {}\n", printable(key), printable(value)));
  }
  if (!reader.tensors().empty()) write_out("tensors\n");
  write_tensors(reader.tensors());
}

void show_model(const std::string& path, const CommonOptions& common) {
  check_holds_config(path);
  const std::string config_path = (fs::path(path) / kConfig).string();
  const Json config = parse_json(read_file(config_path, kMaxConfig), config_path);
  const auto type = config.is_object() ? config.find("model_type") : config.end();
  if (type == config.end() || !type->is_string()) {
    throw Error(ErrorKind::kBadFile, fmt::format("{}: there is no text 'model_type'", config_path));
  }
  std::vector<NamedTensor> tensors;
  for (const std::string& file : weight_files(path)) {
    const SafetensorsReader reader(file);
    tensors.insert(tensors.end(), reader.tensors().begin(), reader.tensors().end());
  }
  const Summary sum = summarise(tensors);
  if (common.json) {
    write_json({{"model", path},
                {"model_type", *type},
                {"config", config},
                {"tensors", to_json(tensors)},
                {"parameters", sum.elements},
                {"bytes", sum.bytes}});
    return;
  }
  write_out(fmt::format("{}: {}, {}\n", path, printable(type->get<std::string>()),
                        described(sum, tensors.size(), "parameters")));
  write_out("configuration\n");
  for (const auto& [key, value] : config.items()) {
    write_out(fmt::format("  {}: {}\n", printable(key),
                          printable(value.dump(-1, ' ', false, Json::error_handler_t::replace))));
  }
  write_out("tensors\n");
  write_tensors(tensors);
}

int run(const Options& options) {
  std::error_code error;
  if (options.path.empty()) {
    show_machine(options.common);
  } else if (fs::is_directory(options.path, error)) {
    show_model(options.path, options.common);
  } else if (fs::path(options.path).extension() == ".json" && is_there(options.path)) {
    throw Error(ErrorKind::kBadFile,
                fmt::format("{} is JSON: name the folder of a model, a safetensors file or a saved "
                            "state",
                            options.path));
  } else {
    show_file(options.path, options.common);
  }
  return 0;
}

Action declare(CLI::App& parser) {
  auto options = std::make_shared<Options>();
  parser.add_option("PATH", options->path,
                    "A safetensors file, a saved state, or the folder of a model; without it: this "
                    "build and machine");
  options->common.declare_json(parser);
  options->common.declare_compute(parser);
  return [options] { return run(*options); };
}

}  // namespace

extern const Verb kInfoVerb = {
    "info", "Show what this build and machine are, or what a file or model holds",
    "ouzel info\n"
    "ouzel info model\n"
    "ouzel info book.state --json",
    declare};

}  // namespace ouzel::app
