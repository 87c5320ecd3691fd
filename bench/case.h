// What `ouzel bench` measures: a list of named cases, each giving rows of one table.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ouzel/context.h"

namespace ouzel::bench {

// One figure. Members that do not apply stay 0 or empty and are left out of what is printed.
struct Row {
  std::string op;
  std::string pass;     // forward, backward, forward_backward or step
  std::string variant;  // says the rest
  std::string dtype = "f32";
  int threads = 1;
  std::int64_t B = 0, H = 0, T = 0, K = 0, V = 0;
  double ms = 0;                     // median
  double gflops = 0;                 // median, useful operations only
  double peak_gflops = 0;            // median of the FMA peak of these threads, measured in between
  std::optional<double> efficiency;  // median of (gflops / peak_gflops)
  std::optional<double> ratio;       // median of the ratios of neighbours in time; see `clock`
  std::optional<double> bytes_token;  // peak bytes per token
  std::optional<double> bytes;        // memory, where the figure is one
  std::optional<double> error;        // against float64, and what it may be
  double bound = 0;
  std::string clock;  // what the time includes, or what the ratio is of
};

struct CaseOptions {
  int runs = 9;
  Isa isa = default_isa();

  Context context(int threads) const { return Context({.threads = threads, .isa = isa}); }
};

struct Case {
  std::string name;
  std::function<std::vector<Row>(const CaseOptions&)> run;
};

// Cases of single operators, and of whole models and the program.
std::vector<Case> operator_cases();
std::vector<Case> model_cases();

// Parts of operator_cases, one a file.
void add_recurrence_cases(std::vector<Case>& cases);
void add_law_cases(std::vector<Case>& cases);
void add_long_cases(std::vector<Case>& cases);
void add_softmax_cases(std::vector<Case>& cases);
void add_gemm_cases(std::vector<Case>& cases);
void add_scan_cases(std::vector<Case>& cases);
void add_crossing_case(std::vector<Case>& cases);

// An efficiency above 1 is a fault of the measurement (16-bit rows may exceed the float32 peak), an
// error beyond its bound one of the operator.
bool plausible(const Row& row);

// A table for people, and {"rows": [...]}.
std::string as_table(const std::vector<Row>& rows);
std::string as_json(const std::vector<Row>& rows);

}  // namespace ouzel::bench
