// Training on small texts: the loss falls, and a run that was stopped in any way goes on bit for
// bit.
#include <csignal>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "ouzel/error.h"
#include "ouzel/train.h"
#include "src/base/dense_tensor.h"
#include "src/formats/files.h"
#include "src/formats/json.h"
#include "src/formats/safetensors.h"
#include "tests/model_cases.h"
#include "tests/temp_folder.h"

namespace ouzel {
namespace {

class Training : public ::testing::Test {
 protected:
  Training() {
    std::string text;
    Random random(1);
    const char* words[] = {"water ", "bird ", "stone ", "runs ", "over ", "the "};
    while (text.size() < 6000) text += words[random.below(6)];
    write_file(path("text"), text);
  }

  std::string path(const std::string& name) const { return folder_ / name; }

  TrainOptions options(const std::string& type, const std::string& out) const {
    TrainOptions o;
    o.model = ModelConfig::defaults(type);
    o.model.hidden_size = 32;
    o.model.num_hidden_layers = 2;
    o.model.intermediate_size = 48;
    o.model.mixer.num_heads = 2;
    o.data = path("text");
    o.out = path(out);
    o.context = 32;
    o.batch = 4;
    o.iterations = 12;
    o.warmup = 3;
    o.lr = 1e-2;
    o.validate_every = 5;
    o.checkpoint_every = 4;
    return o;
  }

  struct Run {
    std::vector<double> losses;
    TrainResult result;
    std::string metrics, weights;
  };
  Run run(const TrainOptions& o, int threads = 2) const {
    Context context({.threads = threads, .poison_scratch = true});
    Run run;
    run.result = train(context, o, [&](const TrainProgress& p) { run.losses.push_back(p.loss); });
    run.metrics = read_file(o.out + "/metrics.jsonl");
    run.weights = read_file(o.out + "/model.safetensors");
    return run;
  }

  // Trains in a child process and kills it after `milliseconds`.
  static void run_and_kill(const TrainOptions& o, int milliseconds) {
    const pid_t child = fork();
    if (child == 0) {
      Context context({.threads = 1});
      train(context, o);
      _exit(0);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
  }

  test::TempFolder folder_;
};

std::vector<std::string> types() { return {"transformer", "linear_attn", "retnet"}; }

TEST_F(Training, LossFallsForEveryType) {
  for (const std::string& type : types()) {
    SCOPED_TRACE(type);
    TrainOptions o = options(type, type);
    o.iterations = 60;
    if (type == "linear_attn") o.model.mixer.feature_map = FeatureMapKind::kElu1;
    const Run run = this->run(o);
    EXPECT_EQ(run.result.iteration, 60);
    EXPECT_GT(run.losses.front(), 5);
    EXPECT_LT(run.losses.back(), 2);  // 2.5: the entropy of single bytes
    EXPECT_GT(run.result.validation_loss, 0);
    EXPECT_LT(run.result.validation_loss, 2);
    EXPECT_LE(run.result.best_validation_loss, run.result.validation_loss);
    Context context({.threads = 1});
    EXPECT_EQ(Model::load(context, o.out).config().to_json(), o.model.to_json());
    // One line an iteration, each of them JSON.
    std::ifstream lines(o.out + "/metrics.jsonl");
    std::string line;
    int count = 0;
    while (std::getline(lines, line)) {
      EXPECT_EQ(parse_json(line, "metrics").at("iteration").get<int>(), ++count);
    }
    EXPECT_EQ(count, 60);
  }
}

TEST_F(Training, ThreadsAndRecomputationChangeNothing) {
  for (const std::string& type : types()) {
    SCOPED_TRACE(type);
    const Run one = run(options(type, type + "/one"), 1);
    const Run two = run(options(type, type + "/two"), 2);
    TrainOptions o = options(type, type + "/recompute");
    o.recompute = true;
    const Run again = run(o, 3);
    EXPECT_EQ(one.losses, two.losses);
    EXPECT_EQ(one.weights, two.weights);
    EXPECT_EQ(one.metrics, two.metrics);
    EXPECT_EQ(one.losses, again.losses);
    EXPECT_EQ(one.weights, again.weights);
  }
}

TEST_F(Training, ResumesBitForBitAfterACancellationAnywhere) {
  for (const bool carry : {false, true}) {
    TrainOptions o = options("retnet", carry ? "whole-c" : "whole");
    o.carry = carry;
    o.grad_accumulation = 2;
    const Run whole = run(o);
    // Asked so often in one run; then cancelled at the n-th question.
    for (const int stop : {1, 2, 50, 333, 1000, 2000}) {
      SCOPED_TRACE(stop);
      TrainOptions broken = o;
      broken.out = path("broken" + std::to_string(stop) + (carry ? "c" : ""));
      std::vector<double> losses;
      const auto keep = [&](const TrainProgress& p) { losses.push_back(p.loss); };
      int questions = 0;
      {
        Context context({.threads = 2, .cancelled = [&] { return ++questions >= stop; }});
        const TrainResult result = train(context, broken, keep);
        EXPECT_EQ(result.iteration, std::ssize(losses));
        if (stop < 100) {
          EXPECT_LT(result.iteration, o.iterations);
        }
        if (0 < result.iteration && result.iteration < o.iterations) {
          // Starting anew would lose the run.
          const std::string kept = read_file(broken.out + "/training.safetensors");
          Context fresh({.threads = 2});
          EXPECT_THROW(train(fresh, broken), Error);
          EXPECT_EQ(read_file(broken.out + "/training.safetensors"), kept);
        }
      }
      broken.resume = true;
      Context context({.threads = 1});
      Model::load(context, broken.out);
      train(context, broken, keep);
      EXPECT_EQ(losses, whole.losses);
      EXPECT_EQ(read_file(broken.out + "/model.safetensors"), whole.weights);
      EXPECT_EQ(read_file(broken.out + "/metrics.jsonl"), whole.metrics);
    }
  }
}

TEST_F(Training, ResumesBitForBitAfterKill) {
  TrainOptions o = options("linear_attn", "whole");
  o.carry = true;
  o.iterations = 40;
  o.checkpoint_every = 3;
  const Run whole = run(o);
  Random random(5);
  for (int round = 0; round < 4; ++round) {
    TrainOptions broken = o;
    broken.out = path("killed" + std::to_string(round));
    run_and_kill(broken, static_cast<int>(random.below(120)));
    broken.resume = true;
    for (int more = 0; more < 3; ++more) {
      run_and_kill(broken, static_cast<int>(20 + random.below(60)));
    }
    const Run end = run(broken);
    EXPECT_EQ(end.result.iteration, o.iterations);
    EXPECT_EQ(end.weights, whole.weights);
    EXPECT_EQ(end.metrics, whole.metrics);
  }
}

TEST_F(Training, GoesOnForMoreIterationsThanItWasStartedWith) {
  const auto rates = [](const std::string& metrics) {
    std::vector<double> list;
    std::istringstream lines(metrics);
    for (std::string line; std::getline(lines, line);) {
      list.push_back(parse_json(line, "metrics").at("lr").get<double>());
    }
    return list;
  };
  TrainOptions o = options("retnet", "short");
  const Run before = run(o);
  std::filesystem::copy(o.out, path("stopped"));
  o.resume = true;
  o.iterations = 20;
  const Run longer = run(o);
  EXPECT_EQ(longer.result.iteration, 20);
  EXPECT_EQ(longer.losses.size(), 8);
  // What was done stays, and what is left has the rates of a run of the new length.
  EXPECT_TRUE(longer.metrics.starts_with(before.metrics));
  TrainOptions whole = options("retnet", "long");
  whole.iterations = 20;
  const std::vector<double> wanted = rates(run(whole).metrics), got = rates(longer.metrics);
  ASSERT_EQ(got.size(), wanted.size());
  for (std::size_t i = 12; i < got.size(); ++i) EXPECT_EQ(got[i], wanted[i]) << i;

  // A stop of the longer run changes nothing.
  o.out = path("stopped");
  {
    std::int64_t done = 0;
    Context context({.threads = 2, .cancelled = [&] { return done == 15; }});
    train(context, o, [&](const TrainProgress& p) { done = p.iteration; });
    EXPECT_EQ(done, 15);
  }
  EXPECT_EQ(run(o).weights, longer.weights);
  EXPECT_EQ(read_file(o.out + "/metrics.jsonl"), longer.metrics);

  // It is not shortened again, and nothing else may differ.
  o.iterations = 12;
  Context context({.threads = 1});
  EXPECT_THROW(train(context, o), Error);
  o.iterations = 30;
  o.warmup = 4;
  EXPECT_THROW(train(context, o), Error);
  EXPECT_EQ(read_file(o.out + "/metrics.jsonl"), longer.metrics);
}

TEST_F(Training, RefusesAFolderInThePlaceOfAFile) {
  for (const char* name :
       {"config.json", "model.safetensors", "training.safetensors", "metrics.jsonl"}) {
    const TrainOptions o = options("retnet", std::string("no-") + name);
    std::filesystem::create_directories(o.out + "/" + name);
    int iterations = 0;
    Context context({.threads = 1});
    EXPECT_THROW(train(context, o, [&](const TrainProgress&) { ++iterations; }), Error) << name;
    EXPECT_EQ(iterations, 0) << name;
  }
}

TEST_F(Training, IsNotUndoneByASaveIntoItsFolder) {
  TrainOptions o = options("retnet", "saved");
  const std::string weights = run(o).weights;
  Context context({.threads = 1});
  const Model other(context, o.model, 5);
  EXPECT_THROW(other.save(o.out), Error);
  EXPECT_EQ(read_file(o.out + "/model.safetensors"), weights);
  std::filesystem::remove(o.out + "/training.safetensors");
  other.save(o.out);
  o.resume = true;
  EXPECT_THROW(train(context, o), Error);
  EXPECT_EQ(Model::load(context, o.out).fingerprint(), other.fingerprint());
}

TEST_F(Training, ResumeMakesUpForAModelThatWasNotSaved) {
  // Killed between the last checkpoint and the model of it, in a save that left its temporary.
  const TrainOptions whole = options("retnet", "whole");
  const std::string weights = run(whole).weights;
  TrainOptions o = whole;
  o.resume = true;
  const std::string model = o.out + "/model.safetensors";
  for (const bool missing : {false, true}) {
    write_file(model, "of an older checkpoint");
    if (missing) std::filesystem::remove(model);
    for (const char* name : {"model.safetensors", "training.safetensors", "config.json"}) {
      write_file(o.out + "/" + name + ".4194304-12.tmp", "half");
    }
    const std::string mine = o.out + "/model.safetensors.mine.tmp";
    write_file(mine, "of the user");
    EXPECT_EQ(run(o).weights, weights);
    EXPECT_TRUE(std::filesystem::remove(mine));
    const auto files = std::filesystem::directory_iterator(o.out);
    EXPECT_EQ(std::distance(begin(files), end(files)), 4) << "temporaries are left";
  }
}

TEST_F(Training, ReplacesAModelOnlyWhereItIsToldTo) {
  TrainOptions o = options("retnet", "kept");
  const std::string weights = run(o).weights;
  o.seed = 2;
  const auto refused = [&](const std::string& part) {
    Context context({.threads = 1});
    try {
      train(context, o);
      ADD_FAILURE() << "trained";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kInvalidArgument);
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(read_file(o.out + "/model.safetensors"), weights);
  };
  refused(
      "holds a trained model: choose another folder, train it on (TrainOptions::resume, more "
      "iterations), or replace it (TrainOptions::overwrite)");
  o.overwrite = o.resume = true;
  refused("give one");
  o.resume = false;
  EXPECT_NE(run(o).weights, weights);
}

TEST_F(Training, KeepsASecondRunOutOfItsFolder) {
  const std::string weights = run(options("retnet", "alone")).weights;
  const TrainOptions o = options("retnet", "shared");
  int refused = 0;
  Context context({.threads = 2});
  train(context, o, [&](const TrainProgress&) {
    for (const bool resume : {false, true}) {
      TrainOptions second = o;
      second.resume = resume;
      Context other({.threads = 1});
      try {
        train(other, second);
      } catch (const Error& error) {
        EXPECT_EQ(error.kind(), ErrorKind::kIo);
        refused += std::string(error.what()).find("another run") != std::string::npos;
      }
    }
  });
  EXPECT_EQ(refused, 2 * o.iterations);
  EXPECT_EQ(read_file(o.out + "/model.safetensors"), weights);
}

TEST_F(Training, RefusesCheckpointsWithImpossibleCounts) {
  TrainOptions o = options("retnet", "counts");
  o.carry = true;  // the iteration chooses the window
  run(o);
  o.resume = true;
  const std::string checkpoint = o.out + "/training.safetensors";
  const std::string whole = read_file(checkpoint);
  const auto changed = [&](const std::string& key, const std::string& value) {
    const SafetensorsReader file(checkpoint);
    std::vector<Buffer> memory;
    std::vector<TensorToWrite> tensors;
    for (const NamedTensor& tensor : file.tensors()) {
      memory.emplace_back(tensor.bytes);
      file.read(tensor, memory.back().data());
      tensors.push_back(
          {tensor.name, dense_tensor(memory.back().data(), *tensor.dtype, tensor.shape)});
    }
    auto metadata = file.metadata();
    metadata[key] = value;
    write_safetensors(checkpoint, tensors, metadata);
  };
  const std::pair<const char*, const char*> faults[] = {
      {"iteration", "-1"},
      {"iteration", "-5000000000"},
      {"iteration", "13"},
      {"iteration", "1e3"},
      {"iteration", "9223372036854775807"},
      {"metrics_bytes", "-3"},
      {"random_position", "-1"},
      {"loss", ""},
  };
  for (const auto& [key, value] : faults) {
    SCOPED_TRACE(std::string(key) + " = " + value);
    write_file(checkpoint, whole);
    changed(key, value);
    Context context({.threads = 1});
    try {
      train(context, o);
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), ErrorKind::kBadFile);
      EXPECT_NE(std::string(error.what()).find(checkpoint), std::string::npos) << error.what();
    }
  }
}

TEST_F(Training, AccumulationIsALargerBatch) {
  TrainOptions o = options("transformer", "large");
  o.batch = 6;
  o.iterations = 5;
  const Run large = run(o);
  o.batch = 2;
  o.grad_accumulation = 3;
  o.out = path("small");
  const Run small = run(o);
  for (std::size_t i = 0; i < large.losses.size(); ++i) {
    EXPECT_NEAR(small.losses[i], large.losses[i], 1e-4 * large.losses[i]);
  }
}

// What is carried must help: in a text whose every window repeats the one before it, a model can
// know the next byte only from the state. Without a carry the first bytes of a window cannot be
// told.
TEST_F(Training, CarryGivesWindowsTheirPast) {
  Random random(9);
  std::string period;
  for (int i = 0; i < 8; ++i) period += static_cast<char>('a' + random.below(26));
  std::string text;
  while (text.size() < 20000) text += period;
  write_file(path("text"), text);
  TrainOptions o = options("retnet", "carried");
  o.context = 2;
  o.batch = 16;
  o.iterations = 80;
  o.validation = 0;
  o.carry = true;
  const double carried = run(o).losses.back();
  o.carry = false;
  o.out = path("fresh");
  const double fresh = run(o).losses.back();
  EXPECT_LT(carried, fresh);
}

// What a sanitizer keeps beside the program's memory is in no plan.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
TEST_F(Training, DISABLED_KeepsItsPlan) {
#else
TEST_F(Training, KeepsItsPlan) {
#endif
  for (const std::string& type : types()) {
    for (const bool recompute : {false, true}) {
      SCOPED_TRACE(type + (recompute ? " recomputed" : ""));
      TrainOptions o = options(type, "plan" + type + (recompute ? "r" : ""));
      o.model.hidden_size = 192;
      o.model.num_hidden_layers = 4;
      o.context = 256;
      o.batch = 8;
      o.iterations = 2;
      o.recompute = recompute;
      o.validate_every = 1;
      Context context({.threads = 2});
      const TrainPlan plan = plan_training(context, o);
      EXPECT_EQ(plan.peak_bytes, plan.weight_bytes + plan.optimizer_bytes + plan.activation_bytes +
                                     plan.other_bytes);
      // In a process of its own, whose peak counts from the fork on.
      int pipes[2];
      ASSERT_EQ(pipe(pipes), 0);
      const pid_t child = fork();
      if (child == 0) {
        Context own({.threads = 2});
        train(own, o);
        std::ifstream status("/proc/self/status");
        std::string word;
        std::size_t kilobytes = 0;
        while (status >> word && word != "VmHWM:") {
        }
        status >> kilobytes;
        const bool written = write(pipes[1], &kilobytes, sizeof(kilobytes)) == sizeof(kilobytes);
        _exit(written ? 0 : 1);
      }
      std::size_t kilobytes = 0;
      ASSERT_EQ(read(pipes[0], &kilobytes, sizeof(kilobytes)), ssize_t{sizeof(kilobytes)});
      int status = 0;
      waitpid(child, &status, 0);
      close(pipes[0]);
      close(pipes[1]);
      EXPECT_LE(kilobytes * 1024, plan.peak_bytes);
      // And the plan is no idle upper bound.
      EXPECT_GE(kilobytes * 1024, plan.peak_bytes - plan.other_bytes);
      EXPECT_EQ(Model::load(context, o.out).parameter_count(), plan.parameters);
    }
  }
}

TEST_F(Training, RefusesWhatCannotWork) {
  Context context({.threads = 1});
  const auto message = [&](const TrainOptions& o, ErrorKind kind) -> std::string {
    try {
      train(context, o);
    } catch (const Error& error) {
      EXPECT_EQ(error.kind(), kind) << error.what();
      return error.what();
    }
    ADD_FAILURE() << "no error";
    return "";
  };
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " is not in: " << text;
  };
  TrainOptions o = options("transformer", "refused");
  write_file(path("empty"), "");
  o.data = path("empty");
  contains(message(o, ErrorKind::kInvalidArgument), "0 bytes");
  o.data = path("absent");
  contains(message(o, ErrorKind::kIo), "absent");
  o = options("transformer", "refused");
  o.context = 6000;
  contains(message(o, ErrorKind::kInvalidArgument), "6000");
  o = options("transformer", "refused");
  o.carry = true;
  contains(message(o, ErrorKind::kInvalidArgument), "window_size");
  o.model.mixer.window_size = 8;
  o.batch = 1000;
  contains(message(o, ErrorKind::kInvalidArgument), "1000 streams");
  o = options("transformer", "refused");
  o.model.vocab_size = 255;
  contains(message(o, ErrorKind::kInvalidArgument), "vocab_size");
  EXPECT_FALSE(std::filesystem::exists(path("refused")));

  o = options("transformer", "started");
  o.iterations = 4;
  train(context, o);
  o.resume = true;
  EXPECT_EQ(train(context, o).iteration, 4);  // nothing left to do
  o.lr = 0.5;
  contains(message(o, ErrorKind::kBadFile), "lr = 0.01");
  write_file(o.out + "/training.safetensors", "damaged");
  contains(message(o, ErrorKind::kBadFile), "training.safetensors");
}

TEST_F(Training, LearnsFromAllButTheLastPart) {
  // The held-back part is one byte that occurs nowhere else: its loss must stay high.
  std::string text(4000, 'a');
  text += std::string(1000, 'z');
  write_file(path("text"), text);
  TrainOptions o = options("retnet", "split");
  o.validation = 0.2;
  o.iterations = 30;
  const Run run = this->run(o);
  EXPECT_LT(run.losses.back(), 0.1);
  EXPECT_GT(run.result.validation_loss, 3);
}

}  // namespace
}  // namespace ouzel
