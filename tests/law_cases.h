// The cases of the laws with gates and erases (ouzel/laws.h): every row of them in the table of
// operators has its tensors drawn here by name and shape.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/cases.h"

namespace ouzel::test {

enum class Gates {
  kNone,    // 0
  kWeak,    // -1e-5
  kMild,    // uniform in (-0.5, -0.01]
  kStrong,  // -20
  kKill,    // -1000
  kReset,   // -inf
  kMixed,   // weak, -1, -3 and -20 side by side
  kHarsh,   // 0, -20, -1000 and -inf among mild ones
};

struct MatrixCase {
  std::string law;
  std::int64_t tokens = 1, keys = 1, values = 1;
  Layout layout = Layout::kRows;
  Heads heads = Heads::kEqual;
  bool reverse = false;
  Gates gates = Gates::kMild;
  Data data = Data::kZeroMean;
  bool states = false;
  bool optional = false;  // optional inputs, and the richer of two shapes
  bool l2norm = false;    // use_qk_l2norm, of laws that have it
};

std::string name_of(const MatrixCase& c);
bool exists(const MatrixCase& c);
bool has_gradients(const MatrixCase& c);
bool is_flat(const MatrixCase& c);
// Whether a gradient, by its name, is but for a few tokens what rounding leaves of its terms.
bool is_rounding(const MatrixCase& c, const std::string& gradient);
Call make_call(const MatrixCase& c, std::uint64_t seed);

// Pairwise cover of the corners, and their cross product over laws, tokens and sizes.
std::vector<MatrixCase> matrix_cases();
std::vector<MatrixCase> all_matrix_cases();
// One case of each law, of moderate size, for the invariances, and some more of the laws that are
// scanned in another way at other sizes. `tokens` per sequence.
std::vector<MatrixCase> matrix_samples(std::int64_t tokens);

}  // namespace ouzel::test
