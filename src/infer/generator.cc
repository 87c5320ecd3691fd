// A generator is a state, the tokens that wait to be processed into it, and a sampler. The model
// sees calls whose borders are a function of the stream alone, which is what makes results so.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <utility>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "src/infer/bytes_model.h"
#include "src/infer/session.h"
#include "src/infer/stop_text.h"

namespace ouzel {
namespace {

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin_ = Clock::now();
};

Session decode(const State& state) { return Session::decode(state.sampler, state.position()); }

}  // namespace

struct Generator::Impl {
  Impl(Context& context, const Model& model, State state, Session session)
      : context(context),
        model(model),
        state(std::move(state)),
        sampler(session.options, session.position, std::move(session.recent)),
        stop(session.options.stop, std::move(session.held)),
        certain(std::move(session.certain)),
        waiting(std::move(session.waiting)),
        keeps_every_token(ouzel::keeps_every_token(model)),
        logits(static_cast<std::size_t>(kBytes)) {
    waiting.reserve(static_cast<std::size_t>(kChunk));
    // A token alone was sampled last, more are a prompt.
    waiting_prompt = waiting.size() > 1 ? static_cast<std::int64_t>(waiting.size()) : 0;
  }

  std::int64_t position() const {
    return state.position() + static_cast<std::int64_t>(waiting.size());
  }

  void accept(std::int32_t token) {
    sampler.accept(token);
    waiting.push_back(token);
  }

  void accept_prompt(std::int32_t token) {
    const std::int64_t room = kChunk - state.position() % kChunk;
    if (static_cast<std::int64_t>(waiting.size()) == room) process();
    accept(token);
    ++waiting_prompt;
  }

  // Neither `read` nor `generate` may come from the callback of `generate`, in whose middle it is.
  void check_free() const {
    if (!generating) return;
    throw Error(ErrorKind::kInvalidArgument,
                "generate: this generator is generating, and its own callback must not read or "
                "generate with it; end the call first");
  }

  bool tell(const std::function<bool(std::string_view)>& write, std::string_view text) {
    struct Ended {
      bool& generating;
      ~Ended() { generating = false; }
    };
    const Ended ended{generating = true};
    return write(text);
  }

  void check_whole() const {
    if (!broken) return;
    throw Error(ErrorKind::kCancelled,
                "this generator was interrupted in the middle of a chunk and cannot go on; start "
                "again from a saved state");
  }

  // All waiting tokens into the state, and the logits after the last.
  void process() {
    check_whole();
    const Stopwatch watch;
    const auto count = static_cast<std::int64_t>(waiting.size());
    if (keeps_every_token) make_room(state, count);
    broken = true;  // until the state is whole again
    model.forward(context, workspace, waiting, state, {logits.data(), {1, kBytes}});
    broken = false;
    waiting.clear();
    if (waiting_prompt != 0) {
      statistics.prompt_tokens += count;
      statistics.prompt_seconds += watch.seconds();
      waiting_prompt = 0;
    } else {
      statistics.steps += count;
      statistics.step_seconds += watch.seconds();
    }
  }

  Session session() const {
    return {sampler.options(), position(), sampler.recent(), waiting, certain, stop.held()};
  }

  Context& context;
  Model model;
  State state;
  Workspace workspace;
  Sampler sampler;
  StopText stop;
  std::string certain;  // generated, for the next call of `write`
  std::vector<std::int32_t> waiting;
  std::int64_t waiting_prompt = 0;  // of these, read
  bool keeps_every_token;
  bool broken = false;
  bool generating = false;
  std::vector<float> logits;
  GenerateStatistics statistics;
};

Generator::Generator(Context& context, const Model& model, const SamplingOptions& options)
    : Generator(context, model, model.new_state(), options) {}

Generator::Generator(Context& context, const Model& model, State state)
    : Generator(context, model, state, sampling_of(state)) {}

Generator::Generator(Context& context, const Model& model, State state,
                     const SamplingOptions& options) {
  options.check();
  check_bytes_model(model, "generate");
  if (const State mine = model.new_state(); state.fingerprint() != mine.fingerprint()) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("generate: the state is of model {}, not of this one, {}",
                            state.fingerprint(), mine.fingerprint()));
  }
  Session session = decode(state);
  state.sampler.clear();
  if (session.options.stop != options.stop) {
    // What was held back for the old stop texts is text like any other now.
    session.certain += std::exchange(session.held, {});
  }
  session.options = options;
  impl_ = std::make_unique<Impl>(context, model, std::move(state), std::move(session));
}

Generator::~Generator() = default;
Generator::Generator(Generator&&) noexcept = default;
Generator& Generator::operator=(Generator&&) noexcept = default;

SamplingOptions Generator::sampling_of(const State& state) { return decode(state).options; }

std::int64_t Generator::position_of(const State& state) { return decode(state).position; }

void Generator::read(std::string_view text) {
  impl_->check_free();
  if (!text.empty()) impl_->certain += impl_->stop.take_held();
  for (char byte : text) impl_->accept_prompt(static_cast<unsigned char>(byte));
}

Finish Generator::generate(std::int64_t tokens,
                           const std::function<bool(std::string_view)>& write) {
  Impl& my = *impl_;
  my.check_free();
  if (tokens < 0) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("generate: the number of tokens is 0 or more, not {}", tokens));
  }
  if (tokens != 0 && my.waiting.empty()) {
    if (my.position() != 0) {
      throw Error(ErrorKind::kInvalidArgument,
                  "generate: the state was not saved by a generator, so that its last token is not "
                  "known: read a prompt first");
    }
    my.accept_prompt(kStart);
  }
  for (std::int64_t i = 0; i < tokens; ++i) {
    my.process();
    const Stopwatch watch;
    const std::int32_t token = my.sampler.sample(my.logits);
    my.accept(token);
    ++my.statistics.generated_tokens;
    std::string text = std::exchange(my.certain, {});
    const bool stopped = my.stop.push(static_cast<char>(token), text);
    my.statistics.step_seconds += watch.seconds();
    const bool go_on = my.tell(write, text);
    if (stopped) return Finish::kStop;
    if (!go_on) return Finish::kCallback;
  }
  return Finish::kLength;
}

std::string Generator::take_held_text() {
  return std::exchange(impl_->certain, {}) + impl_->stop.take_held();
}

std::int64_t Generator::position() const { return impl_->position(); }

State Generator::state() const {
  impl_->check_whole();
  State copy = impl_->state;
  copy.sampler = impl_->session().encode();
  return copy;
}

std::size_t Generator::state_bytes() const { return impl_->state.bytes(); }

const GenerateStatistics& Generator::statistics() const { return impl_->statistics; }

}  // namespace ouzel
