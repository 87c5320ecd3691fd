// What the C ABI's handles hold, and how its functions turn exceptions into codes.
#pragma once

#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "ouzel/c.h"
#include "ouzel/context.h"
#include "ouzel/error.h"
#include "ouzel/generate.h"
#include "ouzel/model.h"

struct ouzel_context {
  ouzel::Context context;
  ouzel::Workspace workspace;
};
struct ouzel_model {
  ouzel::Model model;
};
struct ouzel_state {
  ouzel::State state;
};
struct ouzel_generator {
  ouzel::Generator generator;
};

namespace ouzel::capi {

// Keeps the sentence for ouzel_last_error.
ouzel_status fail(ouzel_status status, const char* sentence) noexcept;

inline ouzel_status status_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return OUZEL_INVALID_ARGUMENT;
    case ErrorKind::kBadFile:
      return OUZEL_BAD_FILE;
    case ErrorKind::kIo:
      return OUZEL_IO;
    case ErrorKind::kOutOfMemory:
      return OUZEL_OUT_OF_MEMORY;
    case ErrorKind::kCancelled:
      return OUZEL_CANCELLED;
  }
  return OUZEL_INTERNAL;
}

template <class Body>
ouzel_status guarded(Body&& body) noexcept {
  try {
    body();
    return OUZEL_OK;
  } catch (const Error& error) {
    return fail(status_of(error.kind()), error.what());
  } catch (const std::bad_alloc&) {
    return fail(OUZEL_OUT_OF_MEMORY, "there is no memory left");
  } catch (const std::exception& error) {
    return fail(OUZEL_INTERNAL, error.what());
  } catch (...) {
    return fail(OUZEL_INTERNAL, "an exception of no known type was thrown");
  }
}

// Throws Error(kInvalidArgument) if `pointer` is null.
template <class T>
T& required(T* pointer, const char* what) {
  if (pointer != nullptr) return *pointer;
  throw Error(ErrorKind::kInvalidArgument, std::string(what) + " must not be NULL");
}

// A struct as this version knows it: members that the caller's version lacks are zero.
template <class T>
T versioned(const T& given, const char* what) {
  constexpr std::size_t kLargest = 4096;  // larger than any struct of any version: not initialised
  if (given.size < sizeof(given.size) || given.size > kLargest || given.size % alignof(T) != 0) {
    throw Error(ErrorKind::kInvalidArgument, std::string(what) + ".size is " +
                                                 std::to_string(given.size) +
                                                 "; set it to sizeof(" + what + ")");
  }
  T known{};
  std::memcpy(&known, &given, given.size < sizeof(T) ? given.size : sizeof(T));
  return known;
}

}  // namespace ouzel::capi
