// Visibility of the shared library's symbols: everything is hidden but what says OUZEL_EXPORT.
#pragma once

#define OUZEL_EXPORT __attribute__((visibility("default")))

// For a class inside an exported one that is not part of the interface.
#define OUZEL_HIDDEN __attribute__((visibility("hidden")))
