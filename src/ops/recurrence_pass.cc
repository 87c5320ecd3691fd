#include "src/ops/recurrence_pass.h"

#include <algorithm>
#include <cstring>

namespace ouzel {

void StatePass::begin(Isa isa, const Fold* fold, const StateMemory<const float>& initial) {
  isa_ = isa;
  fold_ = fold;
  std::memset(state_, 0, static_cast<std::size_t>(slabs_ * slab_state()) * sizeof(float));
  if (initial.s == nullptr) return;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t i = 0; i < rows_; ++i) {
      float* out = state_ + slab * slab_state() + i * kSlab;
      const std::int64_t offset = i * initial.row + slab * kSlab * initial.column;
      for (std::int64_t j = 0; j < width; ++j) out[j] = initial.s[offset + j * initial.column];
      if (initial.residue == nullptr) continue;
      for (std::int64_t j = 0; j < width; ++j) {
        out[j] += initial.residue[offset + j * initial.column];
      }
    }
  }
}

void StatePass::end(const StateMemory<float>& final, bool add) const {
  if (final.s == nullptr) return;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const float* from = state_ + slab * slab_state() + i * kSlab;
      const std::int64_t offset = i * final.row + slab * kSlab * final.column;
      for (std::int64_t j = 0; j < width; ++j) {
        float* to = final.s + offset + j * final.column;
        *to = add ? *to + from[j] : from[j];
        if (final.residue != nullptr) final.residue[offset + j * final.column] = 0;
      }
    }
  }
}

void StatePass::pack_read(const MappedRows& rows, std::int64_t tokens) {
  PackArgs p;
  p.rows = rows.rows;
  p.stride = rows.stride;
  p.map = rows.map;
  p.tokens = tokens;
  p.size = rows_;
  p.out = keyed_;
  pack_keyed(isa_, p);
}

void StatePass::pack_write(const MappedRows& rows, std::int64_t tokens, const float* factor) {
  PackArgs p;
  p.rows = rows.rows;
  p.stride = rows.stride;
  p.map = rows.map;
  p.tokens = tokens;
  p.size = rows_;
  p.factor = factor;
  p.out = keyed_ + kKeyBlock;
  pack_keyed(isa_, p);
}

void StatePass::pack_values(const MappedRows& rows, std::int64_t tokens) {
  PackArgs p;
  p.rows = rows.rows;
  p.stride = rows.stride;
  p.map = rows.map;
  p.tokens = tokens;
  p.size = columns_;
  p.out = slabbed_;
  pack_slabs(isa_, p);
}

void StatePass::run(TileMode mode, std::int64_t tokens, const float* factor, float* out,
                    std::int64_t out_stride) {
  TileArgs a;
  a.mode = mode;
  a.key_blocks = key_blocks_;
  a.partial = partial_;
  a.out_stride = out_stride;
  a.enter = fold_->enter;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    a.state = state_ + slab * slab_state();
    a.width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t t = 0; t < tokens; t += fold_->block) {
      a.tokens = std::min(fold_->block, tokens - t);
      a.leave = fold_->leave[a.tokens];
      a.keyed = keyed_ + t * kKeyedPitch;
      a.values = slabbed_ + slab * kChunk * kSlab + t * kSlab;
      if (mode != TileMode::kWrite) {
        a.factor = factor + t;
        a.out = out + t * out_stride + slab * kSlab;
      }
      recurrence_tile(isa_, a);
    }
  }
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

ColumnGroups::ColumnGroups(std::int64_t columns, std::int64_t tasks, bool may_split)
    : columns(columns), width(columns) {
  // 16 tasks keep eight threads busy to nine tenths; packing once a head saves more than more do.
  if (may_split && tasks < 16) width = std::min(columns, kSlab);
}

}  // namespace ouzel
