#include "src/ops/law_adjoint.h"

#include "src/kernels/law_rows.h"

namespace ouzel {

using enum LawRole;

LawTensorRows LawAdjoint::tensor_rows(const LawTensor& x, std::int64_t rows_per_token) const {
  return {isa_, x, segment_, call_.head(x, state_), call_.reverse(), rows_per_token};
}

void LawAdjoint::load(LawRole role, const Chunk& c, std::int64_t size, float* to,
                      std::int64_t pitch) const {
  tensor_rows(call_.in(role), call_.kind().rows_per_token)
      .load(c.first, c.tokens, 0, size, 1, to, pitch);
}

void LawAdjoint::store(LawRole role, const Chunk& c, std::int64_t size, const float* from,
                       std::int64_t pitch) const {
  const LawTensor& x = grad(role);
  const std::int64_t states = call_.shape().value_heads / x.heads;
  LawTensorRows rows = tensor_rows(x, call_.kind().rows_per_token);
  rows.stream = states == 1 && call_.streams(x);
  rows.store(c.first, c.tokens, 0, size, 1, state_ % states != 0, from, pitch);
}

std::int64_t LawAdjoint::lines(std::int64_t first, PrefetchColumn* columns,
                               std::int64_t room) const {
  const std::int64_t queries = call_.kind().queries;
  std::int64_t count = 0;
  for (std::int64_t r = 0; r < queries; ++r) {
    LawTensorRows{isa_, output_grad_, segment_, state_ * queries + r, call_.reverse(), 1}.prefetch(
        first, 0, call_.kind().values, columns, count, room);
  }
  return count;
}

void LawAdjoint::pack_output_grads(std::int64_t first, std::int64_t tokens,
                                   std::int64_t value_pitch, float* d_o) {
  const std::int64_t queries = call_.kind().queries;
  for (std::int64_t r = 0; r < queries; ++r) {
    LawTensorRows{isa_, output_grad_, segment_, state_ * queries + r, call_.reverse(), 1}.load(
        first, tokens, 0, call_.kind().values, 1, d_o + r * tokens * value_pitch, value_pitch);
  }
}

void LawAdjoint::unpack(std::int64_t first, const LawRows& rows, const LawRows& grads) {
  const Chunk c = {first, rows.tokens, rows.tokens * call_.kind().rows_per_token, rows, grads};
  unpack_erase(c);
  unpack_values(c);
  unpack_decays(c);
  unpack_keys(c);
  unpack_queries(c);
}

void LawAdjoint::norm_adjoint(std::int64_t rows, std::int64_t pitch, float factor, float* x,
                              float* dy) const {
  // y = f x, f = (x . x + eps)^-1/2: dx = f (dy - f (x . dy) f x)
  const std::int64_t size = call_.kind().keys;
  norm_factors(isa_, rows, size, pitch, call_.l2norm_eps(), x, factors_);
  scale_rows(isa_, rows, pitch, factors_, x);
  row_dots(isa_, rows, size, pitch, x, dy, numbers_);
  for (std::int64_t i = 0; i < rows; ++i) numbers_[i] = -numbers_[i];
  add_scaled_rows(isa_, rows, pitch, numbers_, x, dy);
  for (std::int64_t i = 0; i < rows; ++i) factors_[i] *= factor;
  scale_rows(isa_, rows, pitch, factors_, dy);
}

void LawAdjoint::unpack_erase(const Chunk& c) {
  const RowsKind& kind = call_.kind();
  const std::int64_t pitch = c.rows.key_pitch;
  if (kind.erase == EraseKind::kNone) return;
  if (wanted(kEraseWrite)) store(kEraseWrite, c, kind.keys, c.grads.b, pitch);
  if (call_.in(kEraseKey).present()) {
    if (!wanted(kEraseKey)) return;
    if (call_.l2norm()) {
      load(kEraseKey, c, kind.keys, x_, pitch);
      norm_adjoint(c.count, pitch, 1, x_, c.grads.e);
    }
    store(kEraseKey, c, kind.keys, c.grads.e, pitch);
    return;
  }
  // The erase key is the key, perhaps gated.
  if (call_.in(kEraseGate).present()) {
    if (wanted(kEraseGate)) {
      multiply_rows(isa_, c.count, pitch, c.grads.e, c.rows.k, false, x_);
      store(kEraseGate, c, kind.keys, x_, pitch);
    }
    load(kEraseGate, c, kind.keys, x_, pitch);
    multiply_rows(isa_, c.count, pitch, c.grads.e, x_, true, c.grads.k);
  } else {
    std::fill_n(factors_, c.count, 1.0f);
    add_scaled_rows(isa_, c.count, pitch, factors_, c.grads.e, c.grads.k);
  }
}

void LawAdjoint::unpack_values(const Chunk& c) {
  const std::int64_t size = call_.kind().values, pitch = c.rows.value_pitch;
  if (call_.in(kStrength).present()) unpack_strength(c);
  if (call_.in(kWriteGate).present()) {
    if (wanted(kWriteGate)) {
      load(kValue, c, size, x_, pitch);
      multiply_rows(isa_, c.count, pitch, x_, c.grads.v, false, x_);
      store(kWriteGate, c, size, x_, pitch);
    }
    load(kWriteGate, c, size, x_, pitch);
    multiply_rows(isa_, c.count, pitch, x_, c.grads.v, false, c.grads.v);
  }
  if (call_.in(kStep).present()) unpack_step(c);
  if (call_.in(kSkip).present()) unpack_skip(c);
  if (wanted(kValue)) store(kValue, c, size, c.grads.v, pitch);
}

// v := beta v, c := beta.
void LawAdjoint::unpack_strength(const Chunk& c) {
  const RowsKind& kind = call_.kind();
  const std::int64_t pitch = c.rows.value_pitch;
  if (wanted(kStrength)) {
    load(kValue, c, kind.values, x_, pitch);
    if (kind.strength_per_value) {
      multiply_rows(isa_, c.count, pitch, x_, c.grads.v, true, c.grads.c);
      store(kStrength, c, kind.values, c.grads.c, pitch);
    } else {
      row_dots(isa_, c.count, kind.values, pitch, x_, c.grads.v, numbers_);
      for (std::int64_t i = 0; i < c.count; ++i) numbers_[i] += c.grads.c[i];
      store(kStrength, c, 1, numbers_, 1);
    }
  }
  if (kind.strength_per_value) {
    multiply_rows(isa_, c.count, pitch, c.rows.c, c.grads.v, false, c.grads.v);
  } else {
    scale_rows(isa_, c.count, pitch, c.rows.c, c.grads.v);
  }
}

// v := dt v, g := dt A.
void LawAdjoint::unpack_step(const Chunk& c) {
  const std::int64_t size = call_.kind().values, pitch = c.rows.value_pitch;
  float rate = 0;
  const LawTensor& a = call_.in(kRate);
  tensor_rows(a, 1).load(0, 1, 0, 1, 1, &rate, 1);
  load(kStep, c, 1, factors_, 1);
  if (wanted(kStep)) {
    load(kValue, c, size, x_, pitch);
    row_dots(isa_, c.count, size, pitch, x_, c.grads.v, numbers_);
    for (std::int64_t i = 0; i < c.count; ++i) {
      // A reset has no slope, though its rate or step is infinite.
      if (c.grads.g[i] != 0) numbers_[i] += rate * c.grads.g[i];
    }
    store(kStep, c, 1, numbers_, 1);
  }
  if (wanted(kRate)) {
    for (std::int64_t i = 0; i < c.count; ++i) {
      if (c.grads.g[i] == 0) continue;
      *sums_.rate += static_cast<double>(factors_[i]) * static_cast<double>(c.grads.g[i]);
    }
  }
  scale_rows(isa_, c.count, pitch, factors_, c.grads.v);
}

// o := o + D v, for every query.
void LawAdjoint::unpack_skip(const Chunk& c) {
  const RowsKind& kind = call_.kind();
  const std::int64_t pitch = c.rows.value_pitch;
  float skip = 0;
  tensor_rows(call_.in(kSkip), 1).load(0, 1, 0, 1, 1, &skip, 1);
  load(kValue, c, kind.values, y_, pitch);
  for (std::int64_t r = 0; r < kind.queries; ++r) {
    LawTensorRows{isa_, output_grad_, segment_, state_ * kind.queries + r, call_.reverse(), 1}.load(
        c.first, c.tokens, 0, kind.values, 1, x_, pitch);
    if (wanted(kSkip)) {
      row_dots(isa_, c.count, kind.values, pitch, x_, y_, numbers_);
      for (std::int64_t i = 0; i < c.count; ++i) *sums_.skip += static_cast<double>(numbers_[i]);
    }
    std::fill_n(factors_, c.count, skip);
    add_scaled_rows(isa_, c.count, pitch, factors_, x_, c.grads.v);
  }
}

void LawAdjoint::unpack_decays(const Chunk& c) {
  const RowsKind& kind = call_.kind();
  if (!call_.law().has(kKey)) {
    one_minus_exp_adjoint(isa_, c.count, c.rows.key_pitch, c.rows.g, c.grads.k, c.grads.g);
  }
  if (wanted(kDecay)) {
    const std::int64_t size = kind.decay_per_key ? kind.keys : 1;
    const std::int64_t pitch = kind.decay_per_key ? c.rows.key_pitch : 1;
    if (grad(kDecay).is_parameter) {
      for (std::int64_t i = 0; i < c.count; ++i) {
        for (std::int64_t j = 0; j < size; ++j) {
          sums_.decay[j] += static_cast<double>(c.grads.g[i * pitch + j]);
        }
      }
    } else {
      store(kDecay, c, size, c.grads.g, pitch);
    }
  }
  if (wanted(kValueDecay)) store(kValueDecay, c, kind.values, c.grads.gv, c.rows.value_pitch);
}

void LawAdjoint::unpack_keys(const Chunk& c) {
  const RowsKind& kind = call_.kind();
  const std::int64_t pitch = c.rows.key_pitch;
  if (wanted(kBonus)) {
    for (std::int64_t j = 0; j < kind.keys; ++j) {
      sums_.bonus[j] += static_cast<double>(c.grads.u[j]);
    }
  }
  if (!wanted(kKey)) return;
  if (call_.l2norm()) {
    load(kKey, c, kind.keys, x_, pitch);
    norm_adjoint(c.count, pitch, 1, x_, c.grads.k);
  }
  store(kKey, c, kind.keys, c.grads.k, pitch);
}

void LawAdjoint::unpack_queries(const Chunk& c) {
  if (!wanted(kQuery)) return;
  const RowsKind& kind = call_.kind();
  const std::int64_t pitch = c.rows.key_pitch;
  const std::int64_t sharing = call_.shape().outputs_per_query();
  for (std::int64_t r = 0; r < kind.queries; ++r) {
    const std::int64_t output = state_ * kind.queries + r;
    const std::int64_t head = call_.shape().query_of(output);
    float* d_q = c.grads.q + r * c.tokens * pitch;
    if (call_.l2norm()) {
      LawTensorRows{isa_, call_.in(kQuery), segment_, head, call_.reverse(), 1}.load(
          c.first, c.tokens, 0, kind.keys, 1, x_, pitch);
      norm_adjoint(c.tokens, pitch, call_.scale(), x_, d_q);
    }
    const bool streams = sharing == 1 && call_.streams(grad(kQuery));
    LawTensorRows{isa_, grad(kQuery), segment_, head, call_.reverse(), 1, streams}.store(
        c.first, c.tokens, 0, kind.keys, call_.l2norm() ? 1 : call_.scale(), output % sharing != 0,
        d_q, pitch);
  }
}

}  // namespace ouzel
