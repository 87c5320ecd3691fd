// Softmax attention forward, and its step against a cache. A task is some queries of one sequence
// and key head.
#include "ouzel/softmax_attention.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "src/ops/softmax_call.h"

namespace ouzel {
namespace {

using namespace softmax;

// Rows of queries (over the heads of a group) that one forward task takes: enough that packing a
// block of keys is 1-2 % of the work done with it.
constexpr std::int64_t kTaskRows = 384;
std::int64_t queries_of_task(std::int64_t group) {
  return std::max(kSoftmaxWidestTile, kTaskRows / group / kSoftmaxWidestTile * kSoftmaxWidestTile);
}

}  // namespace

void softmax_attention(Context& context, const SoftmaxAttentionOptions& options,
                       const SoftmaxAttentionInputs& inputs,
                       const SoftmaxAttentionOutputs& outputs) {
  constexpr const char* kOp = "softmax_attention";
  const Sizes sizes = check_inputs(kOp, inputs.q, inputs.k, inputs.v);
  const SoftmaxShape shape = make_shape(kOp, options, sizes);
  check_rows(kOp, "o", outputs.o, "[B, TQ, HQ, V]",
             {sizes.batch, sizes.queries, sizes.query_heads, sizes.value_size});
  if (outputs.lse.present()) {
    check(kOp, "lse", outputs.lse, "[B, TQ, HQ]", {sizes.batch, sizes.queries, sizes.query_heads},
          DType::kF64);
  }
  const Sequences sequences = find_sequences(kOp, inputs, sizes);
  if (sizes.queries == 0) return;
  clear_outside(outputs.o, sequences.queries);
  if (outputs.lse.present()) clear_outside(outputs.lse, sequences.queries);

  const std::int64_t group = sizes.group();
  const std::int64_t step = queries_of_task(group);
  std::vector<Task> tasks;
  for (std::size_t n = 0; n < sequences.queries.list.size(); ++n) {
    const std::int64_t queries = sequences.queries.list[n].length;
    const std::int64_t keys = sequences.keys.list[n].length;
    for (std::int64_t begin = 0; begin < queries; begin += step) {
      Task task;
      task.sequence = n;
      task.begin = begin;
      task.end = std::min(begin + step, queries);
      const std::int64_t low =
          std::clamp<std::int64_t>(begin + shape.offset - shape.before, 0, keys);
      const std::int64_t high =
          std::clamp<std::int64_t>(task.end + shape.offset + shape.after, low, keys);
      task.cost = (task.end - begin) * (high - low);
      for (task.head = 0; task.head < sizes.key_heads; ++task.head) tasks.push_back(task);
    }
  }
  sort_by_cost(tasks);
  auto& impl = context.impl();
  const std::int64_t floats = softmax_forward_scratch(shape, std::min(step, sizes.queries));
  impl.reserve(bytes_of(floats));
  impl.run(static_cast<std::int64_t>(tasks.size()), [&](std::int64_t index, Scratch& scratch) {
    const Task& task = tasks[static_cast<std::size_t>(index)];
    const Segment& segment = sequences.queries.list[task.sequence];
    const SoftmaxKeys keys =
        key_rows(inputs.k, inputs.v, sequences.keys.list[task.sequence], task.head);
    SoftmaxForwardArgs args;
    args.shape = shape;
    args.shape.queries = segment.length;
    args.shape.keys = keys.end;
    args.types = {inputs.k.dtype, inputs.v.dtype};
    args.q = any_group_rows<const void>(inputs.q, segment, task.head, group);
    args.o = any_group_rows<void>(outputs.o, segment, task.head, group);
    args.lse = group_rows<double>(outputs.lse, segment, task.head, group);
    args.pieces = &keys;
    args.piece_count = 1;
    args.begin = task.begin;
    args.end = task.end;
    args.scratch = scratch.take<float>(floats);
    softmax_forward(context.isa(), args);
  });
}

void softmax_attention_step(Context& context, const SoftmaxAttentionOptions& options,
                            const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                            std::span<KvCache> caches, const Tensor& o) {
  constexpr const char* kOp = "softmax_attention_step";
  const Sizes sizes = check_inputs(kOp, q, k, v);
  for (const ConstTensor* t : {&q, &k, &v}) {
    if (t->dtype != DType::kF32) fail(kOp, "q, k and v are expected as F32; convert them first");
  }
  const SoftmaxShape shape = make_shape(kOp, options, sizes);
  check(kOp, "o", o, "[N, T, HQ, V]",
        {sizes.batch, sizes.queries, sizes.query_heads, sizes.value_size});
  if (sizes.keys != sizes.queries) {
    fail(kOp, fmt::format("q has {} tokens and k {}; expected as many new keys as queries",
                          sizes.queries, sizes.keys));
  }
  if (!options.causal || options.q_offset != 0) {
    fail(kOp,
         "causal is false or q_offset is set; a step is causal, and the cache knows its position");
  }
  if (static_cast<std::int64_t>(caches.size()) != sizes.batch) {
    fail(kOp,
         fmt::format("{} caches for {} sequences; expected one each", caches.size(), sizes.batch));
  }
  const std::int64_t tokens = sizes.queries;
  for (const KvCache& cache : caches) {
    if (cache.position < 0 || cache.capacity < 1 || cache.k == nullptr || cache.v == nullptr) {
      fail(kOp,
           fmt::format("a cache has position {} and room for {} tokens; expected memory for at "
                       "least one and a position of 0 or more",
                       cache.position, cache.capacity));
    }
    const bool ring = options.window > 0 && cache.capacity >= options.window;
    if (!ring && (cache.position > cache.capacity || tokens > cache.capacity - cache.position)) {
      fail(kOp,
           fmt::format("a cache of {} tokens is at position {} and cannot take {} more; reserve "
                       "more, or use a window of at most its capacity",
                       cache.capacity, cache.position, tokens));
    }
  }
  if (tokens == 0) return;

  const std::int64_t group = sizes.group();
  const std::int64_t k_row = sizes.key_heads * sizes.key_size;
  const std::int64_t v_row = sizes.key_heads * sizes.value_size;
  const std::int64_t step = queries_of_task(group);
  const std::int64_t parts = (tokens + step - 1) / step;
  const std::int64_t floats = tokens == 1 ? softmax_step_scratch(shape)
                                          : softmax_forward_scratch(shape, std::min(step, tokens));
  // The last tokens that the cache keeps.
  const auto store = [&](std::int64_t n, std::int64_t head) {
    const KvCache& cache = caches[static_cast<std::size_t>(n)];
    const SoftmaxKeys rows = key_rows(k, v, {n, 0, tokens}, head);
    for (std::int64_t t = std::max<std::int64_t>(0, tokens - cache.capacity); t < tokens; ++t) {
      check_cancelled_at(t);
      const std::int64_t slot = (cache.position + t) % cache.capacity;
      std::copy_n(static_cast<const float*>(rows.k) + t * rows.k_stride, sizes.key_size,
                  cache.k + slot * k_row + head * sizes.key_size);
      std::copy_n(static_cast<const float*>(rows.v) + t * rows.v_stride, sizes.value_size,
                  cache.v + slot * v_row + head * sizes.value_size);
    }
  };
  auto& impl = context.impl();
  impl.reserve(bytes_of(floats));
  impl.run(sizes.batch * sizes.key_heads * parts, [&](std::int64_t index, Scratch& scratch) {
    const std::int64_t part = index % parts;
    const std::int64_t head = index / parts % sizes.key_heads;
    const std::int64_t n = index / parts / sizes.key_heads;
    const KvCache& cache = caches[static_cast<std::size_t>(n)];
    const Segment segment = {n, 0, tokens};
    // What the cache holds, in at most two runs of slots, then the new tokens.
    SoftmaxKeys pieces[3];
    const std::int64_t oldest = std::max<std::int64_t>(0, cache.position - cache.capacity);
    const std::int64_t wrap =
        std::clamp(cache.position / cache.capacity * cache.capacity, oldest, cache.position);
    pieces[0] = {oldest,
                 wrap,
                 cache.k + oldest % cache.capacity * k_row + head * sizes.key_size,
                 cache.v + oldest % cache.capacity * v_row + head * sizes.value_size,
                 k_row,
                 v_row};
    pieces[1] = {wrap,
                 cache.position,
                 cache.k + wrap % cache.capacity * k_row + head * sizes.key_size,
                 cache.v + wrap % cache.capacity * v_row + head * sizes.value_size,
                 k_row,
                 v_row};
    pieces[2] = key_rows(k, v, segment, head);
    pieces[2].begin = cache.position;
    pieces[2].end = cache.position + tokens;

    SoftmaxShape own = shape;
    own.queries = tokens;
    own.keys = cache.position + tokens;
    own.offset = cache.position;
    if (tokens == 1) {
      SoftmaxStepArgs args;
      args.shape = own;
      args.q = group_rows<const float>(q, segment, head, group);
      args.o = group_rows<float>(o, segment, head, group);
      args.pieces = pieces;
      args.piece_count = 3;
      args.scratch = scratch.take<float>(floats);
      softmax_step(context.isa(), args);
      store(n, head);
    } else {
      SoftmaxForwardArgs args;
      args.shape = own;
      args.q = any_group_rows<const void>(q, segment, head, group);
      args.o = any_group_rows<void>(o, segment, head, group);
      args.pieces = pieces;
      args.piece_count = 3;
      args.begin = part * step;
      args.end = std::min(args.begin + step, tokens);
      args.scratch = scratch.take<float>(floats);
      softmax_forward(context.isa(), args);
    }
  });
  if (tokens > 1) {
    impl.run(sizes.batch * sizes.key_heads, [&](std::int64_t index, Scratch&) {
      store(index / sizes.key_heads, index % sizes.key_heads);
    });
  }
  for (KvCache& cache : caches) cache.position += tokens;
}

}  // namespace ouzel
