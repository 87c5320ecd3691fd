#include "ouzel/selective_scan.h"

#include <algorithm>

#include "src/base/context_impl.h"
#include "src/kernels/pointwise.h"
#include "src/kernels/selective_scan.h"
#include "src/ops/arguments.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/staged_rows.h"

namespace ouzel {
namespace {

// A state of 128 channels and 16 columns, in two parts, with A: 24 KiB, half of the first level.
constexpr std::int64_t kBlock = 128;

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const SelectiveScanOptions& options, const SelectiveScanInputs& inputs)
      : op(op),
        shape(extents_of<3>(op, "x", inputs.x, "batch, tokens, channels")),
        channels(shape[2]),
        width(extents_of<2>(op, "A", inputs.a, "channels, state")[1]),
        softplus(options.dt_softplus),
        sequences(op, inputs.segments, shape[0], shape[1]),
        states{sequences.count(), channels, width},
        columns{shape[0], shape[1], width},
        x(required<const void, 3>(op, "x", inputs.x, shape)),
        dt(required<const void, 3>(op, "dt", inputs.dt, shape)),
        z(view_of<const void, 3>(op, "z", inputs.z, shape)),
        b(required<const void, 3>(op, "B", inputs.b, columns)),
        c(required<const void, 3>(op, "C", inputs.c, columns)),
        a(required<const float, 2>(op, "A", inputs.a, {channels, width})),
        d(view_of<const float, 1>(op, "D", inputs.d, {channels})),
        dt_bias(view_of<const float, 1>(op, "dt_bias", inputs.dt_bias, {channels})),
        initial(view_of<const float, 3>(op, "initial_state", inputs.initial_state, states)) {}

  // `turned` is A of the block, [width][channels].
  SelectiveRows rows(StagedRows& staged, const Segment& part, const ChannelBlock& at,
                     const float* turned) const {
    const auto in = [&](const AnyView<const void, 3>& view) {
      return staged.wide_in(rows_of(view, part, at.first), part.length, at.channels);
    };
    return {in(x),
            in(dt),
            in(z),
            staged.wide_in(rows_of(b, part, 0), part.length, width),
            staged.wide_in(rows_of(c, part, 0), part.length, width),
            width,
            turned,
            d.data == nullptr ? nullptr : d(at.first),
            dt_bias.data == nullptr ? nullptr : dt_bias(at.first),
            softplus};
  }
  // Scratch for the rows of a part.
  std::size_t rows_bytes(std::int64_t tokens, std::int64_t block) const {
    return StagedRows::bytes(tokens, block, DType::kF32, x, dt, z) +
           StagedRows::bytes(tokens, width, DType::kF32, b, c);
  }
  std::int64_t size(const ChannelBlock& at) const { return width * at.channels; }

  const char* op;
  std::array<std::int64_t, 3> shape;
  std::int64_t channels, width;
  bool softplus;
  Sequences sequences;
  std::array<std::int64_t, 3> states, columns;
  AnyView<const void, 3> x, dt, z, b, c;
  View<const float, 2> a;
  View<const float, 1> d, dt_bias;
  View<const float, 3> initial;
};

// A block of channels of [D, M] as [M][channels], and back; null: zeros, or not wanted.
void load_turned(const float* from, std::int64_t stride, std::int64_t channels, std::int64_t width,
                 float* to) {
  if (from == nullptr) return load(nullptr, channels * width, to);
  for (std::int64_t d = 0; d < channels; ++d) {
    for (std::int64_t m = 0; m < width; ++m) to[m * channels + d] = from[d * stride + m];
  }
}
void store_turned(const float* from, std::int64_t channels, std::int64_t width, float* to,
                  std::int64_t stride) {
  if (to == nullptr) return;
  for (std::int64_t d = 0; d < channels; ++d) {
    for (std::int64_t m = 0; m < width; ++m) to[d * stride + m] = from[m * channels + d];
  }
}
template <class T>
T* block_of(const View<T, 3>& state, const ChannelBlock& at) {
  return state.data == nullptr ? nullptr : state(at.sequence, at.first);
}

}  // namespace

void selective_scan(Context& context, const SelectiveScanOptions& options,
                    const SelectiveScanInputs& inputs, const SelectiveScanOutputs& outputs) {
  const Call c("selective_scan", options, inputs);
  const auto residue =
      view_of<const float, 3>(c.op, "initial_residue", inputs.initial_residue, c.states);
  const auto o = required<void, 3>(c.op, "o", outputs.o, c.shape);
  const auto final = view_of<float, 3>(c.op, "final_state", outputs.final_state, c.states);
  const auto final_residue =
      view_of<float, 3>(c.op, "final_residue", outputs.final_residue, c.states);
  if (c.sequences.are_empty(final, final_residue)) return;

  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const bool stream = is_streamed(o), staged = are_staged(DType::kF32, c.x, c.dt, c.z, c.b, c.c, o);
  Context::Impl& impl = context.impl();
  impl.reserve(3 * scratch_of(c.width * blocks.width()) + scratch_of(2 * blocks.width()) +
               c.rows_bytes(kStagedTokens, blocks.width()) +
               StagedRows::bytes(kStagedTokens, blocks.width(), DType::kF32, o));
  LargestDecay decay;
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock at = blocks.task(task);
    const Segment s = c.sequences[at.sequence];
    float* a = scratch.take<float>(c.size(at));
    float* high = scratch.take<float>(c.size(at));
    float* low = scratch.take<float>(c.size(at));
    float* work = scratch.take<float>(2 * at.channels);
    load_turned(c.a(at.first), c.a.stride[0], at.channels, c.width, a);
    load_turned(block_of(c.initial, at), c.initial.stride[1], at.channels, c.width, high);
    load_turned(block_of(residue, at), residue.stride[1], at.channels, c.width, low);
    StagedRows rows(context.isa(), scratch);
    each_part(s, staged, [&](const Segment& part) {
      const auto to = rows.wide_out(rows_of(o, part, at.first), part.length, at.channels);
      decay.see(selective_forward(context.isa(), {part.length, at.channels, stream},
                                  c.rows(rows, part, at, a), to, high, low, work));
      rows.finish();
    });
    store_turned(high, at.channels, c.width, block_of(final, at), final.stride[1]);
    store_turned(low, at.channels, c.width, block_of(final_residue, at), final_residue.stride[1]);
  });
  decay.check(c.op, "dt A");
  c.sequences.zero_padding(outputs.o);
}

void selective_scan_backward(Context& context, const SelectiveScanOptions& options,
                             const SelectiveScanInputs& inputs, const ConstTensor& d_o,
                             const ConstTensor& d_final, const SelectiveScanInputGrads& grads) {
  const Call c("selective_scan_backward", options, inputs);
  const auto d_o_rows = required<const void, 3>(c.op, "d_o", d_o, c.shape);
  const auto d_last = view_of<const float, 3>(c.op, "d_final", d_final, c.states);
  const auto dx = view_of<void, 3>(c.op, "dx", grads.x, c.shape);
  const auto ddt = view_of<void, 3>(c.op, "ddt", grads.dt, c.shape);
  const auto dz = view_of<void, 3>(c.op, "dz", grads.z, c.shape);
  const auto da = view_of<float, 2>(c.op, "dA", grads.a, {c.channels, c.width});
  const auto db = view_of<void, 3>(c.op, "dB", grads.b, c.columns);
  const auto dc = view_of<void, 3>(c.op, "dC", grads.c, c.columns);
  const auto dd = view_of<float, 1>(c.op, "dD", grads.d, {c.channels});
  const auto dbias = view_of<float, 1>(c.op, "ddt_bias", grads.dt_bias, {c.channels});
  const auto d_first = view_of<float, 3>(c.op, "d_initial", grads.initial_state, c.states);
  if (c.sequences.are_empty(d_first)) return;

  // A task owns channels of all sequences, whose parameters they share; its shares of dB and dC are
  // added up when all tasks are done.
  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const std::int64_t begins = (c.sequences.longest() + kSelectiveTokens - 1) / kSelectiveTokens;
  const std::int64_t size = c.width * blocks.width();
  Context::Impl& impl = context.impl();
  const bool stream =
      is_streamed(dx) && is_streamed(ddt) && (dz.data == nullptr || is_streamed(dz));
  const std::int64_t share = c.shape[0] * c.shape[1] * c.width;
  float* shares = impl.shared<float>(2 * share * blocks.blocks());
  impl.reserve(
      7 * scratch_of(size) + scratch_of(size * begins) + scratch_of(2 * blocks.width()) +
      scratch_of(selective_backward_work(c.width)) + scratch_of(4 * blocks.width()) +
      c.rows_bytes(kSelectiveTokens, blocks.width()) +
      StagedRows::bytes(kSelectiveTokens, blocks.width(), DType::kF32, d_o_rows, dx, ddt, dz) +
      StagedRows::bytes(kSelectiveTokens, c.width, DType::kF32, db, dc));
  impl.run(blocks.blocks(), [&](std::int64_t task, Scratch& scratch) {
    float* memory[7];
    for (float*& m : memory) m = scratch.take<float>(size);
    const auto [a, high, low, g_high, g_low, a_high, a_low] = memory;
    float* kept = scratch.take<float>(size * begins);
    float* forward_work = scratch.take<float>(2 * blocks.width());
    float* work = scratch.take<float>(selective_backward_work(c.width));
    float* sums = scratch.take<float>(4 * blocks.width());  // of dD and ddt_bias, in two parts
    const ChannelBlock own = blocks.block(0, task);
    const std::int64_t channels = own.channels, own_size = c.size(own);
    load(nullptr, 4 * channels, sums);
    load(nullptr, own_size, a_high);
    load(nullptr, own_size, a_low);
    load_turned(c.a(own.first), c.a.stride[0], channels, c.width, a);
    StagedRows rows(context.isa(), scratch);
    const View<float, 3> b_share(shares + 2 * task * share, c.columns);
    const View<float, 3> c_share(shares + (2 * task + 1) * share, c.columns);
    for (std::int64_t n = 0; n < c.sequences.count(); ++n) {
      const ChannelBlock at = blocks.block(n, task);
      const Segment s = c.sequences[n];
      // The states at the begins of blocks, the residues dropped as if each were a new call.
      load_turned(block_of(c.initial, at), c.initial.stride[1], channels, c.width, high);
      load(nullptr, own_size, low);
      for (std::int64_t t = 0; t < s.length; t += kSelectiveTokens) {
        store(high, own_size, kept + t / kSelectiveTokens * own_size);
        const Segment part = {s.batch, s.begin + t, std::min(kSelectiveTokens, s.length - t)};
        selective_forward(context.isa(), {part.length, channels}, c.rows(rows, part, at, a), {},
                          high, low, forward_work);
        rows.finish();
      }
      load_turned(block_of(d_last, at), d_last.stride[1], channels, c.width, g_high);
      load(nullptr, own_size, g_low);
      for (std::int64_t t = (s.length - 1) / kSelectiveTokens * kSelectiveTokens;
           t >= 0 && s.length > 0; t -= kSelectiveTokens) {
        check_cancelled();
        const std::int64_t tokens = std::min(kSelectiveTokens, s.length - t);
        const Segment part = {s.batch, s.begin + t, tokens};
        SelectiveGradRows to;
        to.x = rows.wide_out(rows_of(dx, part, own.first), tokens, channels);
        to.dt = rows.wide_out(rows_of(ddt, part, own.first), tokens, channels);
        to.z = rows.wide_out(rows_of(dz, part, own.first), tokens, channels);
        to.b = rows_of(b_share, part, 0);
        to.c = rows_of(c_share, part, 0);
        to.a_high = a_high;
        to.a_low = a_low;
        to.skip_high = sums;
        to.skip_low = sums + channels;
        to.bias_high = sums + 2 * channels;
        to.bias_low = sums + 3 * channels;
        selective_backward(context.isa(), {tokens, channels, stream}, c.rows(rows, part, at, a),
                           kept + t / kSelectiveTokens * own_size,
                           rows.wide_in(rows_of(d_o_rows, part, own.first), tokens, channels), to,
                           g_high, g_low, work);
        rows.finish();
      }
      store_turned(g_high, channels, c.width, block_of(d_first, at), d_first.stride[1]);
    }
    for (std::int64_t i = 0; i < channels; ++i) {
      if (dd.data != nullptr) dd.at(own.first + i) += sums[i];
      if (dbias.data != nullptr) dbias.at(own.first + i) += sums[2 * channels + i];
      for (std::int64_t m = 0; m < c.width && da.data != nullptr; ++m) {
        da.at(own.first + i, m) += a_high[m * channels + i];
      }
    }
  });
  const auto add_shares = [&](const AnyView<void, 3>& to, std::int64_t which) {
    if (to.data == nullptr) return;
    impl.run(c.sequences.count(), [&](std::int64_t n, Scratch& scratch) {
      StagedRows rows(context.isa(), scratch);
      each_part(c.sequences[n], are_staged(DType::kF32, to), [&](const Segment& part) {
        const TokenRows<float> sums = rows.wide_out(rows_of(to, part, 0), part.length, c.width);
        for (std::int64_t t = 0; t < part.length; ++t) {
          check_cancelled_at(t);
          float* sum = sums.data + t * sums.stride;
          load(nullptr, c.width, sum);
          for (std::int64_t k = 0; k < blocks.blocks(); ++k) {
            const View<float, 3> from(shares + (2 * k + which) * share, c.columns);
            add_to(context.isa(), from(part.batch, part.begin + t), sum, c.width);
          }
        }
        rows.finish();
      });
    });
  };
  add_shares(db, 0);
  add_shares(dc, 1);
  for (const Tensor* rows : {&grads.x, &grads.dt, &grads.z, &grads.b, &grads.c}) {
    c.sequences.zero_padding(*rows);
  }
}

void selective_scan_step(Context& context, const SelectiveScanOptions& options,
                         const SelectiveScanInputs& inputs, const Tensor& state,
                         const Tensor& residue, const Tensor& o) {
  check_step("selective_scan_step", "x", inputs.x, state);
  SelectiveScanInputs token = inputs;
  token.initial_state = state;
  token.initial_residue = residue;
  token.segments = nullptr;
  selective_scan(context, options, token, {o, state, residue});
}

}  // namespace ouzel
