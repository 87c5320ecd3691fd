#include "ouzel/short_conv.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/base/dense_tensor.h"
#include "src/kernels/convert.h"
#include "src/kernels/pointwise.h"
#include "src/kernels/short_conv.h"
#include "src/ops/channel_blocks.h"

namespace ouzel {
namespace {

// Tokens of one task: 64 rows of 384 channels and their gradients fit the second-level cache.
constexpr std::int64_t kPieceTokens = 64;
// Numbers that go through scratch together where rows have 16 bits: they stay in the second-level
// cache beside what is made of them.
constexpr std::int64_t kStagedFloats = 1 << 14;
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

// A row as float32: where it is, or in `wide`.
const float* wide_row(Isa isa, const AnyRows<const void>& row, std::int64_t n, float* wide) {
  if (!is_half(row.dtype)) return static_cast<const float*>(row.first);
  convert(isa, row.dtype, row.first, DType::kF32, wide, n);
  return wide;
}
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

// Tokens that go through scratch together: a multiple of what the kernels take at a time.
std::int64_t staged_tokens(const Shape& s) {
  const std::int64_t tokens = kStagedFloats / std::max<std::int64_t>(1, s.channels) / 4 * 4;
  return std::clamp<std::int64_t>(tokens, 4, kPieceTokens);
}

// The inputs of a piece, for kernels that take them where they are or as float32. For the latter
// those of 16 bits are converted into a ring of as many rows as are looked at together.
struct InputRows {
  static std::int64_t ring_floats(const Shape& s, DType dtype) {
    return is_half(dtype) ? (staged_tokens(s) + s.width - 1) * s.channels : 0;
  }

  // Whether all inputs that a piece sees have the type of x.
  bool have_one_type(const View<const float, 3>& initial) const {
    return !is_half(x.dtype) || piece.offset >= s.width - 1 || initial.data == nullptr;
  }
  // Pointers to inputs first - (width - 1) ... first + count - 1, of tokens of the piece, as they
  // are or as float32. Of the latter those before `first` have been loaded, unless it is 0.
  void load(Isa isa, bool as_they_are, std::int64_t first, std::int64_t count) const {
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

  const Shape& s;
  const AnyView<const void, 3>& x;
  const Piece& piece;
  const float* history;
  float* ring;
  const void** rows;
};

// The last `width` of (initial state, x) of a sequence whose first piece this is: column j is input
// length - width + j. Columns move towards the front, so the two states may be the same memory.
void write_state(Isa isa, const InputRows& in, const View<const float, 3>& initial,
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

void zero_rows(const AnyView<void, 3>& y, const Piece& piece) {
  for (std::int64_t t = 0; t < piece.tokens; ++t) {
    std::memset(y(piece.batch, piece.begin + t).first, 0,
                static_cast<std::size_t>(y.extent[2] * size_of(y.dtype)));
  }
}

std::size_t pointers_bytes(std::int64_t count) {
  return Scratch::rounded(static_cast<std::size_t>(count) * sizeof(void*));
}

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
  // Rows of 16 bits as float32: see InputRows, [staged tokens][channels], and the last of a
  // sequence, [width][channels].
  float *x_ring, *dy_wide, *dx_wide;

  static std::int64_t max_rows(const Shape& s) { return kPieceTokens + 2 * (s.width - 1); }
  static std::int64_t wide_floats(const Shape& s, DType dtype, std::int64_t rows) {
    return is_half(dtype) ? rows * s.channels : 0;
  }
  static std::size_t bytes(const Shape& s, const Types& types) {
    const std::int64_t before = s.width - 1;
    return 3 * pointers_bytes(max_rows(s)) + 2 * scratch_of(before * s.channels) +
           scratch_of(s.channels) + scratch_of((kPieceTokens + before) * s.channels) +
           scratch_of(InputRows::ring_floats(s, types.x)) +
           scratch_of(wide_floats(s, types.dy, staged_tokens(s))) +
           scratch_of(wide_floats(s, types.dx, s.width));
  }
  Workspace(const Shape& s, const Types& types, Scratch& scratch)
      : x_rows(scratch.take<const void*>(max_rows(s))),
        dy_rows(scratch.take<const void*>(max_rows(s))),
        dz_rows(scratch.take<const void*>(max_rows(s))),
        history(scratch.take<float>((s.width - 1) * s.channels)),
        d_history(scratch.take<float>((s.width - 1) * s.channels)),
        zeros(scratch.take<float>(s.channels)),
        dz(scratch.take<float>((kPieceTokens + s.width - 1) * s.channels)),
        x_ring(scratch.take<float>(InputRows::ring_floats(s, types.x))),
        dy_wide(scratch.take<float>(wide_floats(s, types.dy, staged_tokens(s)))),
        dx_wide(scratch.take<float>(wide_floats(s, types.dx, s.width))) {
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
  const auto x = s.rows<const void>(inputs.x, "x");
  const auto weight = s.weight<const float>(inputs.weight, "weight");
  const auto bias = s.channel<const float>(inputs.bias, "bias");
  const auto initial = s.states<const float>(inputs.initial_state, "initial_state");
  require(y.present(), s.op, "y");
  const auto out = s.rows<void>(y, "y");
  const auto final_view = s.states<float>(final_state, "final_state");
  if (s.tokens == 0 && final_view.data == nullptr) return;

  Context::Impl& impl = context.impl();
  const Parameters parameters(s, weight, bias, impl.shared<float>(Parameters::floats(s)));
  const std::int64_t max_rows = kPieceTokens + s.width - 1;
  const std::int64_t ring_floats = InputRows::ring_floats(s, x.dtype);
  impl.reserve(pointers_bytes(max_rows) + scratch_of((s.width - 1) * s.channels) +
               scratch_of(ring_floats));
  const Isa isa = context.isa();
  const std::vector<Piece> pieces = pieces_of(segments, s.batch, s.tokens);
  const bool stream = is_streamed(out);
  impl.run(static_cast<std::int64_t>(pieces.size()), [&](std::int64_t task, Scratch& scratch) {
    const Piece& piece = pieces[static_cast<std::size_t>(task)];
    if (piece.sequence < 0) return zero_rows(out, piece);
    const void** pointers = scratch.take<const void*>(max_rows);
    float* history = scratch.take<float>((s.width - 1) * s.channels);
    const InputRows rows{s, x, piece, history, scratch.take<float>(ring_floats), pointers};
    if (piece.offset == 0) {
      read_history(s, initial, piece.sequence, history);
      if (final_view.data != nullptr) write_state(isa, rows, initial, final_view);
    }
    const bool as_they_are =
        rows.have_one_type(initial) && (!is_half(x.dtype) || out.dtype == x.dtype);
    const std::int64_t step = as_they_are ? kPieceTokens : staged_tokens(s);
    for (std::int64_t t = 0; t < piece.tokens; t += step) {
      const std::int64_t tokens = std::min(step, piece.tokens - t);
      rows.load(isa, as_they_are, t, tokens);
      const ConvTokens conv{pointers,        as_they_are ? x.dtype : DType::kF32,
                            tokens,          s.channels,
                            s.width,         parameters.weight,
                            parameters.bias, options.activation == ConvActivation::kSilu,
                            stream};
      const AnyRows<void> to = out(piece.batch, piece.begin + t);
      conv_tokens(isa, conv, to.first, to.dtype, to.stride);
    }
  });
}

void short_conv_backward(Context& context, const ShortConvOptions& options,
                         const ShortConvInputs& inputs, const ConstTensor& dy,
                         const ConstTensor& d_final, const Tensor& dx, const Tensor& dweight,
                         const Tensor& dbias, const Tensor& d_initial) {
  Shape s = shape_of("short_conv_backward", inputs.x, inputs.weight);
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

  const Workspace::Types types = {x.dtype, dy_view.dtype, dx_view.dtype};
  impl.reserve(Workspace::bytes(s, types));
  const Isa isa = context.isa();
  // With a gradient of the final state some rows are added to once they stand.
  const bool stream = is_streamed(dx_view) && d_final_view.data == nullptr;
  const auto backward = [&](const Piece& piece, const Workspace& work, float* own_sums) {
    const auto& [x_rows, dy_rows, dz_rows, history, d_history, zeros, dz, x_ring, dy_wide,
                 dx_wide] = work;
    // The inputs of this piece reach the outputs of up to width - 1 tokens after it.
    const std::int64_t tokens = piece.tokens;
    const std::int64_t after = std::min(before, piece.length - piece.offset - tokens);
    if (piece.offset < before) read_history(s, initial, piece.sequence, history);
    const InputRows rows{s, x, piece, history, x_ring, x_rows};
    const bool as_they_are =
        types.x == types.dy && rows.have_one_type(initial) && (silu || !is_half(types.x));
    ConvTokens conv{x_rows,
                    as_they_are ? types.x : DType::kF32,
                    0,
                    channels,
                    s.width,
                    parameters.weight,
                    parameters.bias,
                    silu};
    // dz of tokens from `first` on, without an activation dy itself, and what they add to the sums.
    const std::int64_t step = as_they_are ? tokens + after : staged_tokens(s);
    const auto gradients = [&](std::int64_t first, std::int64_t end, float* to) {
      for (std::int64_t t = first; t < end; t += step) {
        conv.tokens = std::min(step, end - t);
        for (std::int64_t i = 0; i < conv.tokens; ++i) {
          const AnyRows<const void> row = dy_view(piece.batch, piece.begin + t + i);
          float* wide = silu ? dy_wide + i * channels : dz + (t + i) * channels;
          dy_rows[t + i] = as_they_are ? row.first : wide_row(isa, row, channels, wide);
        }
        if (!silu && to == nullptr) continue;
        rows.load(isa, as_they_are, t, conv.tokens);
        conv_gradients(isa, conv, dy_rows + t, dz + t * channels, to);
      }
    };
    gradients(0, tokens, own_sums);
    gradients(tokens, tokens + after, nullptr);
    for (std::int64_t i = 0; i < tokens + 2 * before; ++i) {
      const std::int64_t t = i - before;
      dz_rows[i] = t < 0 || t >= tokens + after ? zeros : silu ? dz + t * channels : dy_rows[t];
    }
    ConvTokens back{.x = dz_rows + before,
                    .channels = channels,
                    .width = s.width,
                    .weight = adjoint.weight,
                    .bias = adjoint.bias};
    if (dx_view.data != nullptr) {
      // Tokens that the state keeps are added to before they are rounded.
      const std::int64_t kept = piece.length - s.width - piece.offset;
      const bool adds = d_final_view.data != nullptr;
      const bool apart = adds && is_half(types.dx);
      const std::int64_t own = apart ? std::clamp<std::int64_t>(kept, 0, tokens) : tokens;
      AnyRows<void> to = dx_view(piece.batch, piece.begin);
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
          row[d] += d_final_view.at(piece.sequence, d, t - kept);
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
    const Workspace work(s, types, scratch);
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
