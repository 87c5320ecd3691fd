// A model's config.json: any text gives a configuration that survives being written and read again,
// or an Error.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "ouzel/error.h"
#include "ouzel/model.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    const std::string text(reinterpret_cast<const char*>(data), size);
    const std::string written = ouzel::ModelConfig::from_json(text, "input").to_json();
    if (ouzel::ModelConfig::from_json(written, "copy").to_json() != written) std::abort();
  } catch (const ouzel::Error&) {
  }
  return 0;
}
