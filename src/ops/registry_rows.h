// The families of the table of operators, one file each, and the attributes that several rows have.
#pragma once

#include <vector>

#include "src/ops/registry.h"

namespace ouzel {

std::vector<OperatorInfo> linear_attention_rows();   // registry_linear_attention.cc
std::vector<OperatorInfo> retention_rows();          // registry_retention.cc
std::vector<OperatorInfo> matrix_law_rows();         // registry_laws.cc
std::vector<OperatorInfo> softmax_attention_rows();  // registry_softmax_attention.cc
std::vector<OperatorInfo> short_conv_rows();         // registry_short_conv.cc
std::vector<OperatorInfo> norm_rows();               // registry_norm.cc
std::vector<OperatorInfo> scan_rows();               // registry_scans.cc
std::vector<OperatorInfo> slot_rows();               // registry_slots.cc
std::vector<OperatorInfo> memory_rows();             // registry_memories.cc
std::vector<OperatorInfo> average_rows();            // registry_averages.cc
std::vector<OperatorInfo> onnx_rows();               // registry_onnx.cc

// A tensor with a row for each token: float32, bfloat16 or float16, whichever it is given as.
inline TensorInfo token_rows(const char* name, const char* shape, const char* gradient,
                             bool optional = false) {
  TensorInfo rows = {name, shape, gradient, optional};
  rows.takes_half = true;
  return rows;
}

inline constexpr NumberRange kNotNegative = {.least = 0}, kAtLeastOne = {.least = 1};
inline constexpr NumberRange kPositive = {.above = 0};

inline const AttributeInfo kScaleAttribute = {"scale", AttributeKind::kNumber,
                                              "Factor on q (default: K^-0.5)"};
inline const AttributeInfo kCuSeqlensAttribute = {
    "cu_seqlens", AttributeKind::kIntegers,
    "Bounds [0, ..., T] of sequences packed along T of a batch of one"};
inline const AttributeInfo kReverseAttribute = {"reverse", AttributeKind::kFlag,
                                                "Process tokens from last to first", "false"};
inline const AttributeInfo kFormAttribute = {
    "form", AttributeKind::kText, "How to compute", "auto", {"auto", "scan", "parallel"}};

}  // namespace ouzel
