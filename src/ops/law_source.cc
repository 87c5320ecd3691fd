#include "src/ops/law_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include <fmt/format.h>

#include "src/kernels/law_rows.h"
#include "src/kernels/recurrence_block.h"

namespace ouzel {
namespace {

// Above 0 by less than this, a log decay is a rounded 0.
constexpr float kDecayTolerance = 1e-6f;

}  // namespace

void norm_factors(Isa isa, std::int64_t rows, std::int64_t size, std::int64_t pitch, float eps,
                  const float* x, float* factors) {
  row_dots(isa, rows, size, pitch, x, x, factors);
  for (std::int64_t i = 0; i < rows; ++i) factors[i] = 1 / std::sqrt(factors[i] + eps);
}

void normalize_rows(Isa isa, std::int64_t rows, std::int64_t size, std::int64_t pitch, float eps,
                    float factor, float* x) {
  for (std::int64_t i = 0; i < rows; i += kChunk) {
    float factors[kChunk];
    const std::int64_t count = std::min(rows - i, kChunk);
    norm_factors(isa, count, size, pitch, eps, x + i * pitch, factors);
    for (std::int64_t j = 0; j < count; ++j) factors[j] *= factor;
    scale_rows(isa, count, pitch, factors, x + i * pitch);
  }
}

void LawTensorRows::load(std::int64_t first, std::int64_t tokens, std::int64_t column,
                         std::int64_t size, float factor, float* to, std::int64_t pitch) const {
  if (x.rows_per_token != rows_per_token) {
    std::memset(to, 0, static_cast<std::size_t>(tokens * rows_per_token * pitch) * sizeof(float));
  }
  LoadRowsArgs a;
  a.dtype = x.dtype;
  a.stride = x.token_stride(reverse);
  a.rows = tokens;
  a.size = size;
  a.factor = factor;
  a.pitch = pitch;
  a.every = rows_per_token;
  for (std::int64_t row = 0; row < x.rows_per_token; ++row) {
    a.from = x.at(segment, first, head, reverse, row, column);
    a.to = to + row * pitch;
    load_rows(isa, a);
  }
}

void LawTensorRows::store(std::int64_t first, std::int64_t tokens, std::int64_t column,
                          std::int64_t size, float factor, bool add, const float* from,
                          std::int64_t pitch) const {
  StoreRowsArgs a;
  a.pitch = pitch;
  a.every = rows_per_token;
  a.rows = tokens;
  a.size = size;
  a.factor = factor;
  a.dtype = x.dtype;
  a.stride = x.token_stride(reverse);
  a.add = add;
  a.stream = stream;
  for (std::int64_t row = 0; row < x.rows_per_token; ++row) {
    a.from = from + row * pitch;
    a.to = x.at(segment, first, head, reverse, row, column);
    store_rows(isa, a);
  }
}

void LawTensorRows::prefetch(std::int64_t first, std::int64_t column, std::int64_t size,
                             PrefetchColumn* lines, std::int64_t& count, std::int64_t most) const {
  constexpr std::int64_t kLine = 64;
  const std::int64_t element = size_of(x.dtype), stride = x.token_stride(reverse) * element;
  // Strides of columns count floats.
  constexpr std::int64_t kFloat = sizeof(float);
  if (!x.present() || stride % kFloat != 0) return;
  for (std::int64_t row = 0; row < x.rows_per_token; ++row) {
    const char* begin = static_cast<const char*>(x.at(segment, first, head, reverse, row, column));
    for (std::int64_t at = 0; at < size * element && count < most; at += kLine) {
      lines[count++] = {reinterpret_cast<const float*>(begin + at), stride / kFloat};
    }
  }
}

void LawSource::bind(Isa isa, std::int64_t sequence, std::int64_t state, float* kept) {
  isa_ = isa;
  segment_ = call_.segment(sequence);
  state_ = state;
  streams_ = stage_ == nullptr && call_.streams(o_);
  kept_ = kept == nullptr ? nullptr : kept + call_.kept_at(sequence, state);
}

float* LawSource::kept(std::int64_t first, std::int64_t column) const {
  const std::int64_t chunk = backward_chunk(call_.kind());
  if (kept_ == nullptr || first % chunk != 0) return nullptr;
  return kept_ + first / chunk * call_.kept_state() + column * padded(call_.kind().keys, kSlab);
}

std::int64_t LawSource::prefetch(std::int64_t first, std::int64_t column, std::int64_t columns,
                                 PrefetchColumn* lines, std::int64_t most) const {
  using enum LawRole;
  const RowsKind& kind = call_.kind();
  std::int64_t count = 0;
  const auto add = [&](LawRole role, std::int64_t head, std::int64_t from, std::int64_t size) {
    LawTensorRows{isa_, call_.in(role), segment_, head, call_.reverse(), kind.rows_per_token}
        .prefetch(first, from, size, lines, count, most);
  };
  const auto add_own = [&](LawRole role, std::int64_t from, std::int64_t size) {
    if (call_.in(role).present()) add(role, call_.head(call_.in(role), state_), from, size);
  };
  for (std::int64_t r = 0; r < kind.queries; ++r) {
    add(kQuery, call_.shape().query_of(state_ * kind.queries + r), 0, kind.keys);
  }
  for (LawRole role : {kKey, kEraseKey, kEraseWrite, kEraseGate}) add_own(role, 0, kind.keys);
  for (LawRole role : {kValue, kValueDecay, kWriteGate}) add_own(role, column, columns);
  add_own(kStep, 0, 1);
  add_own(kStrength, kind.strength_per_value ? column : 0, kind.strength_per_value ? columns : 1);
  if (!call_.in(kDecay).is_parameter) add_own(kDecay, 0, kind.decay_per_key ? kind.keys : 1);
  return count;
}

void LawSource::load(LawRole role, std::int64_t head, std::int64_t first, std::int64_t tokens,
                     std::int64_t column, std::int64_t size, float factor, float* to,
                     std::int64_t pitch) {
  const std::int64_t rows_per_token = role == LawRole::kQuery ? 1 : call_.kind().rows_per_token;
  LawTensorRows{isa_, call_.in(role), segment_, head, call_.reverse(), rows_per_token}.load(
      first, tokens, column, size, factor, to, pitch);
}

void LawSource::load(LawRole role, std::int64_t first, std::int64_t tokens, std::int64_t column,
                     std::int64_t size, float* to, std::int64_t pitch) {
  load(role, call_.head(call_.in(role), state_), first, tokens, column, size, 1, to, pitch);
}

void LawSource::pack(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows) {
  column_ = column;
  if (rows.q != nullptr) pack_queries(first, rows, nullptr);
  pack_decays(first, column, columns, rows, nullptr);
  pack_keys(first, rows, nullptr);
  pack_values(first, column, columns, rows, nullptr);
}

RowsView LawSource::view(std::int64_t first, std::int64_t column, std::int64_t columns,
                         LawRows& rows) {
  column_ = column;
  RowsView view = view_of(rows);
  pack_queries(first, rows, &view);
  pack_decays(first, column, columns, rows, &view);
  pack_keys(first, rows, &view);
  pack_values(first, column, columns, rows, &view);
  return view;
}

bool LawSource::lends(LawRole role, std::int64_t head, std::int64_t first, std::int64_t column,
                      std::int64_t size, std::int64_t vector, StridedRows& rows) const {
  const LawTensor& x = call_.in(role);
  if (x.is_narrow() || size % vector != 0 || call_.kind().rows_per_token != 1) return false;
  rows = {static_cast<const float*>(x.at(segment_, first, head, call_.reverse(), 0, column)),
          x.token_stride(call_.reverse())};
  return true;
}

void LawSource::pack_queries(std::int64_t first, LawRows& rows, RowsView* view) {
  const RowsKind& kind = call_.kind();
  if (view != nullptr && kind.queries == 1 && !call_.l2norm() &&
      lends(LawRole::kQuery, call_.shape().query_of(state_), first, 0, kind.keys, kGroupKeys,
            view->q)) {
    view->q_scale = call_.scale();
    return;
  }
  for (std::int64_t r = 0; r < kind.queries; ++r) {
    float* q = rows.q + r * rows.tokens * rows.key_pitch;
    const std::int64_t head = call_.shape().query_of(state_ * kind.queries + r);
    load(LawRole::kQuery, head, first, rows.tokens, 0, kind.keys,
         call_.l2norm() ? 1 : call_.scale(), q, rows.key_pitch);
    if (call_.l2norm()) {
      normalize_rows(isa_, rows.tokens, kind.keys, rows.key_pitch, call_.l2norm_eps(),
                     call_.scale(), q);
    }
  }
}

void LawSource::pack_decays(std::int64_t first, std::int64_t column, std::int64_t columns,
                            LawRows& rows, RowsView* view) {
  const RowsKind& kind = call_.kind();
  const std::int64_t count = rows.tokens * kind.rows_per_token;
  if (kind.decay && call_.in(LawRole::kStep).present()) {
    float rate = 0;
    load(LawRole::kRate, 0, 1, 0, 1, &rate, 1);
    load(LawRole::kStep, first, rows.tokens, 0, 1, rows.g, 1);
    for (std::int64_t i = 0; i < count; ++i) rows.g[i] *= rate;
    check_decay(LawRole::kStep, clamp_log_decays(isa_, count, rows.g));
  } else if (view != nullptr && kind.decay_per_key && call_.in(LawRole::kKey).present() &&
             lends(LawRole::kDecay, first, 0, kind.keys, kGroupKeys, view->g)) {
    // They stay.
  } else if (kind.decay) {
    const std::int64_t pitch = kind.decay_per_key ? rows.key_pitch : 1;
    load(LawRole::kDecay, first, rows.tokens, 0, kind.decay_per_key ? kind.keys : 1, rows.g, pitch);
    check_decay(LawRole::kDecay, clamp_log_decays(isa_, count * pitch, rows.g));
  }
  if (kind.value_decay) {
    load(LawRole::kValueDecay, first, rows.tokens, column, columns, rows.gv, rows.value_pitch);
    check_decay(LawRole::kValueDecay, clamp_log_decays(isa_, count * rows.value_pitch, rows.gv));
  }
}

void LawSource::check_decay(LawRole role, float largest) const {
  if (largest <= kDecayTolerance) return;
  call_.refuse(
      fmt::format("{} is a log decay and must be at most 0, not {}; give the logarithm of "
                  "a factor in [0, 1]",
                  role == LawRole::kStep ? "dt A" : call_.name(role), largest));
}

void LawSource::pack_keys(std::int64_t first, LawRows& rows, RowsView* view) {
  const RowsKind& kind = call_.kind();
  const std::int64_t count = rows.tokens * kind.rows_per_token, pitch = rows.key_pitch;
  // Rows of an input, normalised where keys are.
  const auto keys = [&](LawRole role, float* to, StridedRows RowsView::*stay) {
    const bool gated = role == LawRole::kKey && call_.in(LawRole::kEraseGate).present();
    if (view != nullptr && !call_.l2norm() && !gated &&
        lends(role, first, 0, kind.keys, kGroupKeys, view->*stay)) {
      return;
    }
    load(role, first, rows.tokens, 0, kind.keys, to, pitch);
    if (call_.l2norm()) normalize_rows(isa_, count, kind.keys, pitch, call_.l2norm_eps(), 1, to);
  };
  if (call_.in(LawRole::kKey).present()) {
    keys(LawRole::kKey, rows.k, &RowsView::k);
  } else {
    one_minus_exp(isa_, count, pitch, rows.g, rows.k);
  }
  if (kind.erase != EraseKind::kNone) {
    if (call_.in(LawRole::kEraseKey).present()) {
      keys(LawRole::kEraseKey, rows.e, &RowsView::e);
    } else if (call_.in(LawRole::kEraseGate).present()) {
      load(LawRole::kEraseGate, first, rows.tokens, 0, kind.keys, rows.e, pitch);
      multiply_rows(isa_, count, pitch, rows.e, rows.k, false, rows.e);
    } else {
      rows.e = rows.k;
      if (view != nullptr) view->e = view->k;
    }
  }
  if (kind.erase == EraseKind::kGeneral) keys(LawRole::kEraseWrite, rows.b, &RowsView::b);
  if (kind.bonus) {
    const LawTensor& u = call_.in(LawRole::kBonus);
    LawTensorRows{isa_, u, segment_, call_.head(u, state_), false, 1}.load(0, 1, 0, kind.keys, 1,
                                                                           rows.u, pitch);
  }
}

void LawSource::pack_values(std::int64_t first, std::int64_t column, std::int64_t columns,
                            LawRows& rows, RowsView* view) {
  const RowsKind& kind = call_.kind();
  const std::int64_t count = rows.tokens * kind.rows_per_token, pitch = rows.value_pitch;
  const auto values = [&](LawRole role, float* to) {
    load(role, first, rows.tokens, column, columns, to, pitch);
  };
  const auto present = [&](LawRole role) { return call_.in(role).present(); };
  const bool stays = view != nullptr && !present(LawRole::kWriteGate) && !present(LawRole::kStep) &&
                     lends(LawRole::kValue, first, column, columns, kSlab, view->v);
  if (!stays) load_values(first, rows.tokens, column, columns, rows.v, pitch);
  if (present(LawRole::kStrength)) {
    if (kind.strength_per_value) {
      values(LawRole::kStrength, rows.c);
    } else {
      load(LawRole::kStrength, first, rows.tokens, 0, 1, rows.c, 1);
    }
    if (stays) {
      view->v_lacks_c = true;
    } else if (kind.strength_per_value) {
      multiply_rows(isa_, count, pitch, rows.v, rows.c, false, rows.v);
    } else {
      scale_rows(isa_, count, pitch, rows.c, rows.v);
    }
  } else if (kind.erase == EraseKind::kCollinear) {
    std::fill_n(rows.c, count, 1.0f);
  }
  if (call_.in(LawRole::kWriteGate).present()) {
    values(LawRole::kWriteGate, other_);
    multiply_rows(isa_, count, pitch, rows.v, other_, false, rows.v);
  }
  if (call_.in(LawRole::kStep).present()) {
    load(LawRole::kStep, first, rows.tokens, 0, 1, other_, 1);
    scale_rows(isa_, count, pitch, other_, rows.v);
  }
}

void LawSource::load_values(std::int64_t first, std::int64_t tokens, std::int64_t column,
                            std::int64_t columns, float* to, std::int64_t pitch) {
  load(LawRole::kValue, first, tokens, column, columns, to, pitch);
}

float* LawSource::output(std::int64_t r, std::int64_t first, std::int64_t column,
                         std::int64_t& stride) {
  if (stage_ != nullptr) {
    stride = pitch_;
    return stage_ + (r * kChunk + first % kChunk) * pitch_ + column - column_;
  }
  stride = o_.token_stride(call_.reverse());
  const std::int64_t head = state_ * call_.kind().queries + r;
  return static_cast<float*>(o_.at(segment_, first, head, call_.reverse(), 0, column));
}

void LawSource::finish(std::int64_t first, std::int64_t tokens, std::int64_t column,
                       std::int64_t columns) {
  if (stage_ == nullptr) return;
  const std::int64_t queries = call_.kind().queries;
  for (std::int64_t r = 0; r < queries; ++r) {
    float* stage = stage_ + (r * kChunk + first % kChunk) * pitch_;
    if (const LawTensor& skip = call_.in(LawRole::kSkip); skip.present()) {
      float factor = 0;
      load(LawRole::kSkip, 0, 1, 0, 1, &factor, 1);
      load(LawRole::kValue, state_, first, tokens, column, columns, factor, other_, pitch_);
      StoreRowsArgs add;
      add.from = other_;
      add.pitch = add.stride = pitch_;
      add.rows = tokens;
      add.size = columns;
      add.to = stage;
      add.add = true;
      store_rows(isa_, add);
    }
    LawTensorRows{isa_, o_, segment_, state_ * queries + r, call_.reverse(), 1}.store(
        first, tokens, column, columns, 1, false, stage, pitch_);
  }
}

}  // namespace ouzel
