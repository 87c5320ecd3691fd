// Numbers that remember how they were made: a reference that is written as a forward computation
// has its gradients by reverse accumulation over the tape of its operations (S. Linnainmaa, 1970).
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace ouzel::reference {

// The operations of one computation, in order; one at a time for each thread.
class Tape {
 public:
  Tape() : outer_(current_) { current_ = this; }
  ~Tape() { current_ = outer_; }
  Tape(const Tape&) = delete;
  Tape& operator=(const Tape&) = delete;
  static Tape& current() { return *current_; }

  // A value that depends on up to two earlier ones, with its slopes; 0 stands for a constant.
  std::size_t record(std::size_t a, double slope_a, std::size_t b, double slope_b) {
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
  std::vector<double> gradients(std::vector<double> seed) const {
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
    double slope_a = 0, slope_b = 0;
  };
  static inline thread_local Tape* current_ = nullptr;
  Tape* outer_;
  std::vector<Node> nodes_{Node()};
};

struct Var {
  double value = 0;
  std::size_t node = 0;  // on the tape; 0: a constant

  Var() = default;
  Var(double x) : value(x) {}  // NOLINT: numbers are constants
  Var(double x, std::size_t node) : value(x), node(node) {}

  Var& operator+=(const Var& b);
  Var& operator*=(const Var& b);
};

inline Var unary(const Var& a, double value, double slope) {
  return {value, Tape::current().record(a.node, slope, 0, 0)};
}
inline Var binary(const Var& a, const Var& b, double value, double slope_a, double slope_b) {
  return {value, Tape::current().record(a.node, slope_a, b.node, slope_b)};
}
inline Var operator+(const Var& a, const Var& b) { return binary(a, b, a.value + b.value, 1, 1); }
inline Var operator-(const Var& a, const Var& b) { return binary(a, b, a.value - b.value, 1, -1); }
inline Var operator*(const Var& a, const Var& b) {
  return binary(a, b, a.value * b.value, b.value, a.value);
}
inline Var operator/(const Var& a, const Var& b) {
  const double q = a.value / b.value;
  return binary(a, b, q, 1 / b.value, -q / b.value);
}
inline Var operator-(const Var& a) { return unary(a, -a.value, -1); }
inline Var& Var::operator+=(const Var& b) { return *this = *this + b; }
inline Var& Var::operator*=(const Var& b) { return *this = *this * b; }
inline bool operator<(const Var& a, const Var& b) { return a.value < b.value; }

inline Var exp(const Var& a) {
  const double e = std::exp(a.value);
  return unary(a, e, e);
}
inline Var expm1(const Var& a) { return unary(a, std::expm1(a.value), std::exp(a.value)); }
inline Var log(const Var& a) { return unary(a, std::log(a.value), 1 / a.value); }
inline Var log1p(const Var& a) { return unary(a, std::log1p(a.value), 1 / (1 + a.value)); }
inline Var sqrt(const Var& a) {
  const double root = std::sqrt(a.value);
  return unary(a, root, 0.5 / root);
}
inline Var sin(const Var& a) { return unary(a, std::sin(a.value), std::cos(a.value)); }
inline Var cos(const Var& a) { return unary(a, std::cos(a.value), -std::sin(a.value)); }
inline Var abs(const Var& a) { return unary(a, std::abs(a.value), a.value < 0 ? -1 : 1); }

}  // namespace ouzel::reference
