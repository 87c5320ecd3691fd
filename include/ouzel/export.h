// Visibility of the shared library's symbols: everything is hidden but what says OUZEL_EXPORT.
#pragma once

// ouzel/c.h is for C and for any C++.
#if defined(__cplusplus) && __cplusplus <= 201703L && !defined(OUZEL_C_H)
#error "The C++ headers of Ouzel are C++20: compile with -std=c++20 or later"
#include "ouzel/C++20"  // is not there: the compiler ends here, and not after a hundred errors
#endif

#define OUZEL_EXPORT __attribute__((visibility("default")))

// For a class inside an exported one that is not part of the interface.
#define OUZEL_HIDDEN __attribute__((visibility("hidden")))
