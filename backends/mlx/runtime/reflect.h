// Walks the fields of a node by the schema's own description of it, so that what
// holds for every node (slot ids, messages) is written once.
#pragma once

#include <flatbuffers/minireflect.h>

#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

struct Field {
  const char* name;
  flatbuffers::ElementaryType base;
  bool repeated;
  flatbuffers::TypeFunction type;  // null for scalars and strings
  const uint8_t* value;            // where it lies in its table, null if absent

  bool is(flatbuffers::TypeFunction other) const {
    return type == other;
  }
  // A table or a vector is stored as an offset to it.
  const uint8_t* target() const {
    return value + flatbuffers::ReadScalar<flatbuffers::uoffset_t>(value);
  }
  template <typename T>
  const flatbuffers::Vector<T>& vector() const {
    return *reinterpret_cast<const flatbuffers::Vector<T>*>(target());
  }
  template <typename T>
  const T& table() const {
    return *reinterpret_cast<const T*>(target());
  }
  template <typename T>
  const T& structure() const {
    return *reinterpret_cast<const T*>(value);
  }
};

template <typename Visit>
void for_each_field(
    const flatbuffers::Table& table,
    const flatbuffers::TypeTable& type,
    Visit&& visit) {
  for (size_t i = 0; i < type.num_elems; ++i) {
    const auto& code = type.type_codes[i];
    const auto slot = flatbuffers::FieldIndexToOffset(static_cast<flatbuffers::voffset_t>(i));
    visit(Field{
        type.names[i],
        static_cast<flatbuffers::ElementaryType>(code.base_type),
        code.is_repeating != 0,
        code.sequence_ref >= 0 ? type.type_refs[code.sequence_ref] : nullptr,
        table.GetAddressOf(slot)});
  }
}

inline const flatbuffers::TypeTable& type_of(fb::OpNode op) {
  const auto& ops = *fb::OpNodeTypeTable();
  return *ops.type_refs[ops.type_codes[static_cast<size_t>(op)].sequence_ref]();
}

} // namespace executorch_mlx
