// Quantization of new entries of a KV cache.
#include <algorithm>
#include <cmath>
#include <vector>

#include "conversion.h"
#include "quantized_attention.h"
#include "rotation.h"

namespace executorch_mlx {

namespace {

// Copies a row of x to `row` in float32.
void read_row(const kernel::Heads& x, int64_t head, int64_t token, int64_t width, float* row) {
  const void* from = at(x.data, x.type, head * x.strides[1] + token * x.strides[2]);
  if (x.type != FloatType::float32) {
    return kernels().widen(static_cast<const uint16_t*>(from), x.type, x.strides[3], row, width);
  }
  const auto* floats = static_cast<const float*>(from);
  for (int64_t i = 0; i < width; ++i) {
    row[i] = floats[i * x.strides[3]];
  }
}

// Writes x to element `index` of the scales, and returns the value that is stored.
float store_scale(const kernel::Entries& to, int64_t index, float x) {
  if (to.scale_type == FloatType::float32) {
    return static_cast<float*>(to.scales)[index] = x;
  }
  auto* half = static_cast<uint16_t*>(to.scales) + index;
  kernels().narrow(&x, to.scale_type, half, 1);
  kernels().widen(half, to.scale_type, 1, &x, 1);
  return x;
}

// Quantizes one group to `bytes`. `index` is that of its scale.
void quantize_group(const float* x, const kernel::Entries& to, int64_t index, uint8_t* bytes) {
  const auto [low, high] = std::minmax_element(x, x + to.group_size);
  const auto levels = static_cast<float>((1 << to.bits) - 1);
  const float bias = store_scale(to, index + to.groups, *low);
  const float stored = store_scale(to, index, (*high - *low) / levels);
  const float scale = stored == 0 ? 1 : stored;
  const auto level = [&](int i) {
    const float q = std::nearbyint((x[i] - bias) / scale);
    return static_cast<uint8_t>(q > 0 ? std::min(q, levels) : 0); // 0 for NaN
  };
  for (int i = 0; to.bits == 8 && i < to.group_size; ++i) {
    bytes[i] = level(i);
  }
  for (int i = 0; to.bits == 4 && i < to.group_size; i += 2) {
    bytes[i / 2] = static_cast<uint8_t>(level(i) | level(i + 1) << 4);
  }
}

} // namespace

void kernel::quantize_entries(const QuantizeEntries& p) {
  const auto& to = p.to;
  const int64_t groups = (p.width + to.group_size - 1) / to.group_size;
  const int64_t group_bytes = to.group_size * to.bits / 8;
  parallel_ranges(p.heads * p.tokens, p.width * 4, [&](int64_t first, int64_t last) {
    static thread_local std::vector<float> row;
    row.assign(groups * to.group_size, 0);
    for (int64_t i = first; i < last; ++i) {
      const int64_t head = i / p.tokens;
      const int64_t token = i % p.tokens;
      std::fill(row.begin() + p.width, row.end(), 0.0f);
      read_row(p.x, head, token, p.width, row.data());
      if (to.rotate) {
        rotate_groups(row.data(), groups, to.group_size);
      }
      const int64_t scale = head * to.scale_strides[0] + token * to.scale_strides[1] + p.first_group;
      const int64_t entry = head * to.entry_strides[0] + token * to.entry_strides[1];
      uint8_t* bytes = to.entries + entry + p.first_group * group_bytes;
      for (int64_t g = 0; g < groups; ++g) {
        quantize_group(&row[g * to.group_size], to, scale + g, bytes + g * group_bytes);
      }
    }
  });
}

} // namespace executorch_mlx
