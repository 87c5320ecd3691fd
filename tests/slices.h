// Parts of calls and results: one sequence alone, a range of tokens, tokens in reverse.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "tests/calls.h"

namespace ouzel::test {

// Rows [begin, begin + length) of axis 1 of batch row b, as a batch of one. Here and below, all
// counts are tokens and `rows` is what each has in the array.
template <class Real>
reference::Array<Real> take_tokens(const reference::Array<Real>& a, std::int64_t b,
                                   std::int64_t begin, std::int64_t length, std::int64_t rows = 1) {
  begin *= rows;
  length *= rows;
  std::vector<std::int64_t> shape = a.shape;
  shape[0] = 1;
  shape[1] = length;
  reference::Array<Real> part(shape);
  if (part.data.empty()) return part;
  const std::int64_t row = static_cast<std::int64_t>(a.data.size()) / (a.extent(0) * a.extent(1));
  std::copy_n(a.data.begin() + (b * a.extent(1) + begin) * row, length * row, part.data.begin());
  return part;
}

// Entry n of axis 0, as an array of one entry.
template <class Real>
reference::Array<Real> take_sequence(const reference::Array<Real>& a, std::int64_t n) {
  std::vector<std::int64_t> shape = a.shape;
  shape[0] = 1;
  reference::Array<Real> part(shape);
  const auto size = static_cast<std::ptrdiff_t>(part.data.size());
  std::copy_n(a.data.begin() + n * size, size, part.data.begin());
  return part;
}

// The part of sequence n.
template <class Real>
reference::Array<Real> take(const reference::Array<Real>& a, Role role, std::int64_t n,
                            const Segment& tokens, const Segment& keys, std::int64_t rows = 1) {
  switch (role) {
    case Role::kToken:
      return take_tokens(a, tokens.batch, tokens.begin, tokens.length, rows);
    case Role::kKeyToken:
      return take_tokens(a, keys.batch, keys.begin, keys.length);
    case Role::kSequence:
      return take_sequence(a, n);
    default:
      return a;
  }
}

inline Segments key_segments_of(const Call& call) {
  if (const auto* a = std::get_if<Attention>(&call.arguments)) return a->key_segments;
  Call self = call;
  return segments_of(self);
}

// Sequence n as a call of its own.
inline Call alone(const Call& call, std::int64_t n) {
  Call part = call;
  const Segment tokens = segments_of(part).list[static_cast<std::size_t>(n)];
  const Segment keys = key_segments_of(part).list[static_cast<std::size_t>(n)];
  for (const Slot& s : slots(part)) *s.array = take(*s.array, s.role, n, tokens, keys, s.rows);
  segments_of(part) = Segments::whole(1, tokens.length);
  if (auto* a = std::get_if<Attention>(&part.arguments)) {
    a->key_segments = Segments::whole(1, keys.length);
  }
  return part;
}

// Tokens [begin, end) of every row of a call of whole rows; states as they are.
inline Call tokens_of(const Call& call, std::int64_t begin, std::int64_t end) {
  Call part = call;
  for (const Slot& s : slots(part)) {
    if (s.role != Role::kToken) continue;
    std::vector<std::int64_t> shape = s.array->shape;
    shape[1] = (end - begin) * s.rows;
    Doubles rows(shape);
    auto to = rows.data.begin();
    for (std::int64_t b = 0; b < shape[0]; ++b) {
      const Doubles row = take_tokens(*s.array, b, begin, end - begin, s.rows);
      to = std::copy(row.data.begin(), row.data.end(), to);
    }
    *s.array = rows;
  }
  segments_of(part) = Segments::whole(segments_of(part).count(), end - begin);
  return part;
}

// Tokens [begin, end) of every row of a result.
inline Floats tokens_of(const Floats& a, std::int64_t begin, std::int64_t end) {
  std::vector<std::int64_t> shape = a.shape;
  shape[1] = end - begin;
  Floats rows(shape);
  auto to = rows.data.begin();
  for (std::int64_t b = 0; b < shape[0]; ++b) {
    const Floats row = take_tokens(a, b, begin, end - begin);
    to = std::copy(row.data.begin(), row.data.end(), to);
  }
  return rows;
}

// The tokens in reverse order.
template <class Real>
reference::Array<Real> flipped(const reference::Array<Real>& a, std::int64_t rows = 1) {
  reference::Array<Real> f(a.shape);
  if (a.data.empty()) return f;
  const std::int64_t tokens = a.extent(1) / rows;
  const std::int64_t row = static_cast<std::int64_t>(a.data.size()) / (a.extent(0) * tokens);
  for (std::int64_t b = 0; b < a.extent(0); ++b) {
    for (std::int64_t t = 0; t < tokens; ++t) {
      std::copy_n(a.data.begin() + (b * tokens + t) * row, row,
                  f.data.begin() + (b * tokens + tokens - 1 - t) * row);
    }
  }
  return f;
}

// Axis 1 of b after that of a.
template <class Real>
reference::Array<Real> joined(const reference::Array<Real>& a, const reference::Array<Real>& b) {
  std::vector<std::int64_t> shape = a.shape;
  shape[1] += b.extent(1);
  reference::Array<Real> c(shape);
  auto to = c.data.begin();
  for (std::int64_t n = 0; n < shape[0]; ++n) {
    for (const auto* part : {&a, &b}) {
      const reference::Array<Real> rows = take_tokens(*part, n, 0, part->extent(1));
      to = std::copy(rows.data.begin(), rows.data.end(), to);
    }
  }
  return c;
}

}  // namespace ouzel::test
