// NaN and infinity in one number of an input: where they must arrive, and where they must not
// (docs/numerics.md, promise 6). All operators, all instruction sets.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "tests/by_name.h"
#include "tests/law_calls.h"
#include "tests/table_calls.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr Int kTokens = 40;
// What is spoiled: a token of the second batch row, of the last head, the first number.
constexpr Int kBatch = 1;
// The first token of a chunk, one within a block, and the last: no later one carries it from row to
// row of the state.
constexpr Int kSpoiled[] = {16, 17, kTokens - 1};

// Its packed axes are others; it calls other rows of the table.
bool is_onnx(const TableCase& c) { return info_of(c).source.starts_with("ONNX"); }
bool is_causal(const TableCase& c) {
  const Attributes attributes(info_of(c), c.attributes);
  const bool never = c.op == "lambda_layer" || c.op == "nadaraya_watson";
  return !never && (info_of(c).find_attribute("causal") == nullptr || attributes.flag("causal"));
}
// Heads of a tensor of tokens; 0: it has none.
Int heads_of(const TensorInfo& info, const Doubles& array) {
  return info.shape.find(" H") != std::string::npos ? array.extent(2) : 0;
}

const TensorInfo& input_of(const TableCase& c, const std::string& name) {
  return *std::ranges::find(info_of(c).inputs, name, &TensorInfo::name);
}

// Index of the number that is spoiled.
std::size_t index_of(Int token, const Doubles& x, Int rows, Int heads) {
  const Int per_token = static_cast<Int>(x.data.size()) / (x.extent(0) * kTokens);
  const Int per_row = per_token / rows;
  const Int head = heads > 0 ? (heads - 1) * (per_row / heads) : 0;
  return static_cast<std::size_t>((kBatch * kTokens + token) * per_token + head);
}

// Of the outputs with rows of tokens [B, T, HO, ...]: what may know of the spoiled number.
bool may_know(const TableCase& c, Int token, Int heads, Int out_heads, Int b, Int t, Int h) {
  if (b != kBatch) return false;
  if (is_causal(c) && t < token) return false;
  return heads == 0 || (out_heads >= heads ? h * heads / out_heads == heads - 1
                                           : (h + 1) * heads / out_heads == heads);
}

void expect_untouched(const TableCase& c, Int token, Int heads, const Floats& clean,
                      const Floats& spoiled) {
  const Int out_heads = clean.rank() == 4 ? clean.extent(2) : 1;
  const Int rows = clean.extent(0) * clean.extent(1) * out_heads;
  const Int width = static_cast<Int>(clean.data.size()) / rows;
  for (Int r = 0; r < rows; ++r) {
    const Int h = r % out_heads, t = r / out_heads % clean.extent(1),
              b = r / out_heads / clean.extent(1);
    if (may_know(c, token, heads, out_heads, b, t, h)) continue;
    for (Int i = r * width; i < (r + 1) * width; ++i) {
      const auto at = static_cast<std::size_t>(i);
      ASSERT_EQ(clean.data[at], spoiled.data[at]) << "row " << b << " token " << t << " head " << h;
    }
  }
}

// Weights [B, HO, T, rows] of later tokens.
bool is_masked(const Doubles& weights, Int at) {
  const Int rows = weights.extent(3);
  return at % rows * kTokens / rows > at / rows % kTokens;
}

// Where the reference is not finite, nothing may hide it.
void expect_not_hidden(const Results<float>& got, const Results<double>& truth) {
  for (const Named<double>& x : truth.outputs) {
    const Floats& y = array_of(got.outputs, x.name);
    if (x.role == Role::kWeights && x.array.shape != y.shape)
      continue;  // the reference's of one row
    int hidden = 0;
    std::size_t first = 0;
    for (std::size_t i = 0; i < x.array.data.size(); ++i) {
      if (std::isfinite(x.array.data[i]) || !std::isfinite(y.data[i])) continue;
      if (x.role == Role::kWeights && is_masked(x.array, static_cast<Int>(i))) continue;
      if (hidden++ == 0) first = i;
    }
    EXPECT_EQ(hidden, 0) << x.name << " of " << x.array.data.size() << ", first at " << first;
  }
}

// The output at the spoiled token is not finite, at least in one number.
void expect_known(const Floats& o, Int token) {
  const Int width = static_cast<Int>(o.data.size()) / (o.extent(0) * o.extent(1));
  const Int begin = (kBatch * o.extent(1) + token) * width;
  bool known = false;
  for (Int i = begin; i < begin + width; ++i) {
    known = known || !std::isfinite(o.data[static_cast<std::size_t>(i)]);
  }
  EXPECT_TRUE(known);
}

// Inputs that have a meaning at +inf: a weight above all others, so that the output is v; a gate
// that keeps everything.
bool is_limit(const TableCase& c, const std::string& input) {
  return (c.op == "rwkv4" && input == "k") || (c.op == "mlstm" && input == "f");
}

bool has_reference(const TableCase& c) { return is_law(c.op) || has_named_reference(c.op); }

void check(Context& context, const TableCase& c, const Results<float>& clean, Call call,
           const std::string& name, Int token, double value) {
  const std::vector<Slot> list = slots(call);
  const Slot& slot = *std::ranges::find(list, name, &Slot::name);
  const Int heads = heads_of(input_of(c, name), *slot.array);
  slot.array->data[index_of(token, *slot.array, slot.rows, heads)] = value;
  Results<float> got;
  try {
    got = run_by_table(context, call);
  } catch (const Error& e) {  // an infinite gate is out of its range
    EXPECT_TRUE(std::isinf(value)) << e.what();
    EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
    return;
  }
  const Floats& o = got.outputs.front().array;
  expect_untouched(c, token, heads, clean.outputs.front().array, o);
  if (has_reference(c)) {
    const Results<double> truth = run_reference(call);
    expect_not_hidden(got, truth);
    if (is_matrix_law(c.op) && call.form == Form::kAuto) {
      expect_not_hidden(run_steps(context, call), truth);
    }
  } else if (std::isnan(value)) {
    expect_known(o, token);
  }
}

class Nan : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(, Nan, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return name_of(info.param); });

TEST_P(Nan, ReachesItsOwnAndNoOthers) {
  Context context({.threads = 2, .isa = GetParam(), .poison_scratch = true});
  std::uint64_t seed = 0;
  for (const TableCase& c : table_cases()) {
    if (is_onnx(c) || c.op == "nadaraya_watson") continue;  // no batch: all see all
    Call call = make_call(c, table_sizes(c, kTokens), ++seed);
    call.upstream.clear();
    const Results<float> clean = run_by_table(context, call);
    for (float x : clean.outputs.front().array.data) ASSERT_TRUE(std::isfinite(x)) << name_of(c);
    for (const Slot& slot : slots(call)) {
      if (slot.role != Role::kToken) continue;
      for (double value : {kNan, kInfinity}) {
        if (value == kInfinity && is_limit(c, slot.name)) continue;
        for (Int token : kSpoiled) {
          SCOPED_TRACE(testing::Message() << name_of(c) << ": " << slot.name << " of token "
                                          << token << " is " << value);
          check(context, c, clean, call, slot.name, token, value);
        }
      }
    }
  }
}

// Parameters and states: the last number of each.
TEST_P(Nan, OfParametersAndStatesIsNotHidden) {
  Context context({.threads = 2, .isa = GetParam(), .poison_scratch = true});
  std::uint64_t seed = 0;
  for (const TableCase& c : table_cases()) {
    // The reference multiplies masked weights; eps of rwkv4 is a maximum, which may lose what alpha
    // and beta keep.
    if (!has_reference(c) || c.attributes.contains("form") || c.op == "rwkv4") continue;
    Call clean = make_call(c, table_sizes(c, kTokens), ++seed);
    clean.upstream.clear();
    for (std::size_t i = 0; i < slots(clean).size(); ++i) {
      Call call = clean;
      const std::vector<Slot> list = slots(call);
      if (list[i].role == Role::kToken) continue;
      SCOPED_TRACE(testing::Message() << name_of(c) << ": " << list[i].name);
      list[i].array->data.back() = kNan;
      expect_not_hidden(run_by_table(context, call), run_reference(call));
    }
  }
}

}  // namespace
}  // namespace ouzel::test
