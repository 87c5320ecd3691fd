// Backward of the recurrence: the forward pass three times with roles exchanged. With G_t = d loss
// / d S_t = e^g G_{t+1} + (scale phi(q_t)) do_t^T:
//
//     d(phi(q))_t = scale S_t do_t      forward in time: read do, write v, values phi(k)
//     d(phi(k))_t = G_t v_t             backward:        read v, write do, values scale phi(q)
//     dv_t        = G_t^T phi(k_t)      backward:        read phi(k), write scale phi(q), values do
//
// The first two hold the transposed state. 12 K V operations where 10 are the least; keeping all
// three products in one sweep would add the horizontal sums that this form has none of.
//
// Normalised, with r_t = 1 / (z_t . u_t + eps), u_t = scale phi(q_t): do_t is replaced by r_t do_t,
// and d(den)_t = -r_t u_t . (S_t r_t do_t) reaches phi(q) through z_t and phi(k) through a running
// sum of d(den)_t u_t. The first pass leaves r and d(den), two numbers a token and head, to the
// others.
//
// With a running maximum (key_exponents.h) S_t, z_t and phi(k_t) are multiples of 2^c_t, hence G_t
// of 2^-c_t, and phi(q_t) of a power of its own; r_t makes up for all. The gradient of an exponent
// e, phi = exp(e), is phi dphi in any multiple.
#include "src/ops/recurrence_backward.h"

namespace ouzel {

void Backward::rescale(float factor, BackwardBuffers& b) const {
  b.pass.rescale(factor);
  for (float* z : {b.z, b.z_residue}) {
    for (std::int64_t f = 0; f < shape_.features; ++f) z[f] *= factor;
  }
}

TokenValues Backward::exponents_back_in_time(std::int64_t n, std::int64_t state) const {
  if (!exponents_ || !spec_.causal) return exponents_ ? exponents_.final(n, state) : TokenValues();
  return exponents_.of(shape_.key_segment(n), state, !spec_.reverse);
}

float Backward::first_exponent(std::int64_t n, std::int64_t state) const {
  const Segment keys = shape_.key_segment(n);
  if (!exponents_ || !spec_.causal || keys.length == 0) return last_exponent(n, state);
  return exponents_.of(keys, state, spec_.reverse)[0];
}

float Backward::final_grad_factor(std::int64_t n, std::int64_t state) const {
  const float* own = up_.final_state.sequences[static_cast<std::size_t>(n)].exponent;
  return power_of_two(last_exponent(n, state) + (own != nullptr ? own[state] : 0));
}

void Backward::find_common_value(std::int64_t n, std::int64_t state, BackwardBuffers& b) const {
  if (!relative_ || !in_.v.present()) return;
  const Segment keys = shape_.key_segment(n);
  // In the order of the tokens for every pass: the same bits.
  const ChunkedRows v = {isa_, any_rows_of(in_.v, keys, state, spec_.reverse), shape_.values,
                         b.wide_v};
  const std::int64_t used = spec_.causal ? std::min<std::int64_t>(keys.length, 1) : keys.length;
  const float share = 1 / static_cast<float>(std::max<std::int64_t>(used, 1));
  float* const sum = b.values;  // of a chunk
  std::fill_n(b.common_value, shape_.values, 0.0f);
  for (std::int64_t t = 0; t < used; t += kChunk) {
    check_cancelled();
    const std::int64_t tokens = std::min(kChunk, used - t);
    const Rows<const float> rows = v(t, tokens);
    std::fill_n(sum, shape_.values, 0.0f);
    for (std::int64_t i = 0; i < tokens; ++i) {
      const float* row = rows.at(t + i);
      for (std::int64_t j = 0; j < shape_.values; ++j) sum[j] += share * row[j];
    }
    for (std::int64_t j = 0; j < shape_.values; ++j) b.common_value[j] += sum[j];
  }
}

MappedRows Backward::values_of(const ChunkedRows& v, std::int64_t t, std::int64_t tokens,
                               BackwardBuffers& b) const {
  if (!relative_ || !v) {
    const Rows<const float> rows = v(t, tokens);
    return {rows.at(t), rows.stride};
  }
  for (std::int64_t i = 0; i < tokens; ++i) {
    for (std::int64_t j = 0; j < shape_.values; ++j) {
      b.values[i * b.value_pitch + j] = -b.common_value[j];
    }
  }
  const Rows<const float> rows = v(t, tokens);
  MapAdjointArgs add;
  add.tokens = tokens;
  add.size = shape_.values;
  add.x = add.dy = rows.at(t);
  add.x_stride = add.dy_stride = rows.stride;
  add.dx = b.values;
  add.dx_stride = b.value_pitch;
  add.add = true;
  map_adjoint(isa_, add);
  return {b.values, b.value_pitch};
}

// d(den) of a chunk of the first pass, and what it adds to the gradient of phi(q); scale S_t r_t
// do_t is in b.gradient already.
//
// Values a token stand for w (v - a) / (w + eps) + a w / (w + eps): with a the first value of the
// sequence, what v and o have in common leaves the gradients of q and k before it is rounded.
// (Of the first token itself only eps is left.) Where all outputs see all values, a is their mean:
// what is left of 1,000 values of zero mean after the first is 30 times what is left after theirs.
// The second term gives eps r_t^2 do_t . a.
void Backward::normalizer_adjoint(std::int64_t tokens, const TokenValues& inverse,
                                  const TokenValues& denominator_grad, std::int64_t t,
                                  const float* own, float exponent, BackwardBuffers& b) {
  const std::int64_t pitch = b.q_map.pitch();
  row_dots(isa_, tokens, pitch, b.q_rows, pitch, b.gradient, pitch, b.den);
  for (std::int64_t i = 0; i < tokens; ++i) {
    const float r = inverse[t + i];
    const float eps = output_eps(spec_, own != nullptr ? own[i] + exponent : 0);
    float dd = -b.den[i] * r;
    float common = spec_.clamp ? 0 : r * (r * eps);
    if (spec_.clamp && r == 1 / eps) {  // the denominator is a constant
      dd = 0;
      common = r;
    }
    if (common != 0) dd += common * b.value_dots[i];
    denominator_grad[t + i] = dd;
    b.denominator_grad[i] = scale_ * dd;
  }
  row_add(isa_, tokens, pitch, b.denominator_grad, b.z_rows, pitch, b.gradient, pitch);
}

void Backward::query_pass(std::int64_t n, std::int64_t query_head, std::int64_t column,
                          std::int64_t columns, double* sums, BackwardBuffers& b) {
  const Segment segment = shape_.segment(n), keys = shape_.key_segment(n);
  const std::int64_t length = segment.length, pitch = b.q_map.pitch();
  const bool backwards = spec_.reverse;
  const ChunkedRows q = {isa_, any_rows_of(in_.q, segment, query_head, backwards), shape_.keys,
                         b.wide_q};
  const ChunkedGrads dq = {isa_, any_rows_of(out_.q, segment, query_head, backwards), shape_.keys,
                           b.wide_grads};
  const bool stream = plain_ && dq && is_streamed(count_of(out_.q), dq.rows.from(column), columns);
  b.q_map.bind(isa_, spec_.map.q, query_head, path_of(in_.initial_state, n, length, false));
  std::fill(b.gradient, b.gradient + b.gradient_size, 0.0f);  // columns that no pass writes
  const std::int64_t per_query = shape_.outputs_per_query();
  for (std::int64_t r = 0; r < per_query; ++r) {
    const std::int64_t output = query_head * per_query + r;
    const std::int64_t state = shape_.state_of(output), key_head = shape_.key_of(state);
    const ChunkedRows k = {isa_, any_rows_of(in_.k, keys, key_head, backwards), shape_.keys,
                           b.wide_k};
    const ChunkedRows v = {isa_, any_rows_of(in_.v, keys, state, backwards), shape_.values,
                           b.wide_v};
    const ChunkedRows dout = {isa_, any_rows_of(up_.o, segment, output, backwards), shape_.values,
                              b.wide_do};
    const TokenValues inverse = token_values(0, segment, output, backwards);
    const TokenValues denominator_grad = token_values(1, segment, output, backwards);
    find_common_value(n, state, b);
    const Fold fold(log_decay_of(spec_, state), false);
    const TokenValues scales = exponents_.of(keys, state, backwards);
    b.k_map.bind(isa_, key_weights(spec_.map), key_head,
                 path_of(in_.initial_state, n, keys.length, false, scales));

    StateMemory<const float> initial = memory_of<const float>(in_.initial_state, n, state, true);
    std::fill(b.z, b.z + pitch, 0.0f);
    std::fill(b.z_residue, b.z_residue + pitch, 0.0f);
    std::int64_t position = 0;
    if (initial.s != nullptr) {
      const StateView& from = in_.initial_state;
      const SequenceState& s = from.sequences[static_cast<std::size_t>(n)];
      position = s.position;
      if (s.s_residue != nullptr) initial.residue = s.s_residue + state * from.head_stride;
      if (spec_.normalize) {
        const std::int64_t head = state * from.z_head_stride;
        std::copy_n(s.z + head, shape_.features, b.z);
        if (s.z_residue != nullptr) std::copy_n(s.z_residue + head, shape_.features, b.z_residue);
      }
    }
    b.pass.begin(isa_, &fold, initial.at_column(column), position);
    float exponent = exponents_ ? exponents_.initial(n, state) : 0;
    const auto rescale_to = [&](float to) {
      if (to != exponent) rescale(power_of_two(exponent - to), b);
      exponent = to;
    };

    NormalizerArgs norm;
    norm.blocks = pitch / kKeyBlock;
    norm.q = b.q_rows;
    norm.k = b.k_rows;
    norm.pitch = pitch;
    norm.z = b.z;
    norm.z_residue = b.z_residue;
    norm.den = b.den;
    const auto pack_values = [&](std::int64_t t, std::int64_t tokens) {
      if (spec_.normalize) {
        b.k_map.dense(k(t, tokens), t, tokens, b.k_rows);
        b.pass.pack_values({b.k_rows + column, pitch}, tokens);
      } else {
        MappedRows rows = b.k_map.apply(k(t, tokens), t, tokens);
        rows.rows += column;
        b.pass.pack_values(rows, tokens);
      }
    };
    if (!spec_.causal) {
      for (std::int64_t t = 0, tokens = 0; t < keys.length; t += tokens) {
        check_cancelled();
        tokens = chunk_tokens(t, keys.length, scales);
        if (scales) rescale_to(scales[t]);
        b.pass.pack({}, values_of(v, t, tokens, b), tokens, nullptr);
        pack_values(t, tokens);
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
        if (spec_.normalize) {
          norm.mode = TileMode::kWrite;
          norm.tokens = tokens;
          norm.z_rows = nullptr;
          normalizer_scan(isa_, norm);
        }
      }
    }
    const TileMode mode = spec_.causal ? TileMode::kScan : TileMode::kRead;
    for (std::int64_t t = 0, tokens = 0; t < length; t += tokens) {
      check_cancelled();
      tokens = chunk_tokens(t, length, spec_.causal ? scales : TokenValues());
      if (spec_.causal && scales) rescale_to(scales[t]);
      MappedRows write;
      if (spec_.causal) write = values_of(v, t, tokens, b);
      const Rows<const float> above = dout(t, tokens);
      b.pass.pack({above.at(t), above.stride}, write, tokens, fold.write_or_null());
      if (spec_.causal) pack_values(t, tokens);
      const std::int64_t next = t + kChunk;
      if (next < length) {
        dout.prefetch(b.pass, next, 0, shape_.values);
        v.prefetch(b.pass, next, 0, shape_.values);
        k.prefetch(b.pass, next, column, columns);
        q.prefetch(b.pass, next, column, columns);
      }
      const Rows<const float> queries = q(t, tokens);
      for (std::int64_t i = 0; i < tokens; ++i) b.read_factor[i] = scale_ * fold.read[i];
      const float* own = exponents_ ? b.q_map.own_exponents(queries, t, tokens) : nullptr;
      if (spec_.normalize) {
        b.q_map.dense(queries, t, tokens, b.q_rows);
        norm.mode = mode;
        norm.tokens = tokens;
        norm.z_rows = b.z_rows;
        normalizer_scan(isa_, norm);
      }
      for (std::int64_t i = 0; factors_ && i < tokens; ++i) {
        inverse[t + i] =
            output_factor(spec_, scale_ * b.den[i], own != nullptr ? own[i] + exponent : 0);
        b.read_factor[i] *= inverse[t + i];
      }
      if (dq && !stream && next < length) dq.prefetch(b.pass, next, column, columns);
      const Rows<float> grads = dq ? dq(t) : Rows<float>();
      if (dq && r == 0 && plain_) {
        b.pass.run(mode, tokens, b.read_factor, grads.at(t) + column, grads.stride, stream);
        dq.put(t, tokens, column, columns);
        continue;
      }
      b.pass.run(mode, tokens, b.read_factor, b.gradient, pitch);
      if (spec_.normalize) {
        std::fill(b.value_dots, b.value_dots + tokens, 0.0f);
        if (relative_ && v) {
          matrix_vector(isa_, tokens, shape_.values, above.at(t), above.stride, b.common_value,
                        nullptr, b.value_dots);
        }
        normalizer_adjoint(tokens, inverse, denominator_grad, t, own, exponent, b);
      }
      b.q_map.adjoint(queries, t, tokens, b.gradient, grads, r > 0, column, columns, sums);
      if (dq) dq.put(t, tokens, column, keys_of(columns));
    }
  }
  if (stream) finish_streams();
}

void Backward::key_pass(std::int64_t n, std::int64_t key_head, std::int64_t column,
                        std::int64_t columns, double* sums, BackwardBuffers& b) {
  const Segment segment = shape_.segment(n), keys = shape_.key_segment(n);
  const std::int64_t length = keys.length, pitch = b.q_map.pitch();
  const bool backwards = !spec_.reverse;
  const ChunkedRows k = {isa_, any_rows_of(in_.k, keys, key_head, backwards), shape_.keys,
                         b.wide_k};
  const ChunkedGrads dk = {isa_, any_rows_of(out_.k, keys, key_head, backwards), shape_.keys,
                           b.wide_grads};
  const bool stream = plain_ && dk && is_streamed(count_of(out_.k), dk.rows.from(column), columns);
  b.k_map.bind(isa_, key_weights(spec_.map), key_head, {});
  std::fill(b.gradient, b.gradient + b.gradient_size, 0.0f);  // columns that no pass writes
  const std::int64_t per_state = shape_.outputs_per_state();
  const std::int64_t per_key = shape_.states_per_key() * per_state;
  for (std::int64_t r = 0; r < per_key; ++r) {
    const std::int64_t output = key_head * per_key + r;
    const std::int64_t state = shape_.state_of(output), query_head = shape_.query_of(output);
    const bool first = r % per_state == 0;  // of this state's outputs: the final state's gradient
    const ChunkedRows q = {isa_, any_rows_of(in_.q, segment, query_head, backwards), shape_.keys,
                           b.wide_q};
    const ChunkedRows v = {isa_, any_rows_of(in_.v, keys, state, backwards), shape_.values,
                           b.wide_v};
    const ChunkedRows dout = {isa_, any_rows_of(up_.o, segment, output, backwards), shape_.values,
                              b.wide_do};
    const TokenValues inverse = token_values(0, segment, output, backwards);
    const TokenValues denominator_grad = token_values(1, segment, output, backwards);
    find_common_value(n, state, b);
    const Fold fold(log_decay_of(spec_, state), true);
    const TokenValues scales = exponents_back_in_time(n, state);
    float exponent = last_exponent(n, state);
    b.q_map.bind(isa_, spec_.map.q, query_head,
                 path_of(in_.initial_state, n, segment.length, true));
    b.k_map.follow(path_of(in_.initial_state, n, length, true, scales));

    StateMemory<const float> final;
    std::fill(b.z, b.z + pitch, 0.0f);
    std::fill(b.z_residue, b.z_residue + pitch, 0.0f);
    if (first && up_.final_state.present()) {
      final = memory_of<const float>(up_.final_state, n, state, true);
      const SequenceState& s = up_.final_state.sequences[static_cast<std::size_t>(n)];
      if (spec_.normalize) {
        std::copy_n(s.z + state * up_.final_state.z_head_stride, shape_.features, b.z);
      }
    }
    b.pass.begin(isa_, &fold, final.at_column(column), first_position(final, length));
    if (exponents_ && final.s != nullptr) rescale(final_grad_factor(n, state), b);

    VectorScanArgs scan;
    scan.blocks = pitch / kKeyBlock;
    scan.x = b.q_rows;
    scan.y = b.gradient;
    scan.pitch = pitch;
    scan.a = b.denominator_grad;
    scan.b = fold.read;
    scan.sum = b.z;
    scan.sum_residue = b.z_residue;
    const bool plain_factor = !factors_ && write_scale_ == 1 && fold.log_decay == 0;
    const auto pack = [&](std::int64_t t, std::int64_t tokens, const MappedRows& read) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        b.write_factor[i] = write_scale_ * fold.write[i];
        if (factors_) b.write_factor[i] *= inverse[t + i];
        if (spec_.normalize) b.denominator_grad[i] = scale_ * denominator_grad[t + i];
      }
      const Rows<const float> above = dout(t, tokens);
      b.pass.pack(read, {above.at(t), above.stride}, tokens,
                  plain_factor ? nullptr : b.write_factor);
      if (spec_.normalize) {
        b.q_map.dense(q(t, tokens), t, tokens, b.q_rows);
        b.pass.pack_values({b.q_rows + column, pitch}, tokens);
      } else {
        MappedRows rows = b.q_map.apply(q(t, tokens), t, tokens);
        rows.rows += column;
        b.pass.pack_values(rows, tokens);
      }
    };
    if (!spec_.causal) {
      for (std::int64_t t = 0; t < segment.length; t += kChunk) {
        check_cancelled();
        const std::int64_t tokens = std::min(segment.length - t, kChunk);
        pack(t, tokens, {});
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
        if (spec_.normalize) {
          scan.mode = TileMode::kWrite;
          scan.tokens = tokens;
          vector_scan(isa_, scan);
        }
      }
    }
    const TileMode mode = spec_.causal ? TileMode::kScan : TileMode::kRead;
    for (std::int64_t i = 0; i < kChunk; ++i) b.read_factor[i] = read_scale_ * fold.read[i];
    for (std::int64_t t = 0, tokens = 0; t < length; t += tokens) {
      check_cancelled();
      tokens = chunk_tokens(t, length, scales);
      if (scales && scales[t] != exponent) {
        rescale(power_of_two(scales[t] - exponent), b);
        exponent = scales[t];
      }
      const MappedRows read = values_of(v, t, tokens, b);
      spec_.causal ? pack(t, tokens, read) : b.pass.pack(read, {}, tokens, nullptr);
      const std::int64_t next = t + kChunk;
      if (next < length) {
        v.prefetch(b.pass, next, 0, shape_.values);
        dout.prefetch(b.pass, next, 0, shape_.values);
        q.prefetch(b.pass, next, column, columns);
        k.prefetch(b.pass, next, column, columns);
      }
      if (dk && !stream && next < length) dk.prefetch(b.pass, next, column, columns);
      const Rows<float> grads = dk ? dk(t) : Rows<float>();
      if (dk && r == 0 && plain_) {
        b.pass.run(mode, tokens, b.read_factor, grads.at(t) + column, grads.stride, stream);
        dk.put(t, tokens, column, columns);
        continue;
      }
      b.pass.run(mode, tokens, b.read_factor, b.gradient, pitch);
      if (spec_.normalize) {
        scan.mode = mode;
        scan.tokens = tokens;
        vector_scan(isa_, scan);
      }
      b.k_map.adjoint(k(t, tokens), t, tokens, b.gradient, grads, r > 0, column, columns, sums);
      if (dk) dk.put(t, tokens, column, keys_of(columns));
    }
    if (spec_.normalize && out_.initial_state.present()) {
      const StateView& to = out_.initial_state;
      if (to.sequences[static_cast<std::size_t>(n)].exponent == nullptr && exponent != 0) {
        rescale(power_of_two(-exponent), b);
      }
      float* dz = to.sequences[static_cast<std::size_t>(n)].z + state * to.z_head_stride;
      for (std::int64_t i = 0; i < shape_.features; ++i) {
        dz[i] = first ? b.z[i] : dz[i] + b.z[i];
      }
    }
  }
  if (stream) finish_streams();
}

void Backward::value_pass(std::int64_t n, std::int64_t state, std::int64_t column,
                          std::int64_t columns, BackwardBuffers& b) {
  const Segment segment = shape_.segment(n), keys = shape_.key_segment(n);
  const std::int64_t length = keys.length, pitch = padded(columns, kSlab);
  const bool backwards = !spec_.reverse;
  const std::int64_t key_head = shape_.key_of(state);
  const ChunkedRows k = {isa_, any_rows_of(in_.k, keys, key_head, backwards), shape_.keys,
                         b.wide_k};
  const ChunkedGrads dv = {isa_, any_rows_of(out_.v, keys, state, backwards), shape_.values,
                           b.wide_grads};
  const bool stream = dv && is_streamed(count_of(out_.v), dv.rows.from(column), columns);
  const Fold fold(log_decay_of(spec_, state), true);
  const TokenValues scales = exponents_back_in_time(n, state);
  b.k_map.bind(isa_, key_weights(spec_.map), key_head,
               path_of(in_.initial_state, n, length, true, scales));
  std::fill(b.gradient, b.gradient + b.gradient_size, 0.0f);  // columns that no pass writes
  const std::int64_t per_state = shape_.outputs_per_state();
  for (std::int64_t r = 0; r < per_state; ++r) {
    const std::int64_t output = state * per_state + r, query_head = shape_.query_of(output);
    const ChunkedRows q = {isa_, any_rows_of(in_.q, segment, query_head, backwards), shape_.keys,
                           b.wide_q};
    const ChunkedRows dout = {isa_, any_rows_of(up_.o, segment, output, backwards), shape_.values,
                              b.wide_do};
    const TokenValues inverse = token_values(0, segment, output, backwards);
    b.q_map.bind(isa_, spec_.map.q, query_head,
                 path_of(in_.initial_state, n, segment.length, true));
    float exponent = last_exponent(n, state);
    StateMemory<const float> final;
    if (r == 0) final = memory_of<const float>(up_.final_state, n, state, false);
    b.pass.begin(isa_, &fold, final.at_column(column), first_position(final, length));
    if (exponents_ && final.s != nullptr) {
      b.pass.rescale(final_grad_factor(n, state));
    }
    const auto rescale_to = [&](float to) {
      if (to != exponent) b.pass.rescale(power_of_two(to - exponent));
      exponent = to;
    };

    const bool plain_factor = !factors_ && write_scale_ == 1 && fold.log_decay == 0;
    const auto pack = [&](std::int64_t t, std::int64_t tokens, const MappedRows& read) {
      for (std::int64_t i = 0; i < tokens; ++i) {
        b.write_factor[i] = write_scale_ * fold.write[i];
        if (factors_) b.write_factor[i] *= inverse[t + i];
      }
      b.pass.pack(read, b.q_map.apply(q(t, tokens), t, tokens), tokens,
                  plain_factor ? nullptr : b.write_factor);
      const Rows<const float> above = dout(t, tokens);
      b.pass.pack_values({above.at(t) + column, above.stride}, tokens);
    };
    if (!spec_.causal || !dv) {
      const TokenValues queries = spec_.causal ? scales : TokenValues();
      for (std::int64_t t = 0, tokens = 0; t < segment.length; t += tokens) {
        check_cancelled();
        tokens = chunk_tokens(t, segment.length, queries);
        if (queries) rescale_to(queries[t]);
        pack(t, tokens, {});
        b.pass.run(TileMode::kWrite, tokens, nullptr, nullptr, 0);
      }
    }
    const TileMode mode = spec_.causal ? TileMode::kScan : TileMode::kRead;
    for (std::int64_t i = 0; i < kChunk; ++i) b.read_factor[i] = read_scale_ * fold.read[i];
    for (std::int64_t t = 0, tokens = 0; t < length && dv; t += tokens) {
      check_cancelled();
      tokens = chunk_tokens(t, length, scales);
      if (scales) rescale_to(scales[t]);
      const MappedRows read = b.k_map.apply(k(t, tokens), t, tokens);
      spec_.causal ? pack(t, tokens, read) : b.pass.pack(read, {}, tokens, nullptr);
      const std::int64_t next = t + kChunk;
      if (next < length) {
        k.prefetch(b.pass, next, 0, shape_.keys);
        q.prefetch(b.pass, next, 0, shape_.keys);
        dout.prefetch(b.pass, next, column, columns);
      }
      if (!stream && next < length) dv.prefetch(b.pass, next, column, columns);
      const Rows<float> grads = dv(t);
      if (r == 0) {
        b.pass.run(mode, tokens, b.read_factor, grads.at(t) + column, grads.stride, stream);
        dv.put(t, tokens, column, columns);
        continue;
      }
      b.pass.run(mode, tokens, b.read_factor, b.gradient, pitch);
      MapAdjointArgs add;
      add.tokens = tokens;
      add.size = columns;
      add.x = b.gradient;
      add.x_stride = pitch;
      add.dy = b.gradient;
      add.dy_stride = pitch;
      add.dx = grads.at(t) + column;
      add.dx_stride = grads.stride;
      add.add = true;
      map_adjoint(isa_, add);
    }
    if (const StateView& to = out_.initial_state; to.present()) {
      if (to.sequences[static_cast<std::size_t>(n)].exponent == nullptr) rescale_to(0);
      b.pass.end(memory_of<float>(to, n, state, false).at_column(column), r > 0);
    }
  }
  if (stream) finish_streams();
}

}  // namespace ouzel
