// The state of a recurrent mixer: S [heads, keys, values] with the residue that long sums need, and
// the normaliser z [heads, keys] likewise, as parts of a sequence's memory.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "ouzel/recurrence.h"
#include "src/layers/state.h"

namespace ouzel {

class RecurrentState {
 public:
  RecurrentState(StateLayout& layout, const std::string& prefix, std::int64_t heads,
                 std::int64_t keys, std::int64_t values, bool residue, bool normaliser);

  // Fills one entry of `storage` per sequence; no sequences: an absent view.
  StateView view(std::span<const SequenceMemory> sequences, SequenceState* storage) const;

 private:
  std::int64_t heads_, keys_, values_;
  int s_ = -1, s_residue_ = -1, z_ = -1, z_residue_ = -1;
};

}  // namespace ouzel
