// JSON: any bytes give a value that survives being written and read again, or an Error.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "ouzel/error.h"
#include "src/formats/json.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const ouzel::Json value =
        ouzel::parse_json({reinterpret_cast<const char*>(data), size}, "input");
    if (ouzel::parse_json(value.dump(), "copy") != value) std::abort();
  } catch (const ouzel::Error&) {
  }
  return 0;
}
