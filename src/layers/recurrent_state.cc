#include "src/layers/recurrent_state.h"

namespace ouzel {

RecurrentState::RecurrentState(StateLayout& layout, const std::string& prefix, std::int64_t heads,
                               std::int64_t keys, std::int64_t values, bool residue,
                               bool normaliser)
    : heads_(heads), keys_(keys), values_(values) {
  s_ = layout.add(prefix + ".s", {heads, keys, values});
  if (residue) s_residue_ = layout.add(prefix + ".s_residue", {heads, keys, values});
  if (!normaliser) return;
  z_ = layout.add(prefix + ".z", {heads, keys});
  if (residue) z_residue_ = layout.add(prefix + ".z_residue", {heads, keys});
}

StateView RecurrentState::view(std::span<const SequenceMemory> sequences,
                               SequenceState* storage) const {
  if (sequences.empty()) return {};
  for (std::size_t n = 0; n < sequences.size(); ++n) {
    const SequenceMemory& memory = sequences[n];
    const auto part = [&](int number) { return number < 0 ? nullptr : memory.part(number); };
    storage[n] = {part(s_), part(s_residue_), part(z_), part(z_residue_), memory.position};
  }
  return {{storage, sequences.size()}, heads_, keys_, values_, keys_ * values_, values_, keys_};
}

}  // namespace ouzel
