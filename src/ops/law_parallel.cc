// o = weights v: a column of the weights is what the law reads if one row of v is 1 and all others
// are 0, so they come from a scan over an identity matrix of values, 64 tokens of columns at a
// time: O(T^2 K). That is exact for every law that treats all values alike.
#include "src/ops/law_parallel.h"

#include <algorithm>
#include <cstring>

#include <fmt/format.h>

#include "src/base/context_impl.h"
#include "src/base/dense_tensor.h"
#include "src/ops/law_source.h"
#include "src/ops/rows_scan.h"

namespace ouzel {
namespace {

using enum LawRole;

const LawTensor kNoOutput;

class WeightSource final : public LawSource {
 public:
  template <class Memory>
  WeightSource(Memory& memory, const LawCall& call, const Tensor& weights, const LawTensor& o)
      : LawSource(memory, call, kNoOutput, call.kind().values),
        weights_(weights),
        o_(o),
        rows_per_token_(call.kind().rows_per_token),
        pitch_(padded(kChunk * rows_per_token_, kSlab)),
        value_pitch_(padded(call.kind().values, kSlab)) {
    stage_ = memory.template take<float>(call.kind().queries * kChunk * pitch_);
    values_ = memory.template take<float>(kChunk * rows_per_token_ * value_pitch_);
    sum_ = memory.template take<float>(call.kind().queries * call.shape().tokens * value_pitch_);
  }

  // Columns of the weights that belong to tokens [begin, begin + 64).
  void begin_block(std::int64_t begin) {
    begin_ = begin;
    if (const LawTensor& skip = call_.in(kSkip); skip.present()) {
      LawTensorRows{isa_, skip, segment_, call_.head(skip, state_), false, 1}.load(0, 1, 0, 1, 1,
                                                                                   &skip_, 1);
    }
    LawSource::load_values(begin, std::min(segment_.length - begin, kChunk), 0, call_.kind().values,
                           values_, value_pitch_);
  }

  std::int64_t tokens() const override { return segment_.length - begin_; }
  void pack(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows) override {
    LawSource::pack(begin_ + first, column, columns, rows);
  }
  RowsView view(std::int64_t first, std::int64_t column, std::int64_t columns,
                LawRows& rows) override {
    pack(first, column, columns, rows);  // these values are none of the caller's
    return view_of(rows);
  }
  std::int64_t prefetch(std::int64_t, std::int64_t, std::int64_t, PrefetchColumn*,
                        std::int64_t) const override {
    return 0;  // these columns are none of the values'
  }
  float* output(std::int64_t r, std::int64_t first, std::int64_t column,
                std::int64_t& stride) override {
    stride = pitch_;
    return stage_ + (r * kChunk + first % kChunk) * pitch_ + column;
  }
  void finish(std::int64_t first, std::int64_t tokens, std::int64_t,
              std::int64_t columns) override {
    for (std::int64_t r = 0; r < call_.kind().queries; ++r) {
      float* w = stage_ + (r * kChunk + first % kChunk) * pitch_;
      const std::int64_t output = state_ * call_.kind().queries + r;
      for (std::int64_t i = 0; i < tokens; ++i) {
        const std::int64_t known = known_columns(first + i, columns);
        if (first + i < columns) w[i * pitch_ + first + i] += skip_;
        store_weights(output, begin_ + first + i, w + i * pitch_, known);
        multiply(w + i * pitch_, known, sum_of(r) + (begin_ + first + i) * value_pitch_);
      }
    }
  }

  // What all blocks gave together, rounded once.
  void store_outputs() const {
    for (std::int64_t r = 0; r < call_.kind().queries; ++r) {
      const std::int64_t output = state_ * call_.kind().queries + r;
      LawTensorRows{isa_, o_, segment_, output, call_.reverse(), 1}.store(
          0, segment_.length, 0, call_.kind().values, 1, false, sum_of(r), value_pitch_);
    }
  }

 protected:
  void load_values(std::int64_t first, std::int64_t tokens, std::int64_t, std::int64_t columns,
                   float* to, std::int64_t pitch) override {
    const std::int64_t rows = tokens * rows_per_token_;
    std::fill_n(to, rows * pitch, 0.0f);
    const std::int64_t shift = (first - begin_) * rows_per_token_;
    for (std::int64_t i = 0; i < rows && i + shift < columns; ++i) to[i * pitch + i + shift] = 1;
  }

 private:
  // Later values have no weight: not even 0, which would let their NaN pass.
  std::int64_t known_columns(std::int64_t token, std::int64_t columns) const {
    return std::min(columns, (token + 1) * rows_per_token_);
  }
  void multiply(const float* w, std::int64_t columns, float* out) const {
    SmallProductArgs p;
    p.rows = 1;
    p.columns = value_pitch_;
    p.depth = columns;
    p.a = w;
    p.a_row = pitch_;
    p.b = values_;
    p.b_row = p.c_row = value_pitch_;
    p.c = out;
    p.add = begin_ > 0;
    small_product(isa_, p);
  }
  void store_weights(std::int64_t output, std::int64_t token, const float* w,
                     std::int64_t columns) const {
    if (!weights_.present()) return;
    const auto position = [&](std::int64_t t) {
      return segment_.begin + (call_.reverse() ? segment_.length - 1 - t : t);
    };
    float* row = weights_.view<float, 4>()(segment_.batch, output, position(token));
    for (std::int64_t i = 0; i < columns; ++i) {
      row[position(begin_ + i / rows_per_token_) * rows_per_token_ + i % rows_per_token_] = w[i];
    }
  }
  float* sum_of(std::int64_t query) const {
    return sum_ + query * call_.shape().tokens * value_pitch_;
  }

  const Tensor& weights_;
  const LawTensor& o_;
  std::int64_t rows_per_token_, pitch_, value_pitch_;
  std::int64_t begin_ = 0;
  float skip_ = 0;  // on the diagonal
  float *stage_ = nullptr, *values_ = nullptr, *sum_ = nullptr;
};

void check(const LawCall& call, const RecurrenceInputs& inputs, const RecurrenceOutputs& outputs) {
  if (inputs.initial_state.present() || outputs.final_state.present()) {
    call.refuse("the parallel form has no states; use the scan");
  }
  if (call.kind().strength_per_value || call.kind().value_decay || call.in(kWriteGate).present()) {
    call.refuse(
        "gates and strengths that differ between the values have no weights that all values "
        "share; use the scan");
  }
  const Tensor& w = outputs.weights;
  if (!w.present()) return;
  const RecurrenceShape& s = call.shape();
  const std::int64_t expected[] = {s.batch, s.output_heads, s.tokens,
                                   s.tokens * call.kind().rows_per_token};
  bool fits = w.rank == 4 && w.dtype == DType::kF32 && (w.extent[3] <= 1 || w.stride[3] == 1);
  for (std::size_t i = 0; i < 4 && fits; ++i) fits = w.extent[i] == expected[i];
  if (fits) return;
  call.refuse(fmt::format("weights must be a contiguous float32 array [{}, {}, {}, {}], not {}",
                          expected[0], expected[1], expected[2], expected[3], described(w)));
}

}  // namespace

void law_parallel(Context& context, const LawCall& call, const RecurrenceInputs& inputs,
                  const RecurrenceOutputs& outputs, const LawTensor& o) {
  check(call, inputs, outputs);
  const RecurrenceShape& shape = call.shape();
  const std::int64_t n = call.kind().rows_per_token;
  if (outputs.weights.present()) {
    context.impl().run(shape.batch * shape.output_heads, [&](std::int64_t task, Scratch&) {
      const View<float, 4> w = outputs.weights.view<float, 4>();
      for (std::int64_t t = 0; t < shape.tokens; ++t) {
        check_cancelled();
        std::memset(w(task / shape.output_heads, task % shape.output_heads, t), 0,
                    static_cast<std::size_t>(shape.tokens * n) * sizeof(float));
      }
    });
  }
  RowsKind kind = call.kind();
  kind.values = kChunk * n;
  ScratchCounter counter;
  const WeightSource counted(counter, call, outputs.weights, o);
  context.impl().reserve(counter.bytes() + rows_scan_scratch(kind, kind.values));
  const std::int64_t tasks = shape.sequences * shape.value_heads;
  context.impl().run(tasks + gap_tasks(shape), [&](std::int64_t task, Scratch& scratch) {
    if (task >= tasks) {
      zero_gaps(shape, task - tasks, o);
      return;
    }
    WeightSource source(scratch, call, outputs.weights, o);
    source.bind(context.isa(), task / shape.value_heads, task % shape.value_heads);
    const std::int64_t length = call.segment(task / shape.value_heads).length;
    const std::size_t mark = scratch.mark();
    for (std::int64_t begin = 0; begin < length; begin += kChunk) {
      source.begin_block(begin);
      RowsKind block = kind;
      block.values = std::min(length - begin, kChunk) * n;
      rows_scan(context.isa(), block, source, 0, block.values, {}, 0, {}, scratch);
      scratch.rewind(mark);
    }
    source.store_outputs();
  });
}

}  // namespace ouzel
