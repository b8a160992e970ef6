// Makes an allocation of the delegate fail. To be preloaded: it replaces operator new for all libraries of a process.
#include <dlfcn.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace {

thread_local long allocations_until_failure = -1; // -1: none fails

// Whether code of the delegate's library is at this address.
bool is_in_delegate(const void* address) {
  Dl_info info;
  return dladdr(address, &info) != 0 && info.dli_fname != nullptr && std::strstr(info.dli_fname, "libmlx_delegate");
}

} // namespace

// Lets allocation `index` fail, of those that the delegate makes on this thread from now on.
extern "C" void fail_allocation(long index) { allocations_until_failure = index; }

// Returns whether it has failed. No allocation fails any more.
extern "C" int has_failed() {
  const bool result = allocations_until_failure == -1;
  allocations_until_failure = -1;
  return result;
}

void* operator new(std::size_t size) {
  if (allocations_until_failure >= 0 && is_in_delegate(__builtin_return_address(0)) &&
      allocations_until_failure-- == 0) {
    throw std::bad_alloc();
  }
  if (void* const memory = std::malloc(size > 0 ? size : 1)) {
    return memory;
  }
  throw std::bad_alloc();
}

void operator delete(void* memory) noexcept { std::free(memory); }

void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
