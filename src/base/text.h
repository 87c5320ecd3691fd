// Small helpers for messages and what they are about: text of a stranger made safe to print, the
// nearest of several names, lists and numbers.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace ouzel {

// `text` with control characters and bytes that are not UTF-8 as \xNN, cut after `limit` bytes:
// file content can neither steer a terminal nor fill it.
std::string printable(std::string_view text, std::size_t limit = 200);

// The same for each line of a sentence, cut after 4096 bytes: it may quote names and files.
std::string printable_lines(std::string_view sentence);

// Single insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
std::size_t edit_distance(std::string_view a, std::string_view b);

// The candidate that a misspelt `name` most likely meant; none if even the nearest differs in more
// than a third of its letters (at least two edits are allowed).
std::optional<std::string> nearest(std::string_view name, std::span<const std::string> candidates);

// "; did you mean 'NAME'?", or "" without a near candidate: for the end of a message.
std::string did_you_mean(std::string_view name, std::span<const std::string> candidates);

// "a, b, c".
std::string joined(std::span<const std::string> names, std::string_view separator = ", ");

// Visits what stands between the separators; nothing between two of them is left out.
template <class Visit>
void each_part(std::string_view text, char separator, Visit&& visit) {
  while (!text.empty()) {
    const std::size_t end = std::min(text.find(separator), text.size());
    if (end != 0) visit(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
}
std::vector<std::string> split(std::string_view text, char separator);

// The whole of `text` as a number, or none.
template <class T>
std::optional<T> parsed(std::string_view text) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace ouzel
