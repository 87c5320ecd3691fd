#include "apps/ouzel/signature.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include <fmt/format.h>

#include "src/base/text.h"

namespace ouzel::app {

std::set<std::string> letters_of(const TensorInfo& tensor) {
  std::string shape = tensor.shape;
  std::replace(shape.begin(), shape.end(), '|', ' ');
  std::istringstream words(shape);
  return {std::istream_iterator<std::string>(words), std::istream_iterator<std::string>()};
}

std::string signature(const std::vector<TensorInfo>& tensors, bool gradients) {
  std::vector<std::string> parts;
  for (const TensorInfo& info : tensors) {
    std::string shape = info.shape;
    std::replace(shape.begin(), shape.end(), ' ', ',');
    std::string part = fmt::format("{} [{}]", info.name, shape);
    if (gradients && !info.gradient.empty()) part += fmt::format(" ({})", info.gradient);
    if (info.optional) part += " optional";
    if (!info.when.empty()) part += " if " + info.when;
    parts.push_back(part);
  }
  return joined(parts, "; ");
}

}  // namespace ouzel::app
