// Laws whose state decays by gates or is erased before it is written. Each is an object that is
// called like a function:
//
//     ouzel::gla(context, {}, {.q = q, .k = k, .v = v, .g = g}, {.o = o});
//
// docs/laws.md has the equations; shapes and inputs are in recurrence.h. Inputs, outputs and their
// gradients may be float32, bfloat16 or float16, each its own; states are float32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "ouzel/recurrence.h"

namespace ouzel {

struct Law;  // src/ops/law.h

struct LawOptions {
  std::optional<double> scale = {};  // factor on q; default K^-0.5, 1 for mamba2_ssd and rwkv7
  // Laws that erase along the key, delta_rule to comba: q, k (and p) are x / sqrt(x . x +
  // l2norm_eps).
  bool use_qk_l2norm = false;
  double l2norm_eps = 1e-6;
  bool reverse = false;  // tokens are processed from last to first; o stays at the token's position
  // gated_delta_product: k, v and beta have this many rows for each token of q.
  std::int64_t num_householder = 1;
  Form form = Form::kAuto;
};

class OUZEL_EXPORT MatrixLaw {
 public:
  constexpr explicit MatrixLaw(const Law& law) : law_(&law) {}

  // Throws Error(kInvalidArgument) for shapes, types and options that do not fit, and for log
  // decays above 1e-6; outputs are then unspecified, the initial state is as it was.
  void operator()(Context& context, const LawOptions& options, const RecurrenceInputs& inputs,
                  const RecurrenceOutputs& outputs) const;

  // `saved` is what the forward call filled (null: recomputed).
  void backward(Context& context, const LawOptions& options, const RecurrenceInputs& inputs,
                const void* saved, const RecurrenceOutputGrads& output_grads,
                const RecurrenceInputGrads& input_grads) const;

  // One token of N sequences: inputs are those of one token (batch row n is sequence n, without
  // initial state), the state is updated in place, o is [N, 1, HO, V]. Allocates nothing once the
  // context has seen the shape.
  void step(Context& context, const LawOptions& options, const RecurrenceInputs& inputs,
            const StateView& state, const Tensor& o) const;

  // Bytes of `saved` for calls of these options and inputs: the states before every 64 rows.
  std::size_t saved_bytes(const LawOptions& options, const RecurrenceInputs& inputs) const;

  const char* name() const;
  const char* formula() const;

 private:
  const Law* law_;
};

// Decay, then write.
OUZEL_EXPORT extern const MatrixLaw simple_gla;  // a number per head and token
OUZEL_EXPORT extern const MatrixLaw mamba2_ssd;  // the same from dt and A; skip D
OUZEL_EXPORT extern const MatrixLaw gla;         // per key, and per value if gv is given
OUZEL_EXPORT extern const MatrixLaw hgrn2;       // per key; k = 1 - e^g
OUZEL_EXPORT extern const MatrixLaw rwkv5;       // per key, the same for all tokens; bonus u
OUZEL_EXPORT extern const MatrixLaw rwkv6;       // per key; bonus u
// Erase along the key, then write.
OUZEL_EXPORT extern const MatrixLaw delta_rule;
OUZEL_EXPORT extern const MatrixLaw gated_delta_rule;
OUZEL_EXPORT extern const MatrixLaw gated_delta_product;  // several writes a token
OUZEL_EXPORT extern const MatrixLaw kda;                  // decay per key
OUZEL_EXPORT extern const MatrixLaw gdn2;   // decay per key, gates on the erase and on the write
OUZEL_EXPORT extern const MatrixLaw comba;  // erases the undecayed state with a key p of its own
// A general erase b (S^T a)^T of the undecayed state.
OUZEL_EXPORT extern const MatrixLaw iplr;
OUZEL_EXPORT extern const MatrixLaw dplr;
OUZEL_EXPORT extern const MatrixLaw rwkv7;

}  // namespace ouzel
