// The adjoint of packing (rows.h): gradients of the rows of one state become gradients of the
// inputs of its law.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "src/ops/law_call.h"
#include "src/ops/law_source.h"

namespace ouzel {

// Gradients of the inputs by role; absent ones are not computed.
using LawGradients = std::array<LawTensor, kLawRoles>;

// Sums over the tokens of a state, of the gradients of parameters. In double: a plain float sum of
// chunks would lose 1e-4 over a million tokens.
struct LawSums {
  double* decay = nullptr;  // [K]
  double* bonus = nullptr;  // [K]
  double* rate = nullptr;   // [1]
  double* skip = nullptr;   // [1]

  static std::int64_t size(std::int64_t keys) { return 2 * keys + 2; }
  LawSums() = default;
  LawSums(double* memory, std::int64_t keys)
      : decay(memory), bonus(memory + keys), rate(memory + 2 * keys), skip(rate + 1) {}
};

class LawAdjoint : public RowAdjoint {
 public:
  template <class Memory>
  LawAdjoint(Memory& memory, const LawCall& call, const LawTensor& output_grad,
             const LawGradients& grads)
      : call_(call), output_grad_(output_grad), grads_(grads) {
    const std::int64_t rows = kChunk * call.kind().rows_per_token;
    const std::int64_t pitch =
        std::max(rows_key_pitch(call.kind().keys), rows_value_pitch(call.kind().values));
    for (float** p : {&x_, &y_}) *p = memory.template take<float>(rows * pitch);
    for (float** p : {&numbers_, &factors_}) *p = memory.template take<float>(rows);
  }

  void bind(Isa isa, std::int64_t sequence, std::int64_t state, const LawSums& sums) {
    isa_ = isa;
    segment_ = call_.segment(sequence);
    state_ = state;
    sums_ = sums;
  }

  std::int64_t lines(std::int64_t first, PrefetchColumn* columns, std::int64_t room) const override;
  void pack_output_grads(std::int64_t first, std::int64_t tokens, std::int64_t value_pitch,
                         float* d_o) override;
  void unpack(std::int64_t first, const LawRows& rows, const LawRows& grads) override;

 private:
  struct Chunk {
    std::int64_t first, tokens, count;  // count: rows
    const LawRows& rows;
    const LawRows& grads;
  };
  bool wanted(LawRole role) const { return grad(role).present(); }
  const LawTensor& grad(LawRole role) const { return grads_[static_cast<std::size_t>(role)]; }
  LawTensorRows tensor_rows(const LawTensor& x, std::int64_t rows_per_token) const;
  void load(LawRole role, const Chunk& c, std::int64_t size, float* to, std::int64_t pitch) const;
  // Gradients of an input; the first state that reads a head assigns, the others add.
  void store(LawRole role, const Chunk& c, std::int64_t size, const float* from,
             std::int64_t pitch) const;
  void unpack_erase(const Chunk& c);
  void unpack_values(const Chunk& c);
  void unpack_strength(const Chunk& c);
  void unpack_step(const Chunk& c);
  void unpack_skip(const Chunk& c);
  void unpack_decays(const Chunk& c);
  void unpack_keys(const Chunk& c);
  void unpack_queries(const Chunk& c);
  // Gradients of normalised rows become those of the rows `x` before it; x is lost.
  void norm_adjoint(std::int64_t rows, std::int64_t pitch, float factor, float* x, float* dy) const;

  const LawCall& call_;
  const LawTensor& output_grad_;
  const LawGradients& grads_;
  Isa isa_ = Isa::kPortable;
  Segment segment_;
  std::int64_t state_ = 0;
  LawSums sums_;
  float *x_ = nullptr, *y_ = nullptr;              // [rows][pitch]
  float *numbers_ = nullptr, *factors_ = nullptr;  // [rows]
};

}  // namespace ouzel
