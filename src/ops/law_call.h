// One call of a law: its options, sizes and inputs, checked.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "ouzel/laws.h"
#include "src/ops/law.h"
#include "src/ops/recurrence_pass.h"
#include "src/ops/rows.h"

namespace ouzel {

// A tensor of a call as [B, T, heads, size]: a parameter has neither batch nor tokens (its strides
// are 0), a number per head has size 1.
struct LawTensor {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t batch_stride = 0, row_stride = 0, head_stride = 0;
  std::int64_t heads = 0, size = 0;
  std::int64_t rows_per_token = 1;
  bool is_parameter = false;

  bool present() const { return heads > 0; }
  bool is_narrow() const { return dtype != DType::kF32; }
  std::int64_t token_stride(bool reverse) const {
    return (reverse ? -rows_per_token : rows_per_token) * row_stride;
  }
  // Token `t` of a sequence in the order of the pass: its row `row`, from column `column` on.
  void* at(const Segment& s, std::int64_t t, std::int64_t head, bool reverse, std::int64_t row = 0,
           std::int64_t column = 0) const {
    const std::int64_t token = s.begin + (reverse ? s.length - 1 - t : t);
    return static_cast<char*>(data) +
           (s.batch * batch_stride + (token * rows_per_token + row) * row_stride +
            head * head_stride + column) *
               size_of(dtype);
  }
};

inline constexpr std::size_t kLawRoles = static_cast<std::size_t>(LawRole::kSkip) + 1;

class LawCall {
 public:
  // Throws Error(kInvalidArgument), naming the law, for anything that does not fit.
  LawCall(const Law& law, const LawOptions& options, const RecurrenceInputs& inputs);

  const Law& law() const { return law_; }
  const RecurrenceShape& shape() const { return shape_; }
  const RowsKind& kind() const { return kind_; }
  float scale() const { return scale_; }
  bool reverse() const { return reverse_; }
  bool l2norm() const { return l2norm_; }
  float l2norm_eps() const { return l2norm_eps_; }
  // Absent where the law has no such input, or it was not given.
  const LawTensor& in(LawRole role) const { return in_[static_cast<std::size_t>(role)]; }
  const char* name(LawRole role) const { return law_.find(role)->name; }
  // The gradient of an input, of its shape. Absent if `grads` has none, or the input is absent.
  LawTensor gradient(LawRole role, const RecurrenceInputGrads& grads) const;
  // The output, or its gradient, [B, T, HO, V].
  LawTensor output(const ConstTensor& tensor, const char* what) const;
  void check_state(const StateView& state, const char* what) const;
  // The head of an input that a state reads.
  std::int64_t head(const LawTensor& x, std::int64_t state) const {
    return state * x.heads / shape_.value_heads;
  }
  // Whether what is written to a tensor goes past the caches: if it is larger than they are. Its
  // rows are then whole cache lines.
  bool streams(const LawTensor& x) const;
  // States that are kept for the backward pass, a head's of all chunks of a sequence after each
  // other (rows.h); 0 floats where chunks of the two passes do not begin together.
  std::int64_t kept_floats() const;
  std::int64_t kept_at(std::int64_t sequence, std::int64_t state) const;
  std::int64_t kept_state() const;
  Segment segment(std::int64_t n) const { return shape_.segment(n); }
  [[noreturn]] void refuse(const std::string& sentence) const;

 private:
  std::int64_t kept_chunks(std::int64_t sequences) const;
  void check_options(const LawOptions& options, const RecurrenceInputs& inputs);
  void check_sizes(const LawOptions& options, const RecurrenceInputs& inputs);
  void set_kind();
  std::int64_t extent(std::string_view letter) const;
  bool fits(std::string_view shape, const ConstTensor& tensor) const;
  // `shape` is letters as in LawInput::shape.
  LawTensor take(const char* shape, const ConstTensor& tensor, const std::string_view what) const;

  const Law& law_;
  RecurrenceShape shape_;
  RowsKind kind_;
  float scale_ = 1, l2norm_eps_ = 0;
  bool reverse_ = false, l2norm_ = false, parallel_ = false;
  std::array<LawTensor, kLawRoles> in_{};
};

// One head of the state of a sequence; null where the view is absent.
StateMemory<float> state_memory(const StateView& state, std::int64_t sequence, std::int64_t head);
inline StateMemory<const float> readable(const StateMemory<float>& m) {
  return {m.s, m.residue, m.row, m.column};
}
// Tokens that the state of a sequence has seen.
std::int64_t position_of(const StateView& state, std::int64_t sequence);

// Zeros the rows of [B, T, ...] that no segment covers, as tasks of a run: one per batch row.
void zero_gaps(const RecurrenceShape& shape, std::int64_t batch_row, const LawTensor& x);

}  // namespace ouzel
