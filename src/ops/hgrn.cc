#include "ouzel/hgrn.h"

#include "src/base/context_impl.h"
#include "src/kernels/elementwise.h"
#include "src/ops/arguments.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/scan_history.h"
#include "src/ops/staged_rows.h"

namespace ouzel {
namespace {

// Channels of a task. A page of a row: shorter runs leave bandwidth unused (512: 0.73 of it, 1,024:
// 0.87, 2,048: 0.93), longer ones leave wide calls with fewer tasks.
constexpr std::int64_t kBlock = 1024;

// The call's shapes and its inputs as typed views.
struct Call {
  // `like`: the tensor that has the shape of all.
  Call(const char* op, const HgrnInputs& inputs, const char* name, const ConstTensor& like)
      : op(op),
        shape(extents_of<3>(op, name, like, "batch, tokens, channels")),
        channels(shape[2]),
        sequences(op, inputs.segments, shape[0], shape[1]),
        states{sequences.count(), channels},
        x(view_of<const void, 3>(op, "x", inputs.x, shape)),
        g(required<const void, 3>(op, "g", inputs.g, shape)),
        initial(view_of<const float, 2>(op, "initial_state", inputs.initial_state, states)),
        residue(view_of<const float, 2>(op, "initial_residue", inputs.initial_residue, states)) {}

  // Tokens of a block of channels; returns the largest g, at least 0.
  float forward(Isa isa, StagedRows& rows, const Segment& part, const ChannelBlock& b, bool stream,
                DType in, DType out, TokenRows<void> o, float* high, float* low) const {
    return hgrn_forward(isa, {part.length, b.channels, stream, in, out},
                        rows.in(rows_of(x, part, b.first), part.length, b.channels),
                        rows.in(rows_of(g, part, b.first), part.length, b.channels), o, high, low);
  }

  const char* op;
  std::array<std::int64_t, 3> shape;
  std::int64_t channels;
  Sequences sequences;
  std::array<std::int64_t, 2> states;
  AnyView<const void, 3> x, g;
  View<const float, 2> initial, residue;
};

}  // namespace

void hgrn(Context& context, const HgrnInputs& inputs, const HgrnOutputs& outputs) {
  const Call c("hgrn", inputs, "x", inputs.x);
  const auto o = required<void, 3>(c.op, "o", outputs.o, c.shape);
  const auto final = view_of<float, 2>(c.op, "final_state", outputs.final_state, c.states);
  const auto final_residue =
      view_of<float, 2>(c.op, "final_residue", outputs.final_residue, c.states);
  if (c.sequences.are_empty(final, final_residue)) return;

  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const DType in = shared_type(c.x, c.g), out = o.dtype == in ? in : DType::kF32;
  const bool stream = is_streamed(o), staged = are_staged(in, c.x, c.g) || are_staged(out, o);
  Context::Impl& impl = context.impl();
  impl.reserve(2 * scratch_of(blocks.width()) +
               StagedRows::bytes(kStagedTokens, blocks.width(), in, c.x, c.g) +
               StagedRows::bytes(kStagedTokens, blocks.width(), out, o));
  LargestDecay decay;
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    float* high = scratch.take<float>(b.channels);
    float* low = scratch.take<float>(b.channels);
    load(row_of(c.initial, b), b.channels, high);
    load(row_of(c.residue, b), b.channels, low);
    StagedRows rows(context.isa(), scratch, in, out);
    each_part(c.sequences[b.sequence], staged, [&](const Segment& part) {
      const auto to = rows.out(rows_of(o, part, b.first), part.length, b.channels);
      decay.see(c.forward(context.isa(), rows, part, b, stream, in, out, to, high, low));
      rows.finish();
    });
    store(high, b.channels, row_of(final, b));
    store(low, b.channels, row_of(final_residue, b));
  });
  decay.check(c.op, "g");
  c.sequences.zero_padding(outputs.o);
}

void hgrn_backward(Context& context, const HgrnInputs& inputs, const ConstTensor& o,
                   const ConstTensor& d_o, const ConstTensor& d_final, const Tensor& dx,
                   const Tensor& dg, const Tensor& d_initial) {
  const Call c("hgrn_backward", inputs, "g", inputs.g);
  if (!o.present()) required<const void, 3>(c.op, "x", inputs.x, c.shape);
  const auto h = view_of<const float, 3>(c.op, "o", o, c.shape);
  const auto d_o_rows = required<const void, 3>(c.op, "d_o", d_o, c.shape);
  const auto d_last = view_of<const float, 2>(c.op, "d_final", d_final, c.states);
  const auto dx_rows = view_of<void, 3>(c.op, "dx", dx, c.shape);
  const auto dg_rows = view_of<void, 3>(c.op, "dg", dg, c.shape);
  const auto d_first = view_of<float, 2>(c.op, "d_initial", d_initial, c.states);
  if (c.sequences.are_empty(d_first)) return;

  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const bool stream = is_streamed(dx_rows) && is_streamed(dg_rows);
  const DType in = shared_type(c.x, c.g, d_o_rows), own = shared_type(dx_rows, dg_rows);
  const DType out = own == in ? in : DType::kF32;
  const bool staged = are_staged(in, c.x, c.g, d_o_rows) || are_staged(out, dx_rows, dg_rows);
  const ScanHistory history(o.present(), c.sequences.longest(), blocks.width());
  Context::Impl& impl = context.impl();
  impl.reserve(2 * scratch_of(blocks.width()) + history.bytes() +
               StagedRows::bytes(kStagedTokens, blocks.width(), in, c.x, c.g, d_o_rows) +
               StagedRows::bytes(kStagedTokens, blocks.width(), out, dx_rows, dg_rows));
  const Isa isa = context.isa();
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const Segment s = c.sequences[b.sequence];
    float* high = scratch.take<float>(b.channels);
    float* low = scratch.take<float>(b.channels);
    const ScanHistory::Memory memory = history.take(scratch);
    load(row_of(d_last, b), b.channels, high);
    load(nullptr, b.channels, low);
    StagedRows rows(isa, scratch, in, out);
    const auto forward = [&](const Segment& block, TokenRows<float> to, float* up, float* rest) {
      each_part(block, staged, [&](const Segment& part) {
        const TokenRows<void> at = {to.data + (part.begin - block.begin) * to.stride, to.stride};
        c.forward(isa, rows, part, b, false, in, DType::kF32, at, up, rest);
        rows.finish();
      });
    };
    const auto back = [&](const Segment& block, TokenRows<const float> states,
                          const float* before) {
      each_part_back(block, staged, [&](const Segment& part) {
        const auto from = [&](const auto& view) {
          return rows.in(rows_of(view, part, b.first), part.length, b.channels);
        };
        const auto to = [&](const auto& view) {
          return rows.out(rows_of(view, part, b.first), part.length, b.channels);
        };
        const std::int64_t t = part.begin - block.begin;
        const float* h_rows = states.data + t * states.stride;
        hgrn_backward(isa, {part.length, b.channels, stream, in, out}, from(c.g),
                      {h_rows, states.stride}, t > 0 ? h_rows - states.stride : before,
                      from(d_o_rows), to(dx_rows), to(dg_rows), high, low);
        rows.finish();
      });
    };
    history.run(memory, s, b.channels, rows_of(h, s, b.first), row_of(c.initial, b),
                row_of(c.residue, b), forward, back);
    store(high, b.channels, row_of(d_first, b));
  });
  c.sequences.zero_padding(dx);
  c.sequences.zero_padding(dg);
}

void hgrn_step(Context& context, const ConstTensor& x, const ConstTensor& g, const Tensor& state,
               const Tensor& residue, const Tensor& o) {
  check_step("hgrn_step", "x", x, state);
  hgrn(context, {x, g, state, residue}, {o, state, residue});
}

}  // namespace ouzel
