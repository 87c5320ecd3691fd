// What linear_attention and retention promise beyond agreeing with the reference: bit for bit the
// same for any thread count, batch company, packing and padding; nothing depends on later tokens;
// states can be handed on; a step allocates nothing.
#include <atomic>
#include <cstdlib>
#include <new>

#include <gtest/gtest.h>

#include "ouzel/error.h"
#include "src/kernels/recurrence.h"
#include "tests/contexts.h"
#include "tests/recurrence_case.h"

namespace {
std::atomic<std::int64_t> allocations{0};
}  // namespace

// Not inlined: the compiler would take free for the wrong partner of new.
[[gnu::noinline]] void* operator new(std::size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* p = std::malloc(size == 0 ? 1 : size)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, std::size_t) noexcept { std::free(p); }

namespace ouzel {
namespace {

using namespace test;
using enum FeatureMapKind;

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<RecurrenceCase> cases() {
  return {
      {.name = "plain", .tokens = 200, .hq = 1, .hk = 1, .hv = 1, .k = 24, .v = 100},
      {.name = "copied", .tokens = 320, .k = 64, .v = 64},
      {.name = "elu1", .batch = 2, .tokens = 130, .map = kElu1, .normalize = true},
      {.name = "product", .tokens = 130, .map = kElementwiseProduct, .normalize = true},
      {.name = "noncausal", .tokens = 130, .map = kElu1, .normalize = true, .causal = false},
      {.name = "retention", .tokens = 130, .hq = 4, .hk = 2, .hv = 4, .decay = true},
      {.name = "reverse", .tokens = 130, .hq = 4, .reverse = true},
      // Several heads a task, fewer of them with more threads.
      {.name = "together",
       .tokens = 300,
       .hq = 6,
       .hk = 6,
       .hv = 6,
       .k = 32,
       .v = 64,
       .map = kElu1,
       .normalize = true},
      {.name = "decays",
       .tokens = 300,
       .hq = 5,
       .hk = 5,
       .hv = 5,
       .k = 32,
       .v = 32,
       .decay = true,
       .log_decay = {-1e-3, -2, -0.1, -50, 0}},
      {.name = "strong", .tokens = 130, .decay = true, .log_decay = {-2, -50}},
      {.name = "long", .tokens = 2300, .hq = 1, .hk = 1, .hv = 1, .map = kElu1, .normalize = true},
  };
}

TEST(RecurrenceInvariance, ThreadCountChangesNoBit) {
  for (Isa isa : supported_isas()) {
    for (const RecurrenceCase& c : cases()) {
      SCOPED_TRACE(c.name + " " + name_of(isa));
      const RecurrenceData data(c, 7);
      Context one({.threads = 1, .isa = isa});
      RecurrenceRun expected(data);
      expected.forward(one);
      expected.backward(one);
      for (int threads : {2, 3, 7}) {
        const ContextOptions options{.threads = threads, .isa = isa, .poison_scratch = true};
        Context context = threads == 2 ? with_other_cache(options) : Context(options);
        RecurrenceRun run(data);
        run.forward(context);
        run.backward(context);
        EXPECT_TRUE(same_bits(run.o.memory(), expected.o.memory()));
        EXPECT_TRUE(same_bits(run.final.s, expected.final.s));
        EXPECT_TRUE(same_bits(run.final.z, expected.final.z));
        EXPECT_TRUE(same_bits(run.dq.memory(), expected.dq.memory()));
        EXPECT_TRUE(same_bits(run.dk.memory(), expected.dk.memory()));
        EXPECT_TRUE(same_bits(run.dv.memory(), expected.dv.memory()));
        EXPECT_TRUE(same_bits(run.d_initial.s, expected.d_initial.s));
        EXPECT_TRUE(same_bits(run.d_initial.z, expected.d_initial.z));
        for (int i = 0; i < 4; ++i) EXPECT_TRUE(same_bits(run.dw[0][i], expected.dw[0][i]));
      }
    }
  }
}

// Three sequences: alone, as rows of a padded batch whose padding is NaN, packed along T.
// Large outputs are written past the caches where their rows are whole cache lines.
TEST(RecurrenceInvariance, AlignmentOfLargeOutputsChangesNoBit) {
  constexpr std::int64_t kTokens = 2080, kHeads = 16, kSize = 64, kCount = kTokens * kHeads * kSize;
  const auto fill = [](std::uint32_t seed) {
    std::vector<float> x(kCount);
    for (float& y : x) {
      seed = seed * 1664525 + 1013904223;
      y = static_cast<float>(seed >> 8) * 0x1p-23f - 1;
    }
    return x;
  };
  std::vector<float> q = fill(1), k = fill(2), v = fill(3);
  const auto view = [](float* x) { return View<float, 4>(x, {1, kTokens, kHeads, kSize}); };
  RecurrenceInputs inputs;
  inputs.q = Tensor(view(q.data()));
  inputs.k = Tensor(view(k.data()));
  inputs.v = Tensor(view(v.data()));
  for (Isa isa : supported_isas()) {
    SCOPED_TRACE(name_of(isa));
    const ContextOptions options{.threads = 2, .isa = isa, .poison_scratch = true};
    Context context(options), other = with_other_cache(options);
    const auto run = [&](Context& with, std::int64_t offset) {
      Buffer memory(static_cast<std::size_t>(kCount + 16) * sizeof(float));
      std::fill_n(memory.f32(), kCount + 16, -7.0f);
      RecurrenceOutputs outputs;
      outputs.o = Tensor(view(memory.f32() + offset));
      linear_attention(with, {}, inputs, outputs);
      EXPECT_EQ(memory.f32()[offset + kCount], -7.0f);
      return std::vector<float>(memory.f32() + offset, memory.f32() + offset + kCount);
    };
    const std::vector<float> expected = run(context, 0);
    EXPECT_TRUE(same_bits(run(context, 1), expected));
    EXPECT_TRUE(same_bits(run(other, 0), expected));
    EXPECT_TRUE(same_bits(run(other, 1), expected));
  }
}

TEST(RecurrenceInvariance, CompanyAndPaddingChangeNoBit) {
  const std::vector<std::int64_t> lengths = {70, 1, 129};
  for (Isa isa : supported_isas()) {
    for (bool decay : {false, true}) {
      Context context({.threads = 2, .isa = isa, .poison_scratch = true});
      const std::int64_t k = 24, v = 40, heads = 2, longest = 130;
      Random random(3);
      const Doubles rows[] = {random_array<double>(random, {1, 200, heads, k}),
                              random_array<double>(random, {1, 200, heads, k}),
                              random_array<double>(random, {1, 200, heads, v}),
                              random_array<double>(random, {1, 200, heads, v})};
      struct Result {
        std::vector<float> o, dq, dk, dv, s;
      };
      // Lays the sequences out with each one's first row at (batch, begin), NaN elsewhere, runs,
      // and collects the rows in order.
      const auto run = [&](std::int64_t batch, std::int64_t tokens, const Segments& segments,
                           std::int64_t first) {
        std::vector<float> in[4], out[4];
        const std::int64_t sizes[] = {k, k, v, v};
        for (int x = 0; x < 4; ++x) {
          const std::int64_t row = heads * sizes[x];
          in[x].assign(static_cast<std::size_t>(batch * tokens * row),
                       std::numeric_limits<float>::quiet_NaN());
          out[x].assign(in[x].size(), 5.0f);
          std::int64_t from = first;
          for (const Segment& s : segments.list) {
            for (std::int64_t t = 0; t < s.length; ++t, ++from) {
              for (std::int64_t i = 0; i < row; ++i) {
                in[x][static_cast<std::size_t>((s.batch * tokens + s.begin + t) * row + i)] =
                    static_cast<float>(rows[x].data[static_cast<std::size_t>(from * row + i)]);
              }
            }
          }
        }
        const auto view = [&](std::vector<float>& x, std::int64_t size) {
          return View<float, 4>(x.data(), {batch, tokens, heads, size});
        };
        RecurrenceInputs inputs;
        inputs.q = Tensor(view(in[0], k));
        inputs.k = Tensor(view(in[1], k));
        inputs.v = Tensor(view(in[2], v));
        inputs.segments = &segments;
        States final(segments.count(), heads, k, v);
        RecurrenceOutputs outputs;
        outputs.o = view(out[3], v);
        outputs.final_state = final.view;
        RecurrenceOutputGrads up;
        up.o = Tensor(view(in[3], v));
        RecurrenceInputGrads grads;
        grads.q = view(out[0], k);
        grads.k = view(out[1], k);
        grads.v = view(out[2], v);
        LinearAttentionOptions options;
        options.feature_map.kind = kElu1;
        options.normalize = true;
        if (decay) {
          retention(context, {}, inputs, outputs);
          retention_backward(context, {}, inputs, nullptr, up, grads);
        } else {
          linear_attention(context, options, inputs, outputs);
          linear_attention_backward(context, options, inputs, nullptr, up, grads, nullptr);
        }
        Result r;
        r.s = final.s;
        std::vector<float>* to[] = {&r.dq, &r.dk, &r.dv, &r.o};
        for (int x = 0; x < 4; ++x) {
          const std::int64_t row = heads * sizes[x];
          std::vector<bool> inside(static_cast<std::size_t>(batch * tokens));
          for (const Segment& s : segments.list) {
            for (std::int64_t t = 0; t < s.length; ++t) {
              const std::int64_t at = s.batch * tokens + s.begin + t;
              inside[static_cast<std::size_t>(at)] = true;
              to[x]->insert(to[x]->end(), out[x].begin() + at * row,
                            out[x].begin() + (at + 1) * row);
            }
          }
          for (std::size_t t = 0; t < inside.size(); ++t) {
            for (std::int64_t i = 0; i < row && !inside[t]; ++i) {
              EXPECT_EQ(out[x][t * static_cast<std::size_t>(row) + static_cast<std::size_t>(i)], 0);
            }
          }
        }
        return r;
      };
      Result alone;
      std::int64_t first = 0;
      for (std::int64_t length : lengths) {
        const Result r = run(1, length, Segments::whole(1, length), first);
        alone.o.insert(alone.o.end(), r.o.begin(), r.o.end());
        alone.dq.insert(alone.dq.end(), r.dq.begin(), r.dq.end());
        alone.dk.insert(alone.dk.end(), r.dk.begin(), r.dk.end());
        alone.dv.insert(alone.dv.end(), r.dv.begin(), r.dv.end());
        alone.s.insert(alone.s.end(), r.s.begin(), r.s.end());
        first += length;
      }
      const std::vector<std::int64_t> cu = {0, 70, 71, 200};
      const Result others[] = {run(1, 200, Segments::packed(cu), 0),
                               run(3, longest, Segments::padded(lengths, longest), 0),
                               run(3, longest, Segments::padded(lengths, longest, true), 0)};
      for (const Result& r : others) {
        SCOPED_TRACE(name_of(isa));
        EXPECT_TRUE(same_bits(r.o, alone.o));
        EXPECT_TRUE(same_bits(r.dq, alone.dq));
        EXPECT_TRUE(same_bits(r.dk, alone.dk));
        EXPECT_TRUE(same_bits(r.dv, alone.dv));
        EXPECT_TRUE(same_bits(r.s, alone.s));
      }
    }
  }
}

TEST(RecurrenceInvariance, LaterTokensChangeNoEarlierOutput) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const RecurrenceCase& c : cases()) {
      if (!c.causal || c.reverse) continue;
      SCOPED_TRACE(c.name + " " + name_of(isa));
      const RecurrenceData data(c, 11);
      RecurrenceRun run(data);
      run.forward(context);
      for (const std::int64_t t : {std::int64_t{1}, c.tokens / 2 + 3, c.tokens - 1}) {
        RecurrenceRun other(data);
        for (Strided* x : {&other.q, &other.k, &other.v}) {
          const View<float, 4> view = x->view();
          for (std::int64_t b = 0; b < c.batch; ++b) {
            for (std::int64_t h = 0; h < view.extent[2]; ++h) {
              std::fill_n(view(b, t, h), view.extent[3], std::numeric_limits<float>::quiet_NaN());
            }
          }
        }
        other.forward(context);
        const View<float, 4> a = run.o.view(), b = other.o.view();
        for (std::int64_t n = 0; n < c.batch; ++n) {
          EXPECT_EQ(std::memcmp(a(n), b(n), static_cast<std::size_t>(t * a.stride[1]) * 4), 0) << t;
        }
      }
    }
  }
}

// The call over tokens [begin, end) of a run, from and into `states`.
void forward_part(Context& context, RecurrenceRun& run, std::int64_t begin, std::int64_t end,
                  States& states) {
  const auto part = [begin, end](View<float, 4> x) {
    return View<float, 4>(x(0, begin), {x.extent[0], end - begin, x.extent[2], x.extent[3]},
                          x.stride);
  };
  RecurrenceInputs inputs;
  inputs.q = Tensor(part(run.q.view()));
  inputs.k = Tensor(part(run.k.view()));
  inputs.v = Tensor(part(run.v.view()));
  inputs.initial_state = states.view;
  RecurrenceOutputs outputs;
  outputs.o = part(run.o.view());
  outputs.final_state = states.view;  // in place
  if (run.data.c.decay) {
    retention(context, run.retention_options(), inputs, outputs);
  } else {
    linear_attention(context, run.linear_options(), inputs, outputs);
  }
}

TEST(RecurrenceInvariance, StatesAreHandedOn) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 2, .isa = isa, .poison_scratch = true});
    for (const RecurrenceCase& base : cases()) {
      if (!base.causal || base.reverse) continue;
      RecurrenceCase c = base;
      c.states = false;
      SCOPED_TRACE(c.name + " " + name_of(isa));
      const RecurrenceData data(c, 5);
      RecurrenceRun whole(data);
      States whole_state(data.n, c.hv, data.f, c.v, true);
      forward_part(context, whole, 0, c.tokens, whole_state);
      const double largest = std::max(rms(whole.o.values()), rms(doubles(whole_state.s)));
      for (std::int64_t split :
           {std::int64_t{0}, std::int64_t{64}, std::int64_t{77}, std::int64_t{128},
            std::int64_t{2048}, std::int64_t{2176}, std::int64_t{2200}, c.tokens}) {
        if (split > c.tokens) continue;
        RecurrenceRun run(data);
        States state(data.n, c.hv, data.f, c.v, true);
        forward_part(context, run, 0, split, state);
        EXPECT_EQ(state.sequences[0].position, split);
        forward_part(context, run, split, c.tokens, state);
        EXPECT_LE(relative_error(whole.o.values(), run.o.values(), largest), 5e-6) << split;
        EXPECT_LE(relative_error(doubles(whole_state.s), doubles(state.s), largest), 5e-6);
        if (split % 64 == 0 || split == c.tokens) {
          EXPECT_TRUE(same_bits(whole.o.memory(), run.o.memory())) << split;
          EXPECT_TRUE(same_bits(whole_state.s, state.s)) << split;
          EXPECT_TRUE(same_bits(whole_state.s_residue, state.s_residue)) << split;
          EXPECT_TRUE(same_bits(whole_state.z, state.z)) << split;
          EXPECT_TRUE(same_bits(whole_state.z_residue, state.z_residue)) << split;
        }
      }
    }
  }
}

TEST(RecurrenceInvariance, AHardResetForgetsEvenNaN) {
  for (Isa isa : supported_isas()) {
    Context context({.threads = 1, .isa = isa, .poison_scratch = true});
    for (std::int64_t position : {0, 2048}) {
      RecurrenceCase c{.tokens = 70, .decay = true};
      const double inf = std::numeric_limits<double>::infinity();
      c.log_decay = {-inf, -inf};
      const RecurrenceData data(c, 2);
      RecurrenceRun run(data);
      std::fill(run.initial.s.begin(), run.initial.s.end(),
                std::numeric_limits<float>::quiet_NaN());
      for (SequenceState& state : run.initial.sequences) state.position = position;
      const auto truth = reference::recurrence(data.a);
      run.forward(context);
      EXPECT_LE(relative_error(truth.o.data, run.o.values(), 0), 5e-6);
      const View<float, 4> q = run.q.view();
      const auto first = [](View<float, 4> x) {
        return View<float, 4>(x.data, {1, 1, x.extent[2], x.extent[3]}, x.stride);
      };
      std::vector<float> before(run.o.memory());
      retention_step(context, run.retention_options(), Tensor(first(q)),
                     Tensor(first(run.k.view())), Tensor(first(run.v.view())), run.initial.view,
                     first(run.o.view()));
      for (float x : run.initial.s) EXPECT_TRUE(std::isfinite(x));
    }
  }
}

TEST(RecurrenceInvariance, StepsAllocateNothing) {
  for (const RecurrenceCase& c :
       {RecurrenceCase{
            .tokens = 1, .k = 64, .v = 64, .map = kElementwiseProduct, .normalize = true},
        RecurrenceCase{.tokens = 1, .k = 64, .v = 64, .decay = true}}) {
    Context context({.threads = 2});
    const RecurrenceData data(c, 1);
    RecurrenceRun run(data);
    const Tensor q = run.q.view(), k = run.k.view(), v = run.v.view(), o = run.o.view();
    const LinearAttentionOptions linear = run.linear_options();
    const RetentionOptions decayed = run.retention_options();
    const auto step = [&] {
      c.decay ? retention_step(context, decayed, q, k, v, run.initial.view, o)
              : linear_attention_step(context, linear, q, k, v, run.initial.view, o);
    };
    step();
    const std::int64_t before = allocations.load();
    const std::size_t scratch = context.scratch_bytes();
    for (int i = 0; i < 10; ++i) step();
    EXPECT_EQ(allocations.load(), before);
    EXPECT_EQ(context.scratch_bytes(), scratch);
  }
}

TEST(RecurrenceInvariance, RefusesWhatDoesNotFit) {
  Context context({.threads = 1});
  const auto message = [&](const RecurrenceCase& c, auto change) -> std::string {
    const RecurrenceData data(c, 1);
    RecurrenceRun run(data);
    RecurrenceInputs inputs = run.inputs();
    RecurrenceOutputs outputs;
    outputs.o = run.o.view();
    outputs.final_state = run.final.view;
    LinearAttentionOptions options = run.linear_options();
    change(options, inputs, outputs);
    try {
      linear_attention(context, options, inputs, outputs);
    } catch (const Error& e) {
      EXPECT_EQ(e.kind(), ErrorKind::kInvalidArgument);
      return e.what();
    }
    return "";
  };
  using O = LinearAttentionOptions&;
  using I = RecurrenceInputs&;
  using R = RecurrenceOutputs&;
  EXPECT_EQ(message({}, [](O, I, R) {}), "");
  EXPECT_NE(message({}, [](O, I i, R) { i.k.extent[3] = 7; }).find("same key size"),
            std::string::npos);
  EXPECT_NE(message({}, [](O, I i, R) { i.v.extent[1] = 3; }).find("same batch and tokens"),
            std::string::npos);
  for (const std::size_t axis : {0, 1}) {
    const auto negative = [axis](O, I i, R) {
      i.q.extent[axis] = i.k.extent[axis] = i.v.extent[axis] = -1;
    };
    EXPECT_NE(message({}, negative).find("negative"), std::string::npos);
  }
  EXPECT_NE(message({.hv = 3}, [](O, I, R) {}).find("multiple"), std::string::npos);
  EXPECT_NE(message({}, [](O, I i, R) { i.q.dtype = DType::kF64; }).find("float32"),
            std::string::npos);
  EXPECT_NE(message({}, [](O, I i, R) { i.q.stride[3] = 2; }).find("contiguous"),
            std::string::npos);
  EXPECT_NE(message({}, [](O, I, R r) { r.o.extent[2] = 1; }).find("o must be"), std::string::npos);
  EXPECT_NE(message({}, [](O, I, R r) { r.final_state.keys = 3; }).find("final state"),
            std::string::npos);
  EXPECT_NE(message({}, [](O o, I, R) { o.feature_map.kind = kElementwiseProduct; }).find("w1"),
            std::string::npos);
  EXPECT_NE(message({}, [](O o, I, R) { o.form = Form::kParallel; }).find("no states"),
            std::string::npos);
  EXPECT_NE(message({}, [](O o, I, R) { o.eps = -1; }).find("eps"), std::string::npos);
}

}  // namespace
}  // namespace ouzel
