// The list of what `ouzel bench ops` measures.
#include "bench/case.h"

namespace ouzel::bench {

std::vector<Case> operator_cases() {
  std::vector<Case> cases;
  add_recurrence_cases(cases);
  add_law_cases(cases);
  add_softmax_cases(cases);
  add_scan_cases(cases);
  add_long_cases(cases);
  add_gemm_cases(cases);
  add_crossing_case(cases);
  return cases;
}

}  // namespace ouzel::bench
