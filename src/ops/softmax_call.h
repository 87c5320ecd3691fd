// What the passes of softmax attention share: the call's sizes and sequences, checked, and the rows
// and tasks that it is cut into. A task is some queries (forward) or some keys (backward) of one
// sequence and key head; src/kernels/softmax_tile.h has the arithmetic.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "ouzel/softmax_attention.h"
#include "src/base/context_impl.h"
#include "src/kernels/softmax_tile.h"

namespace ouzel::softmax {

[[noreturn]] void fail(const char* op, const std::string& text);

// Also of rows that may have 16 bits.
void check_rows(const char* op, const char* name, const ConstTensor& t, const char* letters,
                std::initializer_list<std::int64_t> expected);
// Checks type, rank, extents (-1: any) and the unit last stride. Allocates only to complain.
void check(const char* op, const char* name, const ConstTensor& t, const char* letters,
           std::initializer_list<std::int64_t> expected, DType dtype = DType::kF32);

struct Sizes {
  std::int64_t batch = 0, queries = 0, keys = 0;  // B, TQ, TK
  std::int64_t query_heads = 0, key_heads = 0;    // HQ, HK
  std::int64_t key_size = 0, value_size = 0;      // K, V
  std::int64_t group() const { return query_heads / key_heads; }
};

Sizes check_inputs(const char* op, const ConstTensor& q, const ConstTensor& k,
                   const ConstTensor& v);
SoftmaxShape make_shape(const char* op, const SoftmaxAttentionOptions& options, const Sizes& sizes);

// The segments of queries and keys, given or whole.
struct Sequences {
  Segments queries, keys;
};
Sequences find_sequences(const char* op, const SoftmaxAttentionInputs& inputs, const Sizes& sizes);

// Sets the rows outside every segment to 0.
inline void clear_outside(const Tensor& tensor, const Segments& segments) {
  std::vector<std::int64_t> done(static_cast<std::size_t>(tensor.extent[0]), 0);
  const std::int64_t row = tensor.rank == 4 ? tensor.extent[3] : 1, size = size_of(tensor.dtype);
  const auto clear = [&](std::int64_t b, std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t h = 0; h < tensor.extent[2]; ++h) {
        char* to = static_cast<char*>(tensor.data) +
                   (b * tensor.stride[0] + t * tensor.stride[1] + h * tensor.stride[2]) * size;
        std::fill_n(to, row * size, char{0});
      }
    }
  };
  for (const Segment& s : segments.list) {
    std::int64_t& from = done[static_cast<std::size_t>(s.batch)];
    clear(s.batch, from, s.begin);
    from = s.begin + s.length;
  }
  for (std::int64_t b = 0; b < tensor.extent[0]; ++b) {
    clear(b, done[static_cast<std::size_t>(b)], tensor.extent[1]);
  }
}

// Rows of one sequence and the group of query heads that read key head `head`.
template <class T, class Tensor>
SoftmaxRows<T> group_rows(const Tensor& tensor, const Segment& segment, std::int64_t head,
                          std::int64_t group) {
  SoftmaxRows<T> rows;
  if (!tensor.present()) return rows;
  rows.token_stride = tensor.stride[1];
  rows.head_stride = tensor.stride[2];
  rows.data = static_cast<T*>(tensor.data) + segment.batch * tensor.stride[0] +
              segment.begin * rows.token_stride + head * group * rows.head_stride;
  return rows;
}

template <class Void, bool Const>
SoftmaxAnyRows<Void> any_group_rows(const BasicTensor<Const>& tensor, const Segment& segment,
                                    std::int64_t head, std::int64_t group) {
  SoftmaxAnyRows<Void> rows;
  if (!tensor.present()) return rows;
  rows.token_stride = tensor.stride[1];
  rows.head_stride = tensor.stride[2];
  rows.dtype = tensor.dtype;
  rows.data = tensor.data;
  rows.data = static_cast<std::conditional_t<Const, const char, char>*>(rows.data) +
              (segment.batch * tensor.stride[0] + segment.begin * rows.token_stride +
               head * group * rows.head_stride) *
                  size_of(tensor.dtype);
  return rows;
}

inline SoftmaxKeys key_rows(const ConstTensor& k, const ConstTensor& v, const Segment& segment,
                            std::int64_t head) {
  SoftmaxKeys keys;
  keys.end = segment.length;
  const auto first = [&](const ConstTensor& x) {
    return static_cast<const char*>(x.data) +
           (segment.batch * x.stride[0] + segment.begin * x.stride[1] + head * x.stride[2]) *
               size_of(x.dtype);
  };
  keys.k = first(k);
  keys.v = first(v);
  keys.k_stride = k.stride[1];
  keys.v_stride = v.stride[1];
  return keys;
}

struct Task {
  std::size_t sequence = 0;
  std::int64_t head = 0;            // of keys
  std::int64_t begin = 0, end = 0;  // queries (forward) or keys (backward)
  std::int64_t cost = 0;
  float* partial = nullptr;  // where dq goes; null: to dq itself
};

// Largest first: the last tasks, which decide how long all wait, are short.
inline void sort_by_cost(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

inline std::size_t bytes_of(std::int64_t floats) {
  return Scratch::rounded(static_cast<std::size_t>(floats) * sizeof(float));
}

}  // namespace ouzel::softmax
