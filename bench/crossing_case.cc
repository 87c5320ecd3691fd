// Linear against softmax attention, both ours, from 16 to 131,072 tokens of one head: time of a
// forward call, peak bytes per token of forward and backward, and where the first becomes the
// faster.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bench/case.h"
#include "bench/measure.h"
#include "ouzel/context.h"
#include "ouzel/error.h"
#include "ouzel/linear_attention.h"
#include "ouzel/softmax_attention.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kSize = 64;

// The arrays of a training step of one head; gradients share the memory of their activations'
// shape.
struct Arrays {
  explicit Arrays(std::int64_t tokens)
      : q(1, {1, tokens, 1, kSize}),
        k(2, {1, tokens, 1, kSize}),
        v(3, {1, tokens, 1, kSize}),
        d_o(4, {1, tokens, 1, kSize}),
        o(Data::empty({1, tokens, 1, kSize})),
        dq(Data::empty({1, tokens, 1, kSize})),
        dk(Data::empty({1, tokens, 1, kSize})),
        dv(Data::empty({1, tokens, 1, kSize})),
        lse(static_cast<std::size_t>(tokens) * sizeof(double)) {}
  std::int64_t bytes() const { return 8 * q.bytes(); }

  Tensor lse_view() const { return {lse.data(), DType::kF64, {1, q.size() / kSize, 1}}; }

  Data q, k, v, d_o, o, dq, dk, dv;
  Buffer lse;
};

struct Form {
  const char* op;
  std::function<void(Context&, const Arrays&, void* saved)> forward, backward;
  // Of what the forward pass keeps for the backward one, besides the arrays.
  std::function<std::size_t(const Arrays&)> saved_bytes;
};

Form linear_form() {
  const auto inputs = [](const Arrays& a) {
    return RecurrenceInputs{.q = a.q.tensor(), .k = a.k.tensor(), .v = a.v.tensor()};
  };
  return {"linear_attention",
          [=](Context& c, const Arrays& a, void* saved) {
            linear_attention(c, {}, inputs(a), {.o = a.o.tensor(), .saved = saved});
          },
          [=](Context& c, const Arrays& a, void* saved) {
            linear_attention_backward(c, {}, inputs(a), saved, {.o = a.d_o.tensor()},
                                      {.q = a.dq.tensor(), .k = a.dk.tensor(), .v = a.dv.tensor()},
                                      nullptr);
          },
          [=](const Arrays& a) { return linear_attention_saved_bytes({}, inputs(a)); }};
}

Form softmax_form() {
  const auto inputs = [](const Arrays& a) {
    return SoftmaxAttentionInputs{.q = a.q.tensor(), .k = a.k.tensor(), .v = a.v.tensor()};
  };
  return {"softmax_attention",
          [=](Context& c, const Arrays& a, void*) {
            softmax_attention(c, {}, inputs(a), {.o = a.o.tensor(), .lse = a.lse_view()});
          },
          [=](Context& c, const Arrays& a, void*) {
            softmax_attention_backward(c, {}, inputs(a), a.o.tensor(), a.lse_view(), a.d_o.tensor(),
                                       a.dq.tensor(), a.dk.tensor(), a.dv.tensor());
          },
          [](const Arrays& a) { return a.lse.bytes(); }};
}

// Peak bytes of a training step: arrays, what is kept between the passes, and scratch. A call
// reserves its scratch before its first task, so a backward pass that is cancelled there has shown
// its peak.
std::int64_t training_bytes(const Form& form, const Arrays& arrays, Isa isa) {
  bool cancel = false;
  Context context({.threads = 1, .isa = isa, .cancelled = [&] { return cancel; }});
  const Buffer saved = Buffer::zeros(form.saved_bytes(arrays));
  for (const auto& pass : {form.forward, form.backward}) {
    cancel = true;
    try {
      pass(context, arrays, saved.data());
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::kCancelled) throw;
    }
  }
  return arrays.bytes() + static_cast<std::int64_t>(saved.bytes() + context.scratch_bytes());
}

std::vector<Row> crossing(const CaseOptions& options) {
  const Form forms[] = {linear_form(), softmax_form()};
  std::vector<Row> rows;
  std::int64_t crossed = 0;
  for (std::int64_t tokens = 16; tokens <= 131'072; tokens *= 2) {
    const Arrays arrays(tokens);
    Context context = options.context(1);
    double ms[2] = {};
    for (int f = 0; f < 2; ++f) {
      const auto call = [&] { forms[f].forward(context, arrays, nullptr); };
      const double first = seconds_of(call);
      // Short calls are repeated to a tenth of a second, those of seconds are not repeated.
      const int repeats =
          std::clamp(static_cast<int>(0.1 / first), first > 0.5 ? 0 : options.runs, 1000);
      std::vector<double> seconds(1, first);
      if (repeats > 0) seconds.clear();
      for (int i = 0; i < repeats; ++i) seconds.push_back(seconds_of(call));
      arrays.o.consume(forms[f].op);
      ms[f] = median(seconds) * 1e3;
      Row row{.op = forms[f].op,
              .pass = "forward",
              .variant = "linear against softmax",
              .B = 1,
              .H = 1,
              .T = tokens,
              .K = kSize,
              .V = kSize,
              .ms = ms[f],
              .clock = "one call; bytes per token: the peak of a forward and a backward pass"};
      row.bytes_token = static_cast<double>(training_bytes(forms[f], arrays, options.isa)) /
                        static_cast<double>(tokens);
      rows.push_back(row);
    }
    if (ms[0] >= ms[1]) crossed = 0;
    if (ms[0] < ms[1] && crossed == 0) crossed = tokens;
  }
  rows.push_back({.op = "linear_attention",
                  .pass = "forward",
                  .variant = "from this T on faster than softmax_attention",
                  .B = 1,
                  .H = 1,
                  .T = crossed,
                  .K = kSize,
                  .V = kSize,
                  .clock = "the rows above"});
  return rows;
}

}  // namespace

void add_crossing_case(std::vector<Case>& cases) { cases.push_back({"crossing/64", crossing}); }

}  // namespace ouzel::bench
