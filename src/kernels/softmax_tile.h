// Softmax attention of one key head, in tiles: queries in vector lanes, keys broadcast. Forward
// with an online softmax (arXiv:1805.02867, arXiv:2205.14135), backward by recomputation from the
// saved log-sum-exp, and one token against a cache.
//
// What a query receives is a function of its row, of the keys and values that it sees and of their
// positions alone, bit for bit: scores are one chain over K, weights and outputs one chain over the
// keys of a block, and blocks begin at multiples of 64 keys of the sequence, whichever queries
// stand beside it and whichever of the kernels below computes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

inline constexpr std::int64_t kSoftmaxBlock = 64;  // keys of one step of the online softmax
inline constexpr std::int64_t kSoftmaxSpan = 256;  // keys of one sweep of the backward over queries
inline constexpr std::int64_t kSoftmaxWidestTile = 48;  // queries side by side, at most
inline constexpr std::int64_t kSoftmaxFar = 1LL << 60;  // "no limit" of SoftmaxShape

// One sequence and one key head with its query heads. Query i sees the keys j of [0, keys) with
// i + offset - before <= j <= i + offset + after.
struct SoftmaxShape {
  std::int64_t key_size = 0, value_size = 0;  // K, V
  std::int64_t heads = 0;                     // query heads that read the key head
  std::int64_t queries = 0, keys = 0;
  std::int64_t offset = 0, before = kSoftmaxFar, after = 0;
  float scale = 1;
};

// Keys and values of the positions [begin, end); strides in numbers.
struct SoftmaxKeys {
  std::int64_t begin = 0, end = 0;
  const void* k = nullptr;
  const void* v = nullptr;
  std::int64_t k_stride = 0, v_stride = 0;
};

// float32, bfloat16 or float16, of all keys and of all values.
struct SoftmaxTypes {
  DType k = DType::kF32, v = DType::kF32;
};

// Rows of one sequence, [token, head of the group, feature], of any type of floats.
template <class Void>
struct SoftmaxAnyRows {
  Void* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  DType dtype = DType::kF32;
  Void* row(std::int64_t token, std::int64_t head) const {
    using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
    const std::int64_t size = dtype == DType::kF32 ? 4 : 2;
    return static_cast<Byte*>(data) + (token * token_stride + head * head_stride) * size;
  }
};

// Rows of one sequence, [token, head of the group, feature].
template <class T>
struct SoftmaxRows {
  T* data = nullptr;
  std::int64_t token_stride = 0, head_stride = 0;
  T* row(std::int64_t token, std::int64_t head) const {
    return data + token * token_stride + head * head_stride;
  }
};

// Queries [begin, end) of every head of the group.
struct SoftmaxForwardArgs {
  SoftmaxShape shape;
  SoftmaxTypes types;
  SoftmaxAnyRows<const void> q;
  SoftmaxAnyRows<void> o;
  SoftmaxRows<double> lse;              // data may be null
  const SoftmaxKeys* pieces = nullptr;  // in order of position, holding every key that is seen
  std::int64_t piece_count = 0;
  std::int64_t begin = 0, end = 0;
  float* scratch = nullptr;  // softmax_forward_scratch floats
};
void softmax_forward(Isa isa, const SoftmaxForwardArgs& args);
std::int64_t softmax_forward_scratch(const SoftmaxShape& shape, std::int64_t queries);

// float32 alone. One query per head, at position shape.keys - 1 with shape.offset = shape.keys - 1.
struct SoftmaxStepArgs {
  SoftmaxShape shape;
  SoftmaxRows<const float> q;
  SoftmaxRows<float> o;
  const SoftmaxKeys* pieces = nullptr;
  std::int64_t piece_count = 0;
  float* scratch = nullptr;  // softmax_step_scratch floats
};
void softmax_step(Isa isa, const SoftmaxStepArgs& args);
std::int64_t softmax_step_scratch(const SoftmaxShape& shape);

// Keys [begin, end) against every query: their dk and dv are assigned, and what they add to dq is
// left in `dq`, assigned too (rows of queries that see none of these keys are left alone, see
// softmax_seeing). Null data: not wanted.
struct SoftmaxBackwardArgs {
  SoftmaxShape shape;
  SoftmaxTypes types;
  SoftmaxAnyRows<const void> q, d_o;
  SoftmaxRows<const float> o;
  SoftmaxRows<const double> lse;
  SoftmaxKeys kv;  // all keys of the sequence
  SoftmaxRows<float> dq;
  SoftmaxAnyRows<void> dk, dv;
  std::int64_t begin = 0, end = 0;
  float* scratch = nullptr;  // softmax_backward_scratch floats
};
void softmax_backward(Isa isa, const SoftmaxBackwardArgs& args);
std::int64_t softmax_backward_scratch(const SoftmaxShape& shape);

// The queries that see a key of [begin, end).
struct SoftmaxRange {
  std::int64_t begin = 0, end = 0;
};
SoftmaxRange softmax_seeing(const SoftmaxShape& shape, std::int64_t begin, std::int64_t end);

}  // namespace ouzel
