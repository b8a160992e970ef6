// Text up to the first stop string.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace executorch_mlx {

// Passes text through until one of the stop strings occurs. Text that may be the beginning of a stop string is held
// back until the next call decides.
class StopStringFilter {
 public:
  // `stop_strings` must not contain an empty string, and must outlive the filter.
  explicit StopStringFilter(const std::vector<std::string>& stop_strings) : stop_strings_(stop_strings) {}

  // Appends to `out` the text that precedes any stop string. Returns the stop string that occurred first, or null.
  const std::string* feed(std::string_view text, std::string& out);

  // Returns the text held back, at the end of the input.
  std::string finish();

 private:
  const std::vector<std::string>& stop_strings_;
  std::string held_;
};

} // namespace executorch_mlx
