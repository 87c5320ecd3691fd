// A model's config.json: any bytes give a configuration that is written and read as itself, or an
// Error.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "ouzel/error.h"
#include "ouzel/model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const auto config = ouzel::ModelConfig::from_json(
        std::string(reinterpret_cast<const char*>(data), size), "input");
    const std::string text = config.to_json();
    if (ouzel::ModelConfig::from_json(text, "copy").to_json() != text) std::abort();
  } catch (const ouzel::Error&) {
  }
  return 0;
}
