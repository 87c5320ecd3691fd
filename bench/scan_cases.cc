// Elementwise scans and the short convolution over the memory's speed: the time of reading their
// inputs and writing their outputs once, and nothing else, over theirs. Arrays of 64 MiB.
#include <fmt/format.h>

#include <vector>

#include "bench/case.h"
#include "bench/measure.h"
#include "ouzel/context.h"
#include "ouzel/hgrn.h"
#include "ouzel/rg_lru.h"
#include "ouzel/rwkv4.h"
#include "ouzel/selective_scan.h"
#include "ouzel/short_conv.h"
#include "src/kernels/traffic.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kTokens = 8192, kChannels = 2048, kWidth = 16;

// Gates in [-2, 0), so that no state grows without end.
Data gates(std::uint64_t seed) {
  Data g(seed, {1, kTokens, kChannels});
  for (std::int64_t i = 0; i < g.size(); ++i) g.data()[i] = -2 / (1 + g.data()[i] * g.data()[i]);
  return g;
}

Row measure(const char* op, bool backward, const std::vector<const Data*>& in,
            const std::vector<const Data*>& out, const CaseOptions& options,
            const std::function<void()>& call) {
  std::vector<const float*> from;
  std::vector<float*> to;
  for (const Data* data : in) from.push_back(data->data());
  for (const Data* data : out) to.push_back(data->data());
  Row row{.op = op,
          .pass = backward ? "backward" : "forward",
          .variant = fmt::format("{} channels", kChannels),
          .B = 1,
          .T = kTokens,
          .clock = "one call; ratio: the time of reading its inputs and writing its outputs once"};
  row = with_ratio(row, options.runs, call,
                   [&] { memory_traffic(options.isa, from, to, kTokens * kChannels); });
  call();
  for (const Data* data : out) data->consume(op);
  return row;
}

Row hgrn_row(bool backward, const CaseOptions& options) {
  const Data x(1, {1, kTokens, kChannels}), g = gates(2), d_o(3, {1, kTokens, kChannels});
  const Data o = Data::empty({1, kTokens, kChannels}), dx = o.like(), dg = o.like();
  Context context = options.context(1);
  const HgrnInputs inputs{.x = x.tensor(), .g = g.tensor()};
  const auto forward = [&] { hgrn(context, inputs, {.o = o.tensor()}); };
  if (!backward) return measure("hgrn", false, {&x, &g}, {&o}, options, forward);
  forward();
  return measure("hgrn", true, {&g, &o, &d_o}, {&dx, &dg}, options, [&] {
    hgrn_backward(context, inputs, o.tensor(), d_o.tensor(), {}, dx.tensor(), dg.tensor(), {});
  });
}

Row rg_lru_row(bool backward, const CaseOptions& options) {
  const Data x(1, {1, kTokens, kChannels}), r(2, {1, kTokens, kChannels}),
      i(3, {1, kTokens, kChannels}), a(4, {kChannels}), d_o(5, {1, kTokens, kChannels});
  const Data o = Data::empty({1, kTokens, kChannels}), dx = o.like(), dr = o.like(), di = o.like(),
             da(6, {kChannels});
  Context context = options.context(1);
  const RgLruInputs inputs{
      .x = x.tensor(), .r = r.tensor(), .i = i.tensor(), .a_param = a.tensor()};
  const auto forward = [&] { rg_lru(context, {}, inputs, {.o = o.tensor()}); };
  if (!backward) return measure("rg_lru", false, {&x, &r, &i}, {&o}, options, forward);
  forward();
  return measure("rg_lru", true, {&x, &r, &i, &o, &d_o}, {&dx, &dr, &di}, options, [&] {
    rg_lru_backward(context, {}, inputs, o.tensor(), d_o.tensor(), {},
                    {.x = dx.tensor(), .r = dr.tensor(), .i = di.tensor(), .a_param = da.tensor()});
  });
}

Row rwkv4_row(bool backward, const CaseOptions& options) {
  const Data k(1, {1, kTokens, kChannels}), v(2, {1, kTokens, kChannels}), w(3, {kChannels}),
      u(4, {kChannels}), d_o(5, {1, kTokens, kChannels});
  const Data o = Data::empty({1, kTokens, kChannels}), dk = o.like(), dv = o.like();
  Context context = options.context(1);
  const Rwkv4Inputs inputs{.k = k.tensor(), .v = v.tensor(), .w = w.tensor(), .u = u.tensor()};
  if (!backward) {
    return measure("rwkv4", false, {&k, &v}, {&o}, options,
                   [&] { rwkv4(context, inputs, {.o = o.tensor()}); });
  }
  return measure("rwkv4", true, {&k, &v, &d_o}, {&dk, &dv}, options, [&] {
    rwkv4_backward(context, inputs, d_o.tensor(), {}, {.k = dk.tensor(), .v = dv.tensor()});
  });
}

Row selective_row(bool backward, const CaseOptions& options) {
  const Data x(1, {1, kTokens, kChannels}), dt(2, {1, kTokens, kChannels}),
      b(3, {1, kTokens, kWidth}), c(4, {1, kTokens, kWidth}), d_o(5, {1, kTokens, kChannels});
  Data a(6, {kChannels, kWidth});
  for (std::int64_t i = 0; i < a.size(); ++i) {
    a.data()[i] = -static_cast<float>(i % kWidth + 1);
  }
  const Data o = Data::empty({1, kTokens, kChannels}), dx = o.like(), ddt = o.like();
  const Data db = Data::empty({1, kTokens, kWidth}), dc = db.like();
  Context context = options.context(1);
  const SelectiveScanInputs inputs{
      .x = x.tensor(), .dt = dt.tensor(), .a = a.tensor(), .b = b.tensor(), .c = c.tensor()};
  const SelectiveScanOptions softplus{.dt_softplus = true};
  if (!backward) {
    return measure("selective_scan", false, {&x, &dt}, {&o}, options,
                   [&] { selective_scan(context, softplus, inputs, {.o = o.tensor()}); });
  }
  return measure("selective_scan", true, {&x, &dt, &d_o}, {&dx, &ddt}, options, [&] {
    selective_scan_backward(
        context, softplus, inputs, d_o.tensor(), {},
        {.x = dx.tensor(), .dt = ddt.tensor(), .b = db.tensor(), .c = dc.tensor()});
  });
}

Row conv_row(bool backward, const CaseOptions& options) {
  const Data x(1, {1, kTokens, kChannels}), weight(2, {kChannels, 4}),
      d_o(3, {1, kTokens, kChannels});
  const Data y = Data::empty({1, kTokens, kChannels}), dx = y.like(), dw(4, {kChannels, 4});
  Context context = options.context(1);
  const ShortConvOptions silu{ConvActivation::kSilu};
  const ShortConvInputs inputs{.x = x.tensor(), .weight = weight.tensor()};
  if (!backward) {
    return measure("short_conv", false, {&x}, {&y}, options,
                   [&] { short_conv(context, silu, inputs, y.tensor(), {}); });
  }
  return measure("short_conv", true, {&x, &d_o}, {&dx}, options, [&] {
    short_conv_backward(context, silu, inputs, d_o.tensor(), {}, dx.tensor(), dw.tensor(), {}, {});
  });
}

}  // namespace

void add_scan_cases(std::vector<Case>& cases) {
  const std::pair<const char*, Row (*)(bool, const CaseOptions&)> scans[] = {
      {"hgrn", hgrn_row},
      {"rg_lru", rg_lru_row},
      {"rwkv4", rwkv4_row},
      {"selective_scan", selective_row},
      {"short_conv", conv_row}};
  for (const auto& [name, row] : scans) {
    for (const bool backward : {false, true}) {
      cases.push_back({fmt::format("{}/{}", name, backward ? "backward" : "forward"),
                       [row = row, backward](const CaseOptions& options) {
                         return std::vector<Row>{row(backward, options)};
                       }});
    }
  }
}

}  // namespace ouzel::bench
