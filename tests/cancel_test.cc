// A call that is cancelled ends soon, also where all of it is one task: every operator of the
// table, forward and backward, on a sequence that would take it far longer.
#include <ctime>

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/context.h"
#include "ouzel/error.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry.h"

namespace ouzel {
namespace {

// Of this thread alone: what else the machine does must not count.
double seconds() {
  timespec time;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// How long a call runs before it is cancelled, and how long it may go without asking; a fiftieth
// of that is usual.
constexpr double kRun = 0.03, kPatience = 0.1;
constexpr std::int64_t kTokens = std::int64_t{1} << 22;

std::int64_t extent_of(const std::string& letter, const OperatorInfo& info) {
  if (letter == "TP") return 31;  // of a window of 32
  if (letter[0] == 'T') return kTokens;
  if (letter == "BD") return 1;
  if (letter == "B" || letter == "N" || letter[0] == 'H') return 1;
  if (letter == "D" && info.find_attribute("cu_seqlens") != nullptr) return 256;  // channels
  return letter == "M" && info.name == "selective_scan" ? 16 : 32;
}

// Zeros of a shape of letters: one row, seen by all tokens.
struct Zeros {
  Zeros(const TensorInfo& tensor, const OperatorInfo& info) {
    const std::string shape = tensor.shape.substr(0, tensor.shape.find('|'));
    view.dtype = tensor.dtype;
    std::int64_t step = 1;
    std::vector<std::string> letters;
    for (std::size_t at = 0; at < shape.size();) {
      const std::size_t end = std::min(shape.find(' ', at), shape.size());
      letters.push_back(shape.substr(at, end - at));
      at = end + 1;
    }
    view.rank = static_cast<int>(letters.size());
    for (std::size_t i = letters.size(); i-- > 0;) {
      const bool digit = letters[i].find_first_not_of("0123456789") == std::string::npos;
      view.extent[i] = digit ? std::stoll(letters[i]) : extent_of(letters[i], info);
      view.stride[i] = view.extent[i] == kTokens && i + 1 < letters.size() ? 0 : step;
      if (view.stride[i] != 0) step *= view.extent[i];
    }
    memory = Buffer::zeros(static_cast<std::size_t>(step * size_of(tensor.dtype)));
    view.data = memory.data();
  }
  Buffer memory;
  ConstTensor view;
};

std::map<std::string, std::string> attributes_of(const OperatorInfo& info,
                                                 const std::string& form) {
  const std::map<std::string, std::string> all = {{"form", form},
                                                  {"layer_idx", "0"},
                                                  {"num_layers", "2"},
                                                  {"q_num_heads", "1"},
                                                  {"kv_num_heads", "1"}};
  std::map<std::string, std::string> own;
  for (const auto& [name, value] : all) {
    if (info.find_attribute(name) != nullptr) own[name] = value;
  }
  return own;
}

void expect_soon(const OperatorInfo& info, const std::string& form, bool backward, Isa isa) {
  SCOPED_TRACE(info.name + (backward ? " backward " : " forward ") + name_of(isa) + " " + form);
  double begin = 0, last = 0, longest = 0;
  const auto asked = [&] {
    const double now = seconds();
    longest = std::max(longest, now - last);
    last = now;
    return now - begin > kRun;
  };
  Context context({.threads = 1, .isa = isa, .cancelled = asked});
  const Attributes checked(info, attributes_of(info, form));
  std::vector<Zeros> memory;
  std::map<std::string, ConstTensor> tensors;
  memory.reserve(info.inputs.size() + 1);
  const auto add = [&](const std::string& name, const TensorInfo& tensor) {
    memory.emplace_back(tensor, info);
    tensors[name] = memory.back().view;
  };
  for (const TensorInfo& input : info.inputs) {
    if (!input.optional && checked.hold(input.when)) add(input.name, input);
  }
  if (backward) add(info.outputs.front().gradient, info.outputs.front());
  OperatorCall call(info, checked, tensors, backward);
  std::vector<Buffer> results;
  for (const ResultInfo& result : call.results()) {
    Tensor to;
    to.rank = static_cast<int>(result.shape.size());
    std::int64_t size = 1;
    for (std::size_t i = result.shape.size(); i-- > 0;) {
      to.extent[i] = result.shape[i];
      to.stride[i] = size;
      size *= result.shape[i];
    }
    if (size > kTokens * 1024) continue;  // the weights of all pairs of tokens
    results.emplace_back(static_cast<std::size_t>(size) * sizeof(float));
    to.data = results.back().data();
    call.put(result.name, to);
  }
  begin = last = seconds();
  try {
    call.run(context);
    ADD_FAILURE() << "ended within " << seconds() - begin << " s, before it was cancelled";
  } catch (const Error& error) {
    if (form == "parallel" && error.kind() == ErrorKind::kInvalidArgument)
      return;  // has no weights
    EXPECT_EQ(error.kind(), ErrorKind::kCancelled) << error.what();
  }
  longest = std::max(longest, seconds() - last);
  EXPECT_LT(longest, kPatience);
}

TEST(Cancel, EveryOperatorEndsSoon) {
  for (const OperatorInfo& info : operators()) {
    std::vector<std::string> forms = {""};
    if (const AttributeInfo* form = info.find_attribute("form")) forms = form->choices;
    for (const std::string& form : forms) {
      for (const Isa isa : {supported_isas().front(), Isa::kPortable}) {
        expect_soon(info, form, false, isa);
        if (form != "parallel") expect_soon(info, form, true, isa);
      }
    }
  }
}

}  // namespace
}  // namespace ouzel
