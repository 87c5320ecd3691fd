// The program: `ouzel VERB ...`, one file per verb.
#include <cstdio>
#include <cstring>

#include "ouzel/ouzel.h"

int main(int argc, char** argv) {
  if (argc == 2 && std::strcmp(argv[1], "--version") == 0) {
    std::printf("ouzel %s\n", ouzel::version());
    return 0;
  }
  return 2;
}
