#include "src/ops/softmax_call.h"

#include <cmath>

#include <fmt/format.h>

#include "ouzel/error.h"
#include "src/base/half.h"

namespace ouzel::softmax {

void fail(const char* op, const std::string& text) {
  throw Error(ErrorKind::kInvalidArgument, fmt::format("{}: {}", op, text));
}

void check(const char* op, const char* name, const ConstTensor& t, const char* letters,
           std::initializer_list<std::int64_t> expected, DType dtype) {
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

void check_rows(const char* op, const char* name, const ConstTensor& t, const char* letters,
                std::initializer_list<std::int64_t> expected) {
  check(op, name, t, letters, expected, is_half(t.dtype) ? t.dtype : DType::kF32);
}

Sizes check_inputs(const char* op, const ConstTensor& q, const ConstTensor& k,
                   const ConstTensor& v) {
  check_rows(op, "q", q, "[B, TQ, HQ, K]", {-1, -1, -1, -1});
  Sizes s;
  s.batch = q.extent[0];
  s.queries = q.extent[1];
  s.query_heads = q.extent[2];
  s.key_size = q.extent[3];
  check_rows(op, "k", k, "[B, TK, HK, K]", {s.batch, -1, -1, s.key_size});
  s.keys = k.extent[1];
  s.key_heads = k.extent[2];
  check_rows(op, "v", v, "[B, TK, HK, V]", {s.batch, s.keys, s.key_heads, -1});
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

}  // namespace ouzel::softmax
