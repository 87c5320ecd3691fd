// What the mixers of a network keep of the past, as parts of one block of floats per sequence:
// fixed parts first, then those that grow by a row with every token (keys and values of softmax
// attention without a window), for which `capacity` rows are reserved.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace ouzel {

struct StatePart {
  std::string name;                 // "layers.0.attn.s"
  std::vector<std::int64_t> shape;  // of the part, or of one row if it grows
  bool grows = false;
  std::int64_t size = 0;  // floats of `shape`
  std::int64_t offset =
      0;  // among the fixed parts; of a growing part: floats per row of those before
};

class StateLayout {
 public:
  // Returns the part's number.
  int add(std::string name, std::vector<std::int64_t> shape, bool grows = false) {
    StatePart part{std::move(name), std::move(shape), grows, 1, 0};
    for (std::int64_t extent : part.shape) part.size *= extent;
    std::int64_t& total = grows ? row_size_ : fixed_size_;
    part.offset = total;
    total += part.size;
    parts_.push_back(std::move(part));
    return static_cast<int>(parts_.size()) - 1;
  }

  const std::vector<StatePart>& parts() const { return parts_; }
  bool grows() const { return row_size_ != 0; }
  std::int64_t size(std::int64_t capacity) const { return fixed_size_ + row_size_ * capacity; }
  bool fits(std::int64_t capacity) const {
    return row_size_ == 0 ||
           capacity <= (INT64_MAX / std::int64_t{sizeof(float)} - fixed_size_) / row_size_;
  }
  // Where a part begins in a block of that capacity.
  std::int64_t begin(int part, std::int64_t capacity) const {
    const StatePart& p = parts_[static_cast<std::size_t>(part)];
    return p.grows ? fixed_size_ + p.offset * capacity : p.offset;
  }

  std::string fingerprint;  // of the model and of the format of states

 private:
  std::int64_t fixed_size_ = 0, row_size_ = 0;
  std::vector<StatePart> parts_;
};

// The block of one sequence.
struct SequenceMemory {
  const StateLayout* layout = nullptr;
  float* base = nullptr;
  std::int64_t capacity = 0;
  std::int64_t position = 0;  // tokens seen

  float* part(int number) const { return base + layout->begin(number, capacity); }
};

}  // namespace ouzel
