#include "ouzel/hgrn.h"

#include "src/base/context_impl.h"
#include "src/kernels/elementwise.h"
#include "src/ops/arguments.h"
#include "src/ops/channel_blocks.h"

namespace ouzel {
namespace {

// Channels of a task. A page of a row: shorter runs leave bandwidth unused (512: 0.73 of it, 1,024:
// 0.87, 2,048: 0.93), longer ones leave wide calls with fewer tasks.
constexpr std::int64_t kBlock = 1024;

}  // namespace

void hgrn(Context& context, const HgrnInputs& inputs, const HgrnOutputs& outputs) {
  const char* op = "hgrn";
  const auto shape = extents_of<3>(op, "x", inputs.x, "batch, tokens, channels");
  const auto [batch, tokens, channels] = shape;
  const Sequences sequences(op, inputs.segments, batch, tokens);
  const std::array<std::int64_t, 2> states{sequences.count(), channels};
  const auto x = required<const float, 3>(op, "x", inputs.x, shape);
  const auto g = required<const float, 3>(op, "g", inputs.g, shape);
  const auto initial = view_of<const float, 2>(op, "initial_state", inputs.initial_state, states);
  const auto residue =
      view_of<const float, 2>(op, "initial_residue", inputs.initial_residue, states);
  const auto o = required<float, 3>(op, "o", outputs.o, shape);
  const auto final = view_of<float, 2>(op, "final_state", outputs.final_state, states);
  const auto final_residue = view_of<float, 2>(op, "final_residue", outputs.final_residue, states);
  if (sequences.are_empty(final, final_residue)) return;

  const ChannelBlocks blocks(sequences.count(), channels, kBlock);
  const bool stream = is_streamed(o);
  Context::Impl& impl = context.impl();
  impl.reserve(2 * Scratch::rounded(static_cast<std::size_t>(blocks.width()) * sizeof(float)));
  LargestDecay decay;
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const Segment s = sequences[b.sequence];
    float* high = scratch.take<float>(b.channels);
    float* low = scratch.take<float>(b.channels);
    load(row_of(initial, b), b.channels, high);
    load(row_of(residue, b), b.channels, low);
    if (s.length > 0) {
      decay.see(hgrn_forward(context.isa(), {s.length, b.channels, stream}, rows_of(x, s, b.first),
                             rows_of(g, s, b.first), rows_of(o, s, b.first), high, low));
    }
    store(high, b.channels, row_of(final, b));
    store(low, b.channels, row_of(final_residue, b));
  });
  decay.check(op, "g");
  sequences.zero_padding(outputs.o);
}

void hgrn_backward(Context& context, const HgrnInputs& inputs, const ConstTensor& o,
                   const ConstTensor& d_o, const ConstTensor& d_final, const Tensor& dx,
                   const Tensor& dg, const Tensor& d_initial) {
  const char* op = "hgrn_backward";
  const auto shape = extents_of<3>(op, "g", inputs.g, "batch, tokens, channels");
  const auto [batch, tokens, channels] = shape;
  const Sequences sequences(op, inputs.segments, batch, tokens);
  const std::array<std::int64_t, 2> states{sequences.count(), channels};
  const auto g = required<const float, 3>(op, "g", inputs.g, shape);
  const auto h = required<const float, 3>(op, "o", o, shape);
  const auto initial = view_of<const float, 2>(op, "initial_state", inputs.initial_state, states);
  const auto d_o_rows = required<const float, 3>(op, "d_o", d_o, shape);
  const auto d_last = view_of<const float, 2>(op, "d_final", d_final, states);
  const auto dx_rows = view_of<float, 3>(op, "dx", dx, shape);
  const auto dg_rows = view_of<float, 3>(op, "dg", dg, shape);
  const auto d_first = view_of<float, 2>(op, "d_initial", d_initial, states);
  if (sequences.are_empty(d_first)) return;

  const ChannelBlocks blocks(sequences.count(), channels, kBlock);
  const bool stream = is_streamed(dx_rows) && is_streamed(dg_rows);
  Context::Impl& impl = context.impl();
  impl.reserve(3 * Scratch::rounded(static_cast<std::size_t>(blocks.width()) * sizeof(float)));
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const Segment s = sequences[b.sequence];
    float* high = scratch.take<float>(b.channels);
    float* low = scratch.take<float>(b.channels);
    float* h0 = scratch.take<float>(b.channels);
    load(row_of(d_last, b), b.channels, high);
    load(nullptr, b.channels, low);
    load(row_of(initial, b), b.channels, h0);
    if (s.length > 0) {
      hgrn_backward(context.isa(), {s.length, b.channels, stream}, rows_of(g, s, b.first),
                    rows_of(h, s, b.first), h0, rows_of(d_o_rows, s, b.first),
                    rows_of(dx_rows, s, b.first), rows_of(dg_rows, s, b.first), high, low);
    }
    store(high, b.channels, row_of(d_first, b));
  });
  sequences.zero_padding(dx);
  sequences.zero_padding(dg);
}

void hgrn_step(Context& context, const ConstTensor& x, const ConstTensor& g, const Tensor& state,
               const Tensor& residue, const Tensor& o) {
  check_step("hgrn_step", "x", x, state);
  hgrn(context, {x, g, state, residue}, {o, state, residue});
}

}  // namespace ouzel
