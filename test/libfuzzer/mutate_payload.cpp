#include "mutate_payload.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <random>
#include <vector>

#include "error.h"
#include "program/payload.h"

namespace fuzz {

namespace {

namespace fb = mlx_delegate;
namespace flat = flatbuffers;

constexpr int64_t kIntegers[] = {0, 1, -1, 2, 3, -2, 4, 7, 8, 16, 32, 64, 127, 128, 255, 256, 1 << 16, 1 << 20,
    std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(), std::numeric_limits<int64_t>::max(),
    std::numeric_limits<int64_t>::min()};
constexpr double kReals[] = {0, -1, 1, 0.5, -0.0, 1e-30, 1e30, 1e300, std::numeric_limits<double>::infinity(),
    std::numeric_limits<double>::quiet_NaN()};

// A place in the payload that a mutation can change.
struct Site {
  uint8_t* at;
  flat::ElementaryType type; // ET_SEQUENCE stands for an entry of a vector of tables. `at` is then the vector.
};

// Collects the sites of a table and of all tables that it refers to.
class Walker {
 public:
  std::vector<Site> sites;

  void visit_table(const uint8_t* at, const flat::TypeTable& type) {
    const auto& table = *reinterpret_cast<const flat::Table*>(at);
    uint8_t tag = 0;
    for (size_t i = 0; i < type.num_elems; ++i) {
      const auto& code = type.type_codes[i];
      const uint8_t* value = table.GetAddressOf(flat::FieldIndexToOffset(static_cast<flat::voffset_t>(i)));
      if (value == nullptr) {
        continue;
      }
      if (code.base_type == flat::ET_UTYPE) {
        tag = *value;
      }
      visit_field(value, code, type, tag);
    }
  }

 private:
  // `tag` is the member of the union if the field is one.
  void visit_field(const uint8_t* value, const flat::TypeCode& code, const flat::TypeTable& type, uint8_t tag) {
    const auto base = static_cast<flat::ElementaryType>(code.base_type);
    const auto* nested = base == flat::ET_SEQUENCE ? type.type_refs[code.sequence_ref]() : nullptr;
    if (code.is_repeating) {
      return visit_list(value + flat::ReadScalar<flat::uoffset_t>(value), base, nested);
    }
    if (nested == nullptr) {
      return add_scalar(value, base);
    }
    if (nested->st == flat::ST_STRUCT) {
      return add_scalar(value, flat::ET_UINT); // Tid and Vid hold one index each
    }
    const uint8_t* target = value + flat::ReadScalar<flat::uoffset_t>(value);
    if (nested->st == flat::ST_TABLE) {
      return visit_table(target, *nested);
    }
    const auto* member = std::lower_bound(nested->values, nested->values + nested->num_elems, int64_t{tag});
    if (tag != 0 && member != nested->values + nested->num_elems && *member == tag) {
      visit_table(target, *nested->type_refs[nested->type_codes[member - nested->values].sequence_ref]());
    }
  }

  void visit_list(const uint8_t* at, flat::ElementaryType base, const flat::TypeTable* nested) {
    const auto size = flat::ReadScalar<flat::uoffset_t>(at);
    const uint8_t* first = at + sizeof(flat::uoffset_t);
    if (nested != nullptr && nested->st == flat::ST_TABLE) {
      sites.push_back({const_cast<uint8_t*>(at), flat::ET_SEQUENCE});
    }
    for (flat::uoffset_t i = 0; i < size; ++i) {
      if (nested == nullptr) {
        add_scalar(first + i * flat::InlineSize(base, nullptr), base);
      } else if (nested->st == flat::ST_STRUCT) {
        add_scalar(first + i * sizeof(uint32_t), flat::ET_UINT);
      } else {
        const uint8_t* entry = first + i * sizeof(flat::uoffset_t);
        visit_table(entry + flat::ReadScalar<flat::uoffset_t>(entry), *nested);
      }
    }
  }

  void add_scalar(const uint8_t* at, flat::ElementaryType base) {
    if (base == flat::ET_STRING) {
      const uint8_t* text = at + flat::ReadScalar<flat::uoffset_t>(at);
      if (flat::ReadScalar<flat::uoffset_t>(text) == 0) {
        return;
      }
      at = text + sizeof(flat::uoffset_t);
      base = flat::ET_CHAR;
    }
    sites.push_back({const_cast<uint8_t*>(at), base});
  }
};

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  size_t below(size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(random_); }

  template <typename List>
  auto pick(const List& list) {
    return list[below(std::size(list))];
  }

  void mutate(const Site& site) {
    switch (site.type) {
      case flat::ET_SEQUENCE:
        return relink(site.at);
      case flat::ET_UTYPE:
        return change_op(site.at);
      case flat::ET_BOOL:
        *site.at ^= 1;
        return;
      case flat::ET_CHAR:
      case flat::ET_UCHAR:
        return write<uint8_t>(site.at);
      case flat::ET_INT:
        return write<int32_t>(site.at);
      case flat::ET_UINT:
        return write_slot(site.at);
      case flat::ET_LONG:
      case flat::ET_ULONG:
        return write<int64_t>(site.at);
      case flat::ET_FLOAT:
        return flat::WriteScalar(site.at, static_cast<float>(pick(kReals)));
      case flat::ET_DOUBLE:
        return flat::WriteScalar(site.at, pick(kReals));
      default:
        return;
    }
  }

 private:
  template <typename T>
  void write(uint8_t* at) {
    const auto old = static_cast<uint64_t>(flat::ReadScalar<T>(at));
    const auto near = static_cast<T>(below(2) == 0 ? old + 1 : old - 1);
    flat::WriteScalar<T>(at, below(3) == 0 ? near : static_cast<T>(pick(kIntegers)));
  }

  // Mostly writes a small number, which many programs of the corpus have as a slot.
  void write_slot(uint8_t* at) {
    flat::WriteScalar<uint32_t>(at, below(16) == 0 ? static_cast<uint32_t>(pick(kIntegers)) : below(24));
  }

  // Makes an entry of a vector of tables refer to the table of another entry, such as another instruction.
  void relink(uint8_t* vector) {
    const auto size = flat::ReadScalar<flat::uoffset_t>(vector);
    if (size < 2) {
      return;
    }
    uint8_t* entries = vector + sizeof(flat::uoffset_t);
    uint8_t* to = entries + below(size) * sizeof(flat::uoffset_t);
    const uint8_t* from = entries + below(size) * sizeof(flat::uoffset_t);
    const uint8_t* target = from + flat::ReadScalar<flat::uoffset_t>(from);
    if (target > to) {
      flat::WriteScalar(to, static_cast<flat::uoffset_t>(target - to));
    }
  }

  // Changes an instruction to another node with the same fields.
  void change_op(uint8_t* at) {
    const auto& ops = *fb::OpNodeTypeTable();
    const auto* end = ops.values + ops.num_elems;
    const auto table_of = [&](const int64_t* op) { return ops.type_codes[op - ops.values].sequence_ref; };
    const auto* old = std::lower_bound(ops.values, end, int64_t{*at});
    if (old == end || *old != *at) {
      return;
    }
    std::vector<uint8_t> others;
    for (const auto* op = ops.values; op != end; ++op) {
      if (*op != 0 && table_of(op) == table_of(old)) {
        others.push_back(static_cast<uint8_t>(*op));
      }
    }
    if (!others.empty()) {
      *at = pick(others);
    }
  }

  std::mt19937 random_;
};

} // namespace

bool mutate_fields(uint8_t* data, size_t size, unsigned seed) {
  Mutator mutator(seed);
  const size_t count = size_t{1} << mutator.below(3);
  size_t done = 0;
  try {
    for (; done < count; ++done) {
      // Verified each time: a field may overlap with another table.
      const auto* graph = executorch_mlx::open_payload(data, size);
      Walker walker;
      walker.visit_table(reinterpret_cast<const uint8_t*>(graph), *fb::MLXGraphTypeTable());
      if (walker.sites.empty()) {
        break;
      }
      mutator.mutate(walker.sites[mutator.below(walker.sites.size())]);
    }
  } catch (const executorch_mlx::Failure&) {
  }
  return done > 0;
}

} // namespace fuzz
