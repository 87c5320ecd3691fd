// Softmax attention: checks, the cut into tasks, and the passes. A task is some queries (forward)
// or some keys (backward) of one sequence and key head; src/kernels/softmax_tile.h has the
// arithmetic.
#include "ouzel/softmax_attention.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/context_impl.h"
#include "src/kernels/softmax_tile.h"

namespace ouzel {
namespace {

// Rows of queries (over the heads of a group) that one forward task takes: enough that packing a
// block of keys is 1-2 % of the work done with it.
constexpr std::int64_t kTaskRows = 384;
// A backward is cut into about this many tasks per sequence when its keys allow: parts of dq then
// wait for their sum, so the number depends on the sequence's own shape alone.
constexpr std::int64_t kBackwardTasks = 16;
constexpr std::int64_t kLeastBackwardKeys = 2 * kSoftmaxSpan;
// Parts of dq held at a time, unless one sequence needs more.
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;

[[noreturn]] void fail(const char* op, const std::string& text) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", op, text));
}

// Checks type, rank, extents (-1: any) and the unit last stride. Allocates only to complain.
void check(const char* op, const char* name, const ConstTensor& t, const char* letters,
           std::initializer_list<std::int64_t> expected, DType dtype = DType::kF32) {
  bool fits = t.present() && t.rank == static_cast<int>(expected.size());
  std::size_t axis = 0;
  for (std::int64_t e : expected) {
    fits = fits && t.extent[axis] >= 0 && (e < 0 || t.extent[axis] == e);
    ++axis;
  }
  if (!fits) {
    std::string sizes;
    for (std::int64_t e : expected) {
      sizes += (sizes.empty() ? "" : ", ") + (e < 0 ? std::string("any") : std::to_string(e));
    }
    fail(op, fmt::format("{} is {}, expected {} = [{}] to fit the other arguments", name,
                         shape_string(t), letters, sizes));
  }
  if (t.dtype != dtype) {
    fail(op, fmt::format("{} is {}, expected {}; convert it first", name, name_of(t.dtype),
                         name_of(dtype)));
  }
  if (t.extent[axis - 1] > 1 && t.stride[axis - 1] != 1) {
    fail(op, fmt::format("{} has a last stride of {}, expected 1; copy it to unit stride", name,
                         t.stride[axis - 1]));
  }
}

struct Sizes {
  std::int64_t batch = 0, queries = 0, keys = 0;  // B, TQ, TK
  std::int64_t query_heads = 0, key_heads = 0;    // HQ, HK
  std::int64_t key_size = 0, value_size = 0;      // K, V
  std::int64_t group() const { return query_heads / key_heads; }
};

Sizes check_inputs(const char* op, const ConstTensor& q, const ConstTensor& k,
                   const ConstTensor& v) {
  check(op, "q", q, "[B, TQ, HQ, K]", {-1, -1, -1, -1});
  Sizes s;
  s.batch = q.extent[0];
  s.queries = q.extent[1];
  s.query_heads = q.extent[2];
  s.key_size = q.extent[3];
  check(op, "k", k, "[B, TK, HK, K]", {s.batch, -1, -1, s.key_size});
  s.keys = k.extent[1];
  s.key_heads = k.extent[2];
  check(op, "v", v, "[B, TK, HK, V]", {s.batch, s.keys, s.key_heads, -1});
  s.value_size = v.extent[3];
  if (s.key_size < 1 || s.value_size < 1 || s.key_heads < 1 || s.query_heads < 1 ||
      s.query_heads % s.key_heads != 0) {
    fail(op,
         fmt::format("q {}, k {}, v {}: heads and sizes must be at least 1, and the query heads a "
                     "multiple of the key heads",
                     shape_string(q), shape_string(k), shape_string(v)));
  }
  return s;
}

SoftmaxShape make_shape(const char* op, const SoftmaxAttentionOptions& options,
                        const Sizes& sizes) {
  if (options.window < 0) {
    fail(op, fmt::format("a window of {} keys; expected 0 (no window) or more", options.window));
  }
  if (options.q_offset < -kSoftmaxFar / 4 || options.q_offset > kSoftmaxFar / 4) {
    fail(op, fmt::format("q_offset is {}; expected at most 2^58 in size", options.q_offset));
  }
  const double scale = options.scale.value_or(1.0 / std::sqrt(static_cast<double>(sizes.key_size)));
  if (!std::isfinite(scale)) fail(op, fmt::format("scale is {}; expected a finite number", scale));
  SoftmaxShape shape;
  shape.key_size = sizes.key_size;
  shape.value_size = sizes.value_size;
  shape.heads = sizes.group();
  shape.offset = options.q_offset;
  shape.before = options.window > 0 ? std::min(options.window - 1, kSoftmaxFar) : kSoftmaxFar;
  shape.after = options.causal ? 0 : kSoftmaxFar;
  shape.scale = static_cast<float>(scale);
  return shape;
}

// The segments of queries and keys, given or whole.
struct Sequences {
  Segments queries, keys;
};

Sequences find_sequences(const char* op, const SoftmaxAttentionInputs& inputs, const Sizes& sizes) {
  Sequences s;
  s.queries = inputs.segments ? *inputs.segments : Segments::whole(sizes.batch, sizes.queries);
  s.keys = inputs.key_segments ? *inputs.key_segments
           : inputs.segments   ? *inputs.segments
                               : Segments::whole(sizes.batch, sizes.keys);
  s.queries.check(op, sizes.batch, sizes.queries);
  s.keys.check(op, sizes.batch, sizes.keys);
  if (s.queries.count() != s.keys.count()) {
    fail(op, fmt::format("{} segments of queries and {} of keys; expected one of each per sequence",
                         s.queries.count(), s.keys.count()));
  }
  for (std::size_t n = 0; n < s.queries.list.size(); ++n) {
    if (s.queries.list[n].batch != s.keys.list[n].batch) {
      fail(op, fmt::format("sequence {} has its queries in batch row {} and its keys in row {}", n,
                           s.queries.list[n].batch, s.keys.list[n].batch));
    }
  }
  return s;
}

// Sets the rows outside every segment to 0.
template <class T>
void clear_outside(const Tensor& tensor, const Segments& segments) {
  std::vector<std::int64_t> done(static_cast<std::size_t>(tensor.extent[0]), 0);
  const std::int64_t row = tensor.rank == 4 ? tensor.extent[3] : 1;
  const auto clear = [&](std::int64_t b, std::int64_t begin, std::int64_t end) {
    for (std::int64_t t = begin; t < end; ++t) {
      for (std::int64_t h = 0; h < tensor.extent[2]; ++h) {
        T* to = static_cast<T*>(tensor.data) + b * tensor.stride[0] + t * tensor.stride[1] +
                h * tensor.stride[2];
        std::fill_n(to, row, T{0});
      }
    }
  };
  for (const Segment& s : segments.list) {
    std::int64_t& from = done[static_cast<std::size_t>(s.batch)];
    clear(s.batch, from, s.begin);
    from = s.begin + s.length;
  }
  for (std::int64_t b = 0; b < tensor.extent[0]; ++b) {
    clear(b, done[static_cast<std::size_t>(b)], tensor.extent[1]);
  }
}

// Rows of one sequence and the group of query heads that read key head `head`.
template <class T, class Tensor>
SoftmaxRows<T> group_rows(const Tensor& tensor, const Segment& segment, std::int64_t head,
                          std::int64_t group) {
  SoftmaxRows<T> rows;
  if (!tensor.present()) return rows;
  rows.token_stride = tensor.stride[1];
  rows.head_stride = tensor.stride[2];
  rows.data = static_cast<T*>(tensor.data) + segment.batch * tensor.stride[0] +
              segment.begin * rows.token_stride + head * group * rows.head_stride;
  return rows;
}

SoftmaxKeys key_rows(const ConstTensor& k, const ConstTensor& v, const Segment& segment,
                     std::int64_t head) {
  SoftmaxKeys keys;
  keys.end = segment.length;
  keys.k = static_cast<const float*>(k.data) + segment.batch * k.stride[0] +
           segment.begin * k.stride[1] + head * k.stride[2];
  keys.v = static_cast<const float*>(v.data) + segment.batch * v.stride[0] +
           segment.begin * v.stride[1] + head * v.stride[2];
  keys.k_stride = k.stride[1];
  keys.v_stride = v.stride[1];
  return keys;
}

struct Task {
  std::size_t sequence = 0;
  std::int64_t head = 0;            // of keys
  std::int64_t begin = 0, end = 0;  // queries (forward) or keys (backward)
  std::int64_t cost = 0;
  float* partial = nullptr;  // where dq goes; null: to dq itself
};

// Largest first: the last tasks, which decide how long all wait, are short.
void sort_by_cost(std::vector<Task>& tasks) {
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const Task& a, const Task& b) { return a.cost > b.cost; });
}

std::int64_t queries_of_task(std::int64_t group) {
  return std::max(kSoftmaxWidestTile, kTaskRows / group / kSoftmaxWidestTile * kSoftmaxWidestTile);
}

std::size_t bytes_of(std::int64_t floats) {
  return Scratch::rounded(static_cast<std::size_t>(floats) * sizeof(float));
}

}  // namespace

void softmax_attention(Context& context, const SoftmaxAttentionOptions& options,
                       const SoftmaxAttentionInputs& inputs,
                       const SoftmaxAttentionOutputs& outputs) {
  constexpr const char* kOp = "softmax_attention";
  const Sizes sizes = check_inputs(kOp, inputs.q, inputs.k, inputs.v);
  const SoftmaxShape shape = make_shape(kOp, options, sizes);
  check(kOp, "o", outputs.o, "[B, TQ, HQ, V]",
        {sizes.batch, sizes.queries, sizes.query_heads, sizes.value_size});
  if (outputs.lse.present()) {
    check(kOp, "lse", outputs.lse, "[B, TQ, HQ]", {sizes.batch, sizes.queries, sizes.query_heads},
          DType::kF64);
  }
  const Sequences sequences = find_sequences(kOp, inputs, sizes);
  clear_outside<float>(outputs.o, sequences.queries);
  if (outputs.lse.present()) clear_outside<double>(outputs.lse, sequences.queries);

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
    args.q = group_rows<const float>(inputs.q, segment, task.head, group);
    args.o = group_rows<float>(outputs.o, segment, task.head, group);
    args.lse = group_rows<double>(outputs.lse, segment, task.head, group);
    args.pieces = &keys;
    args.piece_count = 1;
    args.begin = task.begin;
    args.end = task.end;
    args.scratch = scratch.take<float>(floats);
    softmax_forward(context.isa(), args);
  });
}

void softmax_attention_backward(Context& context, const SoftmaxAttentionOptions& options,
                                const SoftmaxAttentionInputs& inputs, const ConstTensor& o,
                                const ConstTensor& lse, const ConstTensor& d_o, const Tensor& dq,
                                const Tensor& dk, const Tensor& dv) {
  constexpr const char* kOp = "softmax_attention_backward";
  const Sizes sizes = check_inputs(kOp, inputs.q, inputs.k, inputs.v);
  SoftmaxShape shape = make_shape(kOp, options, sizes);
  const auto queries_shape = {sizes.batch, sizes.queries, sizes.query_heads, sizes.value_size};
  check(kOp, "o", o, "[B, TQ, HQ, V]", queries_shape);
  check(kOp, "d_o", d_o, "[B, TQ, HQ, V]", queries_shape);
  check(kOp, "lse", lse, "[B, TQ, HQ]", {sizes.batch, sizes.queries, sizes.query_heads},
        DType::kF64);
  const Sequences sequences = find_sequences(kOp, inputs, sizes);
  if (dq.present()) {
    check(kOp, "dq", dq, "[B, TQ, HQ, K]",
          {sizes.batch, sizes.queries, sizes.query_heads, sizes.key_size});
    clear_outside<float>(dq, sequences.queries);
  }
  if (dk.present()) {
    check(kOp, "dk", dk, "[B, TK, HK, K]",
          {sizes.batch, sizes.keys, sizes.key_heads, sizes.key_size});
    clear_outside<float>(dk, sequences.keys);
  }
  if (dv.present()) {
    check(kOp, "dv", dv, "[B, TK, HK, V]",
          {sizes.batch, sizes.keys, sizes.key_heads, sizes.value_size});
    clear_outside<float>(dv, sequences.keys);
  }

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
      args.q = group_rows<const float>(inputs.q, segment, task.head, group);
      args.o = group_rows<const float>(o, segment, task.head, group);
      args.d_o = group_rows<const float>(d_o, segment, task.head, group);
      args.lse = group_rows<const double>(lse, segment, task.head, group);
      args.kv = key_rows(inputs.k, inputs.v, key_segment, task.head);
      args.dq = group_rows<float>(dq, segment, task.head, group);
      if (dk.present()) {
        const auto rows = group_rows<float>(dk, key_segment, task.head, 1);
        args.dk = rows.data;
        args.dk_stride = rows.token_stride;
      }
      if (dv.present()) {
        const auto rows = group_rows<float>(dv, key_segment, task.head, 1);
        args.dv = rows.data;
        args.dv_stride = rows.token_stride;
      }
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
}

void softmax_attention_step(Context& context, const SoftmaxAttentionOptions& options,
                            const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                            std::span<KvCache> caches, const Tensor& o) {
  constexpr const char* kOp = "softmax_attention_step";
  const Sizes sizes = check_inputs(kOp, q, k, v);
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
      std::copy_n(rows.k + t * rows.k_stride, sizes.key_size,
                  cache.k + slot * k_row + head * sizes.key_size);
      std::copy_n(rows.v + t * rows.v_stride, sizes.value_size,
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
      args.q = group_rows<const float>(q, segment, head, group);
      args.o = group_rows<float>(o, segment, head, group);
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
