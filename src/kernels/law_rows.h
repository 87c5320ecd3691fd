// Rows of a law on their way between the caller's tensors and packed scratch: conversion, scales,
// norms, gates, and their adjoints. Packed rows are float32, `pitch` (a multiple of 16) floats
// apart.
#pragma once

#include <cstdint>

#include "ouzel/context.h"
#include "ouzel/tensor.h"

namespace ouzel {

// Packed rows := factor * rows of a tensor, and zeros from `size` up to the pitch. A pitch of 1
// packs single numbers.
struct LoadRowsArgs {
  const void* from = nullptr;  // float32, bfloat16 or float16
  DType dtype = DType::kF32;
  std::int64_t stride = 0;  // elements between rows; negative: backwards, 0: always the same row
  std::int64_t rows = 0, size = 0;
  float factor = 1;
  float* to = nullptr;
  std::int64_t pitch = 0;
  std::int64_t every = 1;  // pitches between two rows of `to`
};
void load_rows(Isa isa, const LoadRowsArgs& args);

// Rows of a tensor := (or += of float32 only) factor * packed rows, rounded to nearest even.
struct StoreRowsArgs {
  const float* from = nullptr;
  std::int64_t pitch = 0;
  std::int64_t every = 1;
  std::int64_t rows = 0, size = 0;
  float factor = 1;
  void* to = nullptr;
  DType dtype = DType::kF32;
  std::int64_t stride = 0;
  bool add = false;
  // Past the caches: float32 only, rows are whole cache lines. finish_streams() ends such a task.
  bool stream = false;
};
void store_rows(Isa isa, const StoreRowsArgs& args);

// x *= factor, a number a row.
void scale_rows(Isa isa, std::int64_t rows, std::int64_t pitch, const float* factor, float* x);
// y += factor * x, a number a row.
void add_scaled_rows(Isa isa, std::int64_t rows, std::int64_t pitch, const float* factor,
                     const float* x, float* y);
// out := x . y over the first `size` numbers of each row.
void row_dots(Isa isa, std::int64_t rows, std::int64_t size, std::int64_t pitch, const float* x,
              const float* y, float* out);
// z := x * y + (add ? z : 0)
void multiply_rows(Isa isa, std::int64_t rows, std::int64_t pitch, const float* x, const float* y,
                   bool add, float* z);
// g := min(g, 0) of n numbers; NaN stays. Returns the largest g before, or 0.
float clamp_log_decays(Isa isa, std::int64_t n, float* g);
// k := 1 - e^g, and its adjoint dg -= e^g dk.
void one_minus_exp(Isa isa, std::int64_t rows, std::int64_t pitch, const float* g, float* k);
void one_minus_exp_adjoint(Isa isa, std::int64_t rows, std::int64_t pitch, const float* g,
                           const float* dk, float* dg);

}  // namespace ouzel
