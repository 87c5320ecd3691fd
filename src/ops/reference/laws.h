// Reference of the laws whose state S [K, V] decays by gates or is erased before it is written,
// token by token. law_tokens.h has the equations, a function each; here is what is common to them:
// sequences, heads, the order of tokens, the scale and norm of queries and keys.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "ouzel/segments.h"
#include "src/ops/reference/array.h"

namespace ouzel::reference {

// Inputs are [B, T, H, D] or [B, T, H], parameters that all tokens share [H, D] or [H], the initial
// state [N, HV, K, V] or absent: zeros. Output head h of HO, the larger number of query and value
// heads, reads head h H / HO of each. A tensor of n T rows holds n of them for each token.
template <class Real>
struct LawArguments {
  std::string law;
  Tensors<Real> inputs;
  Segments segments;
  std::optional<Real> scale;  // of the query; 1 in mamba2_ssd and rwkv7 if not given, else K^-0.5
  bool reverse = false;
  bool l2norm = false;  // q, k and p are x / sqrt(x . x + 1e-6)
};

std::vector<std::string> law_names();

template <class Real>
Tensors<Real> law(const LawArguments<Real>& arguments);

// Absent upstream gradients are zeros. dh0 always, as if the initial state had been given.
template <class Real>
Tensors<Real> law_backward(const LawArguments<Real>& arguments, const Tensors<Real>& upstream);

// The weights of the parallel form, [B, HO, T, T]: o = weights v without initial states. Of laws
// that treat all values alike.
template <class Real>
Array<Real> law_weights(const LawArguments<Real>& arguments);

}  // namespace ouzel::reference
