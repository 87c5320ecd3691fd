// Errors: one exception type, a kind for programs and a sentence for people.
// The sentence names the operator or file, what was expected, what was found, and the remedy.
#pragma once

#include <stdexcept>
#include <string>

#include "ouzel/export.h"

namespace ouzel {

enum class ErrorKind {
  kInvalidArgument,  // a shape, option or value that an operator or verb cannot take
  kBadFile,          // a file whose content is damaged or of another kind
  kIo,               // the operating system refused to open, read or write
  kOutOfMemory,
  kCancelled,  // the caller's cancel callback said so
};

class OUZEL_EXPORT Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& sentence) : std::runtime_error(sentence), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

}  // namespace ouzel
