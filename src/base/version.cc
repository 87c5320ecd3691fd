#include "ouzel/version.h"

namespace ouzel {

const char* version() { return OUZEL_VERSION; }

}  // namespace ouzel
