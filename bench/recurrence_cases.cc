// Linear attention and retention over the FMA peak: useful operations are 4 T H K V forward and
// 10 T H K V backward (docs/performance.md).
#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "bench/case.h"
#include "bench/chunked_blas.h"
#include "bench/measure.h"
#include "ouzel/context.h"
#include "ouzel/linear_attention.h"
#include "ouzel/retention.h"
#include "ouzel/tensor.h"
#include "src/ops/copy_tensor.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kTokens = 2048, kHeads = 16;

// Arrays [1, T, H, D] of one call and, when its position is not 0, the state that it goes on from.
struct Problem {
  Problem(std::int64_t d, std::int64_t position, std::int64_t heads = kHeads)
      : d(d),
        heads(heads),
        q(1, {1, kTokens, heads, d}),
        k(2, {1, kTokens, heads, d}),
        v(3, {1, kTokens, heads, d}),
        o(Data::empty({1, kTokens, heads, d})),
        // A sum of `position` terms of unit variance, and what float32 lost of it.
        s(4, {heads, d, d}, std::sqrt(static_cast<double>(position))),
        residue(5, {heads, d, d}, std::sqrt(static_cast<double>(position)) * 0x1p-26) {
    inputs.q = q.tensor();
    inputs.k = k.tensor();
    inputs.v = v.tensor();
    if (position != 0) {
      sequence = {.s = s.data(), .s_residue = residue.data(), .position = position};
      inputs.initial_state = {.sequences = {&sequence, 1},
                              .heads = heads,
                              .keys = d,
                              .values = d,
                              .head_stride = d * d,
                              .key_stride = d};
    }
    outputs.o = o.tensor();
  }
  double flops(double factor) const {
    return factor * static_cast<double>(kTokens * heads * d * d);
  }
  Row row(const char* op, const char* pass, std::string variant) const {
    return {.op = op,
            .pass = pass,
            .variant = std::move(variant),
            .B = 1,
            .H = heads,
            .T = kTokens,
            .K = d,
            .V = d,
            .clock = "one call, from the strided arrays to the strided arrays"};
  }

  std::int64_t d, heads;
  Data q, k, v, o, s, residue;
  SequenceState sequence;
  RecurrenceInputs inputs;
  RecurrenceOutputs outputs;
};

struct LinearAttention {
  static constexpr const char* kName = "linear_attention";
  using Options = LinearAttentionOptions;
  static void forward(Context& c, const Options& o, const Problem& p) {
    linear_attention(c, o, p.inputs, p.outputs);
  }
  static std::size_t saved_bytes(const Options& o, const Problem& p) {
    return linear_attention_saved_bytes(o, p.inputs);
  }
  static void backward(Context& c, const Options& o, const Problem& p, const void* saved,
                       const RecurrenceOutputGrads& dout, const RecurrenceInputGrads& din) {
    linear_attention_backward(c, o, p.inputs, saved, dout, din, nullptr);
  }
};

struct Retention {
  static constexpr const char* kName = "retention";
  using Options = RetentionOptions;
  static void forward(Context& c, const Options& o, const Problem& p) {
    retention(c, o, p.inputs, p.outputs);
  }
  static std::size_t saved_bytes(const Options& o, const Problem& p) {
    return retention_saved_bytes(o, p.inputs);
  }
  static void backward(Context& c, const Options& o, const Problem& p, const void* saved,
                       const RecurrenceOutputGrads& dout, const RecurrenceInputGrads& din) {
    retention_backward(c, o, p.inputs, saved, dout, din);
  }
};

template <class Law>
Row forward(const typename Law::Options& options, std::string variant, std::int64_t d,
            std::int64_t position, const CaseOptions& bench) {
  Problem p(d, position);
  Context context = bench.context(1);
  Row row = with_efficiency(p.row(Law::kName, "forward", std::move(variant)), context, p.flops(4),
                            bench.runs, [&] { Law::forward(context, options, p); });
  p.o.consume(Law::kName);
  return row;
}

// [B, T, H, D] as bfloat16, with memory of its own.
struct Narrow {
  Narrow(Context& context, const Data& x)
      : memory(static_cast<std::size_t>(x.bytes()) / 2), tensor(x.tensor()) {
    tensor.data = memory.data();
    tensor.dtype = DType::kBF16;
    copy_tensor(context, x.tensor(), tensor);
  }
  Buffer memory;
  Tensor tensor;
};

template <class Law>
Row bf16_forward(std::int64_t d, const CaseOptions& bench) {
  Problem wide(d, 0);
  Context context = bench.context(1);
  const Narrow q(context, wide.q), k(context, wide.k), v(context, wide.v), o(context, wide.v);
  Problem narrow(d, 0);
  narrow.inputs = {.q = q.tensor, .k = k.tensor, .v = v.tensor};
  narrow.outputs = {.o = o.tensor};
  Row row = wide.row(Law::kName, "forward", "over float32");
  row.dtype = "bf16";
  row.clock = "one call; ratio: the time of the same with float32 inputs and outputs over it";
  row = with_ratio(
      row, bench.runs, [&] { Law::forward(context, {}, narrow); },
      [&] { Law::forward(context, {}, wide); });
  wide.o.consume(Law::kName);
  return row;
}

template <class Law>
Row backward(const typename Law::Options& options, std::string variant, std::int64_t d,
             const CaseOptions& bench) {
  Problem p(d, 0);
  const Data d_o(6, {1, kTokens, kHeads, d});
  const Data dq = Data::empty({1, kTokens, kHeads, d}), dk = Data::empty({1, kTokens, kHeads, d}),
             dv = Data::empty({1, kTokens, kHeads, d});
  Context context = bench.context(1);
  const Buffer saved(Law::saved_bytes(options, p));
  p.outputs.saved = saved.data();
  Law::forward(context, options, p);
  Row row = p.row(Law::kName, "backward", std::move(variant));
  row.clock = "dq, dk and dv of one call; the forward call before it is outside";
  row = with_efficiency(row, context, p.flops(10), bench.runs, [&] {
    Law::backward(context, options, p, saved.data(), {.o = d_o.tensor()},
                  {.q = dq.tensor(), .k = dk.tensor(), .v = dv.tensor()});
  });
  for (const Data* gradient : {&dq, &dk, &dv}) gradient->consume(Law::kName);
  return row;
}

template <class Law>
Row bf16_backward(std::int64_t d, const CaseOptions& bench) {
  Problem wide(d, 0);
  Context context = bench.context(1);
  const Data d_o(6, {1, kTokens, kHeads, d}), dq = wide.o.like(), dk = dq.like(), dv = dq.like();
  const Narrow q(context, wide.q), k(context, wide.k), v(context, wide.v), n_o(context, d_o);
  const Narrow nq(context, wide.q), nk(context, wide.q), nv(context, wide.q);
  Problem narrow(d, 0);
  narrow.inputs = {.q = q.tensor, .k = k.tensor, .v = v.tensor};
  Row row = wide.row(Law::kName, "backward", "over float32");
  row.dtype = "bf16";
  row.clock = "one call; ratio: the time of the same with float32 inputs and gradients over it";
  row = with_ratio(
      row, bench.runs,
      [&] {
        Law::backward(context, {}, narrow, nullptr, {.o = n_o.tensor},
                      {.q = nq.tensor, .k = nk.tensor, .v = nv.tensor});
      },
      [&] {
        Law::backward(context, {}, wide, nullptr, {.o = d_o.tensor()},
                      {.q = dq.tensor(), .k = dk.tensor(), .v = dv.tensor()});
      });
  for (const Data* gradient : {&dq, &dk, &dv}) gradient->consume(Law::kName);
  return row;
}

ChunkedScan chunked_scan_of(const Problem& p) {
  return {.tokens = kTokens,
          .heads = kHeads,
          .size = p.d,
          .q = p.q.data(),
          .k = p.k.data(),
          .v = p.v.data()};
}

Row chunked_forward(std::int64_t d, const CaseOptions& bench) {
  const Problem p(d, 0);
  const ChunkedScan scan = chunked_scan_of(p);
  const Data theirs = p.o.like(), states = Data::empty({chunked_states(scan)});
  Context context = bench.context(1);
  return over_blas(
      p.row(LinearAttention::kName, "forward", ""), bench,
      [&] { LinearAttention::forward(context, {.scale = 1}, p); },
      [&](const OpenBlas& blas) {
        chunked_scan(blas, bench.isa, scan, theirs.data(), states.data());
      },
      {{&p.o, &theirs}});
}

Row chunked_backward(std::int64_t d, const CaseOptions& bench) {
  const Problem p(d, 0);
  const ChunkedScan scan = chunked_scan_of(p);
  const Data d_o(6, {1, kTokens, kHeads, d}), states = Data::empty({chunked_states(scan)});
  const Data ours[] = {p.o.like(), p.o.like(), p.o.like()};
  const Data theirs[] = {p.o.like(), p.o.like(), p.o.like()};
  if (const OpenBlas* blas = OpenBlas::get()) {
    chunked_scan(*blas, bench.isa, scan, p.o.data(), states.data());
  }
  Context context = bench.context(1);
  return over_blas(
      p.row(LinearAttention::kName, "backward", ""), bench,
      [&] {
        LinearAttention::backward(
            context, {.scale = 1}, p, nullptr, {.o = d_o.tensor()},
            {.q = ours[0].tensor(), .k = ours[1].tensor(), .v = ours[2].tensor()});
      },
      [&](const OpenBlas& blas) {
        chunked_backward(blas, bench.isa, scan, states.data(), d_o.data(),
                         {theirs[0].data(), theirs[1].data(), theirs[2].data()});
      },
      {{&ours[0], &theirs[0]}, {&ours[1], &theirs[1]}, {&ours[2], &theirs[2]}});
}

// The same calls on one thread and on two, as many as take milliseconds: a model's calls come one
// after the other, and find the threads awake. The columns of one head's state are tasks.
Row scaling(std::int64_t d, std::int64_t heads, const CaseOptions& bench) {
  Problem p(d, 0, heads);
  const std::int64_t calls = 2 * kHeads / heads;
  Context one = bench.context(1), two = bench.context(2);
  Row row = p.row(LinearAttention::kName, "forward", "identity, two threads over one");
  row.clock = fmt::format("{} calls; ratio: one thread's time over that of two", calls);
  row.threads = 2;
  const auto run = [&](Context& context) {
    for (std::int64_t i = 0; i < calls; ++i) LinearAttention::forward(context, {}, p);
  };
  row = with_ratio(
      row, bench.runs, [&] { run(two); }, [&] { run(one); });
  p.o.consume(LinearAttention::kName);
  return row;
}

}  // namespace

void add_recurrence_cases(std::vector<Case>& cases) {
  const auto add = [&](std::string name, std::int64_t d, auto&& measure) {
    cases.push_back({fmt::format("{}/{}", name, d), [=](const CaseOptions& options) {
                       return std::vector<Row>{measure(options)};
                     }});
  };
  for (const std::int64_t d : {64, 128}) {
    add("linear_attention/forward/identity", d, [=](const CaseOptions& bench) {
      return forward<LinearAttention>({}, "identity", d, 0, bench);
    });
    add("linear_attention/forward/elu1", d, [=](const CaseOptions& bench) {
      LinearAttentionOptions options;
      options.feature_map.kind = FeatureMapKind::kElu1;
      options.normalize = true;
      return forward<LinearAttention>(options, "elu1, normalised", d, 0, bench);
    });
    add("linear_attention/backward/identity", d, [=](const CaseOptions& bench) {
      return backward<LinearAttention>({}, "identity", d, bench);
    });
    add("linear_attention/forward/position_1000000", d, [=](const CaseOptions& bench) {
      return forward<LinearAttention>({}, "identity, at position 1,000,000", d, 1'000'000, bench);
    });
    add("linear_attention/forward_bf16", d,
        [=](const CaseOptions& bench) { return bf16_forward<LinearAttention>(d, bench); });
    add("linear_attention/backward_bf16", d,
        [=](const CaseOptions& bench) { return bf16_backward<LinearAttention>(d, bench); });
    add("linear_attention/forward_chunked", d,
        [=](const CaseOptions& bench) { return chunked_forward(d, bench); });
    add("linear_attention/backward_chunked", d,
        [=](const CaseOptions& bench) { return chunked_backward(d, bench); });
    add("retention/forward", d,
        [=](const CaseOptions& bench) { return forward<Retention>({}, "", d, 0, bench); });
    add("retention/forward_bf16", d,
        [=](const CaseOptions& bench) { return bf16_forward<Retention>(d, bench); });
    add("retention/backward_bf16", d,
        [=](const CaseOptions& bench) { return bf16_backward<Retention>(d, bench); });
    add("retention/backward", d,
        [=](const CaseOptions& bench) { return backward<Retention>({}, "", d, bench); });
  }
  for (const std::int64_t d : {64, 128}) {
    add("linear_attention/threads", d,
        [=](const CaseOptions& bench) { return scaling(d, kHeads, bench); });
    add("linear_attention/threads/one_head", d,
        [=](const CaseOptions& bench) { return scaling(d, 1, bench); });
  }
}

}  // namespace ouzel::bench
