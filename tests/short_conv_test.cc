// The short convolution against its float64 reference, and its promises bit for bit: threads,
// packing, padding, splits and steps.
#include <cmath>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "ouzel/short_conv.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/reference/short_conv.h"
#include "tests/compare.h"
#include "tests/count_allocations.h"
#include "tests/random_arrays.h"

namespace ouzel::test {
namespace {

using reference::Array;
using Arguments = reference::ShortConvArguments<double>;
using Results = reference::ShortConvResults<double>;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

// A float copy of an array, as a view of any rank; its memory lives as long as it.
struct Floats {
  Array<float> array;
  Floats() = default;
  explicit Floats(const Array<double>& from) {
    if (!from.present()) return;
    array = Array<float>(from.shape);
    for (std::size_t i = 0; i < from.data.size(); ++i) {
      array.data[i] = static_cast<float>(from.data[i]);
    }
  }
  static Floats filled(std::vector<std::int64_t> shape, float value) {
    Floats f;
    f.array = Array<float>(std::move(shape));
    std::fill(f.array.data.begin(), f.array.data.end(), value);
    return f;
  }
  Tensor tensor() {
    switch (array.rank()) {
      case 1:
        return {array.data.data(), DType::kF32, {array.extent(0)}};
      case 2:
        return {array.data.data(), DType::kF32, {array.extent(0), array.extent(1)}};
      case 3:
        return {
            array.data.data(), DType::kF32, {array.extent(0), array.extent(1), array.extent(2)}};
      default:
        return {};
    }
  }
};

bool same_bits(const Array<float>& a, const Array<float>& b) {
  return a.shape == b.shape && (a.data.empty() || std::memcmp(a.data.data(), b.data.data(),
                                                              a.data.size() * sizeof(float)) == 0);
}

struct Outcome {
  Array<float> y, s, dx, dweight, dbias, d_initial;
};

// Forward and backward of the arguments. Parameter gradients start at 0, all else at NaN.
Outcome run(Context& context, const Arguments& a, const Results& upstream) {
  Floats x(a.x), weight(a.weight), bias(a.bias), s0(a.s0), dy(upstream.y), ds(upstream.s);
  const std::vector<std::int64_t> states{a.segments.count(), a.x.extent(2), a.weight.extent(1)};
  Floats y = Floats::filled(a.x.shape, kNaN), s = Floats::filled(states, kNaN);
  Floats dx = Floats::filled(a.x.shape, kNaN), d_initial = Floats::filled(states, kNaN);
  Floats dweight = Floats::filled(a.weight.shape, 0);
  Floats dbias = Floats::filled({a.x.extent(2)}, 0);
  ShortConvInputs inputs{x.tensor(), weight.tensor(), bias.tensor(), s0.tensor(), &a.segments};
  const ShortConvOptions options{a.silu ? ConvActivation::kSilu : ConvActivation::kNone};
  short_conv(context, options, inputs, y.tensor(), s.tensor());
  short_conv_backward(context, options, inputs, dy.tensor(), ds.tensor(), dx.tensor(),
                      dweight.tensor(), dbias.tensor(), d_initial.tensor());
  return {y.array, s.array, dx.array, dweight.array, dbias.array, d_initial.array};
}

struct Case {
  std::int64_t batch, tokens, channels, width;
  bool bias, silu, state;
};

struct Call {
  Arguments arguments;
  Results upstream;
};

Call make_call(const Case& c, const Segments& segments, std::uint64_t seed) {
  Random random(seed);
  Call call;
  Arguments& a = call.arguments;
  a.segments = segments;
  a.silu = c.silu;
  a.x = random_array<double>(random, {c.batch, c.tokens, c.channels});
  a.weight = random_array<double>(random, {c.channels, c.width});
  if (c.bias) a.bias = random_array<double>(random, {c.channels});
  if (c.state) a.s0 = random_array<double>(random, {segments.count(), c.channels, c.width});
  call.upstream.y = random_array<double>(random, a.x.shape);
  if (c.state) call.upstream.s = random_array<double>(random, a.s0.shape);
  return call;
}

void expect_like_reference(const Outcome& got, const Call& call) {
  const auto truth = reference::short_conv(call.arguments);
  const auto gradient = reference::short_conv_backward(call.arguments, call.upstream);
  Comparison comparison;
  comparison.output("y", got.y, truth.y);
  comparison.output("final_state", got.s, truth.s);
  comparison.gradient("dx", got.dx, gradient.x);
  comparison.gradient("dweight", got.dweight, gradient.weight);
  if (call.arguments.bias.present()) comparison.gradient("dbias", got.dbias, gradient.bias);
  comparison.gradient("d_initial", got.d_initial, gradient.s0);
  comparison.expect_within(kFloat32);
}

class ShortConvTest : public testing::TestWithParam<Isa> {
 protected:
  Context context_{{.threads = 2, .isa = GetParam(), .poison_scratch = true}};
};

TEST_P(ShortConvTest, AgreesWithTheReference) {
  for (std::int64_t tokens : {0, 1, 2, 3, 4, 5, 17, 63, 64, 65, 131}) {
    for (std::int64_t width : {1, 2, 3, 4, 7}) {
      for (std::int64_t channels : {1, 15, 16, 33, 100}) {
        const Case c{2, tokens, channels, width, channels != 16, width != 3, tokens % 2 == 1};
        SCOPED_TRACE(testing::Message()
                     << tokens << " tokens, " << channels << " channels, width " << width);
        const Call call = make_call(c, Segments::whole(2, tokens), 1);
        expect_like_reference(run(context_, call.arguments, call.upstream), call);
      }
    }
  }
}

// Pieces of 64 tokens whose outputs see further back than their predecessor, into the state too,
// and channels of more than one task.
TEST_P(ShortConvTest, ManyColumnsAndChannelsAgreeWithTheReference) {
  for (const Case& c :
       {Case{2, 131, 3, 70, true, true, true}, Case{1, 131, 3, 150, true, true, true},
        Case{2, 70, 1030, 4, true, true, true}}) {
    SCOPED_TRACE(testing::Message() << "width " << c.width << ", " << c.channels << " channels");
    const Call call = make_call(c, Segments::whole(c.batch, c.tokens), 1);
    expect_like_reference(run(context_, call.arguments, call.upstream), call);
  }
}

// Sequences of a call with padding of NaN between them: like the reference, and bit for bit what
// each gives alone.
TEST_P(ShortConvTest, SequencesIgnorePaddingAndCompany) {
  Segments segments;
  segments.list = {{0, 2, 70}, {0, 72, 0}, {0, 75, 1}, {1, 0, 3}, {1, 10, 130}, {2, 150, 0}};
  for (bool silu : {false, true}) {
    Call call = make_call({3, 150, 37, 4, true, silu, true}, segments, 2);
    Array<double> inside(call.arguments.x.shape);
    for (const Segment& s : segments.list) {
      for (std::int64_t t = 0; t < s.length; ++t) {
        for (std::int64_t d = 0; d < 37; ++d) inside(s.batch, s.begin + t, d) = 1;
      }
    }
    for (std::size_t i = 0; i < inside.data.size(); ++i) {
      if (inside.data[i] != 0) continue;
      call.arguments.x.data[i] = call.upstream.y.data[i] = kNaN;
    }
    const Outcome all = run(context_, call.arguments, call.upstream);
    for (std::size_t i = 0; i < inside.data.size(); ++i) {
      if (inside.data[i] != 0) continue;
      ASSERT_EQ(all.y.data[i], 0.0f);
      ASSERT_EQ(all.dx.data[i], 0.0f);
    }
    expect_like_reference(all, call);

    for (std::size_t n = 0; n < segments.list.size(); ++n) {
      const Segment& s = segments.list[n];
      Call one = make_call({1, s.length, 37, 4, true, silu, true}, Segments::whole(1, s.length), 2);
      one.arguments.weight = call.arguments.weight;
      one.arguments.bias = call.arguments.bias;
      for (std::int64_t d = 0; d < 37; ++d) {
        for (std::int64_t t = 0; t < s.length; ++t) {
          one.arguments.x(0, t, d) = call.arguments.x(s.batch, s.begin + t, d);
          one.upstream.y(0, t, d) = call.upstream.y(s.batch, s.begin + t, d);
        }
        for (std::int64_t j = 0; j < 4; ++j) {
          one.arguments.s0(0, d, j) = call.arguments.s0(n, d, j);
          one.upstream.s(0, d, j) = call.upstream.s(n, d, j);
        }
      }
      const Outcome alone = run(context_, one.arguments, one.upstream);
      const auto same = [](const float* a, const float* b, std::int64_t count) {
        return std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
      };
      if (s.length > 0) {
        EXPECT_TRUE(same(&alone.y(0, 0, 0), &all.y(s.batch, s.begin, 0), s.length * 37)) << n;
        EXPECT_TRUE(same(&alone.dx(0, 0, 0), &all.dx(s.batch, s.begin, 0), s.length * 37)) << n;
      }
      EXPECT_TRUE(same(&alone.s(0, 0, 0), &all.s(n, 0, 0), 37 * 4)) << n;
      EXPECT_TRUE(same(&alone.d_initial(0, 0, 0), &all.d_initial(n, 0, 0), 37 * 4)) << n;
    }
  }
}

TEST_P(ShortConvTest, ThreadsChangeNoBit) {
  const Call call = make_call({3, 300, 70, 4, true, true, true}, Segments::whole(3, 300), 3);
  const Outcome first = run(context_, call.arguments, call.upstream);
  for (int threads : {1, 3, 5}) {
    Context context({.threads = threads, .isa = GetParam(), .poison_scratch = true});
    const Outcome again = run(context, call.arguments, call.upstream);
    EXPECT_TRUE(same_bits(again.y, first.y));
    EXPECT_TRUE(same_bits(again.s, first.s));
    EXPECT_TRUE(same_bits(again.dx, first.dx));
    EXPECT_TRUE(same_bits(again.dweight, first.dweight));
    EXPECT_TRUE(same_bits(again.dbias, first.dbias));
    EXPECT_TRUE(same_bits(again.d_initial, first.d_initial));
  }
}

// A sequence cut anywhere, its state handed over in place, and token by token: the same bits.
TEST_P(ShortConvTest, SplitsAndStepsAreTheUnbrokenSequence) {
  for (std::int64_t width : {1, 2, 3, 4, 5}) {
    const std::int64_t tokens = 70, channels = 21;
    const Call call =
        make_call({2, tokens, channels, width, true, true, true}, Segments::whole(2, tokens), 4);
    const Outcome whole = run(context_, call.arguments, call.upstream);
    Floats x(call.arguments.x), weight(call.arguments.weight), bias(call.arguments.bias);
    const auto part_of = [&](Floats& f, std::int64_t begin, std::int64_t end) {
      return View<float, 3>(f.array.data.data() + begin * channels, {2, end - begin, channels},
                            {tokens * channels, channels, 1});
    };
    const ShortConvOptions options{ConvActivation::kSilu};
    for (std::int64_t cut : {0, 1, 2, 5, 64, 69, 70}) {
      Floats y = Floats::filled(x.array.shape, kNaN), state(call.arguments.s0);
      for (auto [begin, end] : {std::pair{std::int64_t{0}, cut}, std::pair{cut, tokens}}) {
        short_conv(context_, options,
                   {part_of(x, begin, end), weight.tensor(), bias.tensor(), state.tensor()},
                   part_of(y, begin, end), state.tensor());
      }
      EXPECT_TRUE(same_bits(y.array, whole.y)) << cut;
      EXPECT_TRUE(same_bits(state.array, whole.s)) << cut;
    }
    const auto step_all = [&](const Tensor& state) {
      Floats y = Floats::filled(x.array.shape, kNaN);
      for (std::int64_t t = 0; t < tokens; ++t) {
        short_conv_step(context_, options, part_of(x, t, t + 1), weight.tensor(), bias.tensor(),
                        state, part_of(y, t, t + 1));
      }
      EXPECT_TRUE(same_bits(y.array, whole.y));
    };
    Floats state(call.arguments.s0);
    step_all(state.tensor());
    EXPECT_TRUE(same_bits(state.array, whole.s));
    if (width == 1) continue;
    // The window without its oldest input, as dense rows and with gaps between them.
    for (bool dense : {true, false}) {
      Floats window(call.arguments.s0);
      Tensor newest(window.array.data.data() + 1, DType::kF32, {2, channels, width - 1});
      newest.stride[0] = channels * width;
      newest.stride[1] = width;
      Floats packed = Floats::filled({2, channels, width - 1}, kNaN);
      if (dense) {
        copy_tensor(context_, newest, packed.tensor());
        newest = packed.tensor();
      }
      step_all(newest);
      const View<float, 3> v = newest.view<float, 3>();
      for (std::int64_t d = 0; d < channels; ++d) {
        for (std::int64_t j = 1; j < width; ++j) EXPECT_EQ(v.at(1, d, j - 1), whole.s(1, d, j));
      }
    }
  }
}

// Pieces far from the beginning read the state, too, where the width reaches so far.
TEST_P(ShortConvTest, AStateMayBeUpdatedInPlace) {
  for (const std::int64_t width : {1, 4, 64, 65, 66, 129}) {
    for (const std::int64_t tokens : {1, 63, 65, 128, 200}) {
      const Call call =
          make_call({2, tokens, 19, width, true, true, true}, Segments::whole(2, tokens), 9);
      const Outcome expected = run(context_, call.arguments, call.upstream);
      Floats x(call.arguments.x), weight(call.arguments.weight), bias(call.arguments.bias);
      Floats s(call.arguments.s0), y = Floats::filled({2, tokens, 19}, kNaN);
      short_conv(context_, {ConvActivation::kSilu},
                 {x.tensor(), weight.tensor(), bias.tensor(), s.tensor()}, y.tensor(), s.tensor());
      EXPECT_TRUE(same_bits(y.array, expected.y)) << width << " " << tokens;
      EXPECT_TRUE(same_bits(s.array, expected.s)) << width << " " << tokens;
    }
  }
}

TEST_P(ShortConvTest, StepAllocatesNothing) {
  const Call call = make_call({3, 1, 40, 4, true, true, true}, Segments::whole(3, 1), 5);
  Floats x(call.arguments.x), weight(call.arguments.weight), bias(call.arguments.bias),
      state(call.arguments.s0), y(call.arguments.x);
  const auto step = [&] {
    short_conv_step(context_, {ConvActivation::kSilu}, x.tensor(), weight.tensor(), bias.tensor(),
                    state.tensor(), y.tensor());
  };
  step();
  const std::int64_t before = allocations;
  EXPECT_GT(before, 0);
  const std::size_t scratch = context_.scratch_bytes();
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(allocations, before);
  EXPECT_EQ(context_.scratch_bytes(), scratch);
}

// Weights of [D, 1, W] and states with other strides; parameter gradients are added on; absent
// gradients are left out.
TEST_P(ShortConvTest, TakesStridesAndAddsParameterGradients) {
  const Call call = make_call({1, 20, 18, 4, true, true, true}, Segments::whole(1, 20), 6);
  const Outcome expected = run(context_, call.arguments, call.upstream);
  Floats x(call.arguments.x), bias(call.arguments.bias), dy(call.upstream.y), ds(call.upstream.s);
  Floats weight(call.arguments.weight), y = Floats::filled({1, 20, 18}, kNaN);
  // The state as [N, W, D] in memory.
  Floats state = Floats::filled({1, 4, 18}, 0);
  for (std::int64_t d = 0; d < 18; ++d) {
    for (std::int64_t j = 0; j < 4; ++j) {
      state.array(0, j, d) = static_cast<float>(call.arguments.s0(0, d, j));
    }
  }
  const View<float, 3> turned(state.array.data.data(), {1, 18, 4}, {72, 1, 18});
  const Tensor weight3(weight.array.data.data(), DType::kF32, {18, 1, 4});
  const ShortConvOptions options{ConvActivation::kSilu};
  const ShortConvInputs inputs{x.tensor(), weight3, bias.tensor(), turned};
  Floats dweight = Floats::filled({18, 4}, 2);
  short_conv_backward(context_, options, inputs, dy.tensor(), ds.tensor(), {},
                      Tensor(dweight.array.data.data(), DType::kF32, {18, 1, 4}), {}, {});
  for (std::size_t i = 0; i < dweight.array.data.size(); ++i) {
    EXPECT_EQ(dweight.array.data[i], expected.dweight.data[i] + 2);
  }
  short_conv(context_, options, inputs, y.tensor(), turned);
  EXPECT_TRUE(same_bits(y.array, expected.y));
  for (std::int64_t d = 0; d < 18; ++d) {
    for (std::int64_t j = 0; j < 4; ++j) EXPECT_EQ(state.array(0, j, d), expected.s(0, d, j));
  }
}

TEST_P(ShortConvTest, NaNReachesItsChannelAndTheNextTokensAlone) {
  Call call = make_call({1, 30, 20, 4, false, true, false}, Segments::whole(1, 30), 7);
  call.arguments.x(0, 10, 6) = kNaN;
  const Outcome r = run(context_, call.arguments, call.upstream);
  for (std::int64_t t = 0; t < 30; ++t) {
    for (std::int64_t d = 0; d < 20; ++d) {
      EXPECT_EQ(std::isnan(r.y(0, t, d)), d == 6 && t >= 10 && t < 14);
    }
  }
}

// SiLU and its slope where e^-z is no float: in whole vectors and in what is left of a row.
TEST_P(ShortConvTest, ActivationOfAnyNumber) {
  const double inf = std::numeric_limits<double>::infinity();
  const std::vector<double> numbers = {-3e38, -1e30, -1e5, -200, -100, -88,  -87.4, -87.2, -60, -1,
                                       0,     1,     60,   87.2, 87.4, 88.1, 89,    200,   3e38};
  const auto count = static_cast<std::int64_t>(numbers.size());
  for (const std::int64_t tokens : {1, 2, 7}) {
    Call call = make_call({1, tokens, count, 1, false, true, false}, Segments::whole(1, tokens), 8);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t d = 0; d < count; ++d) {
        call.arguments.x(0, t, d) = numbers[static_cast<std::size_t>(d)];
        call.arguments.weight(d, 0) = call.upstream.y(0, t, d) = 1;
      }
    }
    const Outcome r = run(context_, call.arguments, call.upstream);
    for (std::int64_t t = 0; t < tokens; ++t) {
      for (std::int64_t d = 0; d < count; ++d) {
        const double x = numbers[static_cast<std::size_t>(d)], sigmoid = 1 / (1 + std::exp(-x));
        const double y = x * sigmoid, slope = sigmoid + y * (1 - sigmoid);
        EXPECT_NEAR(r.y(0, t, d), y, 4e-6 * std::abs(y) + 1e-35) << x;
        EXPECT_NEAR(r.dx(0, t, d), slope, 1e-6) << x;
      }
    }
    for (const double x : {-inf, inf}) {
      call.arguments.x(0, 0, 0) = x;
      const float y = run(context_, call.arguments, call.upstream).y(0, 0, 0);
      EXPECT_TRUE(x < 0 ? std::isnan(y) : y == x) << x;  // -inf times 0 is NaN
    }
  }
}

TEST_P(ShortConvTest, RefusesWrongShapes) {
  Floats x = Floats::filled({2, 3, 4}, 0), w = Floats::filled({5, 4}, 0),
         y = Floats::filled({2, 3, 4}, 0), good = Floats::filled({4, 4}, 0);
  EXPECT_THROW(short_conv(context_, {}, {x.tensor(), w.tensor()}, y.tensor(), {}), Error);
  EXPECT_THROW(short_conv(context_, {}, {x.tensor(), good.tensor()}, {}, {}), Error);
  EXPECT_THROW(short_conv(context_, {}, {x.tensor(), {}}, y.tensor(), {}), Error);
  EXPECT_THROW(short_conv_step(context_, {}, x.tensor(), good.tensor(), {}, x.tensor(), y.tensor()),
               Error);
  Segments outside;
  outside.list = {{0, 2, 2}};
  EXPECT_THROW(
      short_conv(context_, {}, {x.tensor(), good.tensor(), {}, {}, &outside}, y.tensor(), {}),
      Error);
}

INSTANTIATE_TEST_SUITE_P(EachIsa, ShortConvTest, testing::ValuesIn(supported_isas()),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace ouzel::test
