// Attention over a quantized KV cache, computed for a tile of rows at a time: see attention_tile.h. The keys are
// divided into parts of a fixed size from key 0 on, and the results of the parts are combined in order. Whether the
// parts of a tile are computed side by side or one after the other therefore changes no bit, and neither does the
// number of queries: a part whose keys a query does not see leaves its result as it is.
#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_tile.h"
#include "products.h"
#include "quantized_attention.h"
#include "rotation.h"

namespace executorch_mlx {

namespace {

using Attention = kernel::QuantizedAttention;
using Tile = AttentionTile;

constexpr int64_t kPartKeys = 256;
constexpr int64_t kTileRows = 64;

// The number of keys that are dequantized at a time, so that they stay in the cache of a core: in the first-level cache
// if few rows read them.
constexpr int64_t block_keys(int64_t rows) { return rows <= 16 ? 32 : 64; }

int64_t groups_of(int64_t width, int group_size) { return (width + group_size - 1) / group_size; }

// The sizes of an attention, with keys and values in whole groups.
struct Sizes {
  explicit Sizes(const Attention& a)
      : group(a.heads / a.kv_heads),
        rows(group * a.queries),
        tiles((rows + kTileRows - 1) / kTileRows),
        parts((a.keys + kPartKeys - 1) / kPartKeys),
        width(groups_of(a.width, a.cache.group_size) * a.cache.group_size),
        values(groups_of(a.value_size, a.cache.group_size) * a.cache.group_size) {}

  int64_t group; // query heads that share a key head
  int64_t rows; // queries of these heads
  int64_t tiles; // of rows
  int64_t parts; // of keys
  int64_t width; // of a padded key
  int64_t values; // of a padded value
};

Tile tile_of(const Sizes& s, int64_t index) {
  const int64_t first = index % s.tiles * kTileRows;
  return {.batch = 0,
      .kv_head = index / s.tiles,
      .first = first,
      .count = std::min(kTileRows, s.rows - first),
      .group = s.group};
}

// Unnormalized results of rows: y is the sum of the values with weights exp(score - maximum), whose sum is `sum`.
struct Results {
  std::vector<float> y, maximum, sum;

  void resize(int64_t rows, int64_t values) {
    y.assign(rows * values, 0);
    maximum.assign(rows, -__builtin_inff());
    sum.assign(rows, 0);
  }
};

// Copies the queries of a tile to `q` [count, width], rotated like the keys.
void read_queries(const Attention& a, const Sizes& s, const Tile& tile, std::vector<float>& q) {
  q.assign(tile.count * s.width, 0);
  for (int64_t i = 0; i < tile.count; ++i) {
    const void* from = at(a.q.data, a.q.type, tile.head(i) * a.q.strides[1] + tile.query(i) * a.q.strides[2]);
    float* row = &q[i * s.width];
    read_as_float32(from, a.q.type, a.q.strides[3], a.width, row);
    if (a.cache.rotate) {
      rotate_groups(row, s.width / a.cache.group_size, a.cache.group_size);
    }
  }
}

// Dequantizes the groups [first_group, first_group + groups) of `count` entries from `key` on. If `prefetches`,
// prefetches whole entries that follow, so that the second pass over the entries of a part finds the values in the
// cache.
void dequantize(const kernel::Entries& cache, int64_t head, int64_t key, int64_t count, int64_t first_group,
    int64_t groups, bool prefetches, float* out) {
  const int64_t scale = head * cache.scale_strides[0] + key * cache.scale_strides[1] + first_group;
  const QuantizedEntries entries{.entries = cache.entries + head * cache.entry_strides[0] +
          key * cache.entry_strides[1] + first_group * cache.group_size * cache.bits / 8,
      .entry_stride = cache.entry_strides[1],
      .scales = at(cache.scales, cache.scale_type, scale),
      .scale_type = cache.scale_type,
      .scale_stride = cache.scale_strides[1],
      .bias_offset = cache.groups,
      .bits = cache.bits,
      .group_size = cache.group_size,
      .groups = static_cast<int>(groups),
      .prefetched_bytes = prefetches ? static_cast<int>(cache.groups * cache.group_size * cache.bits / 8) : 0};
  kernels().dequantize_entries(entries, static_cast<int>(count), out, groups * cache.group_size);
}

float maximum_of(const float* x, int64_t count) {
  constexpr int kWidth = 16; // so that the compiler can use vectors
  float lanes[kWidth];
  std::fill_n(lanes, kWidth, -__builtin_inff());
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    for (int j = 0; j < kWidth; ++j) {
      lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    }
  }
  for (; i < count; ++i) {
    lanes[0] = x[i] > lanes[0] ? x[i] : lanes[0];
  }
  return *std::max_element(lanes, lanes + kWidth);
}

// Turns the scores of a row for the keys [first, first + count) into weights. Writes their maximum and returns their
// sum.
float weigh(
    const Attention& a, const Tile& tile, int64_t row, int64_t first, int64_t count, float* scores, float& maximum) {
  const int64_t visible = std::clamp<int64_t>(visible_keys(a, tile, row) - first, 0, count);
  const int64_t mask =
      tile.head(row) * a.mask_strides[1] + tile.query(row) * a.mask_strides[2] + first * a.mask_strides[3];
  for (int64_t i = 0; a.float_mask && i < visible; ++i) {
    scores[i] += a.float_mask[mask + i * a.mask_strides[3]];
  }
  for (int64_t i = 0; a.bool_mask && i < visible; ++i) {
    scores[i] = a.bool_mask[mask + i * a.mask_strides[3]] ? scores[i] : -__builtin_inff();
  }
  maximum = maximum_of(scores, visible);
  const auto is_nan = [](float x) { return std::isnan(x); };
  if (maximum == -__builtin_inff() && std::none_of(scores, scores + visible, is_nan)) {
    std::fill_n(scores, count, 0.0f);
    return 0;
  }
  std::fill(scores + visible, scores + count, 0.0f);
  return kernels().softmax_numerators(scores, visible, /*scale=*/1);
}

// Computes the results of a tile over one part of the keys, of which the last row of the tile sees at least one.
void attend_part(
    const Attention& a, const Sizes& s, const Tile& tile, const std::vector<float>& q, int64_t part, Results& to) {
  static thread_local std::vector<float> scores, block;
  const int64_t m = tile.count;
  const int64_t first = part * kPartKeys;
  const int64_t count = std::min(kPartKeys, visible_keys(a, tile, m - 1) - first);
  to.resize(m, s.values);
  scores.resize(m * kPartKeys);
  const int64_t block_size = block_keys(m);
  block.resize(block_size * std::max(s.width, s.values));
  const int group_size = a.cache.group_size;
  for (int64_t i = 0; i < count; i += block_size) {
    const int64_t n = std::min(block_size, count - i);
    dequantize(a.cache, tile.kv_head, first + i, n, 0, s.width / group_size, /*prefetches=*/true, block.data());
    const Operands operands{.x = q.data(),
        .ldx = s.width,
        .y = &scores[i],
        .ldy = kPartKeys,
        .m = static_cast<int>(m),
        .n = static_cast<int>(n),
        .k = static_cast<int>(s.width),
        .alpha = a.scale};
    multiply_float_rows({{operands, block.data(), s.width}});
  }
  for (int64_t i = 0; i < m; ++i) {
    to.sum[i] = weigh(a, tile, i, first, count, &scores[i * kPartKeys], to.maximum[i]);
  }
  for (int64_t i = 0; i < count; i += block_size) {
    const int64_t n = std::min(block_size, count - i);
    dequantize(
        a.cache, tile.kv_head, first + i, n, a.value_group, s.values / group_size, /*prefetches=*/false, block.data());
    kernels().multiply_columns(&scores[i], kPartKeys, static_cast<int>(m), block.data(), FloatType::float32, s.values,
        static_cast<int>(s.values), static_cast<int>(n), i > 0, nullptr, 0, to.y.data(), s.values);
  }
  const auto read_value = [&](int64_t key, void* value) {
    dequantize(a.cache, tile.kv_head, first + key, 1, a.value_group, s.values / group_size, /*prefetches=*/false,
        static_cast<float*>(value));
  };
  leave_out_unseen_keys(m, count, scores.data(), kPartKeys, FloatType::float32, s.values, to.y.data(), read_value,
      [&](const float* weights, const float* values, float* y) {
        kernels().multiply_columns(weights, kPartKeys, 1, values, FloatType::float32, s.values,
            static_cast<int>(s.values), static_cast<int>(count), /*accumulate=*/false, nullptr, 0, y, s.values);
      });
}

// Adds the results of one more part to `to`. A single copy of this function, so that its products are rounded in one
// way.
[[gnu::noinline]] void add_part(const Results& part, int64_t rows, int64_t values, Results& to) {
  for (int64_t i = 0; i < rows; ++i) {
    if (part.sum[i] == 0) {
      continue;
    }
    const float maximum = std::max(to.maximum[i], part.maximum[i]);
    const float old_factor = std::exp(to.maximum[i] - maximum);
    const float new_factor = std::exp(part.maximum[i] - maximum);
    to.maximum[i] = maximum;
    to.sum[i] = old_factor * to.sum[i] + new_factor * part.sum[i];
    for (int64_t j = i * values; j < (i + 1) * values; ++j) {
      to.y[j] = old_factor * to.y[j] + new_factor * part.y[j];
    }
  }
}

void write_results(const Attention& a, const Sizes& s, const Tile& tile, Results& results) {
  for (int64_t i = 0; i < tile.count; ++i) {
    float* row = &results.y[i * s.values];
    for (int64_t j = 0; j < s.values; ++j) {
      row[j] /= results.sum[i];
    }
    if (a.cache.rotate) {
      rotate_groups(row, s.values / a.cache.group_size, a.cache.group_size);
    }
    const int64_t index = (tile.query(i) * a.heads + tile.head(i)) * a.value_size;
    kernels().scale(row, 1, a.q.type, at(a.y, a.q.type, index), a.value_size);
  }
}

// The parts of which a row of the tile sees a key.
int64_t parts_of(const Attention& a, const Tile& tile) {
  const int64_t keys = visible_keys(a, tile, tile.count - 1);
  return (keys + kPartKeys - 1) / kPartKeys;
}

void attend_tile(const Attention& a, const Sizes& s, const Tile& tile) {
  static thread_local std::vector<float> q;
  static thread_local Results results, part;
  read_queries(a, s, tile, q);
  results.resize(tile.count, s.values);
  const int64_t parts = parts_of(a, tile);
  for (int64_t i = 0; i < parts; ++i) {
    attend_part(a, s, tile, q, i, part);
    add_part(part, tile.count, s.values, results);
  }
  write_results(a, s, tile, results);
}

// For few tiles: computes the parts of all tiles side by side.
void attend_by_parts(const Attention& a, const Sizes& s, int64_t tiles) {
  std::vector<Results> parts(tiles * s.parts);
  parallel(static_cast<int>(parts.size()), [&](int i) {
    static thread_local std::vector<float> q;
    const Tile tile = tile_of(s, i / s.parts);
    if (i % s.parts < parts_of(a, tile)) {
      read_queries(a, s, tile, q);
      attend_part(a, s, tile, q, i % s.parts, parts[i]);
    }
  });
  Results results;
  for (int64_t i = 0; i < tiles; ++i) {
    const Tile tile = tile_of(s, i);
    results.resize(tile.count, s.values);
    for (int64_t j = 0; j < parts_of(a, tile); ++j) {
      add_part(parts[i * s.parts + j], tile.count, s.values, results);
    }
    write_results(a, s, tile, results);
  }
}

} // namespace

void kernel::quantized_attention(const QuantizedAttention& a) {
  const Sizes s(a);
  const int64_t tiles = a.kv_heads * s.tiles;
  if (s.parts > 1 && tiles < 4 * threads()) {
    return attend_by_parts(a, s, tiles);
  }
  parallel(static_cast<int>(tiles), [&](int i) { attend_tile(a, s, tile_of(s, i)); });
}

} // namespace executorch_mlx
