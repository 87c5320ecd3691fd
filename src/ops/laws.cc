// The rows of the table of laws that decay by gates or erase (ouzel/laws.h). Everything that a law
// needs is here: forward, backward, step, the quadratic form, checks and the table of operators
// read these rows.
#include "ouzel/laws.h"

#include "src/ops/law.h"

namespace ouzel {
namespace {

using enum LawRole;
using In = RecurrenceInputs;
using Grad = RecurrenceInputGrads;

constexpr LawInput kQ = {kQuery, "q", "B T HQ K", &In::q, &Grad::q};
constexpr LawInput kK = {kKey, "k", "B T HK K", &In::k, &Grad::k};
constexpr LawInput kV = {kValue, "v", "B T HV V", &In::v, &Grad::v};
constexpr LawInput kG = {kDecay, "g", "B T HV", &In::g, &Grad::g};
constexpr LawInput kKeyG = {kDecay, "g", "B T HV K", &In::g, &Grad::g};
constexpr LawInput kBeta = {kStrength, "beta", "B T HV", &In::beta, &Grad::beta};
constexpr LawInput kA = {kEraseKey, "a", "B T HK K", &In::a, &Grad::a};
constexpr LawInput kB = {kEraseWrite, "b", "B T HK K", &In::b, &Grad::b};
// The names of RWKV: r, and w for the log decay.
constexpr LawInput kR = {kQuery, "r", "B T HQ K", &In::q, &Grad::q};
constexpr LawInput kW = {kDecay, "w", "B T HV K", &In::g, &Grad::g};
constexpr LawInput kU = {kBonus, "u", "HV K", &In::u, &Grad::u};

constexpr LawInput optional(LawInput input) {
  input.optional = true;
  return input;
}
constexpr LawInput shaped(LawInput input, const char* shape) {
  input.shape = shape;
  return input;
}

constexpr const char* kScaleByKeys = "scale K^-0.5";
constexpr const char* kScaleOne = "scale 1";

constexpr Law kSimpleGla = {
    .name = "simple_gla",
    .decay = DecayKind::kPerToken,
    .defaults = kScaleByKeys,
    .formula = "S_t = exp(g_t) S_{t-1} + k_t v_t^T; o_t = S_t^T (scale q_t)",
    .source = "arXiv:2312.06635, arXiv:2405.21060",
    .inputs = {kQ, kK, kV, kG},
};

constexpr Law kMamba2 = {
    .name = "mamba2_ssd",
    .decay = DecayKind::kPerToken,
    .defaults = kScaleOne,
    .formula = "S_t = exp(dt_t A) S_{t-1} + B_t (dt_t x_t)^T; o_t = S_t^T (scale C_t) + D x_t",
    .source = "arXiv:2405.21060",
    .unit_scale = true,
    .inputs = {LawInput{kQuery, "C", "B T HQ K", &In::q, &Grad::q},
               {kKey, "B", "B T HK K", &In::k, &Grad::k},
               {kValue, "x", "B T HV V", &In::v, &Grad::v},
               {kStep, "dt", "B T HV", &In::dt, &Grad::dt},
               {kRate, "A", "HV", &In::A, &Grad::A},
               {kSkip, "D", "HV", &In::D, &Grad::D, true}},
};

constexpr Law kGla = {
    .name = "gla",
    .decay = DecayKind::kPerKey,
    .defaults = kScaleByKeys,
    .formula = "S_t = Diag(exp(g_t)) S_{t-1} Diag(exp(gv_t)) + k_t v_t^T; o_t = S_t^T (scale q_t)",
    .source = "arXiv:2312.06635",
    .inputs = {kQ, kK, kV, kKeyG, {kValueDecay, "gv", "B T HV V", &In::gv, &Grad::gv, true}},
};

constexpr Law kHgrn2 = {
    .name = "hgrn2",
    .decay = DecayKind::kPerKey,
    .defaults = kScaleByKeys,
    .formula = "S_t = Diag(exp(g_t)) S_{t-1} + (1 - exp(g_t)) v_t^T; o_t = S_t^T (scale q_t)",
    .source = "arXiv:2404.07904",
    .inputs = {kQ, kV, kKeyG},
};

constexpr Law kRwkv5 = {
    .name = "rwkv5",
    .decay = DecayKind::kPerKey,
    .read = ReadKind::kBeforeWrite,
    .defaults = kScaleByKeys,
    .formula =
        "o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T (scale r_t); S_t = Diag(exp(w)) S_{t-1} + "
        "k_t v_t^T",
    .source = "arXiv:2404.05892",
    .inputs = {kR, kK, kV, shaped(kW, "HV K"), kU},
};

constexpr Law kRwkv6 = {
    .name = "rwkv6",
    .decay = DecayKind::kPerKey,
    .read = ReadKind::kBeforeWrite,
    .defaults = kScaleByKeys,
    .formula =
        "o_t = (S_{t-1} + Diag(u) k_t v_t^T)^T (scale r_t); S_t = Diag(exp(w_t)) S_{t-1} + "
        "k_t v_t^T",
    .source = "arXiv:2404.05892",
    .inputs = {kR, kK, kV, kW, kU},
};

constexpr Law kDeltaRule = {
    .name = "delta_rule",
    .erase = EraseKind::kCollinear,
    .defaults = kScaleByKeys,
    .formula = "S_t = S_{t-1} + k_t (beta_t * (v_t - S_{t-1}^T k_t))^T; o_t = S_t^T (scale q_t)",
    .source = "arXiv:2102.11174, arXiv:2406.06484",
    .inputs = {kQ, kK, kV, shaped(kBeta, "B T HV|B T HV V")},
};

constexpr Law kGatedDeltaRule = {
    .name = "gated_delta_rule",
    .decay = DecayKind::kPerToken,
    .erase = EraseKind::kCollinear,
    .defaults = kScaleByKeys,
    .formula =
        "P_t = exp(g_t) S_{t-1}; S_t = P_t + k_t (beta_t * (v_t - P_t^T k_t))^T; "
        "o_t = S_t^T (scale q_t)",
    .source = "arXiv:2412.06464",
    .inputs = {kQ, kK, kV, kG, shaped(kBeta, "B T HV|B T HV V")},
};

constexpr Law kGatedDeltaProduct = {
    .name = "gated_delta_product",
    .decay = DecayKind::kPerToken,
    .erase = EraseKind::kCollinear,
    .defaults = "scale K^-0.5, no decay without g",
    .formula =
        "P = exp(g_t) S_{t-1}; P += k (beta (v - P^T k))^T for each of the num_householder "
        "rows of the token; S_t = P; o_t = S_t^T (scale q_t)",
    .source = "arXiv:2502.10297",
    .inputs = {kQ, shaped(kK, "B TN HK K"), shaped(kV, "B TN HV V"), optional(kG),
               shaped(kBeta, "B TN HV")},
};

constexpr Law kKda = {
    .name = "kda",
    .decay = DecayKind::kPerKey,
    .erase = EraseKind::kCollinear,
    .defaults = kScaleByKeys,
    .formula =
        "P_t = Diag(exp(g_t)) S_{t-1}; S_t = P_t + k_t (beta_t (v_t - P_t^T k_t))^T; "
        "o_t = S_t^T (scale q_t)",
    .source = "arXiv:2510.26692",
    .inputs = {kQ, kK, kV, kKeyG, kBeta},
};

constexpr Law kGdn2 = {
    .name = "gdn2",
    .decay = DecayKind::kPerKey,
    .erase = EraseKind::kCollinear,
    .defaults = kScaleByKeys,
    .formula =
        "P_t = Diag(exp(g_t)) S_{t-1}; S_t = P_t + k_t (w_t * v_t - P_t^T (b_t * k_t))^T; "
        "o_t = S_t^T (scale q_t)",
    .source = "flash-linear-attention, ops/gdn2",
    .inputs = {kQ,
               kK,
               kV,
               kKeyG,
               {kEraseGate, "b", "B T HV K", &In::b, &Grad::b},
               {kWriteGate, "w", "B T HV V", &In::w, &Grad::w}},
};

constexpr Law kComba = {
    .name = "comba",
    .decay = DecayKind::kPerToken,
    .erase = EraseKind::kCollinear,
    .defaults = kScaleByKeys,
    .formula =
        "S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - S_{t-1}^T p_t))^T; "
        "o_t = S_t^T (scale q_t)",
    .source = "arXiv:2506.02475",
    .erase_decayed = false,
    .inputs = {kQ, kK, kV, {kEraseKey, "p", "B T HK K", &In::p, &Grad::p}, kG, kBeta},
};

constexpr Law kIplr = {
    .name = "iplr",
    .erase = EraseKind::kGeneral,
    .defaults = kScaleByKeys,
    .formula = "S_t = S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T; o_t = S_t^T (scale q_t)",
    .source = "flash-linear-attention, ops/generalized_delta_rule",
    .erase_decayed = false,
    .inputs = {kQ, kK, kV, kA, kB},
};

constexpr Law kDplr = {
    .name = "dplr",
    .decay = DecayKind::kPerKey,
    .erase = EraseKind::kGeneral,
    .defaults = kScaleByKeys,
    .formula =
        "S_t = Diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T; "
        "o_t = S_t^T (scale q_t)",
    .source = "flash-linear-attention, ops/generalized_delta_rule",
    .erase_decayed = false,
    .inputs = {kQ, kK, kV, kA, kB, kKeyG},
};

constexpr Law kRwkv7 = {
    .name = "rwkv7",
    .decay = DecayKind::kPerKey,
    .erase = EraseKind::kGeneral,
    .defaults = kScaleOne,
    .formula =
        "S_t = Diag(exp(w_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T; "
        "o_t = S_t^T (scale r_t)",
    .source = "arXiv:2503.14456",
    .erase_decayed = false,
    .unit_scale = true,
    .inputs = {kR, kW, kK, kV, kA, kB},
};

constexpr const Law* kLaws[] = {
    &kSimpleGla,         &kMamba2, &kGla,  &kHgrn2, &kRwkv5, &kRwkv6, &kDeltaRule, &kGatedDeltaRule,
    &kGatedDeltaProduct, &kKda,    &kGdn2, &kComba, &kIplr,  &kDplr,  &kRwkv7};

}  // namespace

std::span<const Law* const> matrix_laws() { return kLaws; }

constinit const MatrixLaw simple_gla(kSimpleGla);
constinit const MatrixLaw mamba2_ssd(kMamba2);
constinit const MatrixLaw gla(kGla);
constinit const MatrixLaw hgrn2(kHgrn2);
constinit const MatrixLaw rwkv5(kRwkv5);
constinit const MatrixLaw rwkv6(kRwkv6);
constinit const MatrixLaw delta_rule(kDeltaRule);
constinit const MatrixLaw gated_delta_rule(kGatedDeltaRule);
constinit const MatrixLaw gated_delta_product(kGatedDeltaProduct);
constinit const MatrixLaw kda(kKda);
constinit const MatrixLaw gdn2(kGdn2);
constinit const MatrixLaw comba(kComba);
constinit const MatrixLaw iplr(kIplr);
constinit const MatrixLaw dplr(kDplr);
constinit const MatrixLaw rwkv7(kRwkv7);

}  // namespace ouzel
