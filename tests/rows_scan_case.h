// Problems of the engine's forward pass (src/ops/rows_scan.h), a pairwise cover of its kinds, and
// what a loop in float64 makes of them.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "src/base/bounds.h"
#include "src/ops/rows_scan.h"
#include "tests/compare.h"
#include "tests/pairwise.h"
#include "tests/random_arrays.h"

namespace ouzel::test {

using reference::Array;

inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

enum class Gates { kZero, kWeak, kMild, kStrong, kVanishing, kResets, kHarsh };

struct Problem {
  RowsKind kind;
  std::int64_t tokens = 0;
  Array<float> q, k, v, g, gv, e, b, c, u;
  Array<float> initial;  // [K, V], or absent

  std::int64_t rows() const { return tokens * kind.rows_per_token; }
};

inline float gate(Random& random, Gates gates) {
  switch (gates) {
    case Gates::kZero:
      return 0;
    case Gates::kWeak:
      return -1e-5f;
    case Gates::kMild:
      return random.uniform(-1, 0);
    case Gates::kStrong:
      return -20;
    case Gates::kVanishing:
      return -1000;
    case Gates::kResets:
      return random.integer(0, 4) == 0 ? -kInfinity : random.uniform(-0.5, 0);
    case Gates::kHarsh: {  // factors: 2 % zeros, 28 % 1e-7
      const std::int64_t percent = random.integer(0, 99);
      return percent < 2 ? -kInfinity : percent < 30 ? -16.1f : random.uniform(-0.5, 0);
    }
  }
  return 0;
}

// Transitions are contractive: |k| and |e| are about 1, strengths within (0, 1).
inline Problem make_problem(const RowsKind& kind, std::int64_t tokens, Gates gates, bool state,
                            std::uint64_t seed) {
  Random random(seed);
  Problem p;
  p.kind = kind;
  p.tokens = tokens;
  const std::int64_t rows = p.rows(), keys = kind.keys, values = kind.values;
  const double unit = std::sqrt(3.0 / static_cast<double>(keys));
  p.q = random_array<float>(random, {kind.queries, tokens, keys});
  p.k = random_array<float>(random, {rows, keys}, -unit, unit);
  p.v = random_array<float>(random, {rows, values});
  if (kind.decay) p.g = Array<float>({rows, kind.decay_per_key ? keys : 1});
  if (kind.value_decay) p.gv = Array<float>({rows, values});
  for (Array<float>* g : {&p.g, &p.gv}) {
    for (std::size_t i = 0; i < g->data.size(); ++i) {
      const std::size_t row = i / static_cast<std::size_t>(g->extent(1));
      const bool first = row % static_cast<std::size_t>(kind.rows_per_token) == 0;
      g->data[i] = first ? gate(random, gates) : 0;
    }
  }
  if (kind.erase != EraseKind::kNone) {
    p.e = p.k;
    for (float& x : p.e.data) x *= random.uniform(0.5, 1);
  }
  if (kind.erase == EraseKind::kGeneral) {
    p.b = p.e;
    for (float& x : p.b.data) x *= random.uniform(-0.7, -0.3);
  }
  if (kind.erase == EraseKind::kCollinear) {
    p.c = random_array<float>(random, {rows, kind.strength_per_value ? values : 1}, 0, 1);
  }
  if (kind.bonus) p.u = random_array<float>(random, {keys});
  if (state) p.initial = random_array<float>(random, {keys, values});
  return p;
}

// Tokens [begin, begin + count) of a problem.
class Source : public RowSource {
 public:
  Source(const Problem& p, std::int64_t begin, std::int64_t count, Array<float>& o)
      : p_(p), begin_(begin), count_(count), o_(o) {}

  std::int64_t tokens() const override { return count_; }

  void pack(std::int64_t first, std::int64_t column, std::int64_t columns, LawRows& rows) override {
    EXPECT_EQ(first % 16, 0);
    EXPECT_LE(rows.tokens, 64);
    EXPECT_EQ(rows.key_pitch % 16, 0);
    EXPECT_EQ(rows.value_pitch % 32, 0);
    const std::int64_t n = p_.kind.rows_per_token, keys = p_.kind.keys;
    const std::int64_t row = (begin_ + first) * n, count = rows.tokens * n;
    for (std::int64_t r = 0; r < p_.kind.queries; ++r) {
      copy(p_.q, r * p_.tokens + begin_ + first, rows.tokens, 0, keys,
           rows.q + r * rows.tokens * rows.key_pitch, rows.key_pitch);
    }
    copy(p_.k, row, count, 0, keys, rows.k, rows.key_pitch);
    copy(p_.v, row, count, column, columns, rows.v, rows.value_pitch);
    if (p_.kind.decay_per_key) {
      copy(p_.g, row, count, 0, keys, rows.g, rows.key_pitch);
    } else {
      copy(p_.g, row, count, 0, 1, rows.g, 1);
    }
    copy(p_.gv, row, count, column, columns, rows.gv, rows.value_pitch);
    copy(p_.e, row, count, 0, keys, rows.e, rows.key_pitch);
    copy(p_.b, row, count, 0, keys, rows.b, rows.key_pitch);
    if (p_.kind.strength_per_value) {
      copy(p_.c, row, count, column, columns, rows.c, rows.value_pitch);
    } else {
      copy(p_.c, row, count, 0, 1, rows.c, 1);
    }
    if (p_.u.present()) {
      std::fill_n(rows.u, rows.key_pitch, 0.0f);
      std::copy_n(p_.u.data.data(), keys, rows.u);
    }
  }

  float* output(std::int64_t r, std::int64_t first, std::int64_t column,
                std::int64_t& stride) override {
    stride = p_.kind.values;
    return &o_(r, begin_ + first, column);
  }

  void finish(std::int64_t first, std::int64_t tokens, std::int64_t column,
              std::int64_t columns) override {
    finished += tokens * columns;
    for (std::int64_t t = first; t < first + tokens; ++t) {
      EXPECT_NE(bits(o_(0, begin_ + t, column)), bits(-7.5f)) << "token " << t << " is not written";
    }
  }

  static std::uint32_t bits(float x) {
    std::uint32_t u = 0;
    std::memcpy(&u, &x, sizeof u);
    return u;
  }

  std::atomic<std::int64_t> finished = 0;  // groups of columns finish side by side

 private:
  static void copy(const Array<float>& from, std::int64_t row, std::int64_t count,
                   std::int64_t column, std::int64_t width, float* to, std::int64_t pitch) {
    if (!from.present()) {
      EXPECT_EQ(to, nullptr);
      return;
    }
    const std::int64_t size = from.shape.back();
    for (std::int64_t i = 0; i < count; ++i) {
      std::fill_n(to + i * pitch, pitch, 0.0f);
      std::copy_n(from.data.data() + (row + i) * size + column, width, to + i * pitch);
    }
  }

  const Problem& p_;
  std::int64_t begin_, count_;
  Array<float>& o_;
};

struct Result {
  Array<float> o, final, residue;
};

inline Result empty_result(const Problem& p) {
  Result r{Array<float>({p.kind.queries, p.tokens, p.kind.values}),
           Array<float>({p.kind.keys, p.kind.values}), Array<float>({p.kind.keys, p.kind.values})};
  for (float& x : r.o.data) x = -7.5f;
  return r;
}

template <class T>
inline StateMemory<T> memory_of(const RowsKind& kind, T* s, T* residue) {
  return {s, residue, kind.values, 1};
}

// Tokens [begin, begin + count) from the state in `r`, or from `p.initial` where begin is 0; in
// groups of `width` columns.
inline void scan(Context& context, const Problem& p, std::int64_t begin, std::int64_t count,
                 std::int64_t width, Result& r) {
  const RowsKind& kind = p.kind;
  const Array<float> before = begin == 0 ? p.initial : r.final;
  const Array<float> residue = begin == 0 ? Array<float>() : r.residue;
  Source source(p, begin, count, r.o);
  context.impl().reserve(rows_scan_scratch(kind, width));
  const std::int64_t groups = (kind.values + width - 1) / width;
  context.impl().run(groups, [&](std::int64_t group, Scratch& scratch) {
    const std::int64_t column = group * width;
    rows_scan(context.isa(), kind, source, column, std::min(width, kind.values - column),
              memory_of(kind, before.present() ? before.data.data() : nullptr,
                        residue.present() ? residue.data.data() : nullptr),
              begin, memory_of(kind, r.final.data.data(), r.residue.data.data()), scratch);
  });
  EXPECT_EQ(source.finished, count * kind.values);
}

inline Result scan(Context& context, const Problem& p) {
  Result r = empty_result(p);
  scan(context, p, 0, p.tokens, p.kind.values, r);
  return r;
}

inline Result steps(Context& context, const Problem& p) {
  const RowsKind& kind = p.kind;
  Result r = empty_result(p);
  if (p.initial.present()) r.final = p.initial;
  // One token at a time, packed as the scan packs.
  const auto pitch = [](std::int64_t size, std::int64_t to) { return (size + to - 1) / to * to; };
  const std::int64_t key_pitch = pitch(kind.keys, 16), value_pitch = pitch(kind.values, 32);
  const auto size = [&](std::int64_t rows, std::int64_t row) {
    return std::vector<float>(static_cast<std::size_t>(rows * row), kNaN);
  };
  const std::int64_t n = kind.rows_per_token;
  std::vector<float> q = size(kind.queries, key_pitch), k = size(n, key_pitch), e = k, b = k, g = k,
                     v = size(n, value_pitch), gv = v, c = v, u = size(1, key_pitch),
                     scratch = size(1, rows_step_floats(kind));
  const auto if_present = [](const Array<float>& x, std::vector<float>& to) {
    return x.present() ? to.data() : nullptr;
  };
  Source source(p, 0, p.tokens, r.o);
  for (std::int64_t t = 0; t < p.tokens; ++t) {
    LawRows rows;
    rows.tokens = 1;
    rows.key_pitch = key_pitch;
    rows.value_pitch = value_pitch;
    rows.q = q.data();
    rows.k = k.data();
    rows.v = v.data();
    rows.g = if_present(p.g, g);
    rows.gv = if_present(p.gv, gv);
    rows.e = if_present(p.e, e);
    rows.b = if_present(p.b, b);
    rows.c = if_present(p.c, c);
    rows.u = if_present(p.u, u);
    Source(p, t, 1, r.o).pack(0, 0, kind.values, rows);
    context.impl().run(1, [&](std::int64_t, Scratch&) {
      rows_step(context.isa(), kind, rows,
                memory_of(kind, r.final.data.data(), r.residue.data.data()), t, &r.o(0, t, 0),
                p.tokens * kind.values, scratch.data());
    });
  }
  return r;
}

// The recurrence as it stands in rows.h.
struct Truth {
  Array<double> o, final;
};
inline Truth truth_of(const Problem& p) {
  const RowsKind& kind = p.kind;
  Truth truth{Array<double>({kind.queries, p.tokens, kind.values}),
              Array<double>({kind.keys, kind.values})};
  Array<double>& s = truth.final;
  if (p.initial.present()) s.data.assign(p.initial.data.begin(), p.initial.data.end());
  const auto read = [&](std::int64_t t) {
    for (std::int64_t r = 0; r < kind.queries; ++r) {
      for (std::int64_t j = 0; j < kind.values; ++j) {
        double sum = 0;
        for (std::int64_t i = 0; i < kind.keys; ++i) {
          sum += static_cast<double>(p.q(r, t, i)) * s(i, j);
        }
        truth.o(r, t, j) = sum;
      }
    }
  };
  for (std::int64_t row = 0; row < p.rows(); ++row) {
    const std::int64_t t = row / kind.rows_per_token;
    const bool last = row % kind.rows_per_token == kind.rows_per_token - 1;
    if (kind.bonus && last) {
      read(t);
      for (std::int64_t r = 0; r < kind.queries; ++r) {
        double weight = 0;
        for (std::int64_t i = 0; i < kind.keys; ++i) {
          weight += static_cast<double>(p.q(r, t, i)) * p.u(i) * p.k(row, i);
        }
        for (std::int64_t j = 0; j < kind.values; ++j) truth.o(r, t, j) += weight * p.v(row, j);
      }
    }
    const Array<double> before = s;
    for (std::int64_t i = 0; i < kind.keys; ++i) {
      const double g = kind.decay ? p.g(row, kind.decay_per_key ? i : 0) : 0;
      for (std::int64_t j = 0; j < kind.values; ++j) {
        const double factor = std::exp(g + (kind.value_decay ? p.gv(row, j) : 0));
        s(i, j) = factor == 0 ? 0 : s(i, j) * factor;
      }
    }
    const Array<double>& erased = kind.erase_decayed ? s : before;
    std::vector<double> r(static_cast<std::size_t>(kind.values));
    for (std::int64_t j = 0; j < kind.values && kind.erase != EraseKind::kNone; ++j) {
      for (std::int64_t i = 0; i < kind.keys; ++i) {
        r[static_cast<std::size_t>(j)] += p.e(row, i) * erased(i, j);
      }
    }
    for (std::int64_t i = 0; i < kind.keys; ++i) {
      for (std::int64_t j = 0; j < kind.values; ++j) {
        const double erase = r[static_cast<std::size_t>(j)];
        double v = p.v(row, j);
        if (kind.erase == EraseKind::kCollinear) {
          v -= p.c(row, kind.strength_per_value ? j : 0) * erase;
        }
        s(i, j) += p.k(row, i) * v;
        if (kind.erase == EraseKind::kGeneral) s(i, j) += p.b(row, i) * erase;
      }
    }
    if (!kind.bonus && last) read(t);
  }
  return truth;
}

inline void expect_close(const Result& result, const Truth& truth, const Bounds& bounds) {
  Comparison comparison;
  comparison.output("o", result.o, truth.o);
  comparison.output("final", result.final, truth.final);
  comparison.expect_within(bounds);
}

inline bool same_bits(const Array<float>& a, const Array<float>& b) {
  return a.data.size() == b.data.size() &&
         (a.data.empty() ||
          std::memcmp(a.data.data(), b.data.data(), a.data.size() * sizeof(float)) == 0);
}

inline std::string name_of(const Problem& p, Gates gates) {
  const RowsKind& k = p.kind;
  return testing::PrintToString(
             std::vector<std::int64_t>{p.tokens, k.keys, k.values, k.rows_per_token, k.queries}) +
         " erase " + std::to_string(static_cast<int>(k.erase)) +
         (k.erase_decayed ? "" : " of the undecayed") + (k.decay ? " decay" : "") +
         (k.decay_per_key ? " per key" : "") + (k.value_decay ? " per value" : "") +
         (k.strength_per_value ? " strengths" : "") + (k.bonus ? " bonus" : "") + " gates " +
         std::to_string(static_cast<int>(gates)) + (p.initial.present() ? " state" : "");
}

// Every kind that the engine has, sizes and gates: a pairwise cover.
struct Case {
  RowsKind kind;
  std::int64_t tokens;
  Gates gates;
  bool state;
};
inline const std::vector<Case>& cases() {
  static const std::vector<Case> all = [] {
    const std::vector<std::int64_t> tokens = {0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 200};
    const std::vector<std::int64_t> sizes = {1, 3, 16, 24, 60, 64, 100, 128};
    const std::vector<EraseKind> erases = {EraseKind::kNone, EraseKind::kCollinear,
                                           EraseKind::kGeneral};
    const auto make = [&](const Row& row) {
      Case c;
      c.kind.erase = erases[row[0]];
      c.kind.decay = row[1] != 0;
      c.kind.decay_per_key = row[1] == 2;
      c.kind.value_decay = row[2] != 0;
      c.kind.erase_decayed = row[3] == 0;
      c.kind.strength_per_value = row[4] != 0;
      c.kind.bonus = row[5] != 0;
      c.kind.rows_per_token = static_cast<std::int64_t>(row[6]) + 1;
      c.kind.queries = static_cast<std::int64_t>(row[7]) + 1;
      c.tokens = tokens[row[8]];
      c.kind.keys = sizes[row[9]];
      c.kind.values = sizes[row[10]];
      c.gates = static_cast<Gates>(row[11]);
      c.state = row[12] != 0;
      return c;
    };
    const auto valid = [&](const Row& row) {
      const Case c = make(row);
      const RowsKind& k = c.kind;
      return (k.erase != EraseKind::kNone || k.erase_decayed) &&
             (k.erase == EraseKind::kCollinear || !k.strength_per_value) &&
             (!k.bonus || (k.erase == EraseKind::kNone && k.rows_per_token == 1)) &&
             (k.decay || k.value_decay || c.gates == Gates::kZero);
    };
    std::vector<Case> list;
    for (const Row& row : pairwise({3, 3, 2, 2, 2, 2, 3, 3, 11, 8, 8, 7, 2}, valid)) {
      list.push_back(make(row));
    }
    return list;
  }();
  return all;
}

}  // namespace ouzel::test
