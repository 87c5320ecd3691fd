// Arguments and results of operators in float32.
#pragma once

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include "ouzel/recurrence.h"
#include "ouzel/tensor.h"
#include "tests/calls.h"

namespace ouzel::test {

// An argument in float32 with memory of its own. Strided: every axis but the first is spaced out,
// and the gaps hold NaN (of inputs) or a value that no operator computes (of outputs).
class Operand {
 public:
  Operand() = default;  // absent
  static Operand input(const Doubles& a, bool strided = false) {
    if (!a.present()) return {};
    Operand x(a.shape, strided, std::numeric_limits<float>::quiet_NaN());
    std::size_t next = 0;
    x.for_each([&](float& slot) { slot = static_cast<float>(a.data[next++]); });
    return x;
  }
  static Operand output(std::vector<std::int64_t> shape, bool strided = false) {
    return Operand(std::move(shape), strided, kUnwritten);
  }
  // Gradients of parameters are added to: they start from zero.
  static Operand zeros_like(const Operand& a) {
    return a.present() ? Operand(a.shape_, false, 0) : Operand();
  }
  static Operand output_like(const Operand& a) {
    return a.present() ? Operand(a.shape_, a.strided_, kUnwritten) : Operand();
  }

  bool present() const { return !shape_.empty(); }
  std::int64_t extent(std::size_t axis) const { return shape_[axis]; }
  std::size_t rank() const { return shape_.size(); }
  const std::vector<std::int64_t>& shape() const { return shape_; }

  Tensor tensor() {
    Tensor t;
    if (!present()) return t;
    t.data = memory_.data();
    t.rank = static_cast<int>(rank());
    for (std::size_t i = 0; i < rank(); ++i) {
      t.extent[i] = shape_[i];
      t.stride[i] = stride_[i];
    }
    return t;
  }
  // Entry n of the first axis.
  float* entry(std::size_t n) { return memory_.data() + static_cast<std::int64_t>(n) * stride_[0]; }
  // Rows [begin, begin + count) of axis 1.
  Tensor tokens(std::int64_t begin, std::int64_t count) {
    Tensor x = tensor();
    x.data = memory_.data() + begin * stride_[1];
    x.extent[1] = count;
    return x;
  }
  Tensor token(std::int64_t t) { return tokens(t, 1); }
  // The elements. Throws if the gaps of a strided output were written to.
  Floats floats() {
    if (!present()) return {};
    Floats f(shape_);
    std::size_t next = 0;
    for_each([&](float& slot) { f.data[next++] = slot; });
    if (strided_) {
      Operand gaps = *this;
      gaps.for_each([](float& slot) { slot = kUnwritten; });
      for (float x : gaps.memory_) {
        if (x != kUnwritten) throw std::logic_error("the operator wrote between the rows");
      }
    }
    return f;
  }

 private:
  static constexpr float kUnwritten = -7.0e30f;

  Operand(std::vector<std::int64_t> shape, bool strided, float fill)
      : shape_(std::move(shape)), stride_(shape_.size()), strided_(strided) {
    std::int64_t step = 1;
    for (std::size_t i = rank(); i-- > 0;) {
      stride_[i] = step;
      step *= shape_[i] + (strided && i > 0 ? 3 : 0);
    }
    memory_.assign(static_cast<std::size_t>(step) + 1, fill);  // never empty: it is present
  }
  template <class Visit>
  void for_each(const Visit& visit) {
    std::vector<std::int64_t> index(rank());
    std::int64_t count = 1;
    for (std::int64_t e : shape_) count *= e;
    for (std::int64_t n = 0; n < count; ++n) {
      std::int64_t at = 0;
      for (std::size_t i = 0; i < rank(); ++i) at += index[i] * stride_[i];
      visit(memory_[static_cast<std::size_t>(at)]);
      for (std::size_t i = rank(); i-- > 0 && ++index[i] == shape_[i];) index[i] = 0;
    }
  }

  std::vector<std::int64_t> shape_, stride_;
  bool strided_ = false;
  std::vector<float> memory_;
};

// A state of N sequences: operands for S and z, and the view of both.
struct StateOperands {
  Operand s, z;
  Operand s_residue, z_residue;
  std::int64_t position = 0;
  std::vector<SequenceState> storage;

  StateView view() {
    if (!s.present()) return {};
    const StateView view = state_view(s.tensor(), z.tensor(), storage);
    for (std::size_t n = 0; n < storage.size(); ++n) {
      storage[n].position = position;
      if (s_residue.present()) storage[n].s_residue = s_residue.entry(n);
      if (z_residue.present()) storage[n].z_residue = z_residue.entry(n);
    }
    return view;
  }
  void add_residue(const Residue& residue) {
    s_residue = residue.s.present() ? Operand::input(residue.s) : Operand::zeros_like(s);
    z_residue = residue.z.present() ? Operand::input(residue.z) : Operand::zeros_like(z);
    position = residue.position;
  }
};

inline StateOperands state_of(const Doubles& s, const Doubles& z) {
  StateOperands state;
  state.s = Operand::input(s);
  state.z = Operand::input(z);
  return state;
}

}  // namespace ouzel::test
