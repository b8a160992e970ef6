// Files in the memory map of this process, such as a .pte with weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace executorch_mlx {

// Whole pages of memory that map a file and cannot be written.
class FilePages {
 public:
  FilePages(void* begin, size_t bytes) : begin_(begin), bytes_(bytes) {}

  // Releases the pages. They no longer count as memory of this process. A later read maps them again: the contents stay
  // the same. Returns the number of released bytes, which is 0 for locked pages.
  size_t release() const;

 private:
  void* begin_;
  size_t bytes_;
};

// The parts of the memory that map a file and cannot be written. Known on Linux only.
class MappedFiles {
 public:
  MappedFiles(); // reads the memory map

  // Whether an address is in a part of the memory that maps a file and cannot be written.
  bool contains(const void* address) const;

  // The pages in `bytes` bytes from `begin` on, or nullopt if there are none or they do not map a file.
  std::optional<FilePages> pages(const void* begin, size_t bytes) const;

  // Releases these pages. Returns the number of released bytes, which is 0 for other memory and for locked pages.
  size_t release(const void* begin, size_t bytes) const;

 private:
  struct Range {
    uintptr_t begin;
    uintptr_t end;
  };
  std::vector<Range> ranges_;
};

} // namespace executorch_mlx
