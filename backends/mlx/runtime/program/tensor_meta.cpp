#include "program/tensor_meta.h"

#include <algorithm>

#include "checks.h"
#include "dtype.h"

namespace executorch_mlx {

namespace {

bool is_permutation(const flatbuffers::Vector<uint8_t>& order) {
  uint32_t seen = 0;
  for (const uint8_t axis : order) {
    if (axis >= order.size() || (seen >> axis & 1) != 0) {
      return false;
    }
    seen |= 1u << axis;
  }
  return true;
}

void check_dim(uint32_t tensor, uint32_t axis, const fb::ShapeDim& dim, bool is_static) {
  check_program(is_static ? dim.value() >= 0 : dim.value() >= -1, "tensor_meta ", tensor, ": dimension ", axis,
      ": got size ", dim.value(), ", expected at least ", is_static ? 0 : -1);
  check_program(dim.min_value() >= 0 && (dim.max_value() == -1 || dim.max_value() >= dim.min_value()), "tensor_meta ",
      tensor, ": dimension ", axis, ": got bounds [", dim.min_value(), ", ", dim.max_value(), "]");
}

} // namespace

void check_tensor_meta(const fb::MLXGraph& graph, const Layout& layout) {
  const auto* all = graph.tensor_meta();
  const uint32_t size = all == nullptr ? 0 : all->size();
  check_program(size >= layout.temps_begin(), "tensor_meta: got ", size, " entries, expected ", layout.temps_begin());
  for (uint32_t i = 0; i < layout.temps_begin(); ++i) {
    const auto& meta = *all->Get(i);
    const auto& shape = *meta.shape();
    check_program(shape.size() <= kMaxRank, "tensor_meta ", i, ": got ", shape.size(), " dimensions, expected at most ",
        kMaxRank);
    const bool is_static = i < layout.constants || i >= layout.buffers_begin();
    for (uint32_t axis = 0; axis < shape.size(); ++axis) {
      check_dim(i, axis, *shape.Get(axis), is_static);
    }
    if (const auto* order = meta.dim_order()) {
      check_program(order->size() == 0 || (order->size() == shape.size() && is_permutation(*order)), "tensor_meta ", i,
          ": dim_order: expected a permutation of ", shape.size(), " axes");
    }
  }
}

mx::Shape static_shape(const fb::TensorMeta& meta) {
  mx::Shape shape;
  for (const auto* dim : *meta.shape()) {
    shape.push_back(dim->value());
  }
  return shape;
}

std::vector<int> memory_order(const fb::TensorMeta& meta) {
  std::vector<int> order;
  const auto* dim_order = meta.dim_order();
  for (uint32_t i = 0; i < meta.shape()->size(); ++i) {
    order.push_back(dim_order != nullptr && dim_order->size() != 0 ? dim_order->Get(i) : int(i));
  }
  return order;
}

bool is_row_major(const std::vector<int>& order) { return std::is_sorted(order.begin(), order.end()); }

std::string describe(const fb::TensorMeta& meta) {
  std::string text = name(static_cast<ScalarType>(meta.scalar_type())) + "[";
  for (uint32_t i = 0; i < meta.shape()->size(); ++i) {
    const auto& dim = *meta.shape()->Get(i);
    text += i == 0 ? "" : ",";
    text += dim.value() >= 0   ? std::to_string(dim.value())
        : dim.max_value() >= 0 ? str(dim.min_value(), "..", dim.max_value())
                               : str(dim.min_value(), "..");
  }
  return text + "]";
}

} // namespace executorch_mlx
