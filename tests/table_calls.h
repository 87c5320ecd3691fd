// Random calls of every row of the table of operators, drawn from what the row says of its tensors.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "src/ops/registry.h"
#include "tests/calls.h"

namespace ouzel::test {

// A row of the table with attributes, and inputs that are left out of its calls.
struct TableCase {
  std::string op;
  std::map<std::string, std::string> attributes = {};
  std::vector<std::string> without = {};
};

std::string name_of(const TableCase& c);
const OperatorInfo& info_of(const TableCase& c);

// Every operator in its variants: each feature map, rule and form, causal or not, normalised or
// not.
std::vector<TableCase> table_cases();

// Extents by letter.
using Letters = std::map<std::string, std::int64_t>;

// Extents by letter that suit every case: two batch rows, heads in groups.
Letters table_sizes(const TableCase& c, std::int64_t tokens, std::int64_t keys = 6,
                    std::int64_t values = 5);
// What the row's letters mean: its first alternative.
std::vector<std::int64_t> shape_of(const TensorInfo& tensor, const Letters& sizes);
// Whether an input holds natural logarithms of decays.
bool is_log_decay(const std::string& op, const std::string& input);

// All inputs, optional ones too, of values for which the operator is well behaved, and the upstream
// gradients of all outputs. `states`: initial states too.
Call make_call(const TableCase& c, const Letters& sizes, std::uint64_t seed, bool states = true);

}  // namespace ouzel::test
