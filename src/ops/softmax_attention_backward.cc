// Softmax attention backward. A task is some keys of one sequence and key head, against all
// queries.
#include <algorithm>
#include <array>
#include <vector>

#include "src/base/half.h"
#include "src/ops/copy_tensor.h"
#include "src/ops/softmax_call.h"

namespace ouzel {
namespace {

using namespace softmax;

// A backward is cut into about this many tasks per sequence when its keys allow: parts of dq then
// wait for their sum, so the number depends on the sequence's own shape alone.
constexpr std::int64_t kBackwardTasks = 16;
constexpr std::int64_t kLeastBackwardKeys = 2 * kSoftmaxSpan;
// Parts of dq held at a time, unless one sequence needs more.
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;

}  // namespace

void softmax_attention_backward(Context& context, const SoftmaxAttentionOptions& options,
                                const SoftmaxAttentionInputs& inputs, const ConstTensor& o,
                                const ConstTensor& lse, const ConstTensor& d_o,
                                const Tensor& given_dq, const Tensor& dk, const Tensor& dv) {
  constexpr const char* kOp = "softmax_attention_backward";
  const Sizes sizes = check_inputs(kOp, inputs.q, inputs.k, inputs.v);
  SoftmaxShape shape = make_shape(kOp, options, sizes);
  const auto queries_shape = {sizes.batch, sizes.queries, sizes.query_heads, sizes.value_size};
  check(kOp, "o", o, "[B, TQ, HQ, V]", queries_shape);
  check_rows(kOp, "d_o", d_o, "[B, TQ, HQ, V]", queries_shape);
  check(kOp, "lse", lse, "[B, TQ, HQ]", {sizes.batch, sizes.queries, sizes.query_heads},
        DType::kF64);
  const Sequences sequences = find_sequences(kOp, inputs, sizes);
  // Parts of it come from several tasks, and are added in float32.
  Tensor dq = given_dq;
  Buffer wide_dq;
  if (given_dq.present()) {
    check_rows(kOp, "dq", given_dq, "[B, TQ, HQ, K]",
               {sizes.batch, sizes.queries, sizes.query_heads, sizes.key_size});
    if (is_half(given_dq.dtype)) {
      wide_dq = Buffer(static_cast<std::size_t>(given_dq.size()) * sizeof(float));
      dq = Tensor(wide_dq.f32(), std::array<std::int64_t, 4>{sizes.batch, sizes.queries,
                                                             sizes.query_heads, sizes.key_size});
    }
    clear_outside(dq, sequences.queries);
  }
  if (dk.present()) {
    check_rows(kOp, "dk", dk, "[B, TK, HK, K]",
               {sizes.batch, sizes.keys, sizes.key_heads, sizes.key_size});
    clear_outside(dk, sequences.keys);
  }
  if (dv.present()) {
    check_rows(kOp, "dv", dv, "[B, TK, HK, V]",
               {sizes.batch, sizes.keys, sizes.key_heads, sizes.value_size});
    clear_outside(dv, sequences.keys);
  }
  if (sizes.queries == 0 && sizes.keys == 0) return;

  auto& impl = context.impl();
  const std::int64_t group = sizes.group();
  const std::int64_t floats = softmax_backward_scratch(shape);
  impl.reserve(bytes_of(floats));
  const auto shape_of = [&](std::size_t n) {
    SoftmaxShape s = shape;
    s.queries = sequences.queries.list[n].length;
    s.keys = sequences.keys.list[n].length;
    return s;
  };
  // Keys of a task. All but the first task of a sequence and head leave their part of dq in a
  // buffer.
  const auto keys_of_task = [&](std::int64_t keys) {
    const std::int64_t most = std::max<std::int64_t>(1, keys / kLeastBackwardKeys);
    const std::int64_t parts =
        std::clamp<std::int64_t>((kBackwardTasks + sizes.key_heads - 1) / sizes.key_heads, 1, most);
    const std::int64_t length = (keys + parts - 1) / parts;
    return std::max<std::int64_t>(1, (length + kSoftmaxSpan - 1) / kSoftmaxSpan) * kSoftmaxSpan;
  };
  Buffer partials;
  std::vector<Task> tasks;
  std::vector<std::int64_t> offsets;  // of the tasks' parts in `partials`, -1: none
  const std::size_t count = sequences.queries.list.size();
  for (std::size_t first = 0; first < count;) {
    // As many sequences as the parts of dq allow.
    tasks.clear();
    offsets.clear();
    std::int64_t held = 0;
    std::size_t n = first;
    for (; n < count; ++n) {
      const SoftmaxShape s = shape_of(n);
      const std::int64_t step = keys_of_task(s.keys);
      const std::int64_t row_floats = group * s.key_size;
      std::int64_t need = 0;
      for (std::int64_t begin = step; begin < s.keys && dq.present(); begin += step) {
        const SoftmaxRange range = softmax_seeing(s, begin, std::min(begin + step, s.keys));
        need += (range.end - range.begin) * row_floats * sizes.key_heads;
      }
      if (n > first && (held + need) * static_cast<std::int64_t>(sizeof(float)) > kPartialBytes)
        break;
      for (std::int64_t begin = 0; begin == 0 || begin < s.keys; begin += step) {
        const std::int64_t end = std::min(begin + step, s.keys);
        const SoftmaxRange range = softmax_seeing(s, begin, end);
        for (std::int64_t head = 0; head < sizes.key_heads; ++head) {
          tasks.push_back(
              {n, head, begin, end, (range.end - range.begin) * (end - begin), nullptr});
          offsets.push_back(begin > 0 && dq.present() ? held : -1);
          if (offsets.back() >= 0) held += (range.end - range.begin) * row_floats;
        }
      }
    }
    if (static_cast<std::size_t>(held) * sizeof(float) > partials.bytes()) {
      partials = Buffer();
      partials = Buffer(static_cast<std::size_t>(held) * sizeof(float));
    }
    for (std::size_t i = 0; i < tasks.size(); ++i) {
      if (offsets[i] >= 0) tasks[i].partial = partials.f32() + offsets[i];
    }
    const std::vector<Task> in_order = tasks;
    sort_by_cost(tasks);
    impl.run(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t index, Scratch& scratch) {
      const Task& task = tasks[static_cast<std::size_t>(index)];
      const Segment& segment = sequences.queries.list[task.sequence];
      const Segment& key_segment = sequences.keys.list[task.sequence];
      SoftmaxBackwardArgs args;
      args.shape = shape_of(task.sequence);
      args.types = {inputs.k.dtype, inputs.v.dtype};
      args.q = any_group_rows<const void>(inputs.q, segment, task.head, group);
      args.o = group_rows<const float>(o, segment, task.head, group);
      args.d_o = any_group_rows<const void>(d_o, segment, task.head, group);
      args.lse = group_rows<const double>(lse, segment, task.head, group);
      args.kv = key_rows(inputs.k, inputs.v, key_segment, task.head);
      args.dq = group_rows<float>(dq, segment, task.head, group);
      args.dk = any_group_rows<void>(dk, key_segment, task.head, 1);
      args.dv = any_group_rows<void>(dv, key_segment, task.head, 1);
      args.begin = task.begin;
      args.end = task.end;
      const SoftmaxRange range = softmax_seeing(args.shape, task.begin, task.end);
      if (task.partial != nullptr) {
        args.dq.token_stride = group * args.shape.key_size;
        args.dq.head_stride = args.shape.key_size;
        args.dq.data = task.partial - range.begin * args.dq.token_stride;
      } else if (args.dq.data != nullptr) {
        for (std::int64_t i = 0; i < args.shape.queries; ++i) {
          check_cancelled_at(i);
          if (i == range.begin) i = range.end;
          if (i >= args.shape.queries) break;
          for (std::int64_t h = 0; h < group; ++h) {
            std::fill_n(args.dq.row(i, h), args.shape.key_size, 0.0f);
          }
        }
      }
      args.scratch = scratch.take<float>(floats);
      softmax_backward(context.isa(), args);
    });
    // dq = the first task's part + the second's + ..., in order of keys.
    if (held > 0) {
      impl.run(static_cast<std::int64_t>(n - first) * sizes.key_heads, [&](std::int64_t index,
                                                                           Scratch&) {
        const std::size_t sequence = first + static_cast<std::size_t>(index / sizes.key_heads);
        const std::int64_t head = index % sizes.key_heads;
        const auto rows = group_rows<float>(dq, sequences.queries.list[sequence], head, group);
        for (const Task& task : in_order) {
          if (task.sequence != sequence || task.head != head || task.partial == nullptr) continue;
          const SoftmaxRange range = softmax_seeing(shape_of(sequence), task.begin, task.end);
          const float* from = task.partial;
          for (std::int64_t i = range.begin; i < range.end; ++i) {
            check_cancelled_at(i);
            for (std::int64_t h = 0; h < group; ++h, from += shape.key_size) {
              float* to = rows.row(i, h);
              for (std::int64_t f = 0; f < shape.key_size; ++f) to[f] += from[f];
            }
          }
        }
      });
    }
    first = n;
  }
  if (is_half(given_dq.dtype)) copy_tensor(context, dq, given_dq);
}

}  // namespace ouzel
