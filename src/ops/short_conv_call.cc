#include "src/ops/short_conv_call.h"

#include <cstring>

#include "src/kernels/convert.h"

namespace ouzel {
namespace {

void append(std::vector<ConvPiece>& list, ConvPiece piece) {
  const std::int64_t first = piece.begin, end = first + piece.tokens;
  do {  // a sequence without tokens is a piece too: its state passes through
    piece.tokens = std::min(kPieceTokens, end - piece.begin);
    piece.offset = piece.begin - first;
    list.push_back(piece);
    piece.begin += piece.tokens;
  } while (piece.begin < end);
}

}  // namespace

std::vector<ConvPiece> pieces_of(const Segments& segments, std::int64_t batch,
                                 std::int64_t tokens) {
  std::vector<ConvPiece> list;
  std::vector<std::vector<std::size_t>> rows(static_cast<std::size_t>(batch));
  for (std::size_t n = 0; n < segments.list.size(); ++n) {
    rows[static_cast<std::size_t>(segments.list[n].batch)].push_back(n);
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    std::int64_t at = 0;
    for (std::size_t n : rows[static_cast<std::size_t>(b)]) {
      const Segment& s = segments.list[n];
      if (s.begin > at) append(list, {b, at, s.begin - at});
      append(list, {b, s.begin, s.length, static_cast<std::int64_t>(n), 0, s.length});
      at = s.begin + s.length;
    }
    if (at < tokens) append(list, {b, at, tokens - at});
  }
  return list;
}

void require(bool present, const char* op, const char* name) {
  if (present) return;
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {} must be given", op, name));
}

ConvShape shape_of(const char* op, const ConstTensor& x, const ConstTensor& weight) {
  if (x.rank != 3 || (weight.rank != 2 && weight.rank != 3) ||
      weight.extent[static_cast<std::size_t>(weight.rank - 1)] < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: expected x [batch, tokens, channels] and weight [channels, width] "
                            "with a width of at least 1, found {} and {}",
                            op, shape_string(x), shape_string(weight)));
  }
  ConvShape shape;
  shape.op = op;
  shape.batch = x.extent[0];
  shape.tokens = x.extent[1];
  shape.channels = x.extent[2];
  shape.width = weight.extent[static_cast<std::size_t>(weight.rank - 1)];
  return shape;
}

Segments segments_of(ConvShape& shape, const Segments* given) {
  Segments segments = given != nullptr ? *given : Segments::whole(shape.batch, shape.tokens);
  segments.check(shape.op, shape.batch, shape.tokens);
  shape.sequences = segments.count();
  return segments;
}

ConvParameters::ConvParameters(const ConvShape& s, const View<const float, 2>& w,
                               const View<const float, 1>& b, const ChannelBlocks& blocks,
                               float* memory)
    : width_(s.width), memory_(memory) {
  for (std::int64_t n = 0; n < blocks.blocks(); ++n) {
    const ChannelBlock block = blocks.block(0, n);
    for (std::int64_t i = 0; i < block.channels; ++i) {
      float* to = memory + (s.width + 1) * block.first + i;
      for (std::int64_t j = 0; j < s.width; ++j) to[j * block.channels] = w.at(block.first + i, j);
      to[s.width * block.channels] = b.data != nullptr ? b.at(block.first + i) : 0;
    }
  }
}

const float* wide_row(Isa isa, const AnyRows<const void>& row, std::int64_t n, float* wide) {
  if (!is_half(row.dtype)) return static_cast<const float*>(row.first);
  convert(isa, row.dtype, row.first, DType::kF32, wide, n);
  return wide;
}
void read_history(const ConvShape& s, const View<const float, 3>& state, std::int64_t sequence,
                  float* history) {
  if (state.data == nullptr) {
    std::fill(history, history + (s.width - 1) * s.channels, 0.0f);
    return;
  }
  for (std::int64_t d = 0; d < s.channels; ++d) {
    for (std::int64_t j = 1; j < s.width; ++j) {
      history[(j - 1) * s.channels + d] = state.at(sequence, d, j);
    }
  }
}

void ConvRows::load(Isa isa, bool as_they_are, std::int64_t first, std::int64_t count) const {
  const std::int64_t before = s.width - 1, slots = staged_tokens(s) + before;
  for (std::int64_t i = 0; i < count + before; ++i) {
    const std::int64_t t = piece.offset + first + i - before;
    if (t < 0) {
      rows[i] = history + (before + t) * s.channels;  // zeros are zeros in any type
      continue;
    }
    const AnyRows<const void> row = x(piece.batch, piece.begin - piece.offset + t);
    if (as_they_are || !is_half(x.dtype)) {
      rows[i] = row.first;
      continue;
    }
    float* wide = ring + (first + i) % slots * s.channels;
    rows[i] = i < before && first > 0 ? wide : wide_row(isa, row, s.channels, wide);
  }
}

void zero_rows(const AnyView<void, 3>& y, const ConvPiece& piece) {
  if (y.data == nullptr) return;
  for (std::int64_t t = 0; t < piece.tokens; ++t) {
    std::memset(y(piece.batch, piece.begin + t).first, 0,
                static_cast<std::size_t>(y.extent[2] * size_of(y.dtype)));
  }
}

}  // namespace ouzel
