#include "mlx_internals/graph.h"

#include <mlx/primitives.h>

#include <utility>

namespace executorch_mlx::internals {

bool is_lazy(const mx::array& x, std::string_view name) {
  return x.status() == mx::array::Status::unscheduled && x.has_primitive() && x.primitive().name() == name;
}

std::string_view primitive_name(const mx::array& x) { return x.primitive().name(); }

const std::vector<mx::array>& inputs(const mx::array& x) { return x.inputs(); }

mx::Device device(const mx::array& x) { return x.primitive().stream().device; }

const std::vector<mx::array>& siblings(const mx::array& x) { return x.siblings(); }

void set_inputs(mx::array x, std::vector<mx::array> inputs) { x.inputs() = std::move(inputs); }

std::vector<int> axes_of_transposition(const mx::array& x) {
  return static_cast<const mx::Transpose&>(x.primitive()).state();
}

std::optional<Range> range_of(const mx::array& x) {
  const bool is_range = is_lazy(x, "Arange") && x.ndim() == 1 && (x.dtype() == mx::int32 || x.dtype() == mx::int64);
  if (!is_range) {
    return std::nullopt;
  }
  const auto [start, stop, step] = static_cast<const mx::Arange&>(x.primitive()).state();
  return Range{static_cast<int64_t>(start), static_cast<int64_t>(step)};
}

} // namespace executorch_mlx::internals
