// Visibility of the shared library's symbols: everything is hidden but what says OUZEL_EXPORT.
#pragma once

#define OUZEL_EXPORT __attribute__((visibility("default")))
