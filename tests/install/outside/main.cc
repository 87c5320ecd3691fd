// Uses the installed library: its version is the expected one, a call works, an error is caught.
#include <cstring>

#include <ouzel/ouzel.h>

int main(int argc, char** argv) {
  if (argc != 2 || std::strcmp(ouzel::version(), argv[1]) != 0) return 1;
  const ouzel::Context context({.threads = 2});
  if (context.threads() != 2) return 2;
  try {
    const ouzel::Context refused({.threads = -1});
    return 3;
  } catch (const ouzel::Error& error) {
    return error.kind() == ouzel::ErrorKind::kInvalidArgument ? 0 : 4;
  }
}
