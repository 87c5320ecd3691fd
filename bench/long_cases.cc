// Long sums: narrow positive data through undecayed and weakly decayed laws, up to ten million
// tokens, against a float64 loop. A plain float32 sum would be off by 8e-2.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "bench/case.h"
#include "bench/measure.h"
#include "src/base/bounds.h"
#include "src/base/random.h"
#include "src/ops/registry.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kSize = 8;  // K and V of the one head
constexpr double kWeak = -1e-6;    // log decay

struct LongCase {
  const char* op;
  const char* gate;                     // the input that holds the decay; null: none
  std::vector<std::int64_t> gate_axes;  // after B and T, or, of one for all tokens, all
  bool per_token;
};
const LongCase kCases[] = {
    {"linear_attention", nullptr, {}, false},
    {"retention", "g_gamma", {1}, false},
    {"simple_gla", "g", {1}, true},
    {"gla", "g", {1, kSize}, true},
};

// Error over the truth of what two loops gave, without keeping the truth.
struct Error {
  double difference = 0, truth = 0;
  void add(double found, double expected) {
    difference += (found - expected) * (found - expected);
    truth += expected * expected;
  }
  double value() const { return std::sqrt(difference / truth); }
};

Row measure(const LongCase& c, std::int64_t tokens, const CaseOptions& bench) {
  std::map<std::string, Array> arrays;
  std::uint64_t seed = 1;
  for (const char* name : {"q", "k", "v"}) {
    Array a({1, tokens, 1, kSize});
    Random random(seed++);
    for (std::int64_t i = 0; i < a.tensor.size(); ++i) {
      a.memory.f32()[i] = static_cast<float>(0.9 + 0.2 * random.uniform());
    }
    arrays.emplace(name, std::move(a));
  }
  double decay = 1;
  if (c.gate != nullptr) {
    std::vector<std::int64_t> shape = c.gate_axes;
    if (c.per_token) shape.insert(shape.begin(), {1, tokens});
    Array a(shape, c.per_token ? DType::kF32 : DType::kF64);
    if (c.per_token) {
      std::fill_n(a.memory.f32(), a.tensor.size(), static_cast<float>(kWeak));
      decay = std::exp(static_cast<double>(static_cast<float>(kWeak)));
    } else {
      *a.memory.as<double>() = kWeak;
      decay = std::exp(kWeak);
    }
    arrays.emplace(c.gate, std::move(a));
  }
  std::map<std::string, ConstTensor> tensors;
  for (const auto& [name, array] : arrays) tensors[name] = array.tensor;
  const OperatorInfo& info = find_operator(c.op);
  Context context = bench.context(1);
  std::vector<NamedArray> results;
  const double seconds = seconds_of(
      [&] { results = run_operator(context, info, Attributes(info, {}), tensors, false); });

  double state[kSize][kSize] = {};
  const float *q = arrays.at("q").memory.f32(), *k = arrays.at("k").memory.f32(),
              *v = arrays.at("v").memory.f32(), *o = results[0].array.memory.f32();
  const double scale = 1 / std::sqrt(static_cast<double>(kSize));
  Error output, final;
  for (std::int64_t t = 0; t < tokens; ++t, q += kSize, k += kSize, v += kSize, o += kSize) {
    double sum[kSize] = {};
    for (std::int64_t i = 0; i < kSize; ++i) {
      for (std::int64_t j = 0; j < kSize; ++j) {
        state[i][j] = decay * state[i][j] + static_cast<double>(k[i]) * v[j];
        sum[j] += scale * q[i] * state[i][j];
      }
    }
    for (std::int64_t j = 0; j < kSize; ++j) output.add(o[j], sum[j]);
  }
  for (std::int64_t i = 0; i < kSize * kSize; ++i) {
    final.add(results[1].array.memory.f32()[i], state[i / kSize][i % kSize]);
  }
  Row row{.op = c.op,
          .pass = "forward",
          .variant = "narrow positive data",
          .B = 1,
          .H = 1,
          .T = tokens,
          .K = kSize,
          .V = kSize,
          .ms = 1e3 * seconds,
          .error = std::max(output.value(), final.value()),
          .clock = "one call, memory of the results included"};
  row.bound = kAnyInput.output;
  if (c.gate != nullptr) row.variant += ", log decay -1e-6";
  return row;
}

}  // namespace

void add_long_cases(std::vector<Case>& cases) {
  for (const LongCase& c : kCases) {
    for (const std::int64_t tokens : {16'384, 1'000'000, 10'000'000}) {
      cases.push_back({fmt::format("long/{}/{}", c.op, tokens), [=](const CaseOptions& options) {
                         return std::vector<Row>{measure(c, tokens, options)};
                       }});
    }
  }
}

}  // namespace ouzel::bench
