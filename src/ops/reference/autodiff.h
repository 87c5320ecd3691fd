// Numbers that remember how they were made: a reference that is written as a forward computation
// has its gradients by reverse accumulation over the tape of its operations (S. Linnainmaa, 1970).
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace ouzel::reference {

// The operations of one computation, in order; one at a time for each thread and type.
template <class Real>
class Tape {
 public:
  Tape() : outer_(current_) { current_ = this; }
  ~Tape() { current_ = outer_; }
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  static Tape& current() { return *current_; }

  // A value that depends on up to two earlier ones, with its slopes; 0 stands for a constant.
  std::size_t record(std::size_t a, Real slope_a, std::size_t b, Real slope_b) {
    if (a == 0 && b == 0) return 0;
    nodes_.push_back({a, b, slope_a, slope_b});
    return nodes_.size() - 1;
  }
  std::size_t variable() {
    nodes_.push_back({});
    return nodes_.size() - 1;
  }
  std::size_t size() const { return nodes_.size(); }
  // Gradients of all nodes: `seed` holds those that come from outside.
  std::vector<Real> gradients(std::vector<Real> seed) const {
    for (std::size_t i = nodes_.size(); i-- > 1;) {
      // A slope without a gradient adds nothing, even where it is infinite.
      if (seed[i] == 0) continue;
      seed[nodes_[i].a] += nodes_[i].slope_a * seed[i];
      seed[nodes_[i].b] += nodes_[i].slope_b * seed[i];
    }
    return seed;
  }

 private:
  struct Node {
    std::size_t a = 0, b = 0;
    Real slope_a = 0, slope_b = 0;
  };
  static inline thread_local Tape* current_ = nullptr;
  Tape* outer_;
  std::vector<Node> nodes_{Node()};
};

template <class Real>
struct Traced {
  Real value = 0;
  std::size_t node = 0;  // on the tape; 0: a constant

  Traced() = default;
  Traced(Real x) : value(x) {}  // NOLINT: numbers are constants
  Traced(Real x, std::size_t node) : value(x), node(node) {}
  // Of up to two others, with the slopes to them.
  static Traced of(Real value, const Traced& a, Real slope_a, const Traced& b = {},
                   Real slope_b = 0) {
    return {value, Tape<Real>::current().record(a.node, slope_a, b.node, slope_b)};
  }

  friend Traced operator+(const Traced& a, const Traced& b) {
    return of(a.value + b.value, a, 1, b, 1);
  }
  friend Traced operator-(const Traced& a, const Traced& b) {
    return of(a.value - b.value, a, 1, b, -1);
  }
  friend Traced operator*(const Traced& a, const Traced& b) {
    return of(a.value * b.value, a, b.value, b, a.value);
  }
  friend Traced operator/(const Traced& a, const Traced& b) {
    const Real q = a.value / b.value;
    return of(q, a, 1 / b.value, b, -q / b.value);
  }
  friend Traced operator-(const Traced& a) { return of(-a.value, a, -1); }
  Traced& operator+=(const Traced& b) { return *this = *this + b; }
  Traced& operator*=(const Traced& b) { return *this = *this * b; }
  friend bool operator<(const Traced& a, const Traced& b) { return a.value < b.value; }

  friend Traced exp(const Traced& a) {
    const Real e = std::exp(a.value);
    return of(e, a, e);
  }
  friend Traced expm1(const Traced& a) { return of(std::expm1(a.value), a, std::exp(a.value)); }
  friend Traced log(const Traced& a) { return of(std::log(a.value), a, 1 / a.value); }
  friend Traced log1p(const Traced& a) { return of(std::log1p(a.value), a, 1 / (1 + a.value)); }
  friend Traced sqrt(const Traced& a) {
    const Real root = std::sqrt(a.value);
    return of(root, a, Real(0.5) / root);
  }
  friend Traced sin(const Traced& a) { return of(std::sin(a.value), a, std::cos(a.value)); }
  friend Traced cos(const Traced& a) { return of(std::cos(a.value), a, -std::sin(a.value)); }
  friend Traced abs(const Traced& a) { return of(std::abs(a.value), a, a.value < 0 ? -1 : 1); }
};

using Var = Traced<double>;

}  // namespace ouzel::reference
