// Matrices of float64, dense and row by row: the arithmetic of operators that are asked to be exact
// and not to be fast.
#pragma once

#include <cstdint>

#include "ouzel/context.h"

namespace ouzel {

struct Matrix64 {
  double* data = nullptr;
  std::int64_t rows = 0, columns = 0;
  std::int64_t size() const { return rows * columns; }
};

// y += A x, and y += A^T x.
void add_product(Isa isa, const Matrix64& a, const double* x, double* y);
void add_transposed_product(Isa isa, const Matrix64& a, const double* x, double* y);
// A += scale x y^T
void add_outer(Isa isa, double scale, const double* x, const double* y, const Matrix64& a);
// A := diag(f) A, and A diag(f); a factor of 0 drops what it scales, even NaN.
void scale_rows(Isa isa, const double* f, const Matrix64& a);
void scale_columns(Isa isa, const double* f, const Matrix64& a);
// y += the row sums of A * B, element by element; the column sums.
void add_row_products(Isa isa, const Matrix64& a, const Matrix64& b, double* y);
void add_column_products(Isa isa, const Matrix64& a, const Matrix64& b, double* y);
double dot(Isa isa, const double* x, const double* y, std::int64_t n);
// y += scale x
void add_scaled(Isa isa, double scale, const double* x, std::int64_t n, double* y);

}  // namespace ouzel
