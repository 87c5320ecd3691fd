// A process that is killed at any rename or removal of a save leaves the old model, the new one, or
// a folder that nothing loads, with a sentence that says what to do.
#include <fcntl.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/train.h"
#include "src/formats/files.h"
#include "tests/model_cases.h"
#include "tests/temp_folder.h"

namespace {
int moments_left = -1;  // of this process; negative: it lives on

void spend_moment() {
  if (moments_left-- == 0) _exit(9);  // no destructor runs, as under SIGKILL
}
}  // namespace

// In the place of libc's: before each change of a name, and after it, the process may end.
extern "C" int rename(const char* from, const char* to) noexcept {
  spend_moment();
  const long result = syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
  spend_moment();
  return static_cast<int>(result);
}
extern "C" int unlink(const char* path) noexcept {
  spend_moment();
  const long result = syscall(SYS_unlinkat, AT_FDCWD, path, 0);
  spend_moment();
  return static_cast<int>(result);
}

namespace ouzel::test {
namespace {

constexpr int kMostMoments = 100;  // far more than a save has

// Whether `action` came to its end in a child that dies at a moment.
bool ends_before(int moment, const std::function<void()>& action) {
  const pid_t child = fork();
  if (child == 0) {
    moments_left = moment;
    action();
    _exit(0);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_TRUE(WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 9) << WEXITSTATUS(status);
  return WEXITSTATUS(status) == 0;
}

// What a folder holds: the fingerprint of configuration and weights, or the error's sentence.
std::string found_in(const std::string& folder) {
  Context context({.threads = 1});
  try {
    return Model::load(context, folder).fingerprint();
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kIo);
    return error.what();
  }
}

bool is_remedy(const std::string& found) {
  return found.find("save the model again, or resume its training") != std::string::npos;
}

TEST(InterruptedSave, NeverMixesTwoModels) {
  Context context({.threads = 1});
  // Of equal shapes, so that the weights of either fit the configuration of the other.
  ModelConfig config = model_cases()[3].config, other = config;
  other.mixer.feature_map = FeatureMapKind::kRelu;
  other.norm_eps = 1e-3;
  const Model before(context, config, 1), same(context, config, 2), after(context, other, 3);
  for (const Model* next : {&same, &after}) {
    int moment = 0, kept = 0, alone = 0;
    for (bool ended = false; !ended && moment < kMostMoments; ++moment) {
      SCOPED_TRACE(moment);
      const TempFolder folder;
      before.save(folder.path());
      ended = ends_before(moment, [&] { next->save(folder.path()); });
      const std::string found = found_in(folder.path());
      if (ended) {
        EXPECT_EQ(found, next->fingerprint());
      } else if (is_remedy(found)) {
        ++alone;
      } else {
        EXPECT_TRUE(found == before.fingerprint() || found == next->fingerprint()) << found;
        kept += found == before.fingerprint();
      }
      next->save(folder.path());  // what the remedy says
      EXPECT_EQ(found_in(folder.path()), next->fingerprint());
    }
    EXPECT_GT(moment, 2);
    EXPECT_LT(moment, kMostMoments);
    EXPECT_GT(kept, 0);
    EXPECT_EQ(alone > 0, next == &after);  // a configuration that stays is never away
  }
}

TEST(InterruptedSave, KeepsAConfigurationThatStoodAlone) {
  Context context({.threads = 1});
  const Model model(context, model_cases()[0].config, 1);
  bool ended = false;
  for (int moment = 0; !ended && moment < kMostMoments; ++moment) {
    SCOPED_TRACE(moment);
    const TempFolder folder;
    write_file(folder / "config.json", "\n" + model.config().to_json());  // as the user wrote it
    ended = ends_before(moment, [&] { model.save(folder.path()); });
    const std::string found = found_in(folder.path());
    EXPECT_TRUE(found == model.fingerprint() ||
                found.find("config.json without weights") != std::string::npos)
        << found;
  }
  EXPECT_TRUE(ended);
}

TEST(InterruptedSave, AnOverwritingRunCanBeGoneOnWith) {
  const TempFolder folder;
  std::string text;
  for (int i = 0; i < 600; ++i) text += "water ";
  write_file(folder / "text", text);
  TrainOptions first;
  first.model.hidden_size = 32;
  first.model.num_hidden_layers = 1;
  first.model.intermediate_size = 48;
  first.data = folder / "text";
  first.context = 16;
  first.batch = 2;
  first.iterations = 2;
  TrainOptions second = first;
  second.model.norm_eps = 1e-3;
  const auto run = [](const TrainOptions& options) {
    Context context({.threads = 1});
    train(context, options);
    return Model::load(context, options.out).fingerprint();
  };
  first.out = folder / "first";
  const std::string before = run(first);
  second.out = folder / "second";
  const std::string after = run(second);

  second.out = folder / "both";
  int moment = 0, alone = 0;
  for (bool ended = false; !ended && moment < kMostMoments; ++moment) {
    SCOPED_TRACE(moment);
    std::filesystem::remove_all(second.out);
    std::filesystem::copy(first.out, second.out);
    second.overwrite = true;
    second.resume = false;
    ended = ends_before(moment, [&] { run(second); });
    const std::string found = found_in(second.out);
    EXPECT_TRUE(found == before || found == after || is_remedy(found)) << found;
    alone += is_remedy(found);
    if (std::filesystem::exists(second.out + "/training.safetensors")) {
      second.overwrite = false;
      second.resume = true;
    } else {
      EXPECT_EQ(found, before);  // nothing was begun
    }
    EXPECT_EQ(run(second), after);
  }
  EXPECT_GT(alone, 0);
  EXPECT_LT(moment, kMostMoments);
}

}  // namespace
}  // namespace ouzel::test
