// Gradients without derivations: numbers that remember how they were computed. A reference whose
// backward pass comes from here is independent of one that was derived by hand.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace ouzel::reference {

// Every number is a step with at most two parents; gradients go from the last step to the first.
template <class Real>
class Tape {
 public:
  std::size_t add(std::size_t a, Real da, std::size_t b, Real db) {
    steps_.push_back({a, b, da, db});
    return steps_.size() - 1;
  }
  std::size_t leaf() { return add(0, 0, 0, 0); }
  // gradient[i] = sum over results of seed * d result / d step i.
  std::vector<Real> backward(const std::vector<std::size_t>& results,
                             const std::vector<Real>& seeds) const {
    std::vector<Real> gradient(steps_.size());
    for (std::size_t i = 0; i < results.size(); ++i) gradient[results[i]] += seeds[i];
    for (std::size_t i = steps_.size(); i-- > 0;) {
      gradient[steps_[i].a] += steps_[i].da * gradient[i];
      gradient[steps_[i].b] += steps_[i].db * gradient[i];
    }
    return gradient;
  }

 private:
  struct Step {
    std::size_t a, b;
    Real da, db;
  };
  std::vector<Step> steps_ = {{0, 0, 0, 0}};  // step 0: nobody's parent
};

template <class Real>
struct Traced {
  Tape<Real>* tape = nullptr;  // null: a constant
  std::size_t step = 0;
  Real value = 0;

  Traced() = default;
  Traced(Real constant) : value(constant) {}  // NOLINT: a number is a constant
  static Traced leaf(Tape<Real>& tape, Real value) { return {&tape, tape.leaf(), value}; }
  static Traced of(const Traced& a, Real da, const Traced& b, Real db, Real value) {
    Tape<Real>* tape = a.tape != nullptr ? a.tape : b.tape;
    if (tape == nullptr) return value;
    return {tape, tape->add(a.step, da, b.step, db), value};
  }

  friend Traced operator+(const Traced& a, const Traced& b) {
    return of(a, 1, b, 1, a.value + b.value);
  }
  friend Traced operator-(const Traced& a, const Traced& b) {
    return of(a, 1, b, -1, a.value - b.value);
  }
  friend Traced operator*(const Traced& a, const Traced& b) {
    return of(a, b.value, b, a.value, a.value * b.value);
  }
  friend Traced operator/(const Traced& a, const Traced& b) {
    const Real q = a.value / b.value;
    return of(a, 1 / b.value, b, -q / b.value, q);
  }
  friend Traced exp(const Traced& a) {
    const Real y = std::exp(a.value);
    return of(a, y, {}, 0, y);
  }
  friend Traced sqrt(const Traced& a) {
    const Real y = std::sqrt(a.value);
    return of(a, 1 / (2 * y), {}, 0, y);
  }
  friend Traced cos(const Traced& a) { return of(a, -std::sin(a.value), {}, 0, std::cos(a.value)); }
  friend Traced sin(const Traced& a) { return of(a, std::cos(a.value), {}, 0, std::sin(a.value)); }

 private:
  Traced(Tape<Real>* tape, std::size_t step, Real value) : tape(tape), step(step), value(value) {}
};

}  // namespace ouzel::reference
