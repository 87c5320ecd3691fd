// Every law with gates or an erase over the FMA peak: forward, backward and, against an in-place
// scale of the same state, one token. Useful operations: docs/performance.md.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bench/case.h"
#include "bench/chunked_blas.h"
#include "bench/law_problem.h"
#include "bench/measure.h"
#include "ouzel/context.h"
#include "ouzel/laws.h"
#include "src/kernels/law_rows.h"

namespace ouzel::bench {
namespace {

constexpr std::int64_t kTokens = kLawTokens, kHeads = kLawHeads;

Row row_of(const LawCase& law, const char* pass, std::string variant, std::int64_t tokens,
           std::int64_t d, const char* clock) {
  return {.op = law.law->name(),
          .pass = pass,
          .variant = std::move(variant),
          .B = 1,
          .H = kHeads,
          .T = tokens,
          .K = d,
          .V = d,
          .clock = clock};
}

double flops(double factor, std::int64_t d) {
  return factor * static_cast<double>(kTokens * kHeads * d * d);
}

Row forward(const LawCase& law, std::int64_t d, Gates gates, const char* variant,
            const CaseOptions& bench) {
  LawProblem p(law, kTokens, d, gates);
  Context context = bench.context(1);
  Row row = with_efficiency(row_of(law, "forward", variant, kTokens, d,
                                   "one call, from the strided arrays to the strided arrays"),
                            context, flops(law.forward, d), bench.runs,
                            [&] { (*law.law)(context, {}, p.inputs, p.outputs); });
  p.o().consume(law.law->name());
  return row;
}

// Laws whose families have no other arithmetic in this form.
bool is_in_chunked_form(const LawCase& law) {
  const MatrixLaw* const forms[] = {&simple_gla, &gla, &delta_rule, &gated_delta_rule, &kda, &dplr};
  return std::find(std::begin(forms), std::end(forms), law.law) != std::end(forms);
}

ChunkedScan chunked_scan_of(const LawProblem& p, std::int64_t d) {
  const auto data = [&p](const char* name) {
    const Data* found = p.find(name);
    return found != nullptr ? found->data() : nullptr;
  };
  return {.tokens = kTokens,
          .heads = kHeads,
          .size = d,
          .scale = static_cast<float>(1 / std::sqrt(static_cast<double>(d))),
          .q = data("q"),
          .k = data("k"),
          .v = data("v"),
          .g = data("g"),
          .per_key = p.inputs.g.rank == 4,
          .beta = data("beta"),
          .a = data("a"),
          .b = data("b")};
}

Row chunked_forward(const LawCase& law, std::int64_t d, const CaseOptions& bench) {
  LawProblem p(law, kTokens, d, Gates::kMild);
  const ChunkedScan scan = chunked_scan_of(p, d);
  const Data theirs = p.o().like(), states = Data::empty({chunked_states(scan)});
  Context context = bench.context(1);
  return over_blas(
      row_of(law, "forward", "", kTokens, d, ""), bench,
      [&] { (*law.law)(context, {}, p.inputs, p.outputs); },
      [&](const OpenBlas& blas) {
        chunked_scan(blas, bench.isa, scan, theirs.data(), states.data());
      },
      {{&p.o(), &theirs}});
}

// Both with the states that a forward call kept.
Row chunked_backward(const LawCase& law, std::int64_t d, const CaseOptions& bench) {
  LawProblem p(law, kTokens, d, Gates::kMild);
  const Data d_o(99, {1, kTokens, kHeads, d});
  const RecurrenceInputGrads grads = p.gradients();
  Context context = bench.context(1);
  const Buffer saved(law.law->saved_bytes({}, p.inputs));
  p.outputs.saved = saved.data();
  (*law.law)(context, {}, p.inputs, p.outputs);

  const ChunkedScan scan = chunked_scan_of(p, d);
  const Data states = Data::empty({chunked_states(scan)}), o = p.o().like();
  if (const OpenBlas* blas = OpenBlas::get()) {
    chunked_scan(*blas, bench.isa, scan, o.data(), states.data());
  }
  std::map<std::string, Data> theirs;
  std::vector<ComparedArrays> compared;
  const auto gradient = [&](const char* name) -> float* {
    const Data* ours = p.find_gradient(name);
    if (ours == nullptr) return nullptr;
    const Data& data = theirs.emplace(name, ours->like()).first->second;
    compared.push_back({ours, &data});
    return data.data();
  };
  const ChunkedGradients to = {gradient("q"),    gradient("k"), gradient("v"), gradient("g"),
                               gradient("beta"), gradient("a"), gradient("b")};
  return over_blas(
      row_of(law, "backward", "", kTokens, d, ""), bench,
      [&] { law.law->backward(context, {}, p.inputs, saved.data(), {.o = d_o.tensor()}, grads); },
      [&](const OpenBlas& blas) {
        chunked_backward(blas, bench.isa, scan, states.data(), d_o.data(), to);
      },
      compared);
}

Row backward(const LawCase& law, std::int64_t d, Gates gates, const char* variant,
             const CaseOptions& bench) {
  LawProblem p(law, kTokens, d, gates);
  const Data d_o(99, {1, kTokens, kHeads, d});
  const RecurrenceInputGrads grads = p.gradients();
  Context context = bench.context(1);
  const Buffer saved(law.law->saved_bytes({}, p.inputs));
  p.outputs.saved = saved.data();
  (*law.law)(context, {}, p.inputs, p.outputs);
  Row row =
      row_of(law, "backward", variant, kTokens, d,
             "the gradients of all inputs of one call; the forward call before it is outside");
  if (saved.bytes() != 0) {
    row.bytes_token = static_cast<double>(saved.bytes()) / static_cast<double>(kTokens * kHeads);
  }
  row = with_efficiency(row, context, flops(law.backward, d), bench.runs, [&] {
    law.law->backward(context, {}, p.inputs, saved.data(), {.o = d_o.tensor()}, grads);
  });
  p.consume(law.law->name());
  return row;
}

// A token beside S = 0.999 S, of both parts of S where the position asks for two.
Row step(const LawCase& law, std::int64_t d, bool two_parts, const CaseOptions& bench) {
  constexpr int kSteps = 100;  // of one measurement: one takes tens of microseconds
  LawProblem p(law, 1, d, Gates::kMild);
  const std::int64_t rows = kHeads * d * (two_parts ? 2 : 1);
  const Data s(7, {rows, d});
  const std::vector<float> factors(static_cast<std::size_t>(rows), 0.999f);
  std::vector<SequenceState> storage;
  StateView state = state_view(View<float, 4>(s.data(), {1, kHeads, d, d}), {}, storage);
  if (two_parts) {
    std::fill_n(s.data() + s.size() / 2, s.size() / 2, 0.0f);
    storage[0].s_residue = s.data() + s.size() / 2;
    storage[0].position = 1'000'000;
  }
  Context context = bench.context(1);
  Row row = with_ratio(
      row_of(law, "step",
             two_parts ? "an in-place scale of its state's two parts over it"
                       : "an in-place scale of its state over it",
             1, d,
             "100 tokens of one sequence; ratio: the time of S = 0.999 S over that of a token"),
      bench.runs,
      [&] {
        for (int i = 0; i < kSteps; ++i) {
          law.law->step(context, {}, p.inputs, state, p.outputs.o);
        }
      },
      [&] {
        for (int i = 0; i < kSteps; ++i) {
          scale_rows(context.isa(), rows, d, factors.data(), s.data());
        }
      });
  p.o().consume(law.law->name());
  return row;
}

}  // namespace

void add_law_cases(std::vector<Case>& cases) {
  const auto add = [&](std::string name, std::int64_t d, auto&& measure) {
    cases.push_back({fmt::format("{}/{}", name, d), [=](const CaseOptions& options) {
                       return std::vector<Row>{measure(options)};
                     }});
  };
  for (const LawCase& law : law_cases()) {
    const std::string name = law.law->name();
    const bool gated = std::any_of(law.inputs.begin(), law.inputs.end(),
                                   [](const auto& input) { return input.first == "g"; });
    for (const std::int64_t d : {64, 128}) {
      add(name + "/forward", d, [=](const CaseOptions& bench) {
        return forward(law, d, Gates::kMild, "mild gates", bench);
      });
      add(name + "/backward", d, [=](const CaseOptions& bench) {
        return backward(law, d, Gates::kMild, "mild gates", bench);
      });
      if (is_in_chunked_form(law)) {
        add(name + "/forward_chunked", d,
            [=](const CaseOptions& bench) { return chunked_forward(law, d, bench); });
        add(name + "/backward_chunked", d,
            [=](const CaseOptions& bench) { return chunked_backward(law, d, bench); });
      }
      add(name + "/step", d, [=](const CaseOptions& bench) { return step(law, d, false, bench); });
      add(name + "/step_two_parts", d,
          [=](const CaseOptions& bench) { return step(law, d, true, bench); });
      if (!gated) continue;
      add(name + "/harsh_forward", d, [=](const CaseOptions& bench) {
        return forward(law, d, Gates::kHarsh, "2 % of decays 0, 28 % 1e-7", bench);
      });
      add(name + "/strong_forward", d, [=](const CaseOptions& bench) {
        return forward(law, d, Gates::kStrong, "all gates -20", bench);
      });
      add(name + "/harsh_backward", d, [=](const CaseOptions& bench) {
        return backward(law, d, Gates::kHarsh, "2 % of decays 0, 28 % 1e-7", bench);
      });
    }
  }
}

}  // namespace ouzel::bench
