// Checks of an operator's arguments, and what operators over sequences share: typed views of the
// shapes that were expected, segments that fit, zeros where no sequence is.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <type_traits>

#include "ouzel/error.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"
#include "src/base/dense_tensor.h"
#include "src/base/half.h"
#include "src/ops/token_rows.h"

namespace ouzel {

[[noreturn]] void refuse(const char* op, const std::string& sentence);

// An option, which must be a number that float32 holds, of at least `least`.
double checked(const char* op, const char* name, double option,
               double least = -std::numeric_limits<double>::infinity());
// The factor on queries or keys: size^-0.5 where none is given.
double scale_of(const char* op, const std::optional<double>& given, std::int64_t size);

// The extents of a tensor that must be there; `letters` says what they are: "batch, tokens, width".
template <int Rank, bool Const>
std::array<std::int64_t, Rank> extents_of(const char* op, const char* name,
                                          const BasicTensor<Const>& tensor, const char* letters) {
  if (tensor.rank != Rank) {
    refuse(op, std::string(name) + " should be [" + letters + "], not " + shape_string(tensor));
  }
  std::array<std::int64_t, Rank> extents;
  std::copy_n(tensor.extent.begin(), Rank, extents.begin());
  return extents;
}

// Of T void or const void: floats of any type.
template <class T, int Rank>
using ViewOf = std::conditional_t<std::is_void_v<T>, AnyView<T, Rank>, View<T, Rank>>;

// The view of a tensor of floats with unit last stride, of float32 only unless T is void; null data
// if it is absent.
template <class T, int Rank, bool Const>
ViewOf<T, Rank> view_of(const char* op, const char* name, const BasicTensor<Const>& tensor,
                        const std::array<std::int64_t, Rank>& shape) {
  if (!tensor.present()) return {};
  constexpr bool kAny = std::is_void_v<T>;
  ViewOf<T, Rank> view;
  view.data = static_cast<T*>(tensor.data);
  if constexpr (kAny) view.dtype = tensor.dtype;
  std::copy_n(tensor.extent.begin(), Rank, view.extent.begin());
  std::copy_n(tensor.stride.begin(), Rank, view.stride.begin());
  if ((tensor.dtype != DType::kF32 && !(kAny && is_half(tensor.dtype))) || tensor.rank != Rank ||
      view.extent != shape) {
    refuse(op, std::string(name) + " should be " + (kAny ? "F32, BF16 or F16 " : "F32 ") +
                   shape_string(View<const float, Rank>(nullptr, shape)) + ", not " +
                   described(tensor));
  }
  if (view.stride[Rank - 1] != 1 && shape[Rank - 1] > 1) {
    refuse(op, "the last stride of " + std::string(name) + " should be 1, not " +
                   std::to_string(view.stride[Rank - 1]) + "; copy it first");
  }
  return view;
}

// As view_of, of a tensor that must be there.
template <class T, int Rank, bool Const>
ViewOf<T, Rank> required(const char* op, const char* name, const BasicTensor<Const>& tensor,
                         const std::array<std::int64_t, Rank>& shape) {
  if (!tensor.present()) refuse(op, std::string(name) + " must be given");
  return view_of<T, Rank>(op, name, tensor, shape);
}

// The sequences of a call: those of the segments that were given, or one a batch row. Allocates
// nothing.
class Sequences {
 public:
  Sequences(const char* op, const Segments* given, std::int64_t batch, std::int64_t tokens)
      : given_(given), batch_(batch), tokens_(tokens) {
    if (given != nullptr) given->check(op, batch, tokens);
  }
  std::int64_t count() const { return given_ != nullptr ? given_->count() : batch_; }
  Segment operator[](std::int64_t n) const {
    return given_ != nullptr ? given_->list[static_cast<std::size_t>(n)] : Segment{n, 0, tokens_};
  }
  std::int64_t longest() const {
    std::int64_t longest = 0;
    for (std::int64_t n = 0; n < count(); ++n) longest = std::max(longest, (*this)[n].length);
    return longest;
  }
  // Without tokens and states (views, null where not wanted) there is nothing to compute, however
  // many channels or heads are without them.
  template <class... Views>
  bool are_empty(const Views&... states) const {
    return tokens_ == 0 && (... && (states.data == nullptr));
  }
  // Zeros in the rows of [B, T, ...] that are in no segment; an absent tensor is left alone.
  void zero_padding(const Tensor& rows) const;

 private:
  const Segments* given_;
  std::int64_t batch_, tokens_;
};

// The largest log decay that any task has seen. Up to kMax counts as 0, more is refused.
class LargestDecay {
 public:
  static constexpr float kMax = 1e-6f;
  void see(float g) {
    float top = top_.load(std::memory_order_relaxed);
    while (g > top && !top_.compare_exchange_weak(top, g, std::memory_order_relaxed)) {
    }
  }
  void see(const AnyRows<const void>& g, std::int64_t n);
  void check(const char* op, const char* name) const;

 private:
  std::atomic<float> top_{0};
};

// Of a step: `x` should be one token of N sequences, [N, 1, ...], and the state there.
void check_step(const char* op, const char* name, const ConstTensor& x, const Tensor& state);

}  // namespace ouzel
