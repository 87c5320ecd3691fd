#include "ouzel/short_conv.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/convert.h"
#include "src/kernels/short_conv.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/short_conv_call.h"

namespace ouzel {
namespace {

// The last `width` of (initial state, x) of a sequence whose first piece this is: column j is input
// length - width + j. Columns move towards the front, so the two states may be the same memory.
void write_state(Isa isa, const ConvRows& in, const View<const float, 3>& initial,
                 const View<float, 3>& final_state) {
  const auto& [s, x, piece, history, ring, rows] = in;
  const std::int64_t n = piece.sequence;
  for (std::int64_t j = 0; j < s.width; ++j) {
    const std::int64_t t = piece.length - s.width + j;
    const float* row =
        t >= 0 ? wide_row(isa, x(piece.batch, piece.begin + t), s.channels, ring) : nullptr;
    for (std::int64_t d = 0; d < s.channels; ++d) {
      final_state.at(n, d, j) = row != nullptr            ? row[d]
                                : initial.data != nullptr ? initial.at(n, d, s.width + t)
                                                          : 0;
    }
  }
}

}  // namespace

void short_conv(Context& context, const ShortConvOptions& options, const ShortConvInputs& inputs,
                const Tensor& y, const Tensor& final_state) {
  ConvShape s = shape_of("short_conv", inputs.x, inputs.weight);
  const Segments segments = segments_of(s, inputs.segments);
  const auto x = s.rows<const void>(inputs.x, "x");
  const auto weight = s.weight<const float>(inputs.weight, "weight");
  const auto bias = s.channel<const float>(inputs.bias, "bias");
  const auto initial = s.states<const float>(inputs.initial_state, "initial_state");
  require(y.present(), s.op, "y");
  const auto out = s.rows<void>(y, "y");
  const auto final_view = s.states<float>(final_state, "final_state");
  if (s.tokens == 0 && final_view.data == nullptr) return;

  Context::Impl& impl = context.impl();
  const std::vector<ConvPiece> pieces = pieces_of(segments, s.batch, s.tokens);
  const ChannelBlocks blocks(static_cast<std::int64_t>(pieces.size()), s.channels, kConvBlock);
  float* shared = impl.shared<float>(ConvParameters::floats(s) + kPageFloats);
  const ConvParameters parameters(s, weight, bias, blocks, placed_like(out.data, shared));
  const ConvShape widest = channels_of(s, blocks.block(0, 0));
  const std::int64_t max_rows = kPieceTokens + s.width - 1;
  impl.reserve(pointers_bytes(max_rows) + scratch_of((s.width - 1) * widest.channels) +
               scratch_of(ConvRows::ring_floats(widest, x.dtype)));
  const Isa isa = context.isa();
  const bool stream = is_streamed(out);
  // A state that pieces further on read too is replaced when all are done: it may be the memory of
  // the new one.
  const bool is_shared =
      s.width - 1 > kPieceTokens && initial.data != nullptr && final_view.data != nullptr;
  const auto rows_of = [&](const ConvShape& own, const AnyView<const void, 3>& from,
                           const View<const float, 3>& state, const ConvPiece& piece,
                           Scratch& scratch) {
    const void** pointers = scratch.take<const void*>(max_rows);
    float* history = scratch.take<float>((s.width - 1) * own.channels);
    float* ring = scratch.take<float>(ConvRows::ring_floats(own, x.dtype));
    if (piece.offset < s.width - 1) read_history(own, state, piece.sequence, history);
    return ConvRows{own, from, piece, history, ring, pointers};
  };
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const ConvPiece& piece = pieces[static_cast<std::size_t>(b.sequence)];
    const ConvShape own = channels_of(s, b);
    const auto to = channels_of(out, b);
    if (piece.sequence < 0) return zero_rows(to, piece);
    const auto from = channels_of(x, b);
    const auto state = channels_of(initial, b);
    const ConvRows rows = rows_of(own, from, state, piece, scratch);
    if (piece.offset == 0 && final_view.data != nullptr && !is_shared) {
      write_state(isa, rows, state, channels_of(final_view, b));
    }
    const bool as_they_are =
        rows.have_one_type(state) && (!is_half(x.dtype) || out.dtype == x.dtype);
    const std::int64_t step = as_they_are ? kPieceTokens : staged_tokens(own);
    for (std::int64_t t = 0; t < piece.tokens; t += step) {
      const std::int64_t tokens = std::min(step, piece.tokens - t);
      rows.load(isa, as_they_are, t, tokens);
      const ConvTokens conv{.x = rows.rows,
                            .dtype = as_they_are ? x.dtype : DType::kF32,
                            .tokens = tokens,
                            .channels = own.channels,
                            .width = s.width,
                            .weight = parameters.weight(b),
                            .bias = parameters.bias(b),
                            .silu = options.activation == ConvActivation::kSilu,
                            .stream = stream};
      const AnyRows<void> row = to(piece.batch, piece.begin + t);
      conv_tokens(isa, conv, row.first, row.dtype, row.stride);
    }
  });
  if (!is_shared) return;
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const ConvPiece& piece = pieces[static_cast<std::size_t>(b.sequence)];
    if (piece.sequence < 0 || piece.offset != 0) return;
    const ConvShape own = channels_of(s, b);
    const auto from = channels_of(x, b);
    const auto state = channels_of(initial, b);
    write_state(isa, rows_of(own, from, state, piece, scratch), state, channels_of(final_view, b));
  });
}

void short_conv_step(Context& context, const ShortConvOptions& options, const ConstTensor& x,
                     const ConstTensor& weight, const ConstTensor& bias, const Tensor& state,
                     const Tensor& y) {
  ConvShape s = shape_of("short_conv_step", x, weight);
  s.sequences = s.batch;
  if (s.tokens != 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: x should be [sequences, 1, channels], not {}; use short_conv for "
                            "more tokens",
                            s.op, shape_string(x)));
  }
  require(state.present(), s.op, "state");
  require(y.present(), s.op, "y");
  const auto x_view = s.rows<const void>(x, "x");
  const bool is_short = state.rank == 3 && state.extent[2] == s.width - 1;
  const std::int64_t columns = is_short ? s.width - 1 : s.width;
  const auto state_view = s.view<float, 3>(state, "state", {s.sequences, s.channels, columns});
  const auto y_view = s.rows<void>(y, "y");
  const auto weight_view = s.weight<const float>(weight, "weight");
  const auto bias_view = s.channel<const float>(bias, "bias");
  const bool narrow = is_half(y_view.dtype);
  const std::int64_t x_floats = is_half(x_view.dtype) ? s.channels : 0;
  const std::int64_t y_floats = narrow ? s.channels : 0;
  const Isa isa = context.isa();
  context.impl().reserve(scratch_of(x_floats) + scratch_of(y_floats));
  context.impl().run(s.batch, [&](std::int64_t n, Scratch& scratch) {
    const float* input = wide_row(isa, x_view(n), s.channels, scratch.take<float>(x_floats));
    float* wide = scratch.take<float>(y_floats);
    const ConvStep step{.channels = s.channels,
                        .width = s.width,
                        .columns = columns,
                        .x = input,
                        .weight = weight_view.data,
                        .weight_row = weight_view.stride[0],
                        .weight_column = weight_view.stride[1],
                        .bias = bias_view.data,
                        .bias_stride = bias_view.stride[0],
                        .window = state_view(n),
                        .window_row = state_view.stride[1],
                        .window_column = state_view.stride[2],
                        .silu = options.activation == ConvActivation::kSilu};
    const AnyRows<void> to = y_view(n);
    conv_step(isa, step, narrow ? wide : static_cast<float*>(to.first));
    if (narrow) convert(isa, DType::kF32, wide, to.dtype, to.first, s.channels);
  });
}

}  // namespace ouzel
