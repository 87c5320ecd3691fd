#include "src/ops/heads_scan.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "src/kernels/law_rows.h"
#include "src/kernels/stream_rows.h"
#include "src/kernels/traffic.h"

namespace ouzel {
namespace {

// How many groups of heads a sequence is cut into.
std::int64_t head_groups(const RecurrenceShape& shape, std::int64_t heads, std::int64_t rows,
                         std::int64_t columns, const Context& context) {
  // Of the 2 MiB of a second-level cache. Half a MiB would hold two heads of 64 keys, whose rows
  // are runs of 512 bytes; then runs of 4 KiB count for more, and heads stay in the third level.
  constexpr std::int64_t kBytes = std::int64_t{11} << 17, kRun = 1024;
  const std::int64_t bytes = (2 * rows * columns + 2 * kChunk * (2 * rows + columns)) *
                             static_cast<std::int64_t>(sizeof(float));
  const std::int64_t run =
      context.impl().small_second_level_cache() ? kRun / std::max(rows, columns) : 1;
  const std::int64_t together = std::max({kBytes / bytes, run, std::int64_t{1}});
  const std::int64_t threads = context.threads();
  std::int64_t longest = 0, total = 0;
  for (std::int64_t n = 0; n < shape.sequences; ++n) {
    const std::int64_t length = shape.segment(n).length;
    longest = std::max(longest, length);
    total += length;
  }
  std::int64_t groups = std::max<std::int64_t>(1, (heads + together - 1) / together);
  const auto balanced = [&] {
    // Tasks of one size, the same number for each thread; or none larger than an eighth of that.
    return (shape.sequences * groups % threads == 0 && longest * shape.sequences == total) ||
           8 * threads * longest <= total * groups;
  };
  while (groups < heads && !balanced()) ++groups;
  return groups;
}

}  // namespace

HeadsTasks::HeadsTasks(const RecurrenceShape& shape, std::int64_t heads, std::int64_t rows,
                       std::int64_t columns, bool side_by_side, bool may_split,
                       const Context& context)
    : sequences_(shape.sequences),
      heads_(heads),
      groups_(side_by_side ? head_groups(shape, heads, rows, columns, context) : heads),
      columns_(columns, sequences_ * groups_, may_split && groups_ == heads, context.threads()) {}

HeadsTask HeadsTasks::operator[](std::int64_t task) const {
  const std::int64_t c = task % columns_.count(), group = task / columns_.count();
  const std::int64_t g = group % groups_, first = g * heads_ / groups_;
  return {group / groups_, first, (g + 1) * heads_ / groups_ - first, columns_.begin(c),
          columns_.size(c)};
}

void HeadsScan::begin(const HeadsScanArgs& args) {
  staged_ = args.out.dtype != DType::kF32 || (args.stream && may_stage_);
  plain_ = args.write_scale == 1 && args.gates == nullptr;
  for (std::int64_t h = 0; h < count_; ++h) {
    const ScannedHead& head = heads_[h];
    pass_.select(h);
    pass_.begin(isa_, head.fold, head.initial, head.position);
    if (args.gates != nullptr) continue;
    plain_ = plain_ && head.fold->log_decay == 0;
    for (std::int64_t i = 0; i < kChunk; ++i) {
      factors_[h * kChunk + i] = args.read_scale * head.fold->read[i];
      write_factors_[h * kChunk + i] = args.write_scale * head.fold->write[i];
    }
    if (args.normalize == nullptr) continue;
    const auto copy = [this, h](const float* from, float* to) {
      from != nullptr ? std::copy_n(from, rows_, to + h * rows_)
                      : std::fill_n(to + h * rows_, rows_, 0.0f);
    };
    copy(head.z_initial, norm_.z);
    copy(head.z_residue_initial, norm_.residue);
  }
}

void HeadsScan::fold_gates(const HeadsScanArgs& args, std::int64_t t) {
  const std::int64_t tokens = std::min(kChunk, args.length - t);
  for (std::int64_t h = 0; h < count_; ++h) {
    float log_decays[kChunk];
    float* strength = write_factors_ + h * kChunk;
    std::fill_n(strength, kChunk, 1.0f);
    args.gates->load(h, t, tokens, log_decays, strength);
    ChunkDecays& decays = next_decays_[h];
    decays.fold(isa_, log_decays, tokens);
    for (std::int64_t i = 0; i < kChunk; ++i) strength[i] *= args.write_scale * decays.write[i];
  }
}

void HeadsScan::keep(float* to) const {
  if (to == nullptr) return;
  const std::int64_t keys = padded(rows_, kSlab), own = rows_ * kSlab;
  for (std::int64_t slab = 0; slab < columns_ / kSlab; ++slab, to += keys * kSlab) {
    const float* from = pass_.state() + slab * own;
    if (reinterpret_cast<std::uintptr_t>(to) % 64 == 0) {
      memory_traffic(isa_, {&from, 1}, {&to, 1}, own);  // past the caches
    } else {
      std::copy_n(from, own, to);
    }
    std::fill(to + own, to + keys * kSlab, 0.0f);
  }
}

void HeadsScan::pack(const HeadsScanArgs& args, std::int64_t t) {
  if (args.gates != nullptr) fold_gates(args, t);
  pass_.pack_ahead(args.read.at(t), args.write.at(t), args.values.at(t), args.map, args.length - t,
                   plain_ ? nullptr : write_factors_, args.normalize != nullptr ? &norm_ : nullptr);
}

// Rows of scratch to where they belong.
void HeadsScan::put_out(const HeadsScanArgs& args, std::int64_t t, std::int64_t tokens) const {
  const AnyRows<void> out = args.out.at(t);
  const std::int64_t size = count_ * columns_;
  if (out.dtype == DType::kF32) {
    auto* to = static_cast<float*>(out.first);
    stream_rows(isa_, {out_rows_, out_pitch(), to, out.stride, tokens, size});
    return;
  }
  store_rows(isa_, {.from = out_rows_,
                    .pitch = out_pitch(),
                    .rows = tokens,
                    .size = size,
                    .to = out.first,
                    .dtype = out.dtype,
                    .stride = out.stride});
}

void HeadsScan::run(const HeadsScanArgs& args) {
  begin(args);
  if (args.length > 0) {
    pack(args, 0);
    pass_.finish_ahead();
  }
  for (std::int64_t t = 0; t < args.length; t += kChunk) {
    check_cancelled();
    const std::int64_t tokens = std::min(kChunk, args.length - t), next = t + kChunk;
    for (std::int64_t h = 0; h < count_ && args.normalize != nullptr; ++h) {
      divide(*args.normalize, norm_.den + h * kChunk, factors_ + h * kChunk);
    }
    if (args.gates != nullptr) {
      std::swap(decays_, next_decays_);
      for (std::int64_t h = 0; h < count_; ++h) {
        float* factor = factors_ + h * kChunk;
        for (std::int64_t i = 0; i < kChunk; ++i) factor[i] = args.read_scale * decays_[h].read[i];
      }
    }
    if (next < args.length) {
      pack(args, next);
      if (!args.stream && !staged_) {
        const auto* out = static_cast<const float*>(args.out.at(next).first);
        pass_.prefetch(out, args.out.stride, count_ * columns_);
      }
    }
    for (std::int64_t h = 0; h < count_; ++h) {
      pass_.select(h);
      pass_.skip(heads_[h].skip);
      if (args.gates != nullptr) keep(args.gates->kept(h, t));
      const Rows<float> out =
          staged_ ? Rows<float>{out_rows_, out_pitch()}
                  : Rows<float>{static_cast<float*>(args.out.at(t).first), args.out.stride};
      pass_.run(TileMode::kScan, tokens, factors_ + h * kChunk, out.first + h * columns_,
                out.stride, args.stream && !staged_, args.gates != nullptr ? decays_ + h : nullptr);
    }
    if (staged_) put_out(args, t, tokens);
    if (next < args.length) pass_.finish_ahead();
  }
  finish_streams();
  end();
}

void HeadsScan::end() {
  for (std::int64_t h = 0; h < count_; ++h) {
    const ScannedHead& head = heads_[h];
    pass_.select(h);
    pass_.end(head.final, false);
    if (head.z_final != nullptr) std::copy_n(norm_.z + h * rows_, rows_, head.z_final);
    if (head.z_residue_final != nullptr) {
      std::copy_n(norm_.residue + h * rows_, rows_, head.z_residue_final);
    }
  }
}

// A loop of known length without branches, which becomes one of vectors: beyond a chunk's last
// token, too.
void divide(const RecurrenceSpec& spec, const float* den, float* factor) {
  const float scale = static_cast<float>(spec.scale), eps = static_cast<float>(spec.eps);
  const float least = spec.clamp ? eps : -std::numeric_limits<float>::infinity();
  const float add = spec.clamp ? 0 : eps;
  for (std::int64_t i = 0; i < kChunk; ++i) {
    const float sum = scale * den[i] + add;
    factor[i] = scale * (1 / (sum < least ? least : sum));
  }
}

}  // namespace ouzel
