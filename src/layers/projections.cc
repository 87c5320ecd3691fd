#include "src/layers/projections.h"

#include <cstring>
#include <vector>

#include "ouzel/short_conv.h"

namespace ouzel {
namespace {

std::vector<Linear::Part> parts(const std::string& prefix, const Projections::Sizes& sizes) {
  std::vector<Linear::Part> list = {
      {prefix + ".q_proj", sizes.q}, {prefix + ".k_proj", sizes.k}, {prefix + ".v_proj", sizes.v}};
  if (sizes.g != 0) list.push_back({prefix + ".g_proj", sizes.g});
  return list;
}

constexpr ShortConvOptions kSilu{.activation = ConvActivation::kSilu};

}  // namespace

Projections::Projections(const Builder& builder, const std::string& prefix, const Sizes& sizes,
                         const MixerConfig& config)
    : sizes_(sizes), linear_(builder, parts(prefix, sizes), builder.config.hidden_size) {
  if (!config.use_short_conv) return;
  conv_size_ = config.conv_size;
  // One convolution of q | k | v: its weights stand one after the other.
  ParameterTable& table = builder.table;
  conv_weight_ = table.add(prefix + ".q_conv1d.weight", {sizes.q, 1, conv_size_}, Init::kNormal);
  table.add(prefix + ".k_conv1d.weight", {sizes.k, 1, conv_size_}, Init::kNormal);
  table.add(prefix + ".v_conv1d.weight", {sizes.v, 1, conv_size_}, Init::kNormal);
  window_part_ = builder.state.add(prefix + ".conv", {sizes.qkv(), conv_size_});
}

Projections::Saved::Saved(Arena& arena, const Run& run, const Projections& p)
    : projected(arena.matrix(run.rows(), p.linear_.outputs())),
      qkv(columns(projected, 0, p.sizes_.qkv())),
      gate(columns(projected, p.sizes_.qkv(), p.sizes_.g)) {
  if (p.conv_weight_ < 0) return;
  qkv = arena.matrix(run.rows(), p.sizes_.qkv());
  if (!run.initial.empty()) {
    window = arena.take<float>(run.sequences() * p.sizes_.qkv() * p.conv_size_);
  }
}

void Projections::forward(Run& run, Matrix x, const Saved& saved) const {
  linear_.forward(run, x, saved.projected);
  if (conv_weight_ >= 0) convolve(run, saved);
}

void Projections::convolve(Run& run, const Saved& saved) const {
  const std::int64_t width = sizes_.qkv(), sequences = run.sequences();
  const std::size_t mark = run.arena.used();
  Tensor final_state;
  float* after = nullptr;
  if (!run.final.empty()) {
    after = run.arena.take<float>(sequences * width * conv_size_);
    final_state = {after, DType::kF32, {sequences, width, conv_size_}};
  }
  run.compute([&] {
    // The windows of the sequences lie apart: they are gathered (some kilobytes each) and put back.
    const std::size_t bytes = static_cast<std::size_t>(width * conv_size_) * sizeof(float);
    for (std::int64_t n = 0; n < std::ssize(run.initial); ++n) {
      std::memcpy(saved.window + n * width * conv_size_,
                  run.initial[static_cast<std::size_t>(n)].part(window_part_), bytes);
    }
    const View<const float, 3> in{
        saved.projected.data,
        {run.batch, run.tokens, width},
        {run.tokens * saved.projected.stride[0], saved.projected.stride[0], 1}};
    const View<float, 3> out{saved.qkv.data, {run.batch, run.tokens, width}};
    const View<const float, 2> weight{run.weights + conv_weight_, {width, conv_size_}};
    if (run.step()) {
      const Tensor state{saved.window, DType::kF32, {sequences, width, conv_size_}};
      short_conv_step(run.context, kSilu, in, weight, {}, state, out);
      after = saved.window;
    } else {
      ShortConvInputs inputs{
          .x = in, .weight = weight, .bias = {}, .initial_state = {}, .segments = run.segments};
      if (saved.window != nullptr) {
        inputs.initial_state = {saved.window, DType::kF32, {sequences, width, conv_size_}};
      }
      short_conv(run.context, kSilu, inputs, out, final_state);
    }
    for (std::int64_t n = 0; n < std::ssize(run.final); ++n) {
      std::memcpy(run.final[static_cast<std::size_t>(n)].part(window_part_),
                  after + n * width * conv_size_, bytes);
    }
  });
  run.arena.release(mark);
}

void Projections::backward(Run& run, Matrix x, const Saved& saved, Matrix d_projected,
                           Matrix dx) const {
  if (conv_weight_ >= 0) {
    const std::int64_t width = sizes_.qkv();
    const std::size_t mark = run.arena.used();
    const Matrix d_qkv = run.arena.matrix(run.rows(), width);
    run.compute([&] {
      const auto as_sequences = [&](Matrix m) {
        return View<float, 3>{
            m.data, {run.batch, run.tokens, width}, {run.tokens * m.stride[0], m.stride[0], 1}};
      };
      const View<float, 3> dy = as_sequences(d_qkv), d_in = as_sequences(d_projected);
      for (std::int64_t r = 0; r < run.rows(); ++r) {
        std::memcpy(d_qkv(r), d_projected(r), static_cast<std::size_t>(width) * sizeof(float));
      }
      ShortConvInputs inputs{
          .x = as_sequences(saved.projected),
          .weight = View<const float, 2>{run.weights + conv_weight_, {width, conv_size_}},
          .bias = {},
          .initial_state = {},
          .segments = run.segments};
      if (saved.window != nullptr) {
        inputs.initial_state = {saved.window, DType::kF32, {run.sequences(), width, conv_size_}};
      }
      short_conv_backward(run.context, kSilu, inputs, dy, {}, d_in,
                          View<float, 2>{run.gradients + conv_weight_, {width, conv_size_}}, {},
                          {});
    });
    run.arena.release(mark);
  }
  linear_.backward(run, x, d_projected, dx);
}

}  // namespace ouzel
