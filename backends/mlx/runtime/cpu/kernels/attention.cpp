// Attention, computed for a tile of queries at a time. A tile has few enough scores to keep them in the cache of a
// core while the softmax and the product with the values use them. The output of a query does not depend on the tile:
// the sums over keys begin at key 0, and keys that the query does not see contribute zeros.
#include <algorithm>
#include <vector>

#include "products.h"

namespace executorch_mlx {

namespace {

using Attention = ExecutorchMlxAttention;

constexpr int64_t kScoresPerTile = 128 << 10;  // approximate, and subject to the limits on the number of queries
constexpr int64_t kMaxTileQueries = 128;
constexpr int64_t kMinTileQueries = 16;
constexpr int64_t kConvertedKeys = 256;  // keys that are converted to float32 at a time: few, so that they stay in the cache

// A matrix as the products read it. The elements of a row are contiguous, and each row begins `stride` elements after
// the previous one.
struct Matrix {
  const void* data;
  FloatType type;
  int64_t stride;
};

template <typename T>
void gather_rows(const T* data, const int64_t* strides, int64_t count, int64_t width, T* to) {
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      to[i * width + j] = data[i * strides[2] + j * strides[3]];
    }
  }
}

// Returns rows first ... first + count - 1 of one attention head of x. Each row has `width` elements. If the products
// cannot read the rows in place, they are copied to `buffer`.
Matrix rows_of(
    const ExecutorchMlxHeads& x, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t width,
    std::vector<float>& buffer) {
  const void* data = at(x.data, x.type, batch * x.strides[0] + head * x.strides[1] + first * x.strides[2]);
  const bool has_contiguous_rows = width == 1 || x.strides[3] == 1;
  // Products of bfloat16 pairs need an even stride. The stride of a copy is `width`. Rows with an odd stride are
  // therefore copied if `width` is even.
  const bool keeps_pairs = size_of(x.type) == 4 || x.strides[2] % 2 == 0 || width % 2 != 0;
  if (has_contiguous_rows && keeps_pairs && (count == 1 || x.strides[2] >= width)) {
    return {data, x.type, std::max(x.strides[2], width)};
  }
  buffer.resize(count * width);
  if (x.type == FloatType::float32) {
    gather_rows(static_cast<const float*>(data), x.strides, count, width, buffer.data());
  } else {
    gather_rows(
        static_cast<const uint16_t*>(data), x.strides, count, width, reinterpret_cast<uint16_t*>(buffer.data()));
  }
  return {buffer.data(), x.type, width};
}

// Converts a matrix of `count` rows to contiguous float32 in `buffer`, which does not hold the matrix.
Matrix as_float32(const Matrix& x, int64_t count, int64_t width, std::vector<float>& buffer) {
  if (x.type == FloatType::float32) {
    return x;
  }
  buffer.resize(count * width);
  for (int64_t i = 0; i < count; ++i) {
    const auto* row = static_cast<const uint16_t*>(at(x.data, x.type, i * x.stride));
    kernels().widen(row, x.type, 1, &buffer[i * width], width);
  }
  return {buffer.data(), FloatType::float32, width};
}

// scores [m, keys] = scale * q @ k.T
void multiply_by_keys(const Attention& a, Matrix q, Matrix k, int64_t m, int64_t keys, float* scores) {
  static thread_local std::vector<float> q_buffer, k_buffer;
  int64_t width = a.width;
  const bool in_pairs = kernels().multiplies_bfloat16_pairs && q.type == FloatType::bfloat16 &&
      k.type == FloatType::bfloat16 && width % 2 == 0;
  if (in_pairs) {
    width /= 2;
    q.stride /= 2;
    k = {k.data, FloatType::bfloat16_pair, k.stride / 2};
  } else {
    q = as_float32(q, m, width, q_buffer);
  }
  // The product converts keys in half precision for every few queries. With many queries, converting them once is faster.
  const bool converts_keys = !in_pairs && k.type != FloatType::float32 && m >= kMinTileQueries;
  const int64_t step = converts_keys ? kConvertedKeys : keys;
  for (int64_t first = 0; first < keys; first += step) {
    const int64_t count = std::min(step, keys - first);
    const Matrix stored{at(k.data, k.type, first * k.stride), k.type, k.stride};
    const Matrix part = converts_keys ? as_float32(stored, count, width, k_buffer) : stored;
    const Operands operands{
        .x = static_cast<const float*>(q.data),
        .ldx = q.stride,
        .y = scores + first,
        .ldy = keys,
        .m = static_cast<int>(m),
        .n = static_cast<int>(count),
        .k = static_cast<int>(width),
        .alpha = a.scale};
    multiply_rows(operands, part.data, part.type, part.stride);
  }
}

// Applies the masks to the scores of one query, and then replaces these scores by unnormalized softmax weights.
// Returns the sum of the weights.
float softmax_weights(const Attention& a, int64_t batch, int64_t head, int64_t query, float* scores, int64_t keys) {
  const int64_t mask_offset = batch * a.mask_strides[0] + head * a.mask_strides[1] + query * a.mask_strides[2];
  for (int64_t i = 0; a.float_mask && i < keys; ++i) {
    scores[i] += a.float_mask[mask_offset + i * a.mask_strides[3]];
  }
  bool sees_any = a.bool_mask == nullptr;
  for (int64_t i = 0; a.bool_mask && i < keys; ++i) {
    const bool sees = a.bool_mask[mask_offset + i * a.mask_strides[3]];
    scores[i] = sees ? scores[i] : -__builtin_inff();
    sees_any |= sees;
  }
  const int64_t visible = a.causal ? std::min(keys, query + 1 + a.keys - a.queries) : keys;
  if (!sees_any || visible <= 0) {
    std::fill_n(scores, keys, 1.0f);
    return static_cast<float>(keys);
  }
  std::fill(scores + visible, scores + keys, 0.0f);
  return kernels().softmax_numerators(scores, visible);
}

// Computes the output of queries [first, last) of one attention head.
void attend(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t last) {
  static thread_local std::vector<float> scores, q_buffer, k_buffer, v_buffer, y_buffer;
  const int64_t m = last - first;
  const int64_t offset = a.keys - a.queries;  // if causal, query i sees the keys up to i + offset
  // Leaves out the last keys if none of these queries sees them. But if the first query sees no key at all, all keys
  // are needed: softmax_weights() then gives all keys the same weight.
  const int64_t keys = a.causal && first + offset >= 0 ? last + offset : a.keys;
  const int64_t kv_head = head / (a.heads / a.kv_heads);
  const Matrix q = rows_of(a.q, batch, head, first, m, a.width, q_buffer);
  const Matrix k = rows_of(a.k, batch, kv_head, 0, keys, a.width, k_buffer);
  const Matrix v = rows_of(a.v, batch, kv_head, 0, keys, a.v_width, v_buffer);
  scores.resize(m * keys);
  multiply_by_keys(a, q, k, m, keys, scores.data());
  float factors[kMaxTileQueries];
  for (int64_t i = 0; i < m; ++i) {
    factors[i] = 1 / softmax_weights(a, batch, head, first + i, &scores[i * keys], keys);
  }
  const bool is_float32 = a.q.type == FloatType::float32;
  const int64_t index = ((batch * a.heads + head) * a.queries + first) * a.v_width;
  y_buffer.resize(is_float32 ? 0 : m * a.v_width);
  float* y = is_float32 ? static_cast<float*>(a.y) + index : y_buffer.data();
  const Operands operands{
      .x = scores.data(),
      .ldx = keys,
      .y = y,
      .ldy = a.v_width,
      .m = static_cast<int>(m),
      .n = static_cast<int>(a.v_width),
      .k = static_cast<int>(keys)};
  multiply_columns(operands, v.data, v.type, v.stride);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < a.v_width; ++j) {
      y[i * a.v_width + j] *= factors[i];
    }
  }
  if (!is_float32) {
    kernels().narrow(y, a.q.type, static_cast<uint16_t*>(a.y) + index, m * a.v_width);
  }
}

// In decode there is one query per attention head. Returns a description of the same attention in which the heads of q
// that share keys are the queries of a single head, so that one matrix product computes all of them.
Attention with_heads_as_queries(Attention a) {
  const int64_t group = a.heads / a.kv_heads;
  for (auto* strides : {a.q.strides, a.mask_strides}) {
    strides[2] = strides[1];
    strides[1] *= group;
  }
  a.heads = a.kv_heads;
  a.queries = group;
  a.causal = false;  // a single query sees all keys
  return a;
}

// One of several attentions, divided into tiles.
struct Tiles {
  Attention attention;
  int64_t queries;  // of a tile
  int64_t count;    // of the tiles of a head
  int begin;        // the number of the first tile, counted over all attentions
};

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_attention(const ExecutorchMlxAttention* attention) {
  executorch_mlx_attentions(attention, 1);
}

extern "C" void executorch_mlx_attentions(const ExecutorchMlxAttention* attentions, int count) {
  using namespace executorch_mlx;
  std::vector<Tiles> parts;
  int total = 0;
  for (int i = 0; i < count; ++i) {
    const auto a = attentions[i].queries == 1 ? with_heads_as_queries(attentions[i]) : attentions[i];
    const int64_t queries = std::clamp(kScoresPerTile / a.keys, kMinTileQueries, kMaxTileQueries);
    parts.push_back({a, queries, (a.queries + queries - 1) / queries, total});
    total += static_cast<int>(a.batch * a.heads * parts.back().count);
  }
  parallel(total, [&](int i) {
    const auto after = std::upper_bound(
        parts.begin(), parts.end(), i, [](int number, const Tiles& part) { return number < part.begin; });
    const auto& [a, queries, tiles, begin] = *std::prev(after);
    const int64_t first = (i - begin) % tiles * queries;
    const int64_t head = (i - begin) / tiles;
    attend(a, head / a.heads, head % a.heads, first, std::min(a.queries, first + queries));
  });
}
