#include "src/ops/recurrence_pass.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

namespace ouzel {

void StatePass::begin(Isa isa, const Fold* fold, const StateMemory<const float>& initial,
                      std::int64_t position) {
  isa_ = isa;
  fold_ = fold;
  position_ = position;
  std::memset(state_, 0, static_cast<std::size_t>(slabs_ * slab_state()) * sizeof(float));
  std::memset(low_, 0, static_cast<std::size_t>(slabs_ * slab_state()) * sizeof(float));
  if (initial.s == nullptr) return;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t i = 0; i < rows_; ++i) {
      float* out = state_ + slab * slab_state() + i * kSlab;
      const std::int64_t offset = i * initial.row + slab * kSlab * initial.column;
      for (std::int64_t j = 0; j < width; ++j) out[j] = initial.s[offset + j * initial.column];
      if (initial.residue == nullptr) continue;
      float* low = low_ + slab * slab_state() + i * kSlab;
      for (std::int64_t j = 0; j < width; ++j) {
        const float residue = initial.residue[offset + j * initial.column];
        in_two_parts() ? low[j] = residue : out[j] += residue;
      }
    }
  }
}

void StatePass::rescale(float factor) {
  for (float* x : {state_, low_}) {
    for (std::int64_t i = 0; i < slabs_ * slab_state(); ++i) x[i] *= factor;
  }
}

void StatePass::end(const StateMemory<float>& final, bool add) const {
  if (final.s == nullptr) return;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    const std::int64_t width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t i = 0; i < rows_; ++i) {
      const float* from = state_ + slab * slab_state() + i * kSlab;
      const float* low = low_ + slab * slab_state() + i * kSlab;
      const std::int64_t offset = i * final.row + slab * kSlab * final.column;
      for (std::int64_t j = 0; j < width; ++j) {
        float* to = final.s + offset + j * final.column;
        *to = add ? *to + from[j] : from[j];
        if (final.residue != nullptr) final.residue[offset + j * final.column] = low[j];
      }
    }
  }
}

void StatePass::pack(const MappedRows& read, const MappedRows& write, std::int64_t tokens,
                     const float* write_factor, const Normalizer* normalizer) {
  PackKeyedArgs p;
  p.q = read.rows;
  p.q_stride = read.stride;
  p.k = write.rows;
  p.k_stride = write.stride;
  p.tokens = tokens;
  p.size = rows_;
  p.map = read.rows != nullptr ? read.map : write.map;
  p.k_factor = write_factor;
  p.out = keyed_;
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
  p.out = slabbed_;
  pack_slabs(isa_, p);
}

void StatePass::prefetch(const float* rows, std::int64_t stride, std::int64_t size) {
  constexpr std::int64_t kLine = 16;
  for (std::int64_t i = 0; i < size && prefetch_count_ < kMaxPrefetch; i += kLine) {
    prefetch_[prefetch_count_++] = {rows + i, stride};
  }
}

bool StatePass::pack_ahead(const MappedRows& read, const MappedRows& write,
                           const MappedRows& values, std::int64_t rows_left,
                           const float* write_factor, const Normalizer* normalizer) {
  PackAhead p;
  p.key_pieces = rows_ / kKeyedPitch;
  p.value_pieces = slabs_;
  if (rows_ % kKeyedPitch != 0 || columns_ % kSlab != 0 || read.map != write.map ||
      values.map != ElementMap::kIdentity || fold_->block != kChunk ||
      p.key_pieces + p.value_pieces > slabs_ * key_blocks_) {
    return false;
  }
  p.q = read.rows;
  p.k = write.rows;
  p.v = values.rows;
  p.q_stride = read.stride;
  p.k_stride = write.stride;
  p.v_stride = values.stride;
  p.map = read.map;
  p.k_factor = write_factor;
  p.keyed = next_keyed_;
  p.slabbed = next_slabbed_;
  // 24 pieces are half a microsecond: longer than memory takes.
  p.prefetch_rows = 1 + 24 / (p.key_pieces + p.value_pieces);
  p.last_row = rows_left - 1;
  if (normalizer != nullptr) {
    p.z = normalizer->z;
    p.z_residue = normalizer->residue;
    p.den = normalizer->den;
    p.den_parts = den_parts_;
    std::memset(den_parts_, 0, kChunk * kKeyedPitch * sizeof(float));
  }
  p.tokens = kChunk;
  ahead_ = p;
  return true;
}

void StatePass::run(TileMode mode, std::int64_t tokens, const float* factor, float* out,
                    std::int64_t out_stride, bool stream) {
  if (mode != TileMode::kRead) {
    const bool two_parts = in_two_parts();
    position_ += tokens;
    if (two_parts) return run_long(tokens, factor, out, out_stride, stream);
  }
  Meanwhile meanwhile = this->meanwhile();
  TileArgs a;
  a.mode = mode;
  a.key_blocks = key_blocks_;
  a.partial = partial_;
  a.out_stride = out_stride;
  a.stream = stream;
  a.enter = fold_->enter;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    a.state = state_ + slab * slab_state();
    a.width = std::min(columns_ - slab * kSlab, kSlab);
    for (std::int64_t t = 0; t < tokens; t += fold_->block) {
      a.tokens = std::min(fold_->block, tokens - t);
      a.leave = fold_->leave[a.tokens];
      a.keyed = keyed_ + t * kKeyedPitch;
      a.values = slabbed_ + slab * kSlabPitch + t * kSlab;
      if (mode != TileMode::kWrite) {
        a.factor = factor + t;
        a.out = out + t * out_stride + slab * kSlab;
      }
      // A shorter block would leave out the later rows.
      a.meanwhile = a.tokens == kChunk ? &meanwhile : nullptr;
      recurrence_tile(isa_, a);
    }
  }
  finish_meanwhile();
}

Meanwhile StatePass::meanwhile() const {
  Meanwhile m;
  m.pack = ahead_;
  m.prefetch = prefetch_;
  m.prefetch_count = prefetch_count_;
  const std::int64_t columns =
      prefetch_count_ + (ahead_.tokens != 0 ? ahead_.key_pieces + ahead_.value_pieces : 0);
  while (columns != 0 && 2 * columns * m.period <= slabs_ * key_blocks_) m.period *= 2;
  return m;
}

void StatePass::finish_meanwhile() {
  prefetch_count_ = 0;
  if (ahead_.tokens == 0) return;
  if (ahead_.z != nullptr) finish_pack_ahead(isa_, ahead_);
  std::swap(keyed_, next_keyed_);
  std::swap(slabbed_, next_slabbed_);
  ahead_ = {};
}

void StatePass::run_long(std::int64_t tokens, const float* factor, float* out,
                         std::int64_t out_stride, bool stream) {
  if (out != nullptr) recurrence_scores(isa_, tokens, key_blocks_, keyed_, scores_);
  Meanwhile meanwhile = this->meanwhile();
  LongArgs a;
  if (tokens == kChunk) a.meanwhile = &meanwhile;
  a.stream = stream;
  a.tokens = tokens;
  a.key_blocks = key_blocks_;
  a.keyed = keyed_;
  a.scores = scores_;
  a.leave_minus_1 = static_cast<float>(std::expm1(static_cast<double>(tokens) * fold_->log_decay));
  a.factor = factor;
  a.partial = partial_;
  a.out_stride = out_stride;
  std::int64_t prefetched = 0;
  for (std::int64_t slab = 0; slab < slabs_; ++slab) {
    a.values = slabbed_ + slab * kSlabPitch;
    a.state = state_ + slab * slab_state();
    a.low = low_ + slab * slab_state();
    a.width = std::min(columns_ - slab * kSlab, kSlab);
    if (out != nullptr) a.out = out + slab * kSlab;
    a.prefetch = prefetch_ + prefetched;
    a.prefetch_count = prefetch_count_ - prefetched;
    prefetched += recurrence_long(isa_, a);
  }
  finish_meanwhile();
}

bool is_streamed(std::int64_t count, const Rows<float>& rows, std::int64_t column,
                 std::int64_t columns) {
  // Outputs of 8 MiB and more have left the second-level cache before anyone reads them: past the
  // caches, their lines need not be read first (6 % of the forward's time at 64 keys, 8 % at 128).
  // Tiles write whole slabs.
  constexpr std::int64_t kBytes = std::int64_t{8} << 20, kLine = 16;
  return count * static_cast<std::int64_t>(sizeof(float)) >= kBytes && columns % kSlab == 0 &&
         rows.stride % kLine == 0 &&
         reinterpret_cast<std::uintptr_t>(rows.first + column) % (kLine * sizeof(float)) == 0;
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
