#include "stop_strings.h"

#include <algorithm>
#include <utility>

namespace executorch_mlx::engine {

namespace {

// The length of the longest proper prefix of `stop` that `text` ends with.
size_t overlap(std::string_view text, std::string_view stop) {
  for (size_t n = std::min(text.size(), stop.size() - 1); n > 0; --n) {
    if (text.ends_with(stop.substr(0, n))) {
      return n;
    }
  }
  return 0;
}

} // namespace

const std::string* StopStringFilter::feed(std::string_view text, std::string& out) {
  held_ += text;
  const std::string* found = nullptr;
  size_t found_at = std::string::npos;
  size_t keep = 0;
  for (const std::string& stop : stop_strings_) {
    if (const size_t at = held_.find(stop); at < found_at) {
      found = &stop;
      found_at = at;
    }
    keep = std::max(keep, overlap(held_, stop));
  }
  if (found != nullptr) {
    out += held_.substr(0, found_at);
    held_.clear();
    return found;
  }
  out += held_.substr(0, held_.size() - keep);
  held_.erase(0, held_.size() - keep);
  return nullptr;
}

std::string StopStringFilter::finish() { return std::exchange(held_, {}); }

} // namespace executorch_mlx::engine
