// Recurrences over the tokens of a sequence. A task computes some columns of the state of a head, or some channels of a
// selective scan, for all tokens, so that this part of the state stays in the cache.
#include <algorithm>
#include <cstring>

#include "conversion.h"
#include "token_recurrence.h"

namespace executorch_mlx {

namespace {

constexpr int64_t kManyTokens = 64; // from this number on, the width of a tile does not change

// The vectors of a head, from element `first` on.
TokenVectors vectors_of(const kernel::Tokens& x, int64_t batch, int64_t head, int64_t first = 0) {
  if (x.data == nullptr) {
    return {nullptr, 0, 0};
  }
  return {x.data + batch * x.strides[0] + head * x.strides[1] + first * x.strides[3], x.strides[2], x.strides[3]};
}

// At least `count` floats, which the next call in the same thread overwrites.
float* scratch(size_t count) {
  static thread_local AlignedFloats memory;
  static thread_local size_t size = 0;
  if (size < count) {
    memory = AlignedFloats(count);
    size = count;
  }
  return memory.get();
}

// Runs `columns` columns of the state of a head, from `first` on.
void recur(const kernel::GatedRecurrence& p, int64_t batch, int64_t head, int64_t first, int64_t columns) {
  const int64_t group = head / (p.heads / p.groups);
  const int64_t state = (batch * p.heads + head) * p.size * p.columns + first * (p.is_transposed ? p.size : 1);
  const int64_t tile_stride = (columns + 15) / 16 * 16; // as Kernels::transpose expects
  float* memory = scratch(8 * p.size + (p.is_transposed ? p.size * tile_stride : 0));
  float* tile = memory + 8 * p.size;
  if (p.is_transposed) {
    kernels().transpose_rows(p.state + state, FloatType::float32, p.size, static_cast<int>(columns),
        static_cast<int>(p.size), tile, tile_stride);
  }
  kernels().gated_recurrence({.query = vectors_of(p.query, batch, group),
      .key = vectors_of(p.key, batch, group),
      .value = vectors_of(p.value, batch, head, first),
      .decay = vectors_of(p.decay, batch, head),
      .beta = vectors_of(p.beta, batch, head),
      .decays_by_channel = p.decays_by_channel,
      .state = p.is_transposed ? tile : p.state + state,
      .state_stride = p.is_transposed ? tile_stride : p.columns,
      .next = p.is_transposed ? tile : p.next + state,
      .next_stride = p.is_transposed ? tile_stride : p.columns,
      .y = p.y + (batch * p.tokens * p.heads + head) * p.columns + first,
      .y_stride = p.heads * p.columns,
      .tokens = static_cast<int>(p.tokens),
      .size = static_cast<int>(p.size),
      .columns = static_cast<int>(columns),
      .scratch = memory});
  if (p.is_transposed) {
    kernels().transpose_rows(tile, FloatType::float32, tile_stride, static_cast<int>(p.size), static_cast<int>(columns),
        p.next + state, p.size);
  }
}

} // namespace

void kernel::gated_recurrence(const GatedRecurrence& p) {
  // A transposed state is read along its columns, and gains nothing from wide tiles.
  const int64_t tokens = p.is_transposed ? kManyTokens : std::min(p.tokens, kManyTokens);
  const int64_t width = kernels().recurrence_columns(static_cast<int>(tokens));
  const int64_t tiles = (p.columns + width - 1) / width;
  const int64_t work = p.tokens * p.size * std::min(width, p.columns);
  parallel_ranges(p.batch * p.heads * tiles, work, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i % tiles * width;
      const int64_t head = i / tiles;
      recur(p, head / p.heads, head % p.heads, first, std::min(width, p.columns - first));
    }
  });
}

void kernel::selective_scan(const SelectiveScan& p) {
  const int64_t width = kernels().scan_channels();
  const int64_t tiles = (p.channels + width - 1) / width;
  constexpr int64_t kCost = 8; // of an exponential, relative to the other operations
  parallel_ranges(p.batch * tiles, p.tokens * p.size * width * kCost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t batch = i / tiles;
      const int64_t first = i % tiles * width;
      const int64_t state = (batch * p.channels + first) * p.size;
      kernels().selective_scan({.x = vectors_of(p.x, batch, 0, first),
          .step = vectors_of(p.step, batch, 0, first),
          .key = vectors_of(p.key, batch, 0),
          .query = vectors_of(p.query, batch, 0),
          .rates = p.rates + first * p.size,
          .state = p.state + state,
          .next = p.next + state,
          .y = p.y + batch * p.tokens * p.channels + first,
          .y_stride = p.channels,
          .tokens = static_cast<int>(p.tokens),
          .channels = static_cast<int>(std::min(width, p.channels - first)),
          .size = static_cast<int>(p.size),
          .scratch = scratch(2 * (p.size + 16))});
    }
  });
}

void kernel::copy_rows(const void* const* from, int64_t rows, int64_t bytes, void* to) {
  constexpr int64_t kPart = 64 << 10;
  const int64_t parts = (bytes + kPart - 1) / kPart;
  parallel_ranges(rows * parts, kPart / static_cast<int64_t>(sizeof(float)), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / parts;
      const int64_t first = i % parts * kPart;
      const auto count = static_cast<size_t>(std::min(kPart, bytes - first));
      char* target = static_cast<char*>(to) + row * bytes + first;
      if (from[row] == nullptr) {
        std::memset(target, 0, count);
      } else {
        std::memcpy(target, static_cast<const char*>(from[row]) + first, count);
      }
    }
  });
}

} // namespace executorch_mlx
