// What the passes of the short convolution share: a call's tensors as typed views, the pieces of
// its sequences, and inputs as the rows that kernels take.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"
#include "src/base/context_impl.h"
#include "src/base/dense_tensor.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/rows.h"

namespace ouzel {

// Tokens and channels of one task: its rows and their gradients fit the second-level cache.
inline constexpr std::int64_t kPieceTokens = 64, kConvBlock = 512;
// Numbers that go through scratch together where rows have 16 bits: they stay in the second-level
// cache beside what is made of them.
inline constexpr std::int64_t kStagedFloats = 1 << 14;

// Tokens [begin, begin + tokens) of batch row `batch`. They are those from `offset` on of a
// sequence of `length`, or (sequence -1) padding.
struct ConvPiece {
  std::int64_t batch = 0, begin = 0, tokens = 0;
  std::int64_t sequence = -1, offset = 0, length = 0;
};

std::vector<ConvPiece> pieces_of(const Segments& segments, std::int64_t batch, std::int64_t tokens);

// The shapes of a call, and its tensors as typed views; absent ones have null data.
struct ConvShape {
  const char* op = nullptr;
  std::int64_t batch = 0, tokens = 0, channels = 0, width = 0, sequences = 0;

  template <class T, int Rank, bool Const>
  View<T, Rank> view(const BasicTensor<Const>& tensor, const char* name,
                     const std::array<std::int64_t, Rank>& shape) const {
    if (!tensor.present()) return {};
    const View<T, Rank> v = tensor.template view<T, Rank>();
    if (tensor.dtype != DType::kF32 || tensor.rank != Rank || v.extent != shape) {
      throw Error(
          ErrorKind::kInvalidArgument,
          fmt::format("{}: {} should be F32 {}, not {}", op, name,
                      shape_string(View<const float, Rank>(nullptr, shape)), described(tensor)));
    }
    return v;
  }
  // Of T void or const void.
  template <class T, bool Const>
  AnyView<T, 3> rows(const BasicTensor<Const>& tensor, const char* name) const {
    return view_of<T, 3>(op, name, tensor, {batch, tokens, channels});
  }
  template <class T, bool Const>
  View<T, 3> states(const BasicTensor<Const>& tensor, const char* name) const {
    return view<T, 3>(tensor, name, {sequences, channels, width});
  }
  template <class T, bool Const>
  View<T, 1> channel(const BasicTensor<Const>& tensor, const char* name) const {
    return view<T, 1>(tensor, name, {channels});
  }
  // [D, W]; [D, 1, W], as some checkpoints have it, becomes that.
  template <class T, bool Const>
  View<T, 2> weight(BasicTensor<Const> tensor, const char* name) const {
    if (tensor.rank == 3 && tensor.extent[1] == 1) {
      tensor.rank = 2;
      tensor.extent[1] = tensor.extent[2];
      tensor.stride[1] = tensor.stride[2];
    }
    return view<T, 2>(tensor, name, {channels, width});
  }
};

void require(bool present, const char* op, const char* name);
ConvShape shape_of(const char* op, const ConstTensor& x, const ConstTensor& weight);
Segments segments_of(ConvShape& shape, const Segments* given);

// The channels of a block, of views of all.
template <class T>
View<T, 3> channels_of(View<T, 3> states, const ChannelBlock& b) {
  if (states.data != nullptr) states.data = states(0, b.first);
  states.extent[1] = b.channels;
  return states;
}
template <class Void>
AnyView<Void, 3> channels_of(AnyView<Void, 3> rows, const ChannelBlock& b) {
  if (rows.data != nullptr) rows.data = rows(0, 0, b.first).first;
  rows.extent[2] = b.channels;
  return rows;
}
inline ConvShape channels_of(ConvShape shape, const ChannelBlock& b) {
  shape.channels = b.channels;
  return shape;
}

// The parameters as the kernels read them, block by block: rows [width, channels] and the bias,
// zeros if absent.
class ConvParameters {
 public:
  static std::int64_t floats(const ConvShape& s) { return (s.width + 1) * s.channels; }
  ConvParameters(const ConvShape& s, const View<const float, 2>& w, const View<const float, 1>& b,
                 const ChannelBlocks& blocks, float* memory);
  // Rows of the block's channels, the bias last.
  const float* weight(const ChannelBlock& b) const { return memory_ + (width_ + 1) * b.first; }
  const float* bias(const ChannelBlock& b) const { return weight(b) + width_ * b.channels; }

 private:
  std::int64_t width_;
  float* memory_;
};

// A row as float32: where it is, or in `wide`.
const float* wide_row(Isa isa, const AnyRows<const void>& row, std::int64_t n, float* wide);
// The width - 1 inputs before a sequence, as rows: columns 1 ... of the state, or zeros.
void read_history(const ConvShape& s, const View<const float, 3>& state, std::int64_t sequence,
                  float* history);

// Tokens that go through scratch together: a multiple of what the kernels take at a time.
inline std::int64_t staged_tokens(const ConvShape& s) {
  const std::int64_t tokens = kStagedFloats / std::max<std::int64_t>(1, s.channels) / 4 * 4;
  return std::clamp<std::int64_t>(tokens, 4, kPieceTokens);
}

// The inputs of a piece, for kernels that take them where they are or as float32. For the latter
// those of 16 bits are converted into a ring of as many rows as are looked at together.
struct ConvRows {
  static std::int64_t ring_floats(const ConvShape& s, DType dtype) {
    return is_half(dtype) ? (staged_tokens(s) + s.width - 1) * s.channels : 0;
  }

  // Whether all inputs that a piece sees have the type of x.
  bool have_one_type(const View<const float, 3>& initial) const {
    return !is_half(x.dtype) || piece.offset >= s.width - 1 || initial.data == nullptr;
  }
  // Pointers to inputs first - (width - 1) ... first + count - 1, of tokens of the piece, as they
  // are or as float32. Of the latter those before `first` have been loaded, unless it is 0.
  void load(Isa isa, bool as_they_are, std::int64_t first, std::int64_t count) const;

  const ConvShape& s;
  const AnyView<const void, 3>& x;
  const ConvPiece& piece;
  const float* history;
  float* ring;
  const void** rows;
};

// Padding is 0; y may be absent.
void zero_rows(const AnyView<void, 3>& y, const ConvPiece& piece);

// Memory for floats that are read beside rows being written past the caches: from where it has the
// place of those rows in a page. A load waits for stores under way whose addresses have the same
// last twelve bits, and such stores take long: elsewhere the whole took twice as long on Zen 3.
inline constexpr std::int64_t kPageFloats = 1024;  // so much more must be there
inline float* placed_like(const void* rows, float* memory) {
  const auto apart = reinterpret_cast<std::uintptr_t>(rows) -
                     reinterpret_cast<std::uintptr_t>(static_cast<void*>(memory));
  return memory + apart % 4096 / 64 * 16;
}

inline std::size_t pointers_bytes(std::int64_t count) {
  return Scratch::rounded(static_cast<std::size_t>(count) * sizeof(void*));
}

}  // namespace ouzel
