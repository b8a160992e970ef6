#include "checks.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "mlx_internals/graph.h"
#include "mlx_internals/internals.h"

namespace executorch_mlx {

void check_size(const mx::Shape& shape, mx::Dtype dtype) {
  static const int64_t limit =
      std::min<int64_t>(int64_t{1} << 34, int64_t{sysconf(_SC_PHYS_PAGES)} * sysconf(_SC_PAGE_SIZE) / 2);
  int64_t elements = 1;
  if (shape.size() > kMaxRank) {
    fail(Error::OutOfResources, "result: got ", shape.size(), " axes, expected at most ", kMaxRank);
  }
  for (const int size : shape) {
    if (size == 0) {
      return;
    }
    if (size < 0 || __builtin_mul_overflow(elements, size, &elements) ||
        elements > std::numeric_limits<int32_t>::max()) {
      fail(Error::OutOfResources, "result of shape ", dims(shape), ": expected fewer than 2^31 elements");
    }
  }
  if (elements * int64_t(mx::size_of(dtype)) > limit) {
    fail(Error::OutOfResources, "result ", name(dtype), dims(shape), ": got ", elements * int64_t(mx::size_of(dtype)),
        " bytes, expected at most ", limit);
  }
}

std::vector<int> checked_axes(const flatbuffers::Vector<int32_t>* axes, int rank) {
  if (axes == nullptr || axes->size() == 0) {
    std::vector<int> all(rank);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
  std::vector<int> result;
  for (const int32_t axis : *axes) {
    result.push_back(checked_axis(axis, rank));
    check_program(std::count(result.begin(), result.end(), result.back()) == 1, "axis ", axis, " is listed twice");
  }
  return result;
}

bool is_lazy(const mx::array& x, std::string_view name) {
  return internals::are_usable() && internals::is_lazy(x, name);
}

} // namespace executorch_mlx
