#include "src/ops/recurrence_shape.h"

#include <algorithm>
#include <cmath>
#include <string>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/dense_tensor.h"
#include "src/base/half.h"

namespace ouzel {
namespace {

[[noreturn]] void refuse(const RecurrenceSpec& spec, const std::string& sentence) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", spec.law->name, sentence));
}

bool is_f32_or_half(DType dtype) { return dtype == DType::kF32 || is_half(dtype); }

void check_rank4(const RecurrenceSpec& spec, const ConstTensor& tensor, const char* what,
                 const char* letters) {
  if (tensor.rank != 4 || !is_f32_or_half(tensor.dtype)) {
    refuse(spec, fmt::format("{} must be a float32, bfloat16 or float16 array {}, not {}", what,
                             letters, described(tensor)));
  }
  if (tensor.extent[3] > 1 && tensor.stride[3] != 1) {
    refuse(spec, fmt::format("the last axis of {} must be contiguous (its stride is {}); copy the "
                             "array first",
                             what, tensor.stride[3]));
  }
}

}  // namespace

std::int64_t key_size(const ConstTensor& q) {
  return q.rank == 4 ? std::max<std::int64_t>(q.extent[3], 1) : 1;
}

RecurrenceShape check_recurrence(const RecurrenceSpec& spec, const RecurrenceInputs& inputs) {
  check_rank4(spec, inputs.q, "q", "[B, T, HQ, K]");
  check_rank4(spec, inputs.k, "k", "[B, T, HK, K]");
  check_rank4(spec, inputs.v, "v", "[B, T, HV, V]");
  RecurrenceShape s;
  s.batch = inputs.q.extent[0];
  s.tokens = inputs.q.extent[1];
  s.query_heads = inputs.q.extent[2];
  s.key_heads = inputs.k.extent[2];
  s.value_heads = inputs.v.extent[2];
  s.keys = inputs.q.extent[3];
  s.values = inputs.v.extent[3];
  // A step must not allocate: the sentence is made when it is needed.
  const auto found = [&inputs] {
    return fmt::format("found q {}, k {}, v {}", shape_string(inputs.q), shape_string(inputs.k),
                       shape_string(inputs.v));
  };
  s.key_tokens = inputs.k.extent[1];
  const bool cross = !spec.causal && inputs.segments == nullptr;
  if (inputs.k.extent[0] != s.batch || inputs.v.extent[0] != s.batch ||
      inputs.v.extent[1] != s.key_tokens || (s.key_tokens != s.tokens && !cross)) {
    refuse(spec,
           "q, k and v must have the same batch and tokens (q may have others than k and v "
           "where the call is not causal and has no segments); " +
               found());
  }
  if (inputs.k.extent[3] != s.keys) refuse(spec, "q and k must have the same key size; " + found());
  if (s.batch < 0 || s.tokens < 0 || s.key_tokens < 0)
    refuse(spec, "extents must not be negative; " + found());
  if (s.query_heads < 1 || s.key_heads < 1 || s.value_heads < 1 || s.keys < 1 || s.values < 1) {
    refuse(spec, "heads, key size and value size must be at least 1; " + found());
  }
  if (s.value_heads % s.key_heads != 0) {
    refuse(spec, "the heads of v must be a multiple of those of k; " + found());
  }
  if (s.query_heads % s.value_heads != 0 && s.value_heads % s.query_heads != 0) {
    refuse(spec, "the heads of q must divide those of v or be a multiple of them; " + found());
  }
  s.output_heads = std::max(s.query_heads, s.value_heads);
  s.map = check_feature_map(spec.law->name, spec.map, s.query_heads, s.key_heads, s.keys);
  s.features = s.map.features;
  s.segments = inputs.segments;
  if (s.segments != nullptr) s.segments->check(spec.law->name, s.batch, s.tokens);
  s.sequences = s.segments != nullptr ? s.segments->count() : s.batch;

  if (!std::isfinite(spec.scale)) refuse(spec, "the scale must be a finite number");
  if (!(spec.eps >= 0)) refuse(spec, "eps must be at least 0");
  if (!spec.log_decay.empty()) {
    if (static_cast<std::int64_t>(spec.log_decay.size()) != s.value_heads) {
      refuse(spec, fmt::format("log_decay has {} entries and v has {} heads", spec.log_decay.size(),
                               s.value_heads));
    }
    for (double g : spec.log_decay) {
      // Up to 1e-6 above 0 is rounding, and counts as 0.
      if (!(g <= 1e-6)) {
        refuse(spec, fmt::format("log_decay must be at most 0 (no decay), not {}", g));
      }
    }
  }
  return s;
}

void check_state(const RecurrenceSpec& spec, const RecurrenceShape& shape, const StateView& state,
                 const char* what) {
  if (!state.present()) return;
  if (state.heads != shape.value_heads || state.keys != shape.features ||
      state.values != shape.values ||
      static_cast<std::int64_t>(state.sequences.size()) != shape.sequences) {
    refuse(spec, fmt::format("{} must be [N, HV, F, V] = [{}, {}, {}, {}], not [{}, {}, {}, {}]",
                             what, shape.sequences, shape.value_heads, shape.features, shape.values,
                             state.sequences.size(), state.heads, state.keys, state.values));
  }
  for (const SequenceState& s : state.sequences) {
    if (s.s == nullptr || (spec.normalize && s.z == nullptr)) {
      refuse(spec, fmt::format("{} lacks {}", what,
                               s.s == nullptr ? "the memory of S"
                                              : "z, which a normalised call "
                                                "needs beside S"));
    }
  }
}

void check_positions(const RecurrenceSpec& spec, const RecurrenceShape& shape,
                     const StateView& initial) {
  if (spec.map.kind != FeatureMapKind::kCosformer) return;
  for (std::int64_t n = 0; n < shape.sequences; ++n) {
    const std::int64_t start = path_of(initial, n, 0, false).position;
    const std::int64_t end = start + std::max(shape.segment(n).length, shape.key_segment(n).length);
    if (end > spec.map.options.max_length) {
      refuse(spec, fmt::format("the weights of cosformer end at its length m = {}, and sequence {} "
                               "reaches position {}; raise m from the start on",
                               spec.map.options.max_length, n, end - 1));
    }
  }
}

MapPath path_of(const StateView& initial, std::int64_t n, std::int64_t length, bool back_in_time,
                const TokenValues& exponents) {
  const std::int64_t start =
      initial.present() ? initial.sequences[static_cast<std::size_t>(n)].position : 0;
  return {back_in_time ? start + length - 1 : start, back_in_time ? -1 : 1, exponents};
}

float power_of_two(float exponent) {
  return std::ldexp(1.0f, static_cast<int>(std::clamp(exponent, -200.0f, 200.0f)));
}

void check_rows(const RecurrenceSpec& spec, const ConstTensor& tensor, const char* what,
                const RecurrenceShape& shape, std::int64_t tokens, std::int64_t heads,
                std::int64_t size, bool optional) {
  if (!tensor.present() && optional) return;
  if (tensor.rank != 4 || !is_f32_or_half(tensor.dtype) || tensor.extent[0] != shape.batch ||
      tensor.extent[1] != tokens || tensor.extent[2] != heads || tensor.extent[3] != size) {
    refuse(spec,
           fmt::format("{} must be a float32, bfloat16 or float16 array [{}, {}, {}, {}], not {}",
                       what, shape.batch, tokens, heads, size, described(tensor)));
  }
  if (size > 1 && tensor.stride[3] != 1) {
    refuse(spec, fmt::format("the last axis of {} must be contiguous", what));
  }
}

double log_decay_of(const RecurrenceSpec& spec, std::int64_t state) {
  if (spec.law->decay == DecayKind::kNone) return 0;
  if (spec.log_decay.empty()) return spec.law->default_log_decay(state);
  return std::min(spec.log_decay[static_cast<std::size_t>(state)], 0.0);
}

Fold::Fold(double log_decay, bool shifted) : log_decay(log_decay) {
  constexpr double kGuard = -60 * 0.6931471805599453;
  while (block > 1 && static_cast<double>(block) * log_decay < kGuard) block /= 2;
  const double decay = std::exp(log_decay);
  double power = 1;  // in double: 64 products of float would be off by 2e-6
  leave[0] = 1;
  for (std::int64_t t = 0; t < kChunk; ++t) {
    if (t % block == 0) power = 1;
    const double before = power;
    power *= decay;
    const double p = shifted ? before : power;
    read[t] = static_cast<float>(p);
    write[t] = static_cast<float>(1 / p);
    if (t < block) leave[t + 1] = static_cast<float>(power);
  }
  if (block == 1 && !shifted) {
    enter = static_cast<float>(decay);
    std::fill(read, read + kChunk, 1.0f);
    std::fill(write, write + kChunk, 1.0f);
    leave[1] = 1;
  }
}

}  // namespace ouzel
