// Buffers of a task of the engine's backward (rows_backward.cc).
#pragma once

#include <algorithm>
#include <cstdint>

#include "src/kernels/rows_backward.h"
#include "src/ops/rows.h"

namespace ouzel {

// Rows as packed, and their gradients.
struct RowsBuffers {
  std::int64_t rows = 0, keys = 0, key_pitch = 0, value_pitch = 0;
  LawRows packed, grads;
  float* output_grad = nullptr;  // [queries][tokens][value_pitch], or [rows] for rows_per_token > 1
  float* token_grad = nullptr;   // [queries][tokens][value_pitch], as packed, where they differ
  Folds folds;                   // all of its arrays
  float *value_decay = nullptr, *value_total = nullptr;
  // Folded rows, and sums that are not those of the rows yet, where they differ.
  float *q = nullptr, *k = nullptr, *e = nullptr, *b = nullptr, *dq = nullptr, *dg = nullptr;
  float* gate_sums = nullptr;
  float *written = nullptr, *dr = nullptr;
  float *ek = nullptr, *eb = nullptr, *qk = nullptr, *qb = nullptr;
  float *qw = nullptr, *qr = nullptr, *ew = nullptr, *er = nullptr;  // see BlockGradArgs
  float *block_q = nullptr, *block_k = nullptr, *block_e = nullptr, *block_b = nullptr,
        *block_factor = nullptr;
  float *states = nullptr, *history = nullptr;
  float *transposed = nullptr, *transposed_end = nullptr, *grad = nullptr, *grad_low = nullptr,
        *grad_slabs = nullptr;
  float* low = nullptr;
  // Of a first pass; of one chunk where the source keeps states.
  float* kept = nullptr;    // [chunks + 1] states: in key lanes without erase, else slabs
  float* erased = nullptr;  // [all rows][value_pitch]: r
  std::int64_t state_size = 0;

  template <class Memory>
  // `source_keeps`: the source has the states at the begins of chunks.
  RowsBuffers(Memory& memory, const RowsKind& kind, std::int64_t tokens, bool source_keeps);
};

template <class Memory>
RowsBuffers::RowsBuffers(Memory& memory, const RowsKind& kind, std::int64_t tokens,
                         bool source_keeps) {
  const std::int64_t chunk = backward_chunk(kind);
  const std::int64_t chunks = source_keeps ? 0 : (tokens + chunk - 1) / chunk;
  rows = chunk * kind.rows_per_token;
  keys = padded(kind.keys, kKeyGroup);
  key_pitch = rows_key_pitch(kind.keys);
  value_pitch = rows_value_pitch(kind.values);
  const bool erases = kind.erase != EraseKind::kNone, general = kind.erase == EraseKind::kGeneral;
  const bool decays = kind.decay || kind.value_decay;
  const auto take = [&](bool wanted, std::int64_t count) {
    return wanted ? memory.template take<float>(count) : nullptr;
  };
  // Of a chunk. Zeros: what lies between the end of a row and its pitch is looked at too.
  const auto take_rows = [&](bool wanted, std::int64_t count) {
    float* x = take(wanted, count);
    if (x != nullptr) std::fill_n(x, count, 0.0f);
    return x;
  };
  for (LawRows* r : {&packed, &grads}) {
    r->key_pitch = key_pitch;
    r->value_pitch = value_pitch;
    r->q = take_rows(true, kind.queries * chunk * key_pitch);
    r->k = take_rows(true, rows * key_pitch);
    r->v = take_rows(true, rows * value_pitch);
    r->g = take_rows(kind.decay, rows * (kind.decay_per_key ? key_pitch : 1));
    r->gv = take_rows(kind.value_decay, rows * value_pitch);
    r->e = take_rows(erases, rows * key_pitch);
    r->b = take_rows(general, rows * key_pitch);
    r->c = take_rows(erases && !general, rows * (kind.strength_per_value ? value_pitch : 1));
    r->u = take_rows(kind.bonus, key_pitch);
  }
  output_grad = take_rows(true, kind.queries * rows * value_pitch);
  token_grad = take_rows(kind.rows_per_token > 1, kind.queries * chunk * value_pitch);
  if (kind.decay) {
    folds.per_key = kind.decay_per_key;
    folds.keys = kind.keys;
    folds.width = kind.decay_per_key ? keys : kTileKeys;
    folds.pitch = kind.decay_per_key ? key_pitch : kTileKeys;
    folds.lambda = take(true, (rows + 1) * folds.pitch);
    folds.inverse = take(true, (rows + 1) * folds.pitch);
    folds.factor = take_rows(true, rows * folds.pitch);
    folds.total = take(true, folds.pitch);
  }
  value_decay = take(kind.value_decay, rows * value_pitch);
  value_total = take(kind.value_decay, value_pitch);
  const bool spread = kind.rows_per_token > 1;
  q = take_rows(kind.decay || spread, kind.queries * rows * key_pitch);
  k = take_rows(kind.decay, rows * key_pitch);
  e = take_rows(kind.decay && erases, rows * key_pitch);
  b = take_rows(kind.decay && general, rows * key_pitch);
  dq = take(spread, kind.queries * rows * key_pitch);
  dg = kind.decay_per_key ? grads.g : take(decays, rows * key_pitch);
  gate_sums = take_rows(kind.decay, rows * key_pitch);
  written = take(erases && !general, rows * value_pitch);
  dr = take(erases, rows * value_pitch);
  ek = take(erases, rows * kRowBlock);
  eb = take(general, rows * kRowBlock);
  for (float** p : {&qk, &qw}) *p = take(erases || kind.decay, kind.queries * rows * kRowBlock);
  for (float** p : {&qb, &qr}) *p = take(general, kind.queries * rows * kRowBlock);
  ew = take(erases, rows * kRowBlock);
  er = take(general, rows * kRowBlock);
  block_q = take_rows(kind.decay, kind.queries * rows * key_pitch);
  for (float** p : {&block_k, &block_factor}) *p = take_rows(kind.decay, rows * key_pitch);
  block_e = take_rows(kind.decay && erases, rows * key_pitch);
  block_b = take_rows(kind.decay && general, rows * key_pitch);
  history = take(decays, kHistoryBlock * kHistoryTile);
  state_size = keys * padded(kind.values, kValueSlab);
  // Between blocks of 16 rows, or before those of four and three last ones of one.
  states = take(decays, std::max(padded(rows, kHistoryBlock) / kHistoryBlock * state_size,
                                 (rows / kRowBlock + kRowBlock - 1) * kKeptValues * kTileKeys));
  transposed = take(erases || source_keeps, state_size);
  transposed_end = take(erases || source_keeps, state_size);
  grad = take(true, state_size);
  grad_low = take(true, state_size);
  grad_slabs = take(erases, state_size);
  low = take(true, state_size);
  kept = take(true, (chunks + 1) * state_size);
  erased =
      take(erases, source_keeps ? rows * value_pitch : tokens * kind.rows_per_token * value_pitch);
}

}  // namespace ouzel
