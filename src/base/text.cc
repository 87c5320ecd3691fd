#include "src/base/text.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include <fmt/format.h>

namespace ouzel {
namespace {

// Bytes of the UTF-8 character that `text` begins with, 0 if it begins with none (overlong forms,
// surrogates and values beyond U+10FFFF included).
std::size_t utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<std::uint8_t>(text[i]); };
  const auto tail = [&](std::size_t i) { return i < text.size() && (byte(i) & 0xc0) == 0x80; };
  const std::uint8_t first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return tail(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    if (!tail(1) || !tail(2)) return 0;
    if (first == 0xe0 && byte(1) < 0xa0) return 0;
    if (first == 0xed && byte(1) >= 0xa0) return 0;
    return 3;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    if (!tail(1) || !tail(2) || !tail(3)) return 0;
    if (first == 0xf0 && byte(1) < 0x90) return 0;
    if (first == 0xf4 && byte(1) >= 0x90) return 0;
    return 4;
  }
  return 0;
}

// C0, DEL and (as U+0080..U+009F) C1: what terminals act on.
bool is_control(std::string_view character) {
  const auto first = static_cast<std::uint8_t>(character[0]);
  if (character.size() == 1) return first < 0x20 || first == 0x7f;
  return first == 0xc2 && static_cast<std::uint8_t>(character[1]) < 0xa0;
}

}  // namespace

std::string printable(std::string_view text, std::size_t limit) {
  std::string out;
  while (!text.empty()) {
    if (out.size() >= limit) return out + "...";
    const std::size_t length = utf8_length(text);
    const std::string_view character = text.substr(0, std::max<std::size_t>(length, 1));
    if (length == 0 || is_control(character)) {
      for (char c : character) out += fmt::format("\\x{:02x}", static_cast<std::uint8_t>(c));
    } else {
      out += character;
    }
    text.remove_prefix(character.size());
  }
  return out;
}

std::string printable_lines(std::string_view sentence) {
  constexpr std::size_t kLongestLine = 4096;
  std::string text;
  while (true) {
    const std::size_t end = sentence.find('\n');
    text += printable(sentence.substr(0, end), kLongestLine);
    if (end == std::string_view::npos) return text;
    text += '\n';
    sentence.remove_prefix(end + 1);
  }
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  // Three rows of the table: before the last, last, current (optimal string alignment).
  std::vector<std::size_t> older(b.size() + 1), last(b.size() + 1), now(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    now[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      now[j] = std::min({replace, last[j] + 1, now[j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        now[j] = std::min(now[j], older[j - 2] + 1);
      }
    }
    std::swap(older, last);
    std::swap(last, now);
  }
  return last[b.size()];
}

std::optional<std::string> nearest(std::string_view name, std::span<const std::string> candidates) {
  // A name longer than this is no misspelling, and the table is quadratic.
  constexpr std::size_t kLongest = 64;
  if (name.size() > kLongest) return std::nullopt;
  std::optional<std::string> best;
  std::size_t best_edits = 0;
  for (const std::string& candidate : candidates) {
    if (candidate.size() > kLongest) continue;
    const std::size_t edits = edit_distance(name, candidate);
    const std::size_t allowed = std::max<std::size_t>(2, candidate.size() / 3);
    if (edits > allowed || edits >= std::max(name.size(), candidate.size())) continue;
    if (!best || edits < best_edits) {
      best = candidate;
      best_edits = edits;
    }
  }
  return best;
}

std::string did_you_mean(std::string_view name, std::span<const std::string> candidates) {
  const std::optional<std::string> found = nearest(name, candidates);
  return found ? fmt::format("; did you mean '{}'?", *found) : "";
}

std::string joined(std::span<const std::string> names, std::string_view separator) {
  return fmt::format("{}", fmt::join(names, separator));
}

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> parts;
  each_part(text, separator, [&](std::string_view part) { parts.emplace_back(part); });
  return parts;
}

}  // namespace ouzel
