// The table of laws: what distinguishes one mechanism from another above the pack stage. Every law
// is one row; kernels know none of them.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>

#include "ouzel/recurrence.h"

namespace ouzel {

enum class DecayKind {
  kNone,
  kPerHead,   // one number for all tokens of a head
  kPerToken,  // a number per head and token
  kPerKey,    // a number per row of S
};
enum class EraseKind {
  kNone,
  kCollinear,  // with the key that is written: k (v - c * r)^T
  kGeneral,    // b r^T + k v^T
};
enum class ReadKind {
  kAfterWrite,   // o_t reads S_t
  kBeforeWrite,  // o_t reads S_{t-1}, and the current token through the bonus u
};

// What an input is to a law: the rows (rows.h) that it feeds, and how.
enum class LawRole {
  kQuery,       // q := scale x
  kKey,         // k := x; a law without: k := 1 - e^g
  kValue,       // v := x
  kDecay,       // g := x
  kValueDecay,  // gv := x
  kStrength,    // c := x, v := x v; a collinear erase without: c := 1
  kEraseKey,    // e := x; a collinear erase without: e := k
  kEraseGate,   // e := x * k
  kEraseWrite,  // b := x
  kWriteGate,   // v := x * v
  kBonus,       // u := x
  kStep,        // g := x A, v := x v
  kRate,        // A
  kSkip,        // o := o + x v
};

struct LawInput {
  LawRole role;
  const char* name = nullptr;  // in messages and in the table of operators
  // Letters of its extents as in recurrence.h, alternatives separated by "|"; TN is T times the
  // rows of a token. Without B and T it is a parameter.
  const char* shape = nullptr;
  ConstTensor RecurrenceInputs::*tensor = nullptr;
  Tensor RecurrenceInputGrads::*gradient = nullptr;
  bool optional = false;
};

struct Law {
  const char* name;
  DecayKind decay;
  EraseKind erase;
  ReadKind read;
  bool normalizer;  // may divide by z_t . q_t
  // The natural logarithm of a head's decay when the caller gives none; null without decay.
  double (*default_log_decay)(std::int64_t head);
  const char* defaults;
  const char* formula;
  const char* source;
  // What follows is read of the laws of ouzel/laws.h only.
  bool erase_decayed = true;  // the erase reads S after the decay
  bool unit_scale = false;    // the scale is 1 if none is given, else K^-0.5
  // In the order of the table of operators; the first is the query. Ends where a name is null.
  std::array<LawInput, 7> inputs = {};

  constexpr const LawInput* find(LawRole role) const {
    for (const LawInput& input : inputs) {
      if (input.name != nullptr && input.role == role) return &input;
    }
    return nullptr;
  }
  constexpr bool has(LawRole role) const { return find(role) != nullptr; }
  // Keys are written (and erased) in several rows a token.
  constexpr bool many_rows() const {
    const LawInput* key = find(LawRole::kKey);
    return key != nullptr && std::string_view(key->shape).substr(0, 4) == "B TN";
  }
};

extern const Law kLinearAttentionLaw;  // linear_attention.cc
extern const Law kRetentionLaw;        // retention.cc

// The laws of ouzel/laws.h, in its order.
std::span<const Law* const> matrix_laws();

}  // namespace ouzel
