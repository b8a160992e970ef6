// Attention, piece by piece: the scores of some queries, their softmax and its product with the values
// follow one another while they are in a core's own cache.
#include <algorithm>
#include <vector>

#include "kernels.h"
#include "pool.h"

namespace executorch_mlx {

namespace {

using Attention = ExecutorchMlxAttention;

constexpr int64_t kScores = 128 << 10;  // that a piece has at a time
constexpr int64_t kMostQueries = 128;
constexpr int64_t kFewestQueries = 16;

// Rows as BLAS takes them, `step` apart.
struct Rows {
  const float* data;
  int64_t step;
};

// Some rows of a matrix; in `room` where their numbers do not lie together.
Rows rows_of(
    const ExecutorchMlxHeads& all, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t width,
    std::vector<float>& room) {
  const float* data = all.data + batch * all.strides[0] + head * all.strides[1] + first * all.strides[2];
  const bool together = width == 1 || all.strides[3] == 1;
  if (together && (count == 1 || all.strides[2] >= width)) {
    return {data, std::max(all.strides[2], width)};
  }
  room.resize(count * width);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t j = 0; j < width; ++j) {
      room[i * width + j] = data[i * all.strides[2] + j * all.strides[3]];
    }
  }
  return {room.data(), width};
}

// The weights of `count` keys, not yet over their sum, which is returned.
float weigh(const Attention& a, int64_t batch, int64_t head, int64_t query, float* scores, int64_t count) {
  const int64_t mask =
      batch * a.mask_strides[0] + head * a.mask_strides[1] + query * a.mask_strides[2];
  for (int64_t i = 0; a.added && i < count; ++i) {
    scores[i] += a.added[mask + i * a.mask_strides[3]];
  }
  bool sees = a.seen == nullptr;
  for (int64_t i = 0; a.seen && i < count; ++i) {
    const bool is_seen = a.seen[mask + i * a.mask_strides[3]];
    scores[i] = is_seen ? scores[i] : -__builtin_inff();
    sees |= is_seen;
  }
  const int64_t visible = a.causal ? std::min(count, query + 1 + a.keys - a.queries) : count;
  // As MLX has it, a query that sees nothing sees all alike.
  if (!sees || visible <= 0) {
    std::fill_n(scores, count, 1.0f);
    return static_cast<float>(count);
  }
  std::fill(scores + visible, scores + count, 0.0f);
  return kernels().exponentials(scores, visible);
}

// Queries `first` to `last` of a head.
void attend(const Attention& a, int64_t batch, int64_t head, int64_t first, int64_t last) {
  static thread_local std::vector<float> scores, q_room, k_room, v_room;
  const int64_t m = last - first;
  const int64_t before = a.keys - a.queries;  // keys that the first query does not see as the last
  const int64_t keys = a.causal && first + before >= 0 ? last + before : a.keys;
  const int64_t shared = head / (a.heads / a.kv_heads);
  const Rows q = rows_of(a.q, batch, head, first, m, a.width, q_room);
  const Rows k = rows_of(a.k, batch, shared, 0, keys, a.width, k_room);
  const Rows v = rows_of(a.v, batch, shared, 0, keys, a.values, v_room);
  scores.resize(m * keys);
  cblas_sgemm(
      101, 111, 112, m, keys, a.width, a.scale, q.data, q.step, k.data, k.step, 0, scores.data(), keys);
  float factors[kMostQueries];
  for (int64_t i = 0; i < m; ++i) {
    factors[i] = 1 / weigh(a, batch, head, first + i, &scores[i * keys], keys);
  }
  float* y = a.y + ((batch * a.heads + head) * a.queries + first) * a.values;
  cblas_sgemm(101, 111, 111, m, a.values, keys, 1, scores.data(), keys, v.data, v.step, 0, y, a.values);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < a.values; ++j) {
      y[i * a.values + j] *= factors[i];
    }
  }
}

// One query of each head: those of the heads that share their keys are queries of one head.
Attention with_queries_together(Attention a) {
  const int64_t each = a.heads / a.kv_heads;
  for (auto* strides : {a.q.strides, a.mask_strides}) {
    strides[2] = strides[1];
    strides[1] *= each;
  }
  a.heads = a.kv_heads;
  a.queries = each;
  a.causal = false;  // it sees all keys
  return a;
}

} // namespace

} // namespace executorch_mlx

extern "C" void executorch_mlx_attention(const ExecutorchMlxAttention* attention) {
  using namespace executorch_mlx;
  const auto a = attention->queries == 1 ? with_queries_together(*attention) : *attention;
  const int64_t piece = std::clamp(kScores / a.keys, kFewestQueries, kMostQueries);
  const int64_t pieces = (a.queries + piece - 1) / piece;
  parallel(static_cast<int>(a.batch * a.heads * pieces), [&](int i) {
    const int64_t first = i % pieces * piece;
    const int64_t head = i / pieces;
    attend(a, head / a.heads, head % a.heads, first, std::min(a.queries, first + piece));
  });
}
