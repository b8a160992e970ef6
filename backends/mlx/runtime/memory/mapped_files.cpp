#include "memory/mapped_files.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

namespace executorch_mlx {

MappedFiles::MappedFiles() {
#if defined(__linux__)
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    Range range{};
    char permissions[5] = {};
    uint64_t inode = 0; // 0: no file
    const int fields = std::sscanf(
        line.c_str(), "%" SCNxPTR "-%" SCNxPTR " %4s %*s %*s %" SCNu64, &range.begin, &range.end, permissions, &inode);
    if (fields == 4 && inode != 0 && permissions[0] == 'r' && permissions[1] == '-') {
      ranges_.push_back(range);
    }
  }
#endif
}

bool MappedFiles::contains(const void* address) const {
  const auto at = reinterpret_cast<uintptr_t>(address);
  // The memory map, and so the list, is in ascending order.
  const auto next = std::upper_bound(
      ranges_.begin(), ranges_.end(), at, [](uintptr_t x, const Range& range) { return x < range.begin; });
  return next != ranges_.begin() && at < std::prev(next)->end;
}

std::optional<FilePages> MappedFiles::pages([[maybe_unused]] const void* begin, [[maybe_unused]] size_t bytes) const {
#if defined(__linux__)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
  const auto last = (reinterpret_cast<uintptr_t>(begin) + bytes) / page * page;
  for (const auto& range : ranges_) {
    if (first < last && range.begin <= first && last <= range.end) {
      return FilePages(reinterpret_cast<void*>(first), last - first);
    }
  }
#endif
  return std::nullopt;
}

size_t MappedFiles::release(const void* begin, size_t bytes) const {
  const auto found = pages(begin, bytes);
  return found ? found->release() : 0;
}

size_t FilePages::release() const {
#if defined(__linux__)
  return madvise(begin_, bytes_, MADV_DONTNEED) == 0 ? bytes_ : 0;
#else
  return 0;
#endif
}

} // namespace executorch_mlx
