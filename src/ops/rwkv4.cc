#include "ouzel/rwkv4.h"

#include <algorithm>
#include <cmath>

#include "src/base/context_impl.h"
#include "src/kernels/elementwise.h"
#include "src/ops/arguments.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/staged_rows.h"

namespace ouzel {
namespace {

constexpr std::int64_t kBlock = 512;
constexpr float kNothingYet = -1e38f;  // eps before the first token

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const Rwkv4Inputs& inputs)
      : op(op),
        shape(extents_of<3>(op, "k", inputs.k, "batch, tokens, channels")),
        channels(shape[2]),
        sequences(op, inputs.segments, shape[0], shape[1]),
        states{sequences.count(), 3, 1, channels},
        k(required<const void, 3>(op, "k", inputs.k, shape)),
        v(required<const void, 3>(op, "v", inputs.v, shape)),
        w(required<const float, 1>(op, "w", inputs.w, {channels})),
        u(required<const float, 1>(op, "u", inputs.u, {channels})),
        initial(view_of<const float, 4>(op, "initial_state", inputs.initial_state, states)),
        residue(view_of<const float, 4>(op, "initial_residue", inputs.initial_residue, states)) {}

  // Of all channels, in memory that the tasks share: -e^w, and e^(u - e^w).
  struct Constants {
    float *decay, *now;
  };
  Constants constants(Context& context) const {
    float* decay = context.impl().shared<float>(2 * channels);
    float* now = decay + channels;
    for (std::int64_t c = 0; c < channels; ++c) {
      const double exact = -std::exp(static_cast<double>(w.at(c)));
      decay[c] = static_cast<float>(exact);
      now[c] = static_cast<float>(std::exp(exact + static_cast<double>(u.at(c))));
    }
    return {decay, now};
  }
  Rwkv4Rows rows(StagedRows& staged, const Segment& part, const ChannelBlock& b,
                 const Constants& constants) const {
    const float* now = constants.now + b.first;
    const bool usable = std::all_of(now, now + b.channels, [](float x) {
      constexpr float kLargest = 2e17f;
      return x > 1 / kLargest && x < kLargest;
    });
    return {staged.in(rows_of(k, part, b.first), part.length, b.channels),
            staged.in(rows_of(v, part, b.first), part.length, b.channels),
            constants.decay + b.first, u(b.first), usable ? now : nullptr};
  }
  // The initial state of a block.
  void load_state(const ChannelBlock& b, float* parts) const {
    const std::int64_t n = b.channels;
    for (std::int64_t i = 0; i < 3; ++i) {
      load(initial.data == nullptr ? nullptr : initial(b.sequence, i, 0, b.first), n,
           parts + i * n);
      load(residue.data == nullptr ? nullptr : residue(b.sequence, i, 0, b.first), n,
           parts + (3 + i) * n);
    }
    if (initial.data == nullptr) std::fill(parts + 2 * n, parts + 3 * n, kNothingYet);
  }

  const char* op;
  std::array<std::int64_t, 3> shape;
  std::int64_t channels;
  Sequences sequences;
  std::array<std::int64_t, 4> states;
  AnyView<const void, 3> k, v;
  View<const float, 1> w, u;
  View<const float, 4> initial, residue;
};

}  // namespace

void rwkv4(Context& context, const Rwkv4Inputs& inputs, const Rwkv4Outputs& outputs) {
  const Call c("rwkv4", inputs);
  const auto o = required<void, 3>(c.op, "o", outputs.o, c.shape);
  const auto final = view_of<float, 4>(c.op, "final_state", outputs.final_state, c.states);
  const auto final_residue =
      view_of<float, 4>(c.op, "final_residue", outputs.final_residue, c.states);
  if (c.sequences.are_empty(final, final_residue)) return;

  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const DType in = shared_type(c.k, c.v), out = o.dtype == in ? in : DType::kF32;
  const bool stream = is_streamed(o), staged = are_staged(in, c.k, c.v) || are_staged(out, o);
  Context::Impl& impl = context.impl();
  const Call::Constants constants = c.constants(context);
  impl.reserve(scratch_of(kRwkv4Parts * blocks.width()) +
               StagedRows::bytes(kStagedTokens, blocks.width(), in, c.k, c.v) +
               StagedRows::bytes(kStagedTokens, blocks.width(), out, o));
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const Segment s = c.sequences[b.sequence];
    float* state = scratch.take<float>(kRwkv4Parts * b.channels);
    c.load_state(b, state);
    StagedRows rows(context.isa(), scratch, in, out);
    each_part(s, staged, [&](const Segment& part) {
      rwkv4_forward(context.isa(), {part.length, b.channels, stream, in, out},
                    c.rows(rows, part, b, constants),
                    rows.out(rows_of(o, part, b.first), part.length, b.channels),
                    {state, b.channels});
      rows.finish();
    });
    for (std::int64_t i = 0; i < 3; ++i) {
      if (final.data != nullptr) {
        store(state + i * b.channels, b.channels, final(b.sequence, i, 0, b.first));
      }
      if (final_residue.data != nullptr) {
        store(state + (3 + i) * b.channels, b.channels, final_residue(b.sequence, i, 0, b.first));
      }
    }
  });
  c.sequences.zero_padding(outputs.o);
}

void rwkv4_backward(Context& context, const Rwkv4Inputs& inputs, const ConstTensor& d_o,
                    const ConstTensor& d_final, const Rwkv4InputGrads& grads) {
  const Call c("rwkv4_backward", inputs);
  const auto d_o_rows = required<const void, 3>(c.op, "d_o", d_o, c.shape);
  const auto d_last = view_of<const float, 4>(c.op, "d_final", d_final, c.states);
  const auto dk = view_of<void, 3>(c.op, "dk", grads.k, c.shape);
  const auto dv = view_of<void, 3>(c.op, "dv", grads.v, c.shape);
  const auto dw = view_of<float, 1>(c.op, "dw", grads.w, {c.channels});
  const auto du = view_of<float, 1>(c.op, "du", grads.u, {c.channels});
  const auto d_first = view_of<float, 4>(c.op, "d_initial", grads.initial_state, c.states);
  if (c.sequences.are_empty(d_first)) return;

  // A task owns channels of all sequences, whose parameters they share.
  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const std::int64_t width = blocks.width();
  const bool stream = is_streamed(dk) && is_streamed(dv);
  const std::int64_t begins = (c.sequences.longest() + kRwkv4Tokens - 1) / kRwkv4Tokens;
  const std::int64_t parts = kRwkv4Parts * width;
  const std::int64_t sizes[] = {parts, parts, 4 * width, parts * begins, kRwkv4Work};
  Context::Impl& impl = context.impl();
  const Call::Constants constants = c.constants(context);
  std::size_t bytes =
      StagedRows::bytes(kRwkv4Tokens, width, DType::kF32, c.k, c.v, d_o_rows, dk, dv);
  for (std::int64_t size : sizes) bytes += scratch_of(size);
  impl.reserve(bytes);
  impl.run(blocks.blocks(), [&](std::int64_t task, Scratch& scratch) {
    float* memory[5];
    for (std::size_t i = 0; i < 5; ++i) memory[i] = scratch.take<float>(sizes[i]);
    const auto [state, d_state, sums, kept, work] = memory;
    const std::int64_t channels = blocks.block(0, task).channels, first = task * kBlock;
    const std::int64_t size = kRwkv4Parts * channels;
    StagedRows rows(context.isa(), scratch);
    load(nullptr, 4 * channels, sums);
    for (std::int64_t n = 0; n < c.sequences.count(); ++n) {
      const ChannelBlock b = blocks.block(n, task);
      const Segment s = c.sequences[n];
      const auto part_from = [&](std::int64_t t) {
        return Segment{s.batch, s.begin + t, std::min(kRwkv4Tokens, s.length - t)};
      };
      c.load_state(b, state);
      for (std::int64_t t = 0; t < s.length; t += kRwkv4Tokens) {
        store(state, size, kept + t / kRwkv4Tokens * size);
        const Segment part = part_from(t);
        rwkv4_forward(context.isa(), {part.length, channels}, c.rows(rows, part, b, constants), {},
                      {state, channels});
        rows.finish();
      }
      load(nullptr, size, d_state);
      for (std::int64_t i = 0; i < 3 && d_last.data != nullptr; ++i) {
        load(d_last(n, i, 0, first), channels, d_state + i * channels);
      }
      for (std::int64_t t = (s.length - 1) / kRwkv4Tokens * kRwkv4Tokens; t >= 0 && s.length > 0;
           t -= kRwkv4Tokens) {
        check_cancelled();
        const Segment part = part_from(t);
        const auto to = [&](const AnyView<void, 3>& view) {
          return rows.wide_out(rows_of(view, part, first), part.length, channels);
        };
        rwkv4_backward(
            context.isa(), {part.length, channels, stream}, c.rows(rows, part, b, constants),
            {kept + t / kRwkv4Tokens * size, channels},
            rows.wide_in(rows_of(d_o_rows, part, first), part.length, channels),
            {to(dk), to(dv), sums, sums + channels, sums + 2 * channels, sums + 3 * channels},
            {d_state, channels}, work);
        rows.finish();
      }
      for (std::int64_t i = 0; i < 3 && d_first.data != nullptr; ++i) {
        store(d_state + i * channels, channels, d_first(n, i, 0, first));
      }
    }
    for (std::int64_t i = 0; i < channels; ++i) {
      const auto sum = [&](std::int64_t at) {
        return static_cast<double>(sums[at * channels + i]) +
               static_cast<double>(sums[(at + 1) * channels + i]);
      };
      // d = -e^w is its own slope; an infinite one has dropped what it decays.
      const auto slope = static_cast<double>(constants.decay[first + i]);
      if (dw.data != nullptr && std::isfinite(slope)) {
        dw.at(first + i) += static_cast<float>(sum(0) * slope);
      }
      if (du.data != nullptr) du.at(first + i) += static_cast<float>(sum(2));
    }
  });
  c.sequences.zero_padding(grads.k);
  c.sequences.zero_padding(grads.v);
}

void rwkv4_step(Context& context, const ConstTensor& k, const ConstTensor& v, const ConstTensor& w,
                const ConstTensor& u, const Tensor& state, const Tensor& residue, const Tensor& o) {
  check_step("rwkv4_step", "k", k, state);
  rwkv4(context, {k, v, w, u, state, residue}, {o, state, residue});
}

}  // namespace ouzel
