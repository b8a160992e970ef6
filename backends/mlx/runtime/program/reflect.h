// Visits the fields of an IR node through the schema's reflection tables. Code that treats all IR nodes alike, such as
// the checks of slots and the messages, is therefore written only once.
#pragma once

#include <flatbuffers/minireflect.h>

#include <algorithm>

#include "schema_generated.h"

namespace executorch_mlx {

namespace fb = mlx_delegate;

struct Field {
  const char* name;
  flatbuffers::ElementaryType base; // if repeated, the type of an element; ET_SEQUENCE for tables and structs
  bool repeated; // whether the field is a vector
  flatbuffers::TypeFunction type; // identifies the type of a table or struct; null for scalars and strings
  const uint8_t* value; // where the field is in the node's table; null if the field is absent

  bool is(flatbuffers::TypeFunction other) const { return type == other; }
  // The table or vector that `value` holds an offset to.
  const uint8_t* target() const { return value + flatbuffers::ReadScalar<flatbuffers::uoffset_t>(value); }
  // The field as a vector, a table or a struct. The caller must know which of them it is.
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

// Calls `visit` with each field that `type` has, including fields that are absent from `table`.
template <typename Visit>
void for_each_field(const flatbuffers::Table& table, const flatbuffers::TypeTable& type, Visit&& visit) {
  for (size_t i = 0; i < type.num_elems; ++i) {
    const auto& code = type.type_codes[i];
    const auto field_offset = flatbuffers::FieldIndexToOffset(static_cast<flatbuffers::voffset_t>(i));
    visit(Field{type.names[i], static_cast<flatbuffers::ElementaryType>(code.base_type), code.is_repeating != 0,
        code.sequence_ref >= 0 ? type.type_refs[code.sequence_ref] : nullptr, table.GetAddressOf(field_offset)});
  }
}

// The reflection table of an IR node.
inline const flatbuffers::TypeTable& type_of(fb::OpNode op) {
  const auto& ops = *fb::OpNodeTypeTable();
  // A tag is not an index of the list of types: the list has no gaps, but the tags of extensions start at 200.
  const auto index = std::lower_bound(ops.values, ops.values + ops.num_elems, static_cast<int64_t>(op)) - ops.values;
  return *ops.type_refs[ops.type_codes[index].sequence_ref]();
}

} // namespace executorch_mlx
