// The problems of law_cases.cc: which inputs a law takes, and arrays [1, T, H, D] that mean what
// such inputs mean.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "bench/measure.h"
#include "ouzel/laws.h"

namespace ouzel::bench {

inline constexpr std::int64_t kLawTokens = 2048, kLawHeads = 16;

enum class Gates { kMild, kHarsh, kStrong };

// What a law takes beside q, k and v, and its useful operations in units of K V.
struct LawCase {
  const MatrixLaw* law;
  std::vector<std::pair<std::string, std::string>> inputs;  // name, last axes of [B, T, H, ...]
  double forward, backward;
};
std::vector<LawCase> law_cases();

class LawProblem {
 public:
  LawProblem(const LawCase& law, std::int64_t tokens, std::int64_t d, Gates gates);

  RecurrenceInputs inputs;
  RecurrenceOutputs outputs;
  const Data& o() const { return o_; }
  // An input of this name; null if the law has none.
  const Data* find(const std::string& name) const { return find(data_, name); }
  // Its gradient, after gradients().
  const Data* find_gradient(const std::string& name) const { return find(gradients_, name); }

  // Memory for the gradients of all inputs.
  RecurrenceInputGrads gradients();
  void consume(const char* what) const;

 private:
  static const Data* find(const std::map<std::string, Data>& list, const std::string& name) {
    const auto found = list.find(name);
    return found == list.end() ? nullptr : &found->second;
  }
  void add(const std::string& name, const std::string& axes, std::int64_t tokens, std::int64_t d,
           Gates gates);

  std::map<std::string, Data> data_, gradients_;
  Data o_;
};

}  // namespace ouzel::bench
