// The table of operators, put together from its families.
#include <utility>

#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

std::vector<OperatorInfo> (*const kFamilies[])() = {
    linear_attention_rows,
    retention_rows,
    matrix_law_rows,
    scan_rows,
    slot_rows,
    memory_rows,
    average_rows,
    softmax_attention_rows,
    short_conv_rows,
    norm_rows,
    onnx_rows,
};

std::vector<OperatorInfo> make_table() {
  std::vector<OperatorInfo> table;
  for (auto* family : kFamilies) {
    for (OperatorInfo& row : family()) table.push_back(std::move(row));
  }
  return table;
}

}  // namespace

std::span<const OperatorInfo> operators() {
  static const std::vector<OperatorInfo> table = make_table();
  return table;
}

}  // namespace ouzel
