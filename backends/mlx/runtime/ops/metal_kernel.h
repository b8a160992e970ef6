// Runs Metal source that a program contains. Every build compiles this file, but only a build with
// EXECUTORCH_MLX_METAL_KERNELS calls metal_kernel().
#pragma once

#include <tuple>

#include "ops/op.h"

namespace executorch_mlx {

// Reads a list of `count` names.
inline std::vector<std::string> names_of(
    const char* argument, const flatbuffers::Vector<flatbuffers::Offset<flatbuffers::String>>* names, size_t count) {
  check_program(names != nullptr && names->size() == count, argument, ": got ", names == nullptr ? 0 : names->size(),
      " names, expected ", count);
  std::vector<std::string> result;
  for (const auto* name : *names) {
    result.push_back(name->str());
  }
  return result;
}

// Reads the size of a grid or threadgroup on three axes. A program gives one to three sizes; the missing sizes are 1.
inline std::tuple<int, int, int> extent(
    const char* argument, const flatbuffers::Vector<flatbuffers::Offset<fb::IntOrVid>>& sizes, const Context& c) {
  const auto shape = c.sizes(argument, sizes, /*lowest=*/1);
  check_program(shape.size() >= 1 && shape.size() <= 3, argument, ": got ", shape.size(), " sizes, expected 1 to 3");
  const auto at = [&](size_t i) { return i < shape.size() ? shape[i] : 1; };
  return {at(0), at(1), at(2)};
}

// A program stores the sizes of all output shapes in one flat list, and the rank of each shape in another list.
inline std::vector<mx::Shape> output_shapes(const fb::MetalKernelParams& n, const Context& c) {
  const size_t count = n.outputs()->size();
  const auto* flat = n.output_shapes_flat();
  const auto* ranks = n.output_shape_lengths();
  check_program(flat != nullptr && ranks != nullptr && ranks->size() == count,
      "output_shape_lengths: expected the shapes of ", count, " outputs");
  const auto sizes = c.sizes("output_shapes_flat", *flat);
  std::vector<mx::Shape> shapes;
  size_t begin = 0;
  for (const int rank : *ranks) {
    check_program(rank >= 0 && rank <= static_cast<int>(sizes.size() - begin), "output_shape_lengths: got rank ", rank,
        ", expected at most ", sizes.size() - begin);
    shapes.emplace_back(sizes.begin() + begin, sizes.begin() + begin + rank);
    begin += rank;
  }
  check_program(begin == sizes.size(), "output_shapes_flat: got ", sizes.size(), " sizes, expected ", begin);
  return shapes;
}

inline std::vector<std::pair<std::string, mx::fast::TemplateArg>> template_args(const fb::MetalKernelParams& n) {
  enum { kInt, kBool, kDtype }; // the kinds, as programs number them
  const auto* kinds = n.template_arg_kinds();
  const auto* values = n.template_arg_values();
  const size_t count = n.template_arg_names() == nullptr ? 0 : n.template_arg_names()->size();
  const auto has_all = [&](const auto* list) { return (list == nullptr ? 0 : list->size()) == count; };
  check_program(has_all(kinds) && has_all(values), "template arguments: expected as many names as kinds and values");
  std::vector<std::pair<std::string, mx::fast::TemplateArg>> result;
  for (uint32_t i = 0; i < count; ++i) {
    const int kind = kinds->Get(i);
    const int value = values->Get(i);
    check_program(kind >= kInt && kind <= kDtype, "template argument ", i, ": got kind ", kind, ", expected 0, 1 or 2");
    mx::fast::TemplateArg arg = value;
    if (kind == kBool) {
      arg = value != 0;
    } else if (kind == kDtype) {
      arg = dtype_of(static_cast<int8_t>(value));
    }
    result.emplace_back(n.template_arg_names()->Get(i)->str(), arg);
  }
  return result;
}

inline void metal_kernel(const fb::MetalKernelParams& n, Context& c) {
  const auto inputs = c.list(*n.inputs());
  const size_t outputs = n.outputs()->size();
  const auto shapes = output_shapes(n, c);
  check_program(n.output_dtypes() != nullptr && n.output_dtypes()->size() == outputs,
      "output_dtypes: expected the dtypes of ", outputs, " outputs");
  std::vector<mx::Dtype> dtypes;
  for (uint32_t i = 0; i < outputs; ++i) {
    dtypes.push_back(dtype_of(n.output_dtypes()->Get(i)));
    check_size(shapes[i], dtypes[i]);
  }
  const auto kernel = mx::fast::metal_kernel(n.name()->str(), names_of("input_names", n.input_names(), inputs.size()),
      names_of("output_names", n.output_names(), outputs), n.source()->str(),
      n.header() == nullptr ? "" : n.header()->str(), n.ensure_row_contiguous(), n.atomic_outputs());
  const auto init = n.init_value() ? std::optional<float>(*n.init_value()) : std::nullopt;
  const auto results = kernel(inputs, shapes, dtypes, extent("grid", *n.grid(), c),
      extent("threadgroup", *n.threadgroup(), c), template_args(n), init, /*verbose=*/false, c.stream);
  for (uint32_t i = 0; i < outputs; ++i) {
    c.set(n.outputs()->Get(i), results[i]);
  }
}

inline void no_metal_kernel(const fb::MetalKernelParams&, Context&) {
  fail(Error::NotSupported, "Metal source needs a build with EXECUTORCH_MLX_METAL_KERNELS");
}

} // namespace executorch_mlx
