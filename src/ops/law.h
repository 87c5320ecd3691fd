// The table of laws: what distinguishes one mechanism from another above the pack stage. Every law
// is one row; kernels know none of them.
#pragma once

#include <cstdint>

namespace ouzel {

enum class DecayKind {
  kNone,
  kPerHead,  // one number for all tokens of a head
};
enum class EraseKind {
  kNone,
  kCollinear,  // with the key that is written: k (v - c * r)^T
  kGeneral,    // b r^T + k v^T
};
enum class ReadKind {
  kAfterWrite,  // o_t reads S_t
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
};

extern const Law kLinearAttentionLaw;  // linear_attention.cc
extern const Law kRetentionLaw;        // retention.cc

}  // namespace ouzel
