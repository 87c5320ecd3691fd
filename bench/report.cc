// What the figures look like to people and to programs.
#include <fmt/format.h>

#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "bench/case.h"

namespace ouzel::bench {

bool plausible(const Row& row) {
  if (row.error && !(*row.error <= row.bound)) return false;
  return row.dtype != "f32" || !row.efficiency || *row.efficiency <= 1;
}

std::string as_table(const std::vector<Row>& rows) {
  std::string text = fmt::format(
      "{:18} {:16} {:>2} {:>3} {:>3} {:>6} {:>5} {:>5} {:>10} {:>8} {:>8} {:>6} {:>7}  {}\n",
      "operator", "pass", "th", "B", "H", "T", "K", "V", "ms", "GFLOP/s", "peak", "eff.", "ratio",
      "variant");
  const auto figure = [](double value, int digits) {
    return value == 0 ? std::string() : fmt::format("{:.{}f}", value, digits);
  };
  const auto count = [](std::int64_t n) { return n == 0 ? std::string() : std::to_string(n); };
  for (const Row& r : rows) {
    std::string variant = r.variant;
    if (r.dtype != "f32") variant += ", " + r.dtype;
    if (r.bytes) variant += fmt::format(": {:.0f} bytes", *r.bytes);
    if (r.error) variant += fmt::format(": error {:.1e} of {:.0e}", *r.error, r.bound);
    if (r.bytes_token) variant += fmt::format(", {:.0f} bytes a token", *r.bytes_token);
    text += fmt::format(
        "{:18} {:16} {:>2} {:>3} {:>3} {:>6} {:>5} {:>5} {:>10} {:>8} {:>8} {:>6} {:>7}  {}\n",
        r.op, r.pass, r.threads, count(r.B), count(r.H), count(r.T), count(r.K), count(r.V),
        figure(r.ms, 3), figure(r.gflops, 1), figure(r.peak_gflops, 1),
        r.efficiency ? fmt::format("{:.3f}", *r.efficiency) : "",
        r.ratio ? fmt::format("{:.3f}", *r.ratio) : "", variant);
  }
  text += "\nWhat the clock includes (medians; peak: FMA peak measured between the repetitions):\n";
  std::set<std::string> told;
  for (const Row& r : rows) {
    const std::string line = fmt::format("  {:18} {:16} {}\n", r.op, r.pass, r.clock);
    if (told.insert(line).second) text += line;
  }
  return text;
}

std::string as_json(const std::vector<Row>& rows) {
  nlohmann::ordered_json list = nlohmann::ordered_json::array();
  for (const Row& r : rows) {
    nlohmann::ordered_json row{
        {"op", r.op}, {"pass", r.pass}, {"dtype", r.dtype}, {"threads", r.threads},
        {"B", r.B},   {"H", r.H},       {"T", r.T},         {"K", r.K},
        {"V", r.V}};
    if (r.ms != 0) row["ms"] = r.ms;
    if (r.efficiency) {
      row["gflops"] = r.gflops;
      row["peak_gflops"] = r.peak_gflops;
      row["efficiency"] = *r.efficiency;
    }
    if (r.ratio) row["ratio"] = *r.ratio;
    if (r.bytes) row["bytes"] = *r.bytes;
    if (r.error) {
      row["error"] = *r.error;
      row["bound"] = r.bound;
    }
    if (r.bytes_token) row["bytes_per_token"] = *r.bytes_token;
    row["variant"] = r.variant;
    row["clock"] = r.clock;
    list.push_back(std::move(row));
  }
  return nlohmann::ordered_json{{"rows", std::move(list)}}.dump(2) + "\n";
}

}  // namespace ouzel::bench
