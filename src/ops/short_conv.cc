#include "ouzel/short_conv.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/pointwise.h"
#include "src/kernels/short_conv.h"
#include "src/ops/channel_blocks.h"

namespace ouzel {
namespace {

// Tokens of one task: 64 rows of 384 channels and their gradients fit the second-level cache.
constexpr std::int64_t kPieceTokens = 64;
// Partial sums of the parameters' gradients: one for each group of pieces, at most this many.
constexpr std::int64_t kMaxGroups = 256;

// Tokens [begin, begin + tokens) of batch row `batch`. They are those from `offset` on of a
// sequence of `length`, or (sequence -1) padding.
struct Piece {
  std::int64_t batch = 0, begin = 0, tokens = 0;
  std::int64_t sequence = -1, offset = 0, length = 0;
};

void append(std::vector<Piece>& list, Piece piece) {
  const std::int64_t first = piece.begin, end = first + piece.tokens;
  do {  // a sequence without tokens is a piece too: its state passes through
    piece.tokens = std::min(kPieceTokens, end - piece.begin);
    piece.offset = piece.begin - first;
    list.push_back(piece);
    piece.begin += piece.tokens;
  } while (piece.begin < end);
}

std::vector<Piece> pieces_of(const Segments& segments, std::int64_t batch, std::int64_t tokens) {
  std::vector<Piece> list;
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

// The shapes of a call, and its tensors as typed views; absent ones have null data.
struct Shape {
  const char* op = nullptr;
  std::int64_t batch = 0, tokens = 0, channels = 0, width = 0, sequences = 0;

  template <class T, int Rank, bool Const>
  View<T, Rank> view(const BasicTensor<Const>& tensor, const char* name,
                     const std::array<std::int64_t, Rank>& shape, bool unit_stride) const {
    if (!tensor.present()) return {};
    const View<T, Rank> v = tensor.template view<T, Rank>();
    if (tensor.dtype != DType::kF32 || tensor.rank != Rank || v.extent != shape) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("{}: {} should be F32 {}, not {} {}", op, name,
                              shape_string(View<const float, Rank>(nullptr, shape)),
                              name_of(tensor.dtype), shape_string(tensor)));
    }
    if (unit_stride && v.stride[Rank - 1] != 1 && v.extent[Rank - 1] > 1) {
      throw Error(ErrorKind::kInvalidArgument,
                  fmt::format("{}: the last stride of {} should be 1, not {}; copy it first", op,
                              name, v.stride[Rank - 1]));
    }
    return v;
  }
  template <class T, bool Const>
  View<T, 3> rows(const BasicTensor<Const>& tensor, const char* name) const {
    return view<T, 3>(tensor, name, {batch, tokens, channels}, true);
  }
  template <class T, bool Const>
  View<T, 3> states(const BasicTensor<Const>& tensor, const char* name) const {
    return view<T, 3>(tensor, name, {sequences, channels, width}, false);
  }
  template <class T, bool Const>
  View<T, 1> channel(const BasicTensor<Const>& tensor, const char* name) const {
    return view<T, 1>(tensor, name, {channels}, false);
  }
  // [D, W]; [D, 1, W], as some checkpoints have it, becomes that.
  template <class T, bool Const>
  View<T, 2> weight(BasicTensor<Const> tensor, const char* name) const {
    if (tensor.rank == 3 && tensor.extent[1] == 1) {
      tensor.rank = 2;
      tensor.extent[1] = tensor.extent[2];
      tensor.stride[1] = tensor.stride[2];
    }
    return view<T, 2>(tensor, name, {channels, width}, false);
  }
};

void require(bool present, const char* op, const char* name) {
  if (present) return;
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {} must be given", op, name));
}

Shape shape_of(const char* op, const ConstTensor& x, const ConstTensor& weight) {
  if (x.rank != 3 || (weight.rank != 2 && weight.rank != 3) ||
      weight.extent[static_cast<std::size_t>(weight.rank - 1)] < 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: expected x [batch, tokens, channels] and weight [channels, width] "
                            "with a width of at least 1, found {} and {}",
                            op, shape_string(x), shape_string(weight)));
  }
  Shape shape;
  shape.op = op;
  shape.batch = x.extent[0];
  shape.tokens = x.extent[1];
  shape.channels = x.extent[2];
  shape.width = weight.extent[static_cast<std::size_t>(weight.rank - 1)];
  return shape;
}

// The parameters as the kernels read them: rows [width, channels] and the bias, zeros if absent.
struct Parameters {
  float* weight = nullptr;
  float* bias = nullptr;
  static std::int64_t floats(const Shape& s) { return (s.width + 1) * s.channels; }
  Parameters(const Shape& s, const View<const float, 2>& w, const View<const float, 1>& b,
             float* memory)
      : weight(memory), bias(memory + s.width * s.channels) {
    for (std::int64_t d = 0; d < s.channels; ++d) {
      for (std::int64_t j = 0; j < s.width; ++j) weight[j * s.channels + d] = w.at(d, j);
      bias[d] = b.data != nullptr ? b.at(d) : 0;
    }
  }
};

// The width - 1 inputs before a sequence, as rows: columns 1 ... of the state, or zeros.
void read_history(const Shape& s, const View<const float, 3>& state, std::int64_t sequence,
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

// The last `width` of (initial state, x): column j is input length - width + j of the sequence.
// Columns move towards the front, so the two states may be the same memory.
void write_state(const Shape& s, const View<const float, 3>& x, const View<const float, 3>& initial,
                 const Piece& piece, const View<float, 3>& final_state) {
  for (std::int64_t j = 0; j < s.width; ++j) {
    const std::int64_t t = piece.length - s.width + j;
    const std::int64_t n = piece.sequence;
    for (std::int64_t d = 0; d < s.channels; ++d) {
      final_state.at(n, d, j) = t >= 0                    ? x.at(piece.batch, piece.begin + t, d)
                                : initial.data != nullptr ? initial.at(n, d, s.width + t)
                                                          : 0;
    }
  }
}

// Pointers to inputs offset - (width - 1) ... offset + count - 1 of the piece's sequence.
void input_rows(const Shape& s, const View<const float, 3>& x, const Piece& piece,
                std::int64_t count, const float* history, const float** rows) {
  const std::int64_t start = piece.begin - piece.offset;
  for (std::int64_t i = 0; i < count + s.width - 1; ++i) {
    const std::int64_t t = piece.offset + i - (s.width - 1);
    rows[i] = t >= 0 ? x(piece.batch, start + t) : history + (s.width - 1 + t) * s.channels;
  }
}

void zero_rows(const View<float, 3>& y, const Piece& piece) {
  for (std::int64_t t = 0; t < piece.tokens; ++t) {
    std::memset(y(piece.batch, piece.begin + t), 0,
                static_cast<std::size_t>(y.extent[2]) * sizeof(float));
  }
}

std::size_t scratch_of(std::int64_t count, std::size_t size) {
  return Scratch::rounded(static_cast<std::size_t>(count) * size);
}

// Scratch of one task of the backward pass.
struct Workspace {
  const float** x_rows;
  const float** dy_rows;
  const float** dz_rows;
  float* history;    // the inputs before the sequence
  float* d_history;  // and their gradients
  float* zeros;      // one row
  float* dz;         // of a piece and the width - 1 tokens after it

  static std::int64_t max_rows(const Shape& s) { return kPieceTokens + 2 * (s.width - 1); }
  static std::size_t bytes(const Shape& s) {
    const std::int64_t before = s.width - 1;
    return 3 * scratch_of(max_rows(s), sizeof(float*)) +
           2 * scratch_of(before * s.channels, sizeof(float)) +
           scratch_of(s.channels, sizeof(float)) +
           scratch_of((kPieceTokens + before) * s.channels, sizeof(float));
  }
  Workspace(const Shape& s, Scratch& scratch)
      : x_rows(scratch.take<const float*>(max_rows(s))),
        dy_rows(scratch.take<const float*>(max_rows(s))),
        dz_rows(scratch.take<const float*>(max_rows(s))),
        history(scratch.take<float>((s.width - 1) * s.channels)),
        d_history(scratch.take<float>((s.width - 1) * s.channels)),
        zeros(scratch.take<float>(s.channels)),
        dz(scratch.take<float>((kPieceTokens + s.width - 1) * s.channels)) {
    std::fill(zeros, zeros + s.channels, 0.0f);
  }
};

Segments segments_of(Shape& shape, const Segments* given) {
  Segments segments = given != nullptr ? *given : Segments::whole(shape.batch, shape.tokens);
  segments.check(shape.op, shape.batch, shape.tokens);
  shape.sequences = segments.count();
  return segments;
}

}  // namespace

void short_conv(Context& context, const ShortConvOptions& options, const ShortConvInputs& inputs,
                const Tensor& y, const Tensor& final_state) {
  Shape s = shape_of("short_conv", inputs.x, inputs.weight);
  const Segments segments = segments_of(s, inputs.segments);
  const auto x = s.rows<const float>(inputs.x, "x");
  const auto weight = s.weight<const float>(inputs.weight, "weight");
  const auto bias = s.channel<const float>(inputs.bias, "bias");
  const auto initial = s.states<const float>(inputs.initial_state, "initial_state");
  require(y.present(), s.op, "y");
  const auto out = s.rows<float>(y, "y");
  const auto final_view = s.states<float>(final_state, "final_state");
  if (s.tokens == 0 && final_view.data == nullptr) return;

  Context::Impl& impl = context.impl();
  const Parameters parameters(s, weight, bias, impl.shared<float>(Parameters::floats(s)));
  const std::int64_t max_rows = kPieceTokens + s.width - 1;
  impl.reserve(scratch_of(max_rows, sizeof(float*)) +
               scratch_of((s.width - 1) * s.channels, sizeof(float)));
  const std::vector<Piece> pieces = pieces_of(segments, s.batch, s.tokens);
  const bool stream = is_streamed(out);
  impl.run(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t task, Scratch& scratch) {
    const Piece& piece = pieces[static_cast<std::size_t>(task)];
    if (piece.sequence < 0) return zero_rows(out, piece);
    const float** rows = scratch.take<const float*>(max_rows);
    float* history = scratch.take<float>((s.width - 1) * s.channels);
    if (piece.offset == 0) {
      read_history(s, initial, piece.sequence, history);
      if (final_view.data != nullptr) write_state(s, x, initial, piece, final_view);
    }
    input_rows(s, x, piece, piece.tokens, history, rows);
    ConvTokens conv{rows,
                    piece.tokens,
                    s.channels,
                    s.width,
                    parameters.weight,
                    parameters.bias,
                    options.activation == ConvActivation::kSilu,
                    stream};
    conv_tokens(context.isa(), conv, out(piece.batch, piece.begin), out.stride[1]);
  });
}

void short_conv_backward(Context& context, const ShortConvOptions& options,
                         const ShortConvInputs& inputs, const ConstTensor& dy,
                         const ConstTensor& d_final, const Tensor& dx, const Tensor& dweight,
                         const Tensor& dbias, const Tensor& d_initial) {
  Shape s = shape_of("short_conv_backward", inputs.x, inputs.weight);
  const Segments segments = segments_of(s, inputs.segments);
  const auto x = s.rows<const float>(inputs.x, "x");
  const auto weight = s.weight<const float>(inputs.weight, "weight");
  const auto bias = s.channel<const float>(inputs.bias, "bias");
  const auto initial = s.states<const float>(inputs.initial_state, "initial_state");
  require(dy.present(), s.op, "dy");
  const auto dy_view = s.rows<const float>(dy, "dy");
  const auto d_final_view = s.states<const float>(d_final, "d_final");
  const auto dx_view = s.rows<float>(dx, "dx");
  const auto dweight_view = s.weight<float>(dweight, "dweight");
  const auto dbias_view = s.channel<float>(dbias, "dbias");
  const auto d_initial_view = s.states<float>(d_initial, "d_initial");
  if (s.tokens == 0 && d_initial_view.data == nullptr) return;

  const bool silu = options.activation == ConvActivation::kSilu;
  const std::int64_t before = s.width - 1, channels = s.channels;
  const std::vector<Piece> pieces = pieces_of(segments, s.batch, s.tokens);
  const auto count = static_cast<std::int64_t>(pieces.size());
  const std::int64_t group = std::max<std::int64_t>(1, (count + kMaxGroups - 1) / kMaxGroups);
  const std::int64_t groups = (count + group - 1) / group;

  Context::Impl& impl = context.impl();
  const std::int64_t set = Parameters::floats(s);
  float* shared = impl.shared<float>((2 + groups) * set);
  const Parameters parameters(s, weight, bias, shared);
  // dx_t = sum_i w_{width-1-i} dz_{t+i}: the same convolution, of later rows with the columns
  // turned.
  View<const float, 2> turned = weight;
  turned.data = weight(0, s.width - 1);
  turned.stride[1] = -weight.stride[1];
  const Parameters adjoint(s, turned, {}, shared + set);
  float* sums = shared + 2 * set;

  impl.reserve(Workspace::bytes(s));
  // With a gradient of the final state some rows are added to once they stand.
  const bool stream = is_streamed(dx_view) && d_final_view.data == nullptr;
  const auto backward = [&](const Piece& piece, const Workspace& work, float* own_sums) {
    const auto& [x_rows, dy_rows, dz_rows, history, d_history, zeros, dz] = work;
    // The inputs of this piece reach the outputs of up to width - 1 tokens after it.
    const std::int64_t tokens = piece.tokens;
    const std::int64_t after = std::min(before, piece.length - piece.offset - tokens);
    if (piece.offset < before) read_history(s, initial, piece.sequence, history);
    input_rows(s, x, piece, tokens + after, history, x_rows);
    for (std::int64_t t = 0; t < tokens + after; ++t) {
      dy_rows[t] = dy_view(piece.batch, piece.begin + t);
    }
    ConvTokens conv{x_rows, tokens, channels, s.width, parameters.weight, parameters.bias, silu};
    conv_gradients(context.isa(), conv, dy_rows, dz, own_sums);
    if (silu) {
      conv.x = x_rows + tokens;
      conv.tokens = after;
      conv_gradients(context.isa(), conv, dy_rows + tokens, dz + tokens * channels, nullptr);
    }
    for (std::int64_t i = 0; i < tokens + 2 * before; ++i) {
      const std::int64_t t = i - before;
      dz_rows[i] = t < 0 || t >= tokens + after ? zeros : silu ? dz + t * channels : dy_rows[t];
    }
    ConvTokens back{dz_rows + before, tokens, channels, s.width, adjoint.weight, adjoint.bias};
    if (dx_view.data != nullptr) {
      back.stream = stream;
      conv_tokens(context.isa(), back, dx_view(piece.batch, piece.begin), dx_view.stride[1]);
      if (d_final_view.data != nullptr) {
        const std::int64_t kept = piece.length - s.width;  // the first token that the state keeps
        for (std::int64_t t = std::max(piece.offset, kept); t < piece.offset + tokens; ++t) {
          float* row = dx_view(piece.batch, piece.begin + t - piece.offset);
          for (std::int64_t d = 0; d < channels; ++d) {
            row[d] += d_final_view.at(piece.sequence, d, t - kept);
          }
        }
      }
    }
    if (d_initial_view.data != nullptr && piece.offset == 0) {
      back.x = dz_rows;
      back.tokens = before;
      back.stream = false;
      conv_tokens(context.isa(), back, d_history, channels);
      for (std::int64_t d = 0; d < channels; ++d) {
        for (std::int64_t j = 0; j < s.width; ++j) {
          float sum = j > 0 ? d_history[(j - 1) * channels + d] : 0;
          if (d_final_view.data != nullptr && j >= piece.length) {
            sum += d_final_view.at(piece.sequence, d, j - piece.length);
          }
          d_initial_view.at(piece.sequence, d, j) = sum;
        }
      }
    }
  };
  const bool parameters_wanted = dweight_view.data != nullptr || dbias_view.data != nullptr;
  impl.run(groups, [&](std::int64_t g, Scratch& scratch) {
    float* own = parameters_wanted ? sums + g * set : nullptr;
    if (own != nullptr) std::fill(own, own + set, 0.0f);
    const Workspace work(s, scratch);
    for (std::int64_t p = g * group; p < std::min((g + 1) * group, count); ++p) {
      check_cancelled();
      const Piece& piece = pieces[static_cast<std::size_t>(p)];
      if (piece.sequence >= 0) {
        backward(piece, work, own);
      } else if (dx_view.data != nullptr) {
        zero_rows(dx_view, piece);
      }
    }
  });
  if (!parameters_wanted || groups == 0) return;
  impl.run(s.width + 1, [&](std::int64_t j, Scratch&) {
    float* sum = sums + j * channels;
    for (std::int64_t g = 1; g < groups; ++g) {
      add_to(context.isa(), sum + g * set, sum, channels);
    }
    for (std::int64_t d = 0; d < channels; ++d) {
      if (j < s.width) {
        if (dweight_view.data != nullptr) dweight_view.at(d, j) += sum[d];
      } else if (dbias_view.data != nullptr) {
        dbias_view.at(d) += sum[d];
      }
    }
  });
}

void short_conv_step(Context& context, const ShortConvOptions& options, const ConstTensor& x,
                     const ConstTensor& weight, const ConstTensor& bias, const Tensor& state,
                     const Tensor& y) {
  Shape s = shape_of("short_conv_step", x, weight);
  s.sequences = s.batch;
  if (s.tokens != 1) {
    throw Error(ErrorKind::kInvalidArgument,
                fmt::format("{}: x should be [sequences, 1, channels], not {}; use short_conv for "
                            "more tokens",
                            s.op, shape_string(x)));
  }
  require(state.present(), s.op, "state");
  require(y.present(), s.op, "y");
  const auto x_view = s.rows<const float>(x, "x");
  const bool is_short = state.rank == 3 && state.extent[2] == s.width - 1;
  const std::int64_t columns = is_short ? s.width - 1 : s.width;
  const auto state_view =
      s.view<float, 3>(state, "state", {s.sequences, s.channels, columns}, false);
  const auto y_view = s.rows<float>(y, "y");
  const auto weight_view = s.weight<const float>(weight, "weight");
  const auto bias_view = s.channel<const float>(bias, "bias");
  context.impl().run(s.batch, [&](std::int64_t n, Scratch&) {
    const ConvStep step{.channels = s.channels,
                        .width = s.width,
                        .columns = columns,
                        .x = x_view(n),
                        .weight = weight_view.data,
                        .weight_row = weight_view.stride[0],
                        .weight_column = weight_view.stride[1],
                        .bias = bias_view.data,
                        .bias_stride = bias_view.stride[0],
                        .window = state_view(n),
                        .window_row = state_view.stride[1],
                        .window_column = state_view.stride[2],
                        .silu = options.activation == ConvActivation::kSilu};
    conv_step(context.isa(), step, y_view(n));
  });
}

}  // namespace ouzel
