// The table of operator cases: what shapes, laws, layouts and data the tests run, and the random
// calls that they stand for.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/calls.h"

namespace ouzel::test {

enum class Law {
  kIdentity,
  kIdentityNormalized,
  kElu1,
  kElu1Normalized,
  kReluNormalized,
  kProduct,            // elementwise_product, one map for q and k of all heads
  kProductNormalized,  // one map a head, q and k apart, F != K
  kRetention,
  kDecays,  // retention with the log decays 0, -1e-5, -0.1, -20, -1000, -inf
};
inline constexpr std::size_t kLaws = 9;

enum class Layout {
  kRows,    // two batch rows, each a sequence
  kPacked,  // one row of several sequences, one empty, one of a single token
  kPadded,  // two rows, padding on the left; rows of the padding hold NaN
  kAlone,   // one sequence; not among the covers, for calls of which one is long enough
};
enum class Heads { kOne, kEqual, kMoreValues, kMoreQueries, kOneKey };
enum class Direction { kCausal, kReverse, kNoncausal };
enum class Data {
  kZeroMean,        // uniform in [-1, 1)
  kNarrowPositive,  // uniform in [0.9, 1.1)
  kConstant,        // all equal
};

struct LawCase {
  Law law = Law::kIdentity;
  std::int64_t tokens = 1, keys = 1, values = 1;
  Layout layout = Layout::kRows;
  Heads heads = Heads::kEqual;
  Direction direction = Direction::kCausal;
  Data data = Data::kZeroMean;
  bool states = false;
};

struct AttentionCase {
  std::int64_t tokens = 1, keys = 1, values = 1;
  Layout layout = Layout::kRows;
  Heads heads = Heads::kEqual;  // kMoreValues: as kEqual
  bool causal = true;
  std::int64_t window = 0;
  std::int64_t offset = 0;  // the keys are this many more tokens than the queries
  Data data =
      Data::kZeroMean;  // never kConstant: gradients of q and k are then 0, and noise is all
  bool sharp = false;   // scores reach about 20, so that few keys have all the weight
};

struct ConvCase {
  std::int64_t tokens = 1, channels = 1, width = 1;
  Layout layout = Layout::kRows;
  bool silu = false, bias = false, states = false;
};

std::string name_of(const LawCase& c);
std::string name_of(const AttentionCase& c);
std::string name_of(const ConvCase& c);

// A call with random inputs and upstream gradients for everything.
Call make_call(const LawCase& c, std::uint64_t seed);
Call make_call(const AttentionCase& c, std::uint64_t seed);
Call make_call(const ConvCase& c, std::uint64_t seed);

// Whether such a call exists: retention is causal, non-causal calls take no states, ...
bool exists(const LawCase& c);
bool exists(const AttentionCase& c);

// Whether the gradients are more than the rounding of terms that cancel.
bool has_gradients(const LawCase& c);
bool has_gradients(const AttentionCase& c);
bool has_gradients(const ConvCase& c);
// Whether the gradients of q and k are small differences of large terms (kQuotientFloor).
bool is_flat(const LawCase& c);
bool is_flat(const AttentionCase& c);
bool is_flat(const ConvCase& c);

// Pairwise cover of the corners, and their cross product over tokens, sizes and laws (for the label
// `full`), the other choices being drawn at random.
std::vector<LawCase> recurrence_cases();
std::vector<AttentionCase> attention_cases();
std::vector<ConvCase> conv_cases();
std::vector<LawCase> all_recurrence_cases();
std::vector<AttentionCase> all_attention_cases();

// One case of each law or mask, of moderate size, for the invariances. `tokens` per sequence.
std::vector<LawCase> recurrence_samples(std::int64_t tokens);
std::vector<AttentionCase> attention_samples(std::int64_t tokens);
std::vector<ConvCase> conv_samples(std::int64_t tokens);

}  // namespace ouzel::test
