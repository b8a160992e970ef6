// Finds the first stop string in the text of an answer.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace executorch_mlx::engine {

// Passes text through until one of the stop strings occurs. Text that may be the beginning of a stop string is held
// back until the next call decides.
class StopStringFilter {
 public:
  // `stop_strings` must not contain an empty string, and must outlive the filter.
  explicit StopStringFilter(const std::vector<std::string>& stop_strings) : stop_strings_(stop_strings) {}

  // Takes the next piece of text. Appends to `out` the text that is certainly before any stop string. Returns the stop
  // string that occurs first, or null if there is none. Text from this stop string on is dropped.
  const std::string* feed(std::string_view text, std::string& out);

  // Ends the text. Returns what is still held back.
  std::string finish();

 private:
  const std::vector<std::string>& stop_strings_;
  std::string held_;
};

} // namespace executorch_mlx::engine
