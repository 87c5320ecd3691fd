// What must not change a result: threads, company, padding, strides, later tokens, splits, forms.
// Bit for bit unless a bound is named.
#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/by_name.h"
#include "tests/cases.h"
#include "tests/compare.h"
#include "tests/contexts.h"
#include "tests/law_calls.h"
#include "tests/law_cases.h"
#include "tests/random_arrays.h"
#include "tests/slices.h"

namespace ouzel::test {
namespace {

using Int = std::int64_t;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

struct Sample {
  std::string name;
  Call call;
  Bounds bounds = kFloat32;
  double gradient_floor = kFloor;
};

// One call of each law, mask and kind of convolution, in a layout.
std::vector<Sample> samples(Int tokens, Layout layout = Layout::kRows,
                            Direction direction = Direction::kCausal) {
  std::vector<Sample> list;
  std::uint64_t seed = 500;
  for (LawCase c : recurrence_samples(tokens)) {
    c.layout = layout;
    c.direction = direction;
    list.push_back({name_of(c), make_call(c, ++seed),
                    c.data == Data::kZeroMean ? kFloat32 : kAnyInput,
                    is_flat(c) ? kQuotientFloor : kFloor});
  }
  for (MatrixCase c : matrix_samples(tokens)) {
    c.layout = layout;
    c.reverse = direction == Direction::kReverse;
    list.push_back({name_of(c), make_call(c, ++seed)});
  }
  if (direction != Direction::kCausal) return list;
  for (AttentionCase c : attention_samples(tokens)) {
    c.layout = layout;
    list.push_back({name_of(c), make_call(c, ++seed)});
  }
  for (ConvCase c : conv_samples(tokens)) {
    c.layout = layout;
    list.push_back({name_of(c), make_call(c, ++seed)});
  }
  return list;
}

ContextOptions options_for(Isa isa, int threads = 2) {
  return {.threads = threads, .isa = isa, .poison_scratch = true};
}

bool is_causal(const Call& call) {
  if (const auto* a = std::get_if<Recurrence>(&call.arguments)) return a->causal;
  if (const auto* a = std::get_if<Attention>(&call.arguments)) return a->causal;
  return true;
}

Results<double> doubles(const Results<float>& r) {
  Results<double> d;
  const auto convert = [](const std::vector<Named<float>>& from, std::vector<Named<double>>& to) {
    for (const Named<float>& x : from) {
      Doubles array;
      array.shape = x.array.shape;
      array.data.assign(x.array.data.begin(), x.array.data.end());
      to.push_back({x.name, x.role, array});
    }
  };
  convert(r.outputs, d.outputs);
  convert(r.gradients, d.gradients);
  return d;
}

class Invariances : public testing::TestWithParam<Isa> {};
INSTANTIATE_TEST_SUITE_P(, Invariances, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return name_of(info.param); });

// Nor does what scratch held before: NaN in those, here what the calls before left; nor the size of
// the second-level cache.
TEST_P(Invariances, ThreadCountChangesNothing) {
  Context one(options_for(GetParam(), 1)), two(options_for(GetParam(), 2)),
      three = with_other_cache(options_for(GetParam(), 3)), used({.threads = 1, .isa = GetParam()});
  for (const Sample& s : samples(200)) {
    SCOPED_TRACE(s.name);
    const Results<float> r = run(one, s.call);
    expect_same(run(two, s.call), r);
    expect_same(run(three, s.call), r);
    expect_same(run(used, s.call), r);
  }
}

// A sequence in a batch, packed, or padded (with NaN in the padding) is the sequence alone.
TEST_P(Invariances, CompanyChangesNothing) {
  Context context(options_for(GetParam()));
  for (Layout layout : {Layout::kRows, Layout::kPacked, Layout::kPadded}) {
    for (Direction direction : {Direction::kCausal, Direction::kReverse}) {
      for (const Sample& s : samples(131, layout, direction)) {
        SCOPED_TRACE(s.name);
        Call call = s.call;
        const Results<float> together = run(context, call);
        const Segments segments = segments_of(call), keys = key_segments_of(call);
        for (Int n = 0; n < segments.count(); ++n) {
          SCOPED_TRACE(n);
          const auto i = static_cast<std::size_t>(n);
          Results<float> part = together;
          for (auto* list : {&part.outputs, &part.gradients}) {
            for (Named<float>& x : *list) {
              x.array = take(x.array, x.role, n, segments.list[i], keys.list[i], x.rows);
            }
          }
          Results<float> own = run(context, alone(call, n));
          // Gradients of parameters sum over all sequences.
          for (Results<float>* r : {&part, &own}) {
            std::erase_if(r->gradients,
                          [](const Named<float>& x) { return x.role == Role::kParameter; });
          }
          expect_same(part, own);
        }
      }
    }
  }
}

TEST_P(Invariances, PaddingIsNeverReadNorLeftUnwritten) {
  Context context(options_for(GetParam()));
  for (Layout layout : {Layout::kPacked, Layout::kPadded}) {
    for (const Sample& s : samples(70, layout)) {
      SCOPED_TRACE(s.name);
      Call zeros = s.call;
      for (const Slot& slot : slots(zeros)) {
        for (double& x : slot.array->data) x = std::isnan(x) ? 0 : x;
      }
      const Results<float> r = run(context, s.call);
      expect_same(run(context, zeros), r);
      const Floats& o = array_of(r.outputs, "o");
      const Int last = o.extent(1) - 1, first = 0;
      const Int row = layout == Layout::kPacked ? last : first;
      for (float x : tokens_of(o, row, row + 1).data) EXPECT_EQ(x, 0);
    }
  }
}

TEST_P(Invariances, StridesChangeNothing) {
  Context context(options_for(GetParam()));
  for (const Sample& s : samples(70)) {
    SCOPED_TRACE(s.name);
    Call strided = s.call;
    strided.strided = true;
    expect_same(run(context, strided), run(context, s.call));
  }
}

// Tensors of 8 MiB and more may be written past the caches, in whole lines: here with widths that
// are not a whole number of the kernels' columns. With gaps between rows they are not.
TEST_P(Invariances, LargeTensorsAreTheSame) {
  Context context(options_for(GetParam()));
  constexpr Int kTokens = 22'000, kValues = 48;  // in two batch rows: 8.4 MB
  const LawCase sum{Law::kIdentity, kTokens, 16, kValues, Layout::kRows, Heads::kOne};
  std::vector<Sample> list = {{name_of(sum), make_call(sum, 900)}};
  for (const char* law : {"gla", "kda"}) {
    const MatrixCase c{law, kTokens, 16, kValues, Layout::kRows, Heads::kOne};
    list.push_back({name_of(c), make_call(c, 901)});
  }
  for (Sample& s : list) {
    SCOPED_TRACE(s.name);
    const Results<float> r = run(context, s.call);
    s.call.strided = true;
    expect_same(run(context, s.call), r);
  }
}

// Where the second-level cache is small, outputs of several heads go there through scratch.
TEST_P(Invariances, LargeTensorsOfHeadsAreTheSameWithAnyCache) {
  Context context(options_for(GetParam())), other = with_other_cache(options_for(GetParam()));
  constexpr Int kTokens = 8'200;  // 8.4 MB of values, in two batch rows and two heads
  const LawCase sum{Law::kRetention, kTokens, 32, 64, Layout::kRows, Heads::kEqual};
  const MatrixCase gated{"simple_gla", kTokens, 32, 64, Layout::kRows, Heads::kEqual};
  Call backward = make_call(sum, 902), forward = make_call(gated, 903);
  forward.upstream.clear();
  for (Call* call : {&backward, &forward}) {
    SCOPED_TRACE(call == &backward ? "retention" : "simple_gla");
    const Results<float> r = run(context, *call);
    expect_same(run(other, *call), r);
    call->strided = true;
    expect_same(run(other, *call), r);
  }
}

TEST_P(Invariances, LaterTokensNeverChangeEarlierOutputs) {
  Context context(options_for(GetParam()));
  constexpr Int kTokens = 150;
  for (const Sample& s : samples(kTokens)) {
    if (!is_causal(s.call)) continue;
    SCOPED_TRACE(s.name);
    Call forward = s.call;
    forward.upstream.clear();
    const Floats before = array_of(run(context, forward).outputs, "o");
    for (Int t : {Int{1}, Int{7}, Int{64}, Int{100}, kTokens - 1}) {
      for (double value : {kNan, 1e30, 0.25}) {
        SCOPED_TRACE(testing::Message() << "tokens from " << t << " are " << value);
        Call changed = forward;
        for (const Slot& slot : slots(changed)) {
          if (slot.role != Role::kToken) continue;
          const Int rows = slot.array->extent(0) * kTokens;
          const Int width = static_cast<Int>(slot.array->data.size()) / rows;
          const double filled = is_log_decay(changed, slot) ? -value : value;
          for (Int r = 0; r < rows; ++r) {
            if (r % kTokens >= t) std::fill_n(slot.array->data.begin() + r * width, width, filled);
          }
        }
        const Floats after = array_of(run(context, changed).outputs, "o");
        EXPECT_TRUE(same_bits(tokens_of(after, 0, t), tokens_of(before, 0, t)));
      }
    }
  }
}

TEST_P(Invariances, ReverseIsTheFlippedSequence) {
  Context context(options_for(GetParam()));
  for (const Sample& s : samples(150)) {
    Call reversed = s.call;
    if (auto* a = std::get_if<Recurrence>(&reversed.arguments)) {
      a->reverse = true;
    } else if (auto* b = std::get_if<ByName>(&reversed.arguments)) {
      b->attributes["reverse"] = "true";
    } else {
      continue;
    }
    SCOPED_TRACE(s.name);
    for (const Slot& slot : slots(reversed)) {
      if (slot.role == Role::kToken) *slot.array = flipped(*slot.array, slot.rows);
    }
    Results<float> r = run(context, reversed);
    for (auto* list : {&r.outputs, &r.gradients}) {
      for (Named<float>& x : *list) {
        if (x.role == Role::kToken) x.array = flipped(x.array, x.rows);
      }
    }
    expect_same(r, run(context, s.call));
  }
}

// Forward only. The states of a recurrence have residues, so that nothing is lost where a call
// ends.
Call forward_of(const Call& call) {
  Call forward = call;
  forward.upstream.clear();
  if (std::holds_alternative<Recurrence>(call.arguments) ||
      std::holds_alternative<ByName>(call.arguments)) {
    forward.residue = Residue();
  }
  return forward;
}

// `call` starting from the final states in `before`, which have seen `position` tokens.
Call resumed(Call call, const Results<float>& before, Int position) {
  if (call.residue) call.residue->position = position;
  for (const Named<double>& x : doubles(before).outputs) {
    if (x.name == "s_residue") call.residue->s = x.array;
    if (x.name == "z_residue") call.residue->z = x.array;
    if (auto* a = std::get_if<Recurrence>(&call.arguments)) {
      if (x.name == "final_state") a->s0 = x.array;
      if (x.name == "z") a->z0 = x.array;
    } else if (auto* b = std::get_if<ByName>(&call.arguments)) {
      if (x.name == "final_state") b->inputs["initial_state"] = x.array;
    } else if (x.name == "final_state") {
      std::get<Conv>(call.arguments).s0 = x.array;
    }
  }
  return call;
}

// The call cut in two at token t, the states handed on: its outputs.
Results<float> split(Context& context, const Call& call, Int t, Int tokens) {
  const Results<float> first = run(context, tokens_of(call, 0, t));
  Results<float> second = run(context, resumed(tokens_of(call, t, tokens), first, t));
  for (std::size_t i = 0; i < second.outputs.size(); ++i) {
    Named<float>& x = second.outputs[i];
    if (x.role == Role::kToken) x.array = joined(first.outputs[i].array, x.array);
  }
  return second;
}

// Two calls, the states handed on, are one call: within the bound at every split, bit for bit where
// the first part is a multiple of 64 tokens.
TEST_P(Invariances, SplitsAgree) {
  Context context(options_for(GetParam()));
  constexpr Int kTokens = 135;
  for (const Sample& s : samples(kTokens)) {
    if (std::holds_alternative<Attention>(s.call.arguments)) continue;
    SCOPED_TRACE(s.name);
    const Call call = forward_of(s.call);
    const Results<float> whole = run(context, call);
    Results<double> truth = doubles(whole);
    const auto is_residue = [](const auto& x) { return x.name.ends_with("_residue"); };
    std::erase_if(truth.outputs, is_residue);
    for (Int t = 0; t <= kTokens; ++t) {
      // Slow, and nothing of its own there; and the laws are many.
      const bool few =
          GetParam() == Isa::kPortable || std::holds_alternative<ByName>(call.arguments);
      if (few && t % 16 > 1) continue;
      SCOPED_TRACE(t);
      Results<float> parts = split(context, call, t, kTokens);
      if (t % 64 == 0) expect_same(parts, whole);
      std::erase_if(parts.outputs, is_residue);
      expect_within(parts, truth, kResumed);
    }
  }
}

// The same beyond position 2,048, where sums go on in two parts; and a plain state, which forgets
// the residue, stays within the bound.
TEST_P(Invariances, SplitsOfLongSequencesAgree) {
  Context context(options_for(GetParam()));
  constexpr Int kTokens = 2048 + 300;
  std::vector<Sample> list;
  for (LawCase c : recurrence_samples(kTokens)) {
    c.keys = c.values = 12;
    if (c.law == Law::kRetention) c.heads = Heads::kMoreValues;
    list.push_back({name_of(c), make_call(c, 77)});
  }
  for (MatrixCase c : matrix_samples(kTokens)) {
    c.keys = c.values = 12;
    c.gates = Gates::kWeak;
    if (!exists(c)) c.gates = Gates::kNone;
    list.push_back({name_of(c), make_call(c, 78)});
  }
  for (const Sample& s : list) {
    SCOPED_TRACE(s.name);
    Call call = forward_of(s.call);
    const Results<float> whole = run(context, call);
    for (Int t : {Int{64}, Int{1984}, Int{2048}, Int{2112}, Int{2304}}) {
      SCOPED_TRACE(t);
      expect_same(split(context, call, t, kTokens), whole);
    }
    call.residue.reset();
    const Results<double> plain = doubles(run(context, call));
    for (Int t : {Int{1}, Int{64}, Int{2049}, Int{2112}, Int{2300}}) {
      SCOPED_TRACE(t);
      expect_within(split(context, call, t, kTokens), plain, kResumed);
    }
  }
}

// The gradient through a split: d loss / d (handed state) goes from the second call to the first.
TEST_P(Invariances, SplitGradientsAgree) {
  Context context(options_for(GetParam()));
  constexpr Int kTokens = 135;
  for (const Sample& s : samples(kTokens)) {
    if (std::holds_alternative<Attention>(s.call.arguments)) continue;
    SCOPED_TRACE(s.name);
    const Results<double> truth = run_reference(s.call);
    for (Int t : {Int{1}, Int{50}, Int{64}, Int{128}, kTokens - 1}) {
      SCOPED_TRACE(t);
      Call first = tokens_of(s.call, 0, t);
      Call forward = first;
      forward.upstream.clear();
      const Call second = resumed(tokens_of(s.call, t, kTokens), run(context, forward), t);
      const Results<double> g2 = doubles(run(context, second));
      for (const Named<double>& x : g2.gradients) {
        if (x.name == "dh0") first.upstream["dht"] = x.array;
        if (x.name == "dz0") first.upstream["dzt"] = x.array;
      }
      const Results<double> g1 = doubles(run(context, first));
      Comparison comparison;
      for (const Named<double>& x : truth.gradients) {
        const auto find = [&](const Results<double>& r) {
          for (const Named<double>& y : r.gradients) {
            if (y.name == x.name) return y.array;
          }
          return Doubles();
        };
        const Doubles a = find(g1), b = find(g2);
        Doubles both = a;                                 // of an initial state
        if (x.role == Role::kToken) both = joined(a, b);  // also where a token has several rows
        if (x.role == Role::kParameter) {
          for (std::size_t i = 0; i < both.data.size(); ++i) both.data[i] += b.data[i];
        }
        comparison.gradient(x.name, both, x.array);
      }
      comparison.expect_within(bounds_on(GetParam(), s.bounds), s.gradient_floor);
    }
  }
}

TEST_P(Invariances, OneTokenByNameIsTheStepUnlessTheScanIsAskedFor) {
  Context context(options_for(GetParam()));
  std::uint64_t seed = 300;
  for (const MatrixCase& c : matrix_samples(2)) {
    SCOPED_TRACE(name_of(c));
    Call two = make_call(c, ++seed);
    two.upstream.clear();
    Call one = tokens_of(two, 0, 1);
    expect_same(run_by_table(context, one), run_steps(context, one));
    std::get<ByName>(one.arguments).attributes["form"] = "scan";
    EXPECT_TRUE(same_bits(array_of(run_by_table(context, one).outputs, "o"),
                          tokens_of(array_of(run(context, two).outputs, "o"), 0, 1)));
  }
}

TEST_P(Invariances, StepsAreTheScan) {
  Context context(options_for(GetParam()));
  for (const Sample& s : samples(100)) {
    if (!is_causal(s.call)) continue;
    SCOPED_TRACE(s.name);
    Call forward = s.call;
    forward.upstream.clear();
    Results<double> scan = doubles(run(context, forward));
    std::erase_if(scan.outputs, [](const Named<double>& x) { return x.name == "lse"; });
    expect_within(run_steps(context, forward), scan, kResumed);
  }
}

TEST_P(Invariances, FormsAgreeWithTheReference) {
  Context context(options_for(GetParam()));
  for (const Direction direction : {Direction::kCausal, Direction::kReverse}) {
    for (const Sample& s : samples(100, Layout::kPacked, direction)) {
      if (!std::holds_alternative<Recurrence>(s.call.arguments)) continue;
      for (const Form form : {Form::kScan, Form::kParallel}) {
        SCOPED_TRACE(testing::Message() << s.name << " form " << static_cast<int>(form));
        Call call = s.call;
        call.form = form;
        auto& a = std::get<Recurrence>(call.arguments);
        if (form == Form::kParallel) {
          a.s0 = a.z0 = Doubles();
          std::erase_if(call.upstream, [](const auto& x) { return x.first != "do"; });
        }
        expect_within(run(context, call), run_reference(call), bounds_on(GetParam(), s.bounds),
                      s.gradient_floor);
      }
    }
  }
}

TEST_P(Invariances, BackwardWithoutSavedRecomputes) {
  Context context(options_for(GetParam()));
  for (const Sample& s : samples(150)) {
    SCOPED_TRACE(s.name);
    Call call = s.call;
    call.saved = false;
    expect_within(run(context, call), doubles(run(context, s.call)), kResumed, s.gradient_floor);
  }
}

}  // namespace
}  // namespace ouzel::test
