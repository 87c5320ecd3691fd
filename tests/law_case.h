// Calls of the laws of ouzel/laws.h straight through their objects, with random inputs of any type.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ouzel/laws.h"
#include "src/base/half.h"
#include "src/ops/law.h"
#include "src/ops/reference/laws.h"
#include "tests/random_arrays.h"

namespace ouzel::test {

struct LawSizes {
  std::int64_t batch = 1, tokens = 1;
  std::int64_t query_heads = 1, key_heads = 1, value_heads = 1;
  std::int64_t keys = 1, values = 1;
  std::int64_t rows = 1;  // of a token, in laws that have several

  std::int64_t output_heads() const { return std::max(query_heads, value_heads); }
};

// A dense array of float32, bfloat16 or float16.
class TypedArray {
 public:
  TypedArray() = default;
  TypedArray(std::vector<std::int64_t> shape, DType dtype)
      : shape_(std::move(shape)), dtype_(dtype) {
    std::int64_t size = 1;
    for (std::int64_t e : shape_) size *= e;
    size_ = static_cast<std::size_t>(size);
    memory_.resize(size_ * static_cast<std::size_t>(size_of(dtype)) + 1);
  }
  std::size_t size() const { return size_; }
  void set(std::size_t i, float x) {
    if (dtype_ == DType::kBF16) {
      reinterpret_cast<BFloat16*>(memory_.data())[i] = to_bf16(x);
    } else if (dtype_ == DType::kF16) {
      reinterpret_cast<Float16*>(memory_.data())[i] = to_f16(x);
    } else {
      reinterpret_cast<float*>(memory_.data())[i] = x;
    }
  }
  float get(std::size_t i) const {
    if (dtype_ == DType::kBF16) {
      return to_float(reinterpret_cast<const BFloat16*>(memory_.data())[i]);
    }
    if (dtype_ == DType::kF16) {
      return to_float(reinterpret_cast<const Float16*>(memory_.data())[i]);
    }
    return reinterpret_cast<const float*>(memory_.data())[i];
  }
  Tensor tensor() {
    Tensor t;
    if (shape_.empty()) return t;
    t.data = memory_.data();
    t.dtype = dtype_;
    t.rank = static_cast<int>(shape_.size());
    std::int64_t step = 1;
    for (std::size_t i = shape_.size(); i-- > 0;) {
      t.extent[i] = shape_[i];
      t.stride[i] = step;
      step *= shape_[i];
    }
    return t;
  }
  // Token t of [B, T, ...], `rows` rows of it, as [B, rows, ...].
  Tensor token(std::int64_t t, std::int64_t rows = 1) {
    Tensor x = tensor();
    x.data = static_cast<char*>(x.data) + t * rows * x.stride[1] * size_of(dtype_);
    x.extent[1] = rows;
    return x;
  }
  const std::vector<std::int64_t>& shape() const { return shape_; }
  template <class Real>
  reference::Array<Real> array() const {
    reference::Array<Real> a(shape_);
    for (std::size_t i = 0; i < size_; ++i) a.data[i] = static_cast<Real>(get(i));
    return a;
  }

 private:
  std::vector<std::int64_t> shape_;
  DType dtype_ = DType::kF32;
  std::size_t size_ = 0;
  std::vector<char> memory_;
};

// The inputs of a law, what it is to compute, and room for it.
struct LawCase {
  const Law& law;
  LawSizes sizes;
  LawOptions options;
  std::map<std::string, TypedArray> in, grads;
  TypedArray o, d_o;
  std::vector<float> initial, final, d_final, d_initial;  // [N, HV, K, V]
  Segments segments;

  LawCase(const Law& row, const LawSizes& s, DType dtype = DType::kF32)
      : law(row), sizes(s), segments(Segments::whole(s.batch, s.tokens)) {
    if (!law.many_rows()) sizes.rows = 1;
    options.num_householder = sizes.rows;
    Random random(7);
    for (const LawInput& input : law.inputs) {
      if (input.name == nullptr) break;
      const TypedArray array(shape_of(input.shape), dtype);
      in[input.name] = grads[input.name] = array;
      fill(input, random, in[input.name]);
    }
    o = d_o = TypedArray({s.batch, s.tokens, s.output_heads(), s.values}, dtype);
    for (std::size_t i = 0; i < d_o.size(); ++i) d_o.set(i, random.uniform(-1, 1));
    final.resize(state_size());
    d_initial.resize(state_size());
    initial = random_array<float>(random, {static_cast<std::int64_t>(state_size())}).data;
    d_final = random_array<float>(random, {static_cast<std::int64_t>(state_size())}).data;
  }

  std::size_t state_size() const {
    return static_cast<std::size_t>(segments.count() * sizes.value_heads * sizes.keys *
                                    sizes.values);
  }
  std::vector<std::int64_t> state_shape() const {
    return {segments.count(), sizes.value_heads, sizes.keys, sizes.values};
  }
  const LawInput& input(const std::string& name) const {
    return *std::find_if(law.inputs.begin(), law.inputs.end(),
                         [&](const LawInput& x) { return name == x.name; });
  }
  // Gradients of parameters are added to: they begin at 1.
  void reset_gradients() {
    for (auto& [name, array] : grads) {
      const bool parameter = input(name).shape[0] != 'B';
      for (std::size_t i = 0; i < array.size(); ++i) array.set(i, parameter ? 1 : NAN);
    }
  }

  RecurrenceInputs inputs() {
    RecurrenceInputs x;
    for (auto& [name, array] : in) x.*input(name).tensor = array.tensor();
    x.segments = &segments;
    return x;
  }
  RecurrenceInputs token(std::int64_t t) {
    RecurrenceInputs x;
    for (auto& [name, array] : in) {
      const LawInput& i = input(name);
      const bool rows = std::string(i.shape).find("TN") != std::string::npos;
      x.*i.tensor = i.shape[0] == 'B' ? array.token(t, rows ? sizes.rows : 1) : array.tensor();
    }
    return x;
  }
  RecurrenceInputGrads gradients() {
    RecurrenceInputGrads x;
    for (auto& [name, array] : grads) x.*input(name).gradient = array.tensor();
    return x;
  }
  StateView view(std::vector<float>& memory, std::vector<SequenceState>& storage) const {
    const std::vector<std::int64_t> s = state_shape();
    return state_view(Tensor(memory.data(), DType::kF32, {s[0], s[1], s[2], s[3]}), {}, storage);
  }

  void forward(Context& context) {
    std::vector<SequenceState> from, to;
    RecurrenceInputs x = inputs();
    x.initial_state = view(initial, from);
    MatrixLaw{law}(context, options, x, {.o = o.tensor(), .final_state = view(final, to)});
  }
  void backward(Context& context) {
    std::vector<SequenceState> from, d_to, d_from;
    RecurrenceInputs x = inputs();
    x.initial_state = view(initial, from);
    RecurrenceInputGrads dx = gradients();
    dx.initial_state = view(d_initial, d_from);
    reset_gradients();
    MatrixLaw{law}.backward(context, options, x, nullptr,
                            {.o = d_o.tensor(), .final_state = view(d_final, d_to)}, dx);
  }

  reference::LawArguments<double> arguments() const {
    reference::LawArguments<double> a;
    a.law = law.name;
    for (const auto& [name, array] : in) a.inputs[name] = array.array<double>();
    a.inputs["initial_state"] = state(initial);
    a.segments = segments;
    a.scale = options.scale;
    a.reverse = options.reverse;
    a.l2norm = options.use_qk_l2norm;
    return a;
  }
  reference::Array<double> state(const std::vector<float>& memory) const {
    reference::Array<double> s(state_shape());
    std::copy(memory.begin(), memory.end(), s.data.begin());
    return s;
  }

  std::vector<std::int64_t> shape_of(const std::string& letters) const {
    std::vector<std::int64_t> shape;
    const std::string first = letters.substr(0, letters.find('|'));
    for (std::size_t at = 0; at < first.size();) {
      const std::size_t end = std::min(first.find(' ', at), first.size());
      shape.push_back(extent(first.substr(at, end - at)));
      at = end + 1;
    }
    return shape;
  }
  std::int64_t extent(const std::string& letter) const {
    const std::map<std::string, std::int64_t> extents = {
        {"B", sizes.batch},        {"T", sizes.tokens},     {"TN", sizes.tokens * sizes.rows},
        {"HQ", sizes.query_heads}, {"HK", sizes.key_heads}, {"HV", sizes.value_heads},
        {"K", sizes.keys},         {"V", sizes.values}};
    return extents.at(letter);
  }

 private:
  // Decays of all strengths; erases that contract.
  void fill(const LawInput& input, Random& random, TypedArray& x) const {
    using enum LawRole;
    const double unit = 1.7 / std::sqrt(static_cast<double>(sizes.keys));
    for (std::size_t i = 0; i < x.size(); ++i) {
      float value = random.uniform(-1, 1);
      switch (input.role) {
        case kDecay:
        case kValueDecay:
          value = i % 11 == 3 ? -20.0f : i % 13 == 5 ? 0.0f : random.uniform(-0.5, 0);
          break;
        case kRate:
          value = random.uniform(-1, -0.1);
          break;
        case kStrength:
        case kEraseGate:
        case kWriteGate:
        case kStep:
          value = random.uniform(0, 1);
          break;
        case kKey:
        case kEraseKey:
          value *= static_cast<float>(unit);
          break;
        case kEraseWrite:
          value *= static_cast<float>(-0.5 * unit);
          break;
        default:
          break;
      }
      x.set(i, value);
    }
  }
};

}  // namespace ouzel::test
