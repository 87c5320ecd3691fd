// The reader of safetensors files: any bytes give tensors that lie inside the file, or an Error.
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "fuzz/framed_mutator.h"
#include "fuzz/input_file.h"
#include "ouzel/error.h"
#include "src/formats/safetensors.h"

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned seed) {
  return mutate_framed(data, size, max_size, seed);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const ouzel::InputFile file(data, size);
  try {
    const ouzel::SafetensorsReader reader(file.path());
    std::uint64_t bytes = 0;
    for (const ouzel::NamedTensor& tensor : reader.tensors()) {
      if (tensor.offset > size || tensor.bytes > size - tensor.offset) std::abort();
      bytes += tensor.bytes;
      std::vector<std::uint8_t> raw(tensor.bytes);
      reader.read(tensor, raw.data());
      if (!tensor.is_float()) continue;
      std::vector<float> narrow(static_cast<std::size_t>(tensor.size()));
      std::vector<double> wide(narrow.size());
      reader.read_f32(tensor, narrow.data());
      reader.read_f64(tensor, wide.data());
    }
    if (bytes > size) std::abort();
  } catch (const ouzel::Error&) {
  }
  return 0;
}
