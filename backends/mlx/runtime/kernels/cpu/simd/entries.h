// Entries of a quantized KV cache. Part of kernels.cpp.
#pragma once

#include "quantized.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// Prefetches bytes [0, count) after `from`.
inline void prefetch_bytes(const char* from, ptrdiff_t count) {
  for (ptrdiff_t i = 0; i < count; i += 64) {
    prefetch(from + i);
  }
}

void dequantize_entries(const QuantizedEntries& e, int count, float* out, ptrdiff_t ldo) {
  float scale_buffer[kMaxGroups];
  float bias_buffer[kMaxGroups];
  call_with_bits(e.bits, [&](auto bits) {
    constexpr int Bits = decltype(bits)::value;
    const ptrdiff_t element = e.scale_type == FloatType::float32 ? 4 : 2;
    const ptrdiff_t ahead = rows_to_prefetch(e.entry_stride);
    for (int i = 0; i < count; ++i) {
      const ptrdiff_t first = i * e.scale_stride;
      if (e.prefetched_bytes > 0) {
        const ptrdiff_t later = (i + ahead) * e.scale_stride * element;
        prefetch_bytes(reinterpret_cast<const char*>(e.entries) + (i + ahead) * e.entry_stride, e.prefetched_bytes);
        prefetch_bytes(static_cast<const char*>(e.scales) + later, 2 * e.bias_offset * element);
      }
      const float* scales = as_float32(e.scales, e.scale_type, first, e.groups, scale_buffer);
      const float* biases = as_float32(e.scales, e.scale_type, first + e.bias_offset, e.groups, bias_buffer);
      const char* from = reinterpret_cast<const char*>(e.entries + i * e.entry_stride);
      float* to = out + i * ldo;
      for (int g = 0; g < e.groups; ++g) {
        const Group<Bits> group(scales[g], biases[g]);
        for (int j = 0; j < e.group_size; j += kLanes, to += kLanes, from += kLanes * Bits / 8) {
          store(natural_order<Bits>(group.values(from)), to);
        }
      }
    }
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
