// Whole models of 6 layers, 6 heads and width 384: a training step over the FMA
// peak, generation far into a stream; and how long the program takes to start.
#include <fcntl.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <system_error>
#include <vector>

#include <fmt/format.h>

#include "bench/case.h"
#include "bench/measure.h"
#include "ouzel/error.h"
#include "ouzel/model.h"
#include "ouzel/train.h"
#include "src/formats/files.h"

extern char** environ;

namespace ouzel::bench {
namespace {

using Clock = std::chrono::steady_clock;

ModelConfig config_of(const std::string& type) {
  ModelConfig config = ModelConfig::defaults(type);
  config.hidden_size = 384;
  config.num_hidden_layers = 6;
  config.mixer.num_heads = 6;
  return config;
}

// A folder that goes with its content.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string path = (std::filesystem::temp_directory_path() / "ouzel-bench-XXXXXX").string();
    if (mkdtemp(path.data()) == nullptr) {
      throw Error(ErrorKind::kIo, fmt::format("cannot make the folder {}: {}", path,
                                              std::generic_category().message(errno)));
    }
    path_ = path;
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  std::string operator/(const char* name) const { return (path_ / name).string(); }

 private:
  std::filesystem::path path_;
};

// A MiB of words drawn from a few hundred: text enough for the time of a step.
std::string words() {
  std::mt19937_64 random(1);
  std::vector<std::string> vocabulary(300);
  for (std::string& word : vocabulary) {
    word.resize(2 + random() % 8);
    for (char& c : word) c = static_cast<char>('a' + random() % 26);
  }
  std::string text;
  while (text.size() < 1 << 20) text += vocabulary[random() % vocabulary.size()] + ' ';
  return text;
}

std::vector<Row> training_step(const std::string& type, const CaseOptions& options) {
  const TemporaryFolder folder;
  write_file(folder / "text", words());
  TrainOptions train_options;
  train_options.model = config_of(type);
  train_options.data = folder / "text";
  train_options.out = folder / "out";
  train_options.context = 256;
  train_options.batch = 16;
  train_options.iterations = 1 + options.runs;
  train_options.validation = 0;
  train_options.checkpoint_every = train_options.iterations + 1;

  Context context = options.context(default_threads());
  const auto parameters =
      static_cast<double>(plan_training(context, train_options).parameters_without_embeddings);
  const std::int64_t tokens = train_options.context * train_options.batch;
  const double flops = 6 * parameters * static_cast<double>(tokens);
  // An iteration lasts from the end of one callback to the begin of the next;
  // the first one touches memory.
  Context bursts = options.context(context.threads());
  std::vector<double> seconds, peaks, ratios;
  double before = 0;
  auto resumed = Clock::now();
  train(context, train_options, [&](const TrainProgress& progress) {
    const std::chrono::duration<double> passed = Clock::now() - resumed;
    const double after = peak_flops(bursts);
    if (progress.iteration > 1) {
      seconds.push_back(passed.count());
      peaks.push_back(std::max(before, after));
      ratios.push_back(flops / seconds.back() / peaks.back());
    }
    if (!std::isfinite(progress.loss)) {
      throw Error(ErrorKind::kInvalidArgument, "bench: the training loss is not finite");
    }
    before = after;
    resumed = Clock::now();
  });
  return {Row{.op = "train_step",
              .pass = "forward_backward",
              .variant = type + ", 6 layers, width 384, 6 heads",
              .threads = context.threads(),
              .B = train_options.batch,
              .H = 6,
              .T = train_options.context,
              .K = 64,
              .V = 64,
              .ms = median(seconds) * 1e3,
              .gflops = flops / median(seconds) / 1e9,
              .peak_gflops = median(peaks) / 1e9,
              .efficiency = median(ratios),
              .clock = "forward, backward, clipping and AdamW; operations: 6 a "
                       "token and parameter, "
                       "embeddings and lm_head not counted"}};
}

// Bytes of memory that the process holds.
std::int64_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

std::vector<Row> generation(const CaseOptions& options) {
  constexpr std::int64_t kNear = 5'000, kFar = 100'000, kWindow = 1'000;
  Context context = options.context(default_threads());
  const ModelConfig config = config_of("linear_attn");
  const Model model(context, config, 1);
  Workspace workspace;
  std::mt19937_64 random(2);
  std::vector<std::int32_t> window(kWindow);
  std::vector<float> logits(static_cast<std::size_t>(config.vocab_size));
  const View<float, 2> rows(logits.data(), {1, config.vocab_size});
  const auto feed_to = [&](State& state, std::int64_t position) {
    while (state.position() < position) {
      for (std::int32_t& token : window) token = static_cast<std::int32_t>(random() % 256);
      model.forward(context, workspace, window, state, rows);
    }
  };
  // Greedy: the byte that was chosen is the next input.
  constexpr int kTokens = 20;
  std::int32_t token = 0;
  const auto generate = [&](State& state) {
    return [&] {
      for (int i = 0; i < kTokens; ++i) {
        model.forward(context, workspace, std::span<const std::int32_t>(&token, 1), state, rows);
        token = static_cast<std::int32_t>(std::max_element(logits.begin(), logits.end()) -
                                          logits.begin());
      }
    };
  };

  State near = model.new_state();
  feed_to(near, kNear);
  State far = near;
  generate(near)();  // the memory of single tokens is there before the stream goes on
  const std::int64_t memory = resident_bytes();
  feed_to(far, kFar);
  const std::int64_t growth = resident_bytes() - memory;
  Row time =
      with_ratio({.op = "generate",
                  .pass = "step",
                  .variant = "linear_attn, 6 layers, width 384, 6 heads: position 100,000 "
                             "over 5,000",
                  .threads = context.threads(),
                  .B = 1,
                  .H = 6,
                  .T = 1,
                  .K = 64,
                  .V = 64,
                  .clock = "one token at position 5,000, its choice from the logits of the one "
                           "before included; ratio: the time at 100,000 over that at 5,000"},
                 std::max(options.runs, 25), generate(near), generate(far));
  time.ms /= kTokens;
  Row memory_row{.op = "generate",
                 .pass = "step",
                 .variant = "growth of resident memory from position 5,000 to 100,000",
                 .threads = context.threads(),
                 .B = 1,
                 .H = 6,
                 .bytes = static_cast<double>(growth),
                 .clock = "no time"};
  return {time, memory_row};
}

std::vector<Row> start_up(const CaseOptions& options) {
  const auto start = [] {
    posix_spawn_file_actions_t quiet;
    posix_spawn_file_actions_init(&quiet);
    posix_spawn_file_actions_addopen(&quiet, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
    std::string program = "/proc/self/exe", flag = "--version";
    char* arguments[] = {program.data(), flag.data(), nullptr};
    pid_t child = 0;
    const int error = posix_spawn(&child, program.c_str(), &quiet, nullptr, arguments, environ);
    posix_spawn_file_actions_destroy(&quiet);
    int status = 0;
    if (error != 0 || waitpid(child, &status, 0) != child || status != 0) {
      throw Error(ErrorKind::kIo, "bench: 'ouzel --version' could not be run");
    }
  };
  start();
  std::vector<double> seconds;
  for (int i = 0; i < std::max(options.runs, 25); ++i) seconds.push_back(seconds_of(start));
  return {Row{.op = "start_up",
              .variant = "ouzel --version",
              .ms = median(seconds) * 1e3,
              .clock = "the process, from its making to its end"}};
}

}  // namespace

std::vector<Case> model_cases() {
  std::vector<Case> cases;
  for (const char* type : {"linear_attn", "transformer"}) {
    cases.push_back({fmt::format("train_step/{}", type),
                     [=](const CaseOptions& options) { return training_step(type, options); }});
  }
  cases.push_back({"generate/linear_attn", generation});
  cases.push_back({"start_up", start_up});
  return cases;
}

}  // namespace ouzel::bench
