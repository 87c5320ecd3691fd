#include "src/ops/recurrence_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "src/kernels/law_rows.h"

namespace ouzel {

void StatePass::begin(Isa isa, const Fold* fold, const StateMemory<const float>& initial,
                      std::int64_t position) {
  isa_ = isa;
  own() = {fold, position};
  std::memset(state(0), 0, static_cast<std::size_t>(2 * head_state()) * sizeof(float));
  if (initial.s == nullptr) return;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t i = 0; i < rows_; ++i) {
      float* out = state(slab) + i * kSlab;
      const std::int64_t offset = i * initial.row + slab * kSlab * initial.column;
      for (std::int64_t j = 0; j < width; ++j) out[j] = initial.s[offset + j * initial.column];
      if (initial.residue == nullptr) continue;
      float* residues = low(slab) + i * kSlab;
      for (std::int64_t j = 0; j < width; ++j) {
        const float residue = initial.residue[offset + j * initial.column];
        in_two_parts() ? residues[j] = residue : out[j] += residue;
      }
    }
  }
}

void StatePass::rescale(float factor) {
  for (float* x = state(0); x < state(0) + 2 * head_state(); ++x) *x *= factor;
}

void StatePass::end(const StateMemory<float>& final, bool add) const {
  if (final.s == nullptr) return;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const float* from = state(slab) + i * kSlab;
      const float* residues = low(slab) + i * kSlab;
      const std::int64_t offset = i * final.row + slab * kSlab * final.column;
      for (std::int64_t j = 0; j < width; ++j) {
        float* to = final.s + offset + j * final.column;
        *to = add ? *to + from[j] : from[j];
        if (final.residue != nullptr) final.residue[offset + j * final.column] = residues[j];
      }
    }
  }
}

void StatePass::pack(const MappedRows& read, const MappedRows& write, std::int64_t tokens,
                     const float* write_factor, const Normalizer* normalizer) {
  meanwhile_ = {};
  PackKeyedArgs p;
  p.q = read.rows;
  p.q_stride = read.stride;
  p.k = write.rows;
  p.k_stride = write.stride;
  p.tokens = tokens;
  p.size = rows_;
  p.map = read.rows != nullptr ? read.map : write.map;
  p.k_factor = write_factor;
  p.out = keyed();
  if (normalizer != nullptr) {
    p.z = normalizer->z;
    p.z_residue = normalizer->residue;
    p.den = normalizer->den;
  }
  pack_keyed(isa_, p);
}

void StatePass::pack_values(const MappedRows& rows, std::int64_t tokens) {
  PackArgs p;
  p.rows = rows.rows;
  p.stride = rows.stride;
  p.map = rows.map;
  p.tokens = tokens;
  p.size = columns_;
  p.out = values(0);
  pack_slabs(isa_, p);
}

void StatePass::prefetch(const float* rows, std::int64_t stride, std::int64_t size) {
  constexpr std::int64_t kLine = 16;
  meanwhile_.prefetch = prefetch_;
  for (std::int64_t i = 0; i < size && meanwhile_.prefetch_count < kMaxPrefetch; i += kLine) {
    prefetch_[meanwhile_.prefetch_count++] = {rows + i, stride};
  }
}

void StatePass::pack_ahead(const AnyRows<const void>& read, const AnyRows<const void>& write,
                           const AnyRows<const void>& values, ElementMap map,
                           std::int64_t rows_left, const float* write_factor,
                           const Normalizer* normalizer) {
  meanwhile_ = {};
  PackAhead& p = meanwhile_.pack;
  p.q = read.first;
  p.k = write.first;
  p.v = values.first;
  p.dtype = values.dtype;
  p.q_stride = read.stride;
  p.k_stride = write.stride;
  p.v_stride = values.stride;
  p.map = map;
  p.k_factor = write_factor;
  p.keyed = next_keyed_;
  p.slabbed = next_slabbed_;
  p.heads = heads_;
  p.key_pieces = rows_ / kKeyedPitch;
  p.value_pieces = slabs_;
  p.tokens = std::min(rows_left, kChunk);
  p.rows_left = rows_left;
  // 24 pieces are half a microsecond: longer than memory takes.
  p.rows_ahead = 1 + 24 / (heads_ * (p.key_pieces + p.value_pieces));
  if (normalizer == nullptr) return;
  p.z = normalizer->z;
  p.z_residue = normalizer->residue;
  p.den = normalizer->den;
  p.den_parts = den_parts_;
  std::fill_n(den_parts_, heads_ * kChunk * kKeyedPitch, 0.0f);
}

void StatePass::finish_ahead() {
  finish_pack_ahead(isa_, meanwhile_.pack);
  std::swap(keyed_, next_keyed_);
  std::swap(slabbed_, next_slabbed_);
  meanwhile_ = {};
}

void StatePass::run(TileMode mode, std::int64_t tokens, const float* factor, float* out,
                    std::int64_t out_stride, bool stream, const ChunkDecays* decays) {
  if (mode != TileMode::kRead) {
    const bool two_parts = in_two_parts();
    own().position += tokens;
    if (two_parts) return run_long(tokens, factor, out, out_stride, stream, decays);
  }
  TileArgs a;
  TileBlock blocks[kChunk];
  if (decays != nullptr) {
    a.blocks = decays->blocks;
    a.leave = decays->leave;
  } else {
    const Fold& fold = *own().fold;
    std::int64_t n = 0;
    for (std::int64_t t = 0; t < tokens; t += fold.block, ++n) {
      if (t != 0) a.leave = fold.leave[fold.block];
      blocks[n] = {std::min(fold.block, tokens - t), a.leave * fold.enter};
    }
    a.blocks = blocks;
    a.leave = fold.leave[blocks[n - 1].tokens];
  }
  a.mode = mode;
  a.tokens = tokens;
  a.key_blocks = key_blocks_;
  a.keyed = keyed();
  a.factor = factor;
  a.partial = partial_;
  a.out_stride = out_stride;
  a.skip = skip_;
  a.stream = stream;
  a.meanwhile = &meanwhile_;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    a.values = values(slab);
    a.state = state(slab);
    a.width = std::min(columns_ - slab * kSlab, kSlab);
    if (mode != TileMode::kWrite) a.out = out + slab * kSlab;
    recurrence_tile(isa_, a);
  }
}

void StatePass::run_long(std::int64_t tokens, const float* factor, float* out,
                         std::int64_t out_stride, bool stream, const ChunkDecays* decays) {
  if (decays == nullptr) {
    return run_long_block(0, tokens, static_cast<double>(tokens) * own().fold->log_decay, factor,
                          out, out_stride, stream);
  }
  for (std::int64_t t = 0, i = 0; t < tokens; t += decays->blocks[i++].tokens) {
    const float alone = decays->alone[i];
    if (alone == 0) std::fill_n(state(0), 2 * head_state(), 0.0f);  // even NaN
    if (alone != 0 && alone != 1) rescale(alone);
    run_long_block(t, decays->blocks[i].tokens, decays->log[i], factor, out, out_stride, stream);
  }
}

void StatePass::run_long_block(std::int64_t first, std::int64_t tokens, double log_decay,
                               const float* factor, float* out, std::int64_t out_stride,
                               bool stream) {
  const float* keyed = this->keyed() + first * kKeyedPitch;
  if (out != nullptr) recurrence_scores(isa_, tokens, key_blocks_, keyed, scores_);
  LongArgs a;
  a.meanwhile = &meanwhile_;
  a.skip = skip_;
  a.stream = stream;
  a.tokens = tokens;
  a.key_blocks = key_blocks_;
  a.keyed = keyed;
  a.scores = scores_;
  // S + S (e^g - 1) would cancel where e^g is small.
  const bool strong = log_decay < -0.5;
  a.leave_minus_1 = strong ? 0 : static_cast<float>(std::expm1(log_decay));
  a.factor = factor + first;
  a.x = x_;
  a.out_stride = out_stride;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    a.values = values(slab) + first * kSlab;
    a.state = state(slab);
    a.low = low(slab);
    a.width = std::min(columns_ - slab * kSlab, kSlab);
    if (out != nullptr) a.out = out + first * out_stride + slab * kSlab;
    recurrence_long(isa_, a);
  }
  if (strong) rescale(static_cast<float>(std::exp(log_decay)));
}

bool is_streamed(std::int64_t count, const AnyRows<void>& rows, std::int64_t columns) {
  // Outputs of 8 MiB and more have left the second-level cache before anyone reads them: past the
  // caches, their lines need not be read first (6 % of the forward's time at 64 keys, 8 % at 128).
  // Tiles write whole slabs.
  constexpr std::int64_t kBytes = std::int64_t{8} << 20, kLine = 16;
  return rows.dtype == DType::kF32 && count * static_cast<std::int64_t>(sizeof(float)) >= kBytes &&
         columns % kSlab == 0 && rows.stride % kLine == 0 &&
         reinterpret_cast<std::uintptr_t>(rows.first) % (kLine * sizeof(float)) == 0;
}

std::int64_t gap_tasks(const RecurrenceShape& shape) {
  return shape.segments != nullptr ? shape.batch : 0;
}

void zero_gaps(const RecurrenceShape& shape, std::int64_t batch_row, const Tensor& x) {
  if (!x.present()) return;
  const View<float, 4> view = x.view<float, 4>();
  const auto zero = [&view, batch_row](std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t h = 0; h < view.extent[2]; ++h) {
        std::memset(view(batch_row, t, h), 0, static_cast<std::size_t>(view.extent[3]) * 4);
      }
    }
  };
  std::int64_t end = 0;
  for (const Segment& s : shape.segments->list) {
    if (s.batch != batch_row) continue;
    zero(end, s.begin);
    end = s.begin + s.length;
  }
  zero(end, shape.tokens);
}

ColumnGroups::ColumnGroups(std::int64_t columns, std::int64_t tasks, bool may_split,
                           std::int64_t threads)
    : columns(columns), width(columns) {
  if (!may_split) return;
  const std::int64_t slabs = (columns + kSlab - 1) / kSlab;
  std::int64_t groups = 1;
  // All threads have as many, or some of them one more than seven others have.
  while (groups < slabs && tasks * groups % threads != 0 && tasks * groups < 8 * threads) ++groups;
  width = std::min(columns, (slabs + groups - 1) / groups * kSlab);
}

Rows<const float> wide_rows(Isa isa, const AnyRows<const void>& rows, std::int64_t t,
                            std::int64_t tokens, std::int64_t size, float* memory) {
  if (rows.dtype == DType::kF32) return {static_cast<const float*>(rows.first), rows.stride};
  const std::int64_t pitch = padded(size, kSlab);
  load_rows(isa, {.from = rows.at(t).first,
                  .dtype = rows.dtype,
                  .stride = rows.stride,
                  .rows = tokens,
                  .size = size,
                  .to = memory,
                  .pitch = pitch});
  return {memory - t * pitch, pitch};
}

void put_wide_rows(Isa isa, const float* from, std::int64_t pitch, std::int64_t tokens,
                   std::int64_t size, const AnyRows<void>& to) {
  store_rows(isa, {.from = from,
                   .pitch = pitch,
                   .rows = tokens,
                   .size = size,
                   .to = to.first,
                   .dtype = to.dtype,
                   .stride = to.stride});
}

}  // namespace ouzel
