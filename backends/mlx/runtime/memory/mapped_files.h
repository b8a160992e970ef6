// Files in the memory map of this process, such as a .pte with weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace executorch_mlx {

// The parts of the memory that map a file and cannot be written. Known on Linux only.
class MappedFiles {
 public:
  MappedFiles();  // reads the memory map

  // Whether an address is in a part of the memory that maps a file and cannot be written.
  bool contains(const void* address) const;

  // Releases the pages in `bytes` bytes from `begin` on, if they map a file. They no longer count as memory of this
  // process. A later read maps them again: the contents stay the same. Returns the number of released bytes, which is 0
  // for other memory and for locked pages.
  size_t release(const void* begin, size_t bytes) const;

 private:
  struct Range {
    uintptr_t begin;
    uintptr_t end;
  };
  std::vector<Range> ranges_;
};

} // namespace executorch_mlx
