// The interface of layers. Layers hold shapes, offsets into the flat array of parameters and packed
// weights; a Run carries all else. forward pushes a frame (what backward needs) on the run's arena,
// backward finds it there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "ouzel/context.h"
#include "ouzel/segments.h"
#include "ouzel/tensor.h"
#include "src/layers/arena.h"
#include "src/layers/parameters.h"
#include "src/layers/state.h"

namespace ouzel {

using Matrix = View<float, 2>;
using ConstMatrix = View<const float, 2>;

// One pass over tokens [batch, tokens]; activations are matrices of batch * tokens rows.
struct Run {
  Context& context;
  Arena& arena;
  const float* weights = nullptr;
  float* gradients = nullptr;  // added to by backward
  std::int64_t batch = 0, tokens = 0;
  const Segments* segments = nullptr;            // null: every batch row is one sequence
  std::span<const std::int64_t> positions = {};  // of every row
  // The memory of each sequence before and after; both may be the same. Empty: zeros, not wanted.
  std::span<const SequenceMemory> initial = {}, final = {};
  bool training = false;  // frames keep what backward needs

  std::int64_t rows() const { return batch * tokens; }
  std::int64_t sequences() const { return segments ? segments->count() : batch; }
  Segment segment(std::int64_t n) const {
    return segments ? segments->list[static_cast<std::size_t>(n)] : Segment{n, 0, tokens};
  }
  // One token of every sequence, continuing a state: the step operators serve it.
  bool step() const { return tokens == 1 && !segments && !initial.empty() && !training; }
  // Everything that touches memory of the arena happens in here: on a counting arena nothing does.
  template <class F>
  void compute(F&& operation) const {
    if (!arena.counting()) operation();
  }
};

// Where a frame begins in the arena.
using Frame = std::size_t;

// Columns [first, first + count).
inline Matrix columns(Matrix m, std::int64_t first, std::int64_t count) {
  return {m.data + first, {m.extent[0], count}, m.stride};
}
// Columns [first, first + heads * size) as [rows, heads, size].
inline View<float, 3> heads_of(Matrix m, std::int64_t first, std::int64_t heads,
                               std::int64_t size) {
  return {m.data + first, {m.extent[0], heads, size}, {m.stride[0], size, 1}};
}
// The same as [batch, tokens, heads, size].
inline View<float, 4> sequences_of(const Run& run, Matrix m, std::int64_t first, std::int64_t heads,
                                   std::int64_t size) {
  return {m.data + first,
          {run.batch, run.tokens, heads, size},
          {run.tokens * m.stride[0], m.stride[0], size, 1}};
}

// Mixes tokens (or, as the MLP, channels): the inner part of a residual block.
class Mixer {
 public:
  Mixer() = default;
  Mixer(const Mixer&) = delete;
  Mixer& operator=(const Mixer&) = delete;
  virtual ~Mixer() = default;

  // Takes the frame's memory from the arena; the same calls in the same order find it again.
  virtual Frame push(Arena& arena, const Run& run) const = 0;
  // y += mixer(x).
  virtual void forward(Run& run, Matrix x, Matrix y, Frame frame) const = 0;
  // dx = gradient of x. Parameter gradients are added to. May overwrite the frame.
  virtual void backward(Run& run, Matrix x, Matrix dy, Matrix dx, Frame frame) const = 0;
};

}  // namespace ouzel
