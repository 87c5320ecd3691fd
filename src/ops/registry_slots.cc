// Rows of the slot memories.
#include "ouzel/abc.h"
#include "ouzel/gsa.h"
#include "src/ops/operator_call.h"
#include "src/ops/registry_rows.h"

namespace ouzel {
namespace {

void run_gsa(OperatorCall& call) {
  const GsaOptions options = {.scale = call.attributes().number("scale")};
  const GsaInputs inputs = {.q = call.in("q"),
                            .k = call.in("k"),
                            .v = call.in("v"),
                            .s = call.in("s"),
                            .g = call.in("g"),
                            .hk0 = call.in("hk0"),
                            .hv0 = call.in("hv0"),
                            .segments = call.segments()};
  if (call.wants_outputs()) {
    gsa(call.context(), options, inputs,
        {.o = call.out("o"), .hkt = call.out("hkt"), .hvt = call.out("hvt")});
  }
  if (!call.backward()) return;
  gsa_backward(call.context(), options, inputs,
               {.o = call.in("do"), .hkt = call.in("dhkt"), .hvt = call.in("dhvt")},
               {.q = call.out("dq"),
                .k = call.out("dk"),
                .v = call.out("dv"),
                .s = call.out("ds"),
                .g = call.out("dg"),
                .hk0 = call.out("dhk0"),
                .hv0 = call.out("dhv0")});
}

void run_abc(OperatorCall& call) {
  const AbcOptions options = {.scale = call.attributes().number("scale")};
  const AbcInputs inputs = {.q = call.in("q"),
                            .k = call.in("k"),
                            .v = call.in("v"),
                            .s = call.in("s"),
                            .hk0 = call.in("hk0"),
                            .hv0 = call.in("hv0"),
                            .lse0 = call.in("lse0"),
                            .segments = call.segments()};
  if (call.wants_outputs()) {
    abc(call.context(), options, inputs,
        {.o = call.out("o"),
         .hkt = call.out("hkt"),
         .hvt = call.out("hvt"),
         .lset = call.out("lset")});
  }
  if (!call.backward()) return;
  abc_backward(call.context(), options, inputs,
               {.o = call.in("do"), .hkt = call.in("dhkt"), .hvt = call.in("dhvt")},
               {.q = call.out("dq"),
                .k = call.out("dk"),
                .v = call.out("dv"),
                .s = call.out("ds"),
                .hk0 = call.out("dhk0"),
                .hv0 = call.out("dhv0"),
                .lse0 = call.out("dlse0")});
}

}  // namespace

std::vector<OperatorInfo> slot_rows() {
  const TensorInfo q = token_rows("q", "B T HQ K", "dq"), k = token_rows("k", "B T H K", "dk");
  const TensorInfo v = token_rows("v", "B T H V", "dv"), s = token_rows("s", "B T H M", "ds");
  const TensorInfo hk0 = {"hk0", "N H K M", "dhk0", true}, hv0 = {"hv0", "N H M V", "dhv0", true};
  const TensorInfo o = token_rows("o", "B T HQ V", "do");
  const TensorInfo hkt = {"hkt", "N H K M", "dhkt"}, hvt = {"hvt", "N H M V", "dhvt"};
  return {
      {"gsa",
       {},
       "hk' = hk Diag(exp g) + k s^T; p = softmax(hk'^T (scale q)); hv' = Diag(exp g) hv + s v^T; "
       "o = hv'^T p",
       "arXiv:2409.07146",
       {q, k, v, s, token_rows("g", "B T H M", "dg"), hk0, hv0},
       {o, hkt, hvt},
       {kScaleAttribute, kCuSeqlensAttribute},
       run_gsa,
       {5, 14}},
      {"abc",
       {},
       "lse' = log(e^lse + e^s); hk' = hk Diag(e^(lse-lse')) + k (e^(s-lse'))^T, hv' likewise; "
       "p = softmax(hk'^T (scale q)); o = hv'^T p",
       "arXiv:2110.02488",
       {q, k, v, s, hk0, hv0, {"lse0", "N H M", "dlse0", true}},
       {o, hkt, hvt, {"lset", "N H M", ""}},
       {kScaleAttribute, kCuSeqlensAttribute},
       run_abc,
       {5, 14}},
  };
}

}  // namespace ouzel
