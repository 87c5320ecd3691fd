#include "ouzel/rg_lru.h"

#include <cmath>

#include "src/base/context_impl.h"
#include "src/kernels/elementwise.h"
#include "src/ops/arguments.h"
#include "src/ops/channel_blocks.h"
#include "src/ops/scan_history.h"
#include "src/ops/staged_rows.h"

namespace ouzel {
namespace {

constexpr std::int64_t kBlock = 1024;

double softplus(double x) { return std::fmax(x, 0.0) + std::log1p(std::exp(-std::fabs(x))); }
double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

// The call's shapes and its inputs as typed views.
struct Call {
  Call(const char* op, const RgLruInputs& inputs)
      : op(op),
        shape(extents_of<3>(op, "x", inputs.x, "batch, tokens, channels")),
        channels(shape[2]),
        sequences(op, inputs.segments, shape[0], shape[1]),
        states{sequences.count(), channels},
        x(required<const void, 3>(op, "x", inputs.x, shape)),
        r(required<const void, 3>(op, "r", inputs.r, shape)),
        i(required<const void, 3>(op, "i", inputs.i, shape)),
        a_param(required<const float, 1>(op, "a_param", inputs.a_param, {channels})),
        initial(view_of<const float, 2>(op, "initial_state", inputs.initial_state, states)),
        residue(view_of<const float, 2>(op, "initial_residue", inputs.initial_residue, states)) {}

  // c softplus(a_param), in memory that the tasks share.
  const float* rates(Context& context, double c) const {
    checked(op, "c", c, 0);
    float* rate = context.impl().shared<float>(channels);
    for (std::int64_t d = 0; d < channels; ++d) {
      rate[d] = static_cast<float>(c * softplus(static_cast<double>(a_param.at(d))));
    }
    return rate;
  }
  // Tokens of sequence `s`.
  RgLruRows rows(StagedRows& staged, const RgLruOptions& options, const Segment& s,
                 const Segment& part, const ChannelBlock& b, const float* rate) const {
    const auto in = [&](const AnyView<const void, 3>& view) {
      return staged.in(rows_of(view, part, b.first), part.length, b.channels);
    };
    return {in(x), in(r), in(i), rate + b.first,
            options.first_multiplier_one && part.begin == s.begin};
  }

  const char* op;
  std::array<std::int64_t, 3> shape;
  std::int64_t channels;
  Sequences sequences;
  std::array<std::int64_t, 2> states;
  AnyView<const void, 3> x, r, i;
  View<const float, 1> a_param;
  View<const float, 2> initial, residue;
};

}  // namespace

void rg_lru(Context& context, const RgLruOptions& options, const RgLruInputs& inputs,
            const RgLruOutputs& outputs) {
  const Call c("rg_lru", inputs);
  const auto o = required<void, 3>(c.op, "o", outputs.o, c.shape);
  const auto final = view_of<float, 2>(c.op, "final_state", outputs.final_state, c.states);
  const auto final_residue =
      view_of<float, 2>(c.op, "final_residue", outputs.final_residue, c.states);
  if (c.sequences.are_empty(final, final_residue)) return;

  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const DType in = shared_type(c.x, c.r, c.i), out = o.dtype == in ? in : DType::kF32;
  const bool stream = is_streamed(o), staged = are_staged(in, c.x, c.r, c.i) || are_staged(out, o);
  Context::Impl& impl = context.impl();
  const float* rate = c.rates(context, options.c);
  impl.reserve(2 * scratch_of(blocks.width()) +
               StagedRows::bytes(kStagedTokens, blocks.width(), in, c.x, c.r, c.i) +
               StagedRows::bytes(kStagedTokens, blocks.width(), out, o));
  impl.run(blocks.tasks(), [&](std::int64_t task, Scratch& scratch) {
    const ChannelBlock b = blocks.task(task);
    const Segment s = c.sequences[b.sequence];
    float* high = scratch.take<float>(b.channels);
    float* low = scratch.take<float>(b.channels);
    load(row_of(c.initial, b), b.channels, high);
    load(row_of(c.residue, b), b.channels, low);
    StagedRows rows(context.isa(), scratch, in, out);
    each_part(s, staged, [&](const Segment& part) {
      rg_lru_forward(context.isa(), {part.length, b.channels, stream, in, out},
                     c.rows(rows, options, s, part, b, rate),
                     rows.out(rows_of(o, part, b.first), part.length, b.channels), high, low);
      rows.finish();
    });
    store(high, b.channels, row_of(final, b));
    store(low, b.channels, row_of(final_residue, b));
  });
  c.sequences.zero_padding(outputs.o);
}

void rg_lru_backward(Context& context, const RgLruOptions& options, const RgLruInputs& inputs,
                     const ConstTensor& o, const ConstTensor& d_o, const ConstTensor& d_final,
                     const RgLruInputGrads& grads) {
  const Call c("rg_lru_backward", inputs);
  const auto h = view_of<const float, 3>(c.op, "o", o, c.shape);
  const auto d_o_rows = required<const void, 3>(c.op, "d_o", d_o, c.shape);
  const auto d_last = view_of<const float, 2>(c.op, "d_final", d_final, c.states);
  const auto dx = view_of<void, 3>(c.op, "dx", grads.x, c.shape);
  const auto dr = view_of<void, 3>(c.op, "dr", grads.r, c.shape);
  const auto di = view_of<void, 3>(c.op, "di", grads.i, c.shape);
  const auto da = view_of<float, 1>(c.op, "da_param", grads.a_param, {c.channels});
  const auto d_first = view_of<float, 2>(c.op, "d_initial", grads.initial_state, c.states);
  if (c.sequences.are_empty(d_first)) return;

  // A task owns channels of all sequences, whose parameters they share.
  const ChannelBlocks blocks(c.sequences.count(), c.channels, kBlock);
  const bool stream = is_streamed(dx) && is_streamed(dr) && is_streamed(di);
  const DType in = shared_type(c.x, c.r, c.i, d_o_rows), own = shared_type(dx, dr, di);
  const DType out = own == in ? in : DType::kF32;
  const bool staged = are_staged(in, c.x, c.r, c.i, d_o_rows) || are_staged(out, dx, dr, di);
  const ScanHistory history(o.present(), c.sequences.longest(), blocks.width());
  Context::Impl& impl = context.impl();
  const Isa isa = context.isa();
  const float* rate = c.rates(context, options.c);
  impl.reserve(4 * scratch_of(blocks.width()) + history.bytes() +
               StagedRows::bytes(kStagedTokens, blocks.width(), in, c.x, c.r, c.i, d_o_rows) +
               StagedRows::bytes(kStagedTokens, blocks.width(), out, dx, dr, di));
  impl.run(blocks.blocks(), [&](std::int64_t task, Scratch& scratch) {
    float* memory[4];
    for (float*& m : memory) m = scratch.take<float>(blocks.width());
    const auto [high, low, rate_high, rate_low] = memory;
    const ScanHistory::Memory past = history.take(scratch);
    StagedRows rows(isa, scratch, in, out);
    load(nullptr, blocks.width(), rate_high);
    load(nullptr, blocks.width(), rate_low);
    for (std::int64_t n = 0; n < c.sequences.count(); ++n) {
      const ChannelBlock b = blocks.block(n, task);
      const Segment s = c.sequences[n];
      load(row_of(d_last, b), b.channels, high);
      load(nullptr, b.channels, low);
      const auto forward = [&](const Segment& block, TokenRows<float> to, float* up, float* rest) {
        each_part(block, staged, [&](const Segment& part) {
          rg_lru_forward(isa, {part.length, b.channels, false, in},
                         c.rows(rows, options, s, part, b, rate),
                         {to.data + (part.begin - block.begin) * to.stride, to.stride}, up, rest);
          rows.finish();
        });
      };
      const auto back = [&](const Segment& block, TokenRows<const float> states,
                            const float* before) {
        each_part_back(block, staged, [&](const Segment& part) {
          const auto to = [&](const AnyView<void, 3>& view) {
            return rows.out(rows_of(view, part, b.first), part.length, b.channels);
          };
          const std::int64_t t = part.begin - block.begin;
          const float* h_rows = states.data + t * states.stride;
          rg_lru_backward(isa, {part.length, b.channels, stream, in, out},
                          c.rows(rows, options, s, part, b, rate), {h_rows, states.stride},
                          t > 0 ? h_rows - states.stride : before,
                          rows.in(rows_of(d_o_rows, part, b.first), part.length, b.channels),
                          {to(dx), to(dr), to(di), rate_high, rate_low}, high, low);
          rows.finish();
        });
      };
      history.run(past, s, b.channels, rows_of(h, s, b.first), row_of(c.initial, b),
                  row_of(c.residue, b), forward, back);
      store(high, b.channels, row_of(d_first, b));
    }
    if (da.data == nullptr) return;
    const ChannelBlock b = blocks.block(0, task);
    for (std::int64_t d = 0; d < b.channels; ++d) {
      const auto a = static_cast<double>(c.a_param.at(b.first + d));
      const double sum = static_cast<double>(rate_high[d]) + static_cast<double>(rate_low[d]);
      da.at(b.first + d) += static_cast<float>(sum * options.c * sigmoid(a));
    }
  });
  for (const Tensor* rows : {&grads.x, &grads.r, &grads.i}) c.sequences.zero_padding(*rows);
}

void rg_lru_step(Context& context, const RgLruOptions& options, const ConstTensor& x,
                 const ConstTensor& r, const ConstTensor& i, const ConstTensor& a_param,
                 const Tensor& state, const Tensor& residue, const Tensor& o) {
  check_step("rg_lru_step", "x", x, state);
  RgLruOptions later = options;
  later.first_multiplier_one = false;
  rg_lru(context, later, {x, r, i, a_param, state, residue}, {o, state, residue});
}

}  // namespace ouzel
