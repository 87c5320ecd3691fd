// The gradients of the short convolution. A task owns channels of some neighbouring pieces: their
// dz, what these add to the parameters' gradients, and dx, which is the same convolution of dz.
#include <algorithm>
#include <vector>

#include "ouzel/short_conv.h"
#include "src/base/context_impl.h"
#include "src/kernels/convert.h"
#include "src/kernels/pointwise.h"
#include "src/kernels/short_conv.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/short_conv_call.h"

namespace ouzel {
namespace {

// Partial sums of the parameters' gradients: one for each group of pieces, at most this many.
constexpr std::int64_t kMaxGroups = 256;

// Scratch of one task of the backward pass.
struct Workspace {
  // The types of the call's rows.
  struct Types {
    DType x, dy, dx;
  };
  const void** x_rows;
  const void** dy_rows;
  const void** dz_rows;
  float* history;    // the inputs before the sequence
  float* d_history;  // and their gradients
  float* zeros;      // one row
  float* dz;         // of a piece and the width - 1 tokens after it
  // Rows of 16 bits as float32: see ConvRows, [staged tokens][channels], and the last of a
  // sequence, [width][channels].
  float *x_ring, *dy_wide, *dx_wide;

  static std::int64_t max_rows(const ConvShape& s) { return kPieceTokens + 2 * (s.width - 1); }
  static std::int64_t wide_floats(const ConvShape& s, DType dtype, std::int64_t rows) {
    return is_half(dtype) ? rows * s.channels : 0;
  }
  static std::size_t bytes(const ConvShape& s, const Types& types) {
    const std::int64_t before = s.width - 1;
    return 3 * pointers_bytes(max_rows(s)) + 2 * scratch_of(before * s.channels) +
           scratch_of(s.channels) + scratch_of((kPieceTokens + before) * s.channels + kPageFloats) +
           scratch_of(ConvRows::ring_floats(s, types.x)) +
           scratch_of(wide_floats(s, types.dy, staged_tokens(s))) +
           scratch_of(wide_floats(s, types.dx, s.width));
  }
  Workspace(const ConvShape& s, const Types& types, const void* dx, Scratch& scratch)
      : x_rows(scratch.take<const void*>(max_rows(s))),
        dy_rows(scratch.take<const void*>(max_rows(s))),
        dz_rows(scratch.take<const void*>(max_rows(s))),
        history(scratch.take<float>((s.width - 1) * s.channels)),
        d_history(scratch.take<float>((s.width - 1) * s.channels)),
        zeros(scratch.take<float>(s.channels)),
        dz(placed_like(
            dx, scratch.take<float>((kPieceTokens + s.width - 1) * s.channels + kPageFloats))),
        x_ring(scratch.take<float>(ConvRows::ring_floats(s, types.x))),
        dy_wide(scratch.take<float>(wide_floats(s, types.dy, staged_tokens(s)))),
        dx_wide(scratch.take<float>(wide_floats(s, types.dx, s.width))) {
    std::fill(zeros, zeros + s.channels, 0.0f);
  }
};

}  // namespace

void short_conv_backward(Context& context, const ShortConvOptions& options,
                         const ShortConvInputs& inputs, const ConstTensor& dy,
                         const ConstTensor& d_final, const Tensor& dx, const Tensor& dweight,
                         const Tensor& dbias, const Tensor& d_initial) {
  ConvShape s = shape_of("short_conv_backward", inputs.x, inputs.weight);
  const Segments segments = segments_of(s, inputs.segments);
  const auto x = s.rows<const void>(inputs.x, "x");
  const auto weight = s.weight<const float>(inputs.weight, "weight");
  const auto bias = s.channel<const float>(inputs.bias, "bias");
  const auto initial = s.states<const float>(inputs.initial_state, "initial_state");
  require(dy.present(), s.op, "dy");
  const auto dy_view = s.rows<const void>(dy, "dy");
  const auto d_final_view = s.states<const float>(d_final, "d_final");
  const auto dx_view = s.rows<void>(dx, "dx");
  const auto dweight_view = s.weight<float>(dweight, "dweight");
  const auto dbias_view = s.channel<float>(dbias, "dbias");
  const auto d_initial_view = s.states<float>(d_initial, "d_initial");
  if (s.tokens == 0 && d_initial_view.data == nullptr) return;

  const bool silu = options.activation == ConvActivation::kSilu;
  const std::int64_t before = s.width - 1;
  const std::vector<ConvPiece> pieces = pieces_of(segments, s.batch, s.tokens);
  const auto count = static_cast<std::int64_t>(pieces.size());
  const std::int64_t group = std::max<std::int64_t>(1, (count + kMaxGroups - 1) / kMaxGroups);
  const ChannelBlocks blocks((count + group - 1) / group, s.channels, kConvBlock);
  const std::int64_t groups = blocks.tasks() / std::max<std::int64_t>(1, blocks.blocks());

  Context::Impl& impl = context.impl();
  const std::int64_t set = ConvParameters::floats(s);
  float* shared = placed_like(dx_view.data, impl.shared<float>((2 + groups) * set + kPageFloats));
  const ConvParameters parameters(s, weight, bias, blocks, shared + set);
  // dx_t = sum_i w_{width-1-i} dz_{t+i}: the same convolution, of later rows with the columns
  // turned.
  View<const float, 2> turned = weight;
  turned.data = weight(0, s.width - 1);
  turned.stride[1] = -weight.stride[1];
  const ConvParameters adjoint(s, turned, {}, blocks, shared);
  float* sums = shared + 2 * set;  // a set a group, each like the parameters

  const Workspace::Types types = {x.dtype, dy_view.dtype, dx_view.dtype};
  impl.reserve(Workspace::bytes(channels_of(s, blocks.block(0, 0)), types));
  const Isa isa = context.isa();
  // With a gradient of the final state some rows are added to once they stand.
  const bool stream = is_streamed(dx_view) && d_final_view.data == nullptr;
  const auto backward = [&](const ConvPiece& piece, const ChannelBlock& b, const Workspace& work,
                            float* own_sums) {
    const auto& [x_rows, dy_rows, dz_rows, history, d_history, zeros, dz, x_ring, dy_wide,
                 dx_wide] = work;
    const ConvShape own = channels_of(s, b);
    const std::int64_t channels = own.channels;
    const auto from = channels_of(x, b), dy_from = channels_of(dy_view, b);
    const auto dx_to = channels_of(dx_view, b);
    const auto state = channels_of(initial, b), d_last = channels_of(d_final_view, b);
    const auto d_first = channels_of(d_initial_view, b);
    // The inputs of this piece reach the outputs of up to width - 1 tokens after it.
    const std::int64_t tokens = piece.tokens;
    const std::int64_t after = std::min(before, piece.length - piece.offset - tokens);
    if (piece.offset < before) read_history(own, state, piece.sequence, history);
    const ConvRows rows{own, from, piece, history, x_ring, x_rows};
    const bool as_they_are =
        types.x == types.dy && rows.have_one_type(state) && (silu || !is_half(types.x));
    ConvTokens conv{.x = x_rows,
                    .dtype = as_they_are ? types.x : DType::kF32,
                    .channels = channels,
                    .width = s.width,
                    .weight = parameters.weight(b),
                    .bias = parameters.bias(b),
                    .silu = silu};
    std::fill(dz_rows, dz_rows + tokens + 2 * before, zeros);
    // dz of tokens from `first` on, without an activation dy itself, and what they add to the sums.
    const std::int64_t step = as_they_are ? tokens + after : staged_tokens(own);
    const auto gradients = [&](std::int64_t first, std::int64_t end, float* to) {
      for (std::int64_t t = first; t < end; t += step) {
        conv.tokens = std::min(step, end - t);
        for (std::int64_t i = t; i < t + conv.tokens; ++i) {
          const AnyRows<const void> row = dy_from(piece.batch, piece.begin + i);
          float* wide = silu ? dy_wide + (i - t) * channels : dz + i * channels;
          dy_rows[i] = as_they_are ? row.first : wide_row(isa, row, channels, wide);
          dz_rows[before + i] = silu ? dz + i * channels : dy_rows[i];
        }
        if (!silu && to == nullptr) continue;
        rows.load(isa, as_they_are, t, conv.tokens);
        if (silu) conv_gradients(isa, conv, dy_rows + t, dz + t * channels);
        if (to != nullptr) conv_sums(isa, conv, dz_rows + before + t, to);
      }
    };
    gradients(0, tokens, own_sums);
    gradients(tokens, tokens + after, nullptr);
    ConvTokens back{.x = dz_rows + before,
                    .channels = channels,
                    .width = s.width,
                    .weight = adjoint.weight(b),
                    .bias = adjoint.bias(b)};
    if (dx_view.data != nullptr) {
      // Tokens that the state keeps are added to before they are rounded.
      const std::int64_t kept = piece.length - s.width - piece.offset;
      const bool adds = d_final_view.data != nullptr;
      const bool apart = adds && is_half(types.dx);
      const std::int64_t own = apart ? std::clamp<std::int64_t>(kept, 0, tokens) : tokens;
      AnyRows<void> to = dx_to(piece.batch, piece.begin);
      back.tokens = own;
      back.stream = stream;
      conv_tokens(isa, back, to.first, to.dtype, to.stride);
      if (apart) {
        back.x = dz_rows + before + own;
        back.tokens = tokens - own;
        conv_tokens(isa, back, dx_wide, DType::kF32, channels);
      }
      for (std::int64_t t = std::max<std::int64_t>(0, kept); t < tokens && adds; ++t) {
        const AnyRows<void> at = to.at(t);
        float* row = apart ? dx_wide + (t - own) * channels : static_cast<float*>(at.first);
        for (std::int64_t d = 0; d < channels; ++d) {
          row[d] += d_last.at(piece.sequence, d, t - kept);
        }
        if (apart) convert(isa, DType::kF32, row, at.dtype, at.first, channels);
      }
    }
    if (d_initial_view.data != nullptr && piece.offset == 0) {
      back.x = dz_rows;
      back.tokens = before;
      back.stream = false;
      conv_tokens(isa, back, d_history, DType::kF32, channels);
      for (std::int64_t d = 0; d < channels; ++d) {
        for (std::int64_t j = 0; j < s.width; ++j) {
          float sum = j > 0 ? d_history[(j - 1) * channels + d] : 0;
          if (d_final_view.data != nullptr && j >= piece.length) {
            sum += d_last.at(piece.sequence, d, j - piece.length);
          }
          d_first.at(piece.sequence, d, j) = sum;
        }
      }
    }
  };
  const bool parameters_wanted = dweight_view.data != nullptr || dbias_view.data != nullptr;
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const std::int64_t g = b.sequence;
    float* own = parameters_wanted ? sums + g * set + (s.width + 1) * b.first : nullptr;
    if (own != nullptr) std::fill(own, own + (s.width + 1) * b.channels, 0.0f);
    const Workspace work(channels_of(s, b), types, dx_view.data, scratch);
    for (std::int64_t p = g * group; p < std::min((g + 1) * group, count); ++p) {
      check_cancelled();
      const ConvPiece& piece = pieces[static_cast<std::size_t>(p)];
      if (piece.sequence >= 0) {
        backward(piece, b, work, own);
      } else {
        zero_rows(channels_of(dx_view, b), piece);
      }
    }
  });
  if (!parameters_wanted || groups == 0) return;
  impl.run(blocks.blocks(), [&](std::int64_t n, Scratch&) {
    const ChannelBlock b = blocks.block(0, n);
    float* sum = sums + (s.width + 1) * b.first;
    for (std::int64_t g = 1; g < groups; ++g) {
      add_to(context.isa(), sum + g * set, sum, (s.width + 1) * b.channels);
    }
    for (std::int64_t i = 0; i < b.channels; ++i) {
      for (std::int64_t j = 0; j < s.width && dweight_view.data != nullptr; ++j) {
        dweight_view.at(b.first + i, j) += sum[j * b.channels + i];
      }
      if (dbias_view.data != nullptr) {
        dbias_view.at(b.first + i) += sum[s.width * b.channels + i];
      }
    }
  });
}

}  // namespace ouzel
