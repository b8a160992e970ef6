// Attention, computed for a tile of rows at a time: see attention_tile.h. A tile has few enough scores to keep them in
// the cache of a core while the softmax and the product with the values use them.
//
// The output of a query does not depend on the tile. A score adds the products of the elements of the query and of the
// key in ascending order. An output adds the values in the order of the keys, from key 0 on, and keys that the query
// does not see contribute zeros, or nothing if their values are infinite or NaN.
#include <algorithm>
#include <vector>

#include "attention.h"
#include "attention_tile.h"
#include "products.h"

namespace executorch_mlx {

namespace {

using kernel::Attention;
using Tile = AttentionTile;

constexpr int64_t kScoresPerTile = 128 << 10; // approximate, and subject to the limits on the number of rows
constexpr int64_t kMaxTileRows = kMaxTileValueRows; // more would multiply more scores that a causal mask hides
constexpr int64_t kMinTileRows = 16;
constexpr int64_t kTransposedKeys = 64; // keys that are transposed at a time: few, so that they stay in the cache
constexpr int64_t kValuesPerPass = kMaxTileValues; // that stay in the cache while all rows of the tile use them

// A matrix as the products read it. The elements of a row are contiguous, and each row begins `stride` elements after
// the previous one.
struct Matrix {
  const void* data;
  FloatType type;
  int64_t stride;
};

// Returns the first `count` rows of one attention head of x. Each row has `width` elements. If the products cannot read
// the rows in place, they are copied to `buffer`.
Matrix rows_of(
    const kernel::Heads& x, int64_t batch, int64_t head, int64_t count, int64_t width, std::vector<float>& buffer) {
  const void* data = at(x.data, x.type, batch * x.strides[0] + head * x.strides[1]);
  const bool has_contiguous_rows = width == 1 || x.strides[3] == 1;
  // Products of bfloat16 pairs need an even stride. The stride of a copy is `width`. Rows with an odd stride are
  // therefore copied if `width` is even.
  const bool keeps_pairs = size_of(x.type) == 4 || x.strides[2] % 2 == 0 || width % 2 != 0;
  if (has_contiguous_rows && keeps_pairs && (count == 1 || x.strides[2] >= width)) {
    return {data, x.type, std::max(x.strides[2], width)};
  }
  buffer.resize(count * width);
  for (int64_t i = 0; i < count; ++i) {
    void* to = at(buffer.data(), x.type, i * width);
    copy_row(at(data, x.type, i * x.strides[2]), x.type, x.strides[3], width, to);
  }
  return {buffer.data(), x.type, width};
}

const void* query_row(const Attention& a, const Tile& tile, int64_t row) {
  const int64_t offset =
      tile.batch * a.q.strides[0] + tile.head(row) * a.q.strides[1] + tile.query(row) * a.q.strides[2];
  return at(a.q.data, a.q.type, offset);
}

void* result_row(const Attention& a, const Tile& tile, int64_t row) {
  const int64_t index = ((tile.batch * a.queries + tile.query(row)) * a.heads + tile.head(row)) * a.v_width;
  return at(a.y, a.q.type, index);
}

// Copies the queries of a tile to `buffer`: as they are if `in_pairs`, else as float32.
Matrix read_queries(const Attention& a, const Tile& tile, bool in_pairs, std::vector<float>& buffer) {
  const FloatType type = in_pairs ? a.q.type : FloatType::float32;
  const int64_t stride = a.width + kPadding;
  buffer.resize(tile.count * stride);
  for (int64_t i = 0; i < tile.count; ++i) {
    const void* from = query_row(a, tile, i);
    void* to = at(buffer.data(), type, i * stride);
    if (in_pairs) {
      copy_row(from, type, a.q.strides[3], a.width, to);
    } else {
      read_as_float32(from, a.q.type, a.q.strides[3], a.width, static_cast<float*>(to));
    }
  }
  return {buffer.data(), type, stride};
}

// The first row of the tile that sees more than `key` keys, or else the number of rows.
int64_t first_row_beyond(const Attention& a, const Tile& tile, int64_t key) {
  if (!a.causal) {
    return key < a.keys ? 0 : tile.count;
  }
  const int64_t query = std::max<int64_t>(0, key - (a.keys - a.queries));
  return std::clamp<int64_t>(query * tile.group - tile.first, 0, tile.count);
}

// scores [rows, keys] = q @ k.T. Leaves out some scores of keys that a row does not see.
void multiply_by_keys(
    const Attention& a, const Tile& tile, Matrix q, Matrix k, int64_t keys, float* scores, int64_t stride) {
  static thread_local std::vector<float> transposed;
  int64_t width = a.width;
  if (q.type == FloatType::bfloat16) {
    width /= 2;
    q.stride /= 2;
    if (const auto multiply = kernels().multiply_tiles) {
      const PairTiles tiles(static_cast<const float*>(q.data), q.stride, tile.count, width);
      const auto* rows = static_cast<const uint16_t*>(k.data);
      return multiply(tiles.from_row(0), tile.count, rows, k.stride, keys, a.width, scores, stride);
    }
    k = {k.data, FloatType::bfloat16_pair, k.stride / 2};
  }
  if (tile.count <= kMaxTransposedRows) {
    return kernels().multiply_transposed(
        static_cast<const float*>(q.data), q.stride, tile.count, k.data, k.type, k.stride, keys, width, scores, stride);
  }
  transposed.resize(width * kTransposedKeys);
  for (int64_t first = 0; first < keys; first += kTransposedKeys) {
    const int count = static_cast<int>(std::min(kTransposedKeys, keys - first));
    const int64_t row = first_row_beyond(a, tile, first);
    kernels().transpose_rows(
        at(k.data, k.type, first * k.stride), k.type, k.stride, count, width, transposed.data(), kTransposedKeys);
    kernels().multiply_columns(static_cast<const float*>(q.data) + row * q.stride, q.stride, tile.count - row,
        transposed.data(), k.type == FloatType::bfloat16_pair ? k.type : FloatType::float32, kTransposedKeys, count,
        width,
        /*accumulate=*/false, nullptr, 0, scores + row * stride + first, stride);
  }
}

// Scales the scores of a row that sees a key, and replaces the other scores by minus infinity. Returns whether it sees
// any key.
bool hide_scores(const Attention& a, const bool* mask, int64_t keys, float* scores) {
  if (a.mask_strides[3] == 1) {
    return kernels().hide_scores(scores, mask, keys, a.scale);
  }
  bool sees_any = false;
  for (int64_t i = 0; i < keys; ++i) {
    const bool sees = mask[i * a.mask_strides[3]];
    scores[i] = sees ? a.scale * scores[i] : -__builtin_inff();
    sees_any |= sees;
  }
  return sees_any;
}

// Scales the scores of a row and applies the masks, and then replaces the scores by unnormalized softmax weights.
// Returns the sum of the weights.
float softmax_weights(const Attention& a, const Tile& tile, int64_t row, int64_t keys, float* scores) {
  const int64_t mask_offset =
      tile.batch * a.mask_strides[0] + tile.head(row) * a.mask_strides[1] + tile.query(row) * a.mask_strides[2];
  for (int64_t i = 0; a.float_mask && i < keys; ++i) {
    scores[i] = a.scale * scores[i] + a.float_mask[mask_offset + i * a.mask_strides[3]];
  }
  const bool sees_any = a.bool_mask == nullptr || hide_scores(a, a.bool_mask + mask_offset, keys, scores);
  if (!sees_any && a.zero_if_unseen) {
    std::fill_n(scores, keys, 0.0f);
    return 1;
  }
  const int64_t visible = std::min(keys, visible_keys(a, tile, row));
  if (!sees_any || visible <= 0) {
    std::fill_n(scores, keys, 1.0f);
    return static_cast<float>(keys);
  }
  std::fill(scores + visible, scores + keys, 0.0f);
  const bool is_scaled = a.float_mask || a.bool_mask;
  return kernels().softmax_numerators(scores, visible, is_scaled ? 1 : a.scale);
}

// Whether the product of weights with values of this type uses the tiles of AMX.
bool multiplies_values_in_tiles(const Attention& a, FloatType type) {
  return kernels().multiply_value_tiles != nullptr && a.q.type == FloatType::bfloat16 && type == FloatType::bfloat16 &&
      a.v_width % kTileRows == 0;
}

// y [rows, v_width] = weights [rows, count] @ the values first ... first + count - 1 of v, or += if first > 0. In
// tiles, count is at most kValuesPerPass, and more than kTileRows rows may be followed by kTileRows - 1 rows of any
// values.
void multiply_by_some_values(const Attention& a, const float* weights, int64_t stride, int64_t rows, const Matrix& v,
    int64_t first, int64_t count, bool in_tiles, float* y) {
  const void* const values = at(v.data, v.type, first * v.stride);
  const bool accumulate = first > 0;
  if (in_tiles) {
    return kernels().multiply_value_tiles(weights, stride, rows, static_cast<const uint16_t*>(values), v.stride,
        a.v_width, count, accumulate, y, a.v_width);
  }
  kernels().multiply_columns(
      weights, stride, rows, values, v.type, v.stride, a.v_width, count, accumulate, nullptr, 0, y, a.v_width);
}

// y [rows, v_width] = weights @ v, perhaps followed by kTileRows - 1 rows of any values.
void multiply_by_values(const Attention& a, const Tile& tile, const float* weights, int64_t stride, int64_t keys,
    const Matrix& v, float* y) {
  const bool all = visible_keys(a, tile, 0) <= 0; // a row that sees no key gives all keys the same weight
  const bool in_tiles = multiplies_values_in_tiles(a, v.type);
  // Few rows read each value once, so the values need not stay in the cache. But if multiply_columns needs more than
  // two passes for all columns, each pass would read a small part of every row of the values, from many pages of
  // memory.
  const bool reads_in_order = !in_tiles && tile.count <= kMaxTransposedRows &&
      2 * kernels().column_panel_width(static_cast<int>(tile.count)) >= a.v_width;
  const int64_t step = reads_in_order ? keys : kValuesPerPass;
  for (int64_t first = 0; first < keys; first += step) {
    const int64_t row = all ? 0 : first_row_beyond(a, tile, first);
    multiply_by_some_values(a, weights + row * stride + first, stride, tile.count - row, v, first,
        std::min(step, keys - first), in_tiles, y + row * a.v_width);
  }
}

// A row of multiply_by_values(), for values that are zeros where the weight is 0.
void multiply_by_seen_values(const Attention& a, const float* weights, int64_t keys, const Matrix& v, float* y) {
  const bool in_tiles = multiplies_values_in_tiles(a, v.type);
  for (int64_t first = 0; first < keys; first += kValuesPerPass) {
    const int64_t count = std::min(kValuesPerPass, keys - first);
    multiply_by_some_values(a, weights + first, keys, 1, v, first, count, in_tiles, y);
  }
  // In tiles, a weight is the sum of two numbers, and the second one may be 0 where a value is infinite.
  if (in_tiles && kernels().has_nan(y, a.v_width)) {
    multiply_by_some_values(a, weights, keys, 1, v, 0, keys, /*in_tiles=*/false, y);
  }
}

void attend(const Attention& a, const Tile& tile) {
  static thread_local std::vector<float> scores, q_buffer, k_buffer, v_buffer, y;
  // Leaves out the last keys if no row of the tile sees them. But if a row sees no key at all, all keys are needed:
  // softmax_weights() then gives all keys the same weight.
  const int64_t keys = visible_keys(a, tile, 0) > 0 ? visible_keys(a, tile, tile.count - 1) : a.keys;
  const Matrix k = rows_of(a.k, tile.batch, tile.kv_head, keys, a.width, k_buffer);
  const Matrix v = rows_of(a.v, tile.batch, tile.kv_head, keys, a.v_width, v_buffer);
  const bool in_pairs = kernels().multiplies_bfloat16_pairs && a.q.type == FloatType::bfloat16 &&
      k.type == FloatType::bfloat16 && a.width % 2 == 0;
  const Matrix q = read_queries(a, tile, in_pairs, q_buffer);
  const int64_t stride = (keys + kPadding - 1) / kPadding * kPadding + kPadding;
  scores.resize(tile.count * stride);
  multiply_by_keys(a, tile, q, k, keys, scores.data(), stride);
  float factors[kMaxTileRows];
  for (int64_t i = 0; i < tile.count; ++i) {
    factors[i] = 1 / softmax_weights(a, tile, i, keys, &scores[i * stride]);
  }
  y.resize((tile.count + kTileRows - 1) * a.v_width);
  multiply_by_values(a, tile, scores.data(), stride, keys, v, y.data());
  const auto read_value = [&](int64_t key, void* to) {
    copy_row(at(v.data, v.type, key * v.stride), v.type, 1, a.v_width, to);
  };
  leave_out_unseen_keys(tile.count, keys, scores.data(), stride, v.type, a.v_width, y.data(), read_value,
      [&](const float* weights, const float* values, float* row) {
        multiply_by_seen_values(a, weights, keys, {values, v.type, a.v_width}, row);
      });
  for (int64_t i = 0; i < tile.count; ++i) {
    kernels().scale(&y[i * a.v_width], factors[i], a.q.type, result_row(a, tile, i), a.v_width);
  }
}

// One of several attentions, divided into tiles.
struct Tiles {
  const Attention& attention;
  int64_t group; // heads of q that share a head of the keys
  int64_t rows; // of a tile
  int64_t count; // of the tiles of a head of the keys
  int begin; // the number of the first tile, counted over all attentions

  Tile operator[](int number) const {
    const int64_t first = (number - begin) % count * rows;
    const int64_t head = (number - begin) / count;
    const int64_t heads = attention.kv_heads;
    return {head / heads, head % heads, first, std::min(rows, attention.queries * group - first), group};
  }
};

} // namespace

void kernel::attention(const Attention* attentions, int count) {
  std::vector<Tiles> parts;
  int total = 0;
  for (int i = 0; i < count; ++i) {
    const auto& a = attentions[i];
    const int64_t group = a.heads / a.kv_heads;
    const int64_t rows = std::clamp(kScoresPerTile / a.keys, kMinTileRows, kMaxTileRows);
    parts.push_back({a, group, rows, (a.queries * group + rows - 1) / rows, total});
    total += static_cast<int>(a.batch * a.kv_heads * parts.back().count);
  }
  parallel(total, [&](int i) {
    const auto after = std::upper_bound(
        parts.begin(), parts.end(), i, [](int number, const Tiles& part) { return number < part.begin; });
    const auto& part = *std::prev(after);
    attend(part.attention, part[i]);
  });
}

} // namespace executorch_mlx
