// Calls that must throw an Error of a kind, with `part` in its sentence.
#pragma once

#include <string>

#include <gtest/gtest.h>

#include "ouzel/error.h"

namespace ouzel::test {

template <class Action>
void expect_error(ErrorKind kind, const std::string& part, const Action& action) {
  try {
    action();
    FAIL() << "accepted; expected: " << part;
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind) << e.what();
    EXPECT_NE(std::string(e.what()).find(part), std::string::npos) << e.what();
  }
}
template <class Action>
void expect_refused(const std::string& part, const Action& action) {
  expect_error(ErrorKind::kInvalidArgument, part, action);
}

}  // namespace ouzel::test
