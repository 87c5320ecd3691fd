// The library's version.
#pragma once

#include "ouzel/export.h"

namespace ouzel {

OUZEL_EXPORT const char* version();  // "0.1.0"

}  // namespace ouzel
