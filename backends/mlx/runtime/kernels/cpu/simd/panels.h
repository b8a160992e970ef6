// Products of many rows of x with many rows of a matrix. The results are those of dot.h, bit for bit. Part of
// kernels.cpp.
//
// dot.h computes a result as kLanes partial sums. Partial sum i adds the products of the elements i, kLanes + i,
// 2 * kLanes + i, ... of the two rows. A panel holds kLanes rows in kLanes sections. Section i has the elements for
// partial sum i: element i of all rows, then element kLanes + i of all rows, and so on. A vector of a section therefore
// has the same element of kLanes rows, and a vector of accumulators has partial sum i of kLanes results.
//
// The partial sums are added in pairs, in the order of sums() in vector.h. As soon as both sums of a pair are complete,
// they are added, so that only a few of them are held at a time. With 32 registers, the two sections of a pair are
// computed together: half as many sums go through memory, where each store of a vector takes as long as two
// multiplications.
//
// A panel has its sections in the order in which they are added. Of the sections that are computed together, it has the
// first vector of each, then the second vector of each, and so on. A kernel therefore reads a panel from its beginning
// to its end.
#pragma once

#include "dot.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// 16 registers hold too few sums for two sections.
constexpr int kSectionsTogether = kRegisters == 32 ? 2 : 1;
constexpr int kPanelsFromRows = kRegisters == 32 ? 64 : 48;
constexpr int kSectionGroups = kLanes / kSectionsTogether;
constexpr int kPanelGroupRows = 4; // rows of x whose sums fit in the registers
constexpr int kPanelGroups = kLanes / kPanelGroupRows; // in a panel of x
constexpr ptrdiff_t kCacheLine = 64;

constexpr int log2_of(int i) { return i == 1 ? 0 : 1 + log2_of(i / 2); }

// How often the sums of sections that are computed together are added to others, until all sections are included.
constexpr int kPanelLevels = log2_of(kSectionGroups);

inline int steps_of(int k) { return (k + kLanes - 1) / kLanes; }

constexpr int reversed_bits(int i) {
  int result = 0;
  for (int bit = 1; bit < kLanes; bit *= 2) {
    result = result * 2 + (i & bit ? 1 : 0);
  }
  return result;
}

// The number of floats from one group of sections to the next. It is an odd number of vectors, so that the groups do
// not compete for the same cache lines.
inline ptrdiff_t section_group_stride(int k) { return (ptrdiff_t{steps_of(k)} * kSectionsTogether | 1) * kLanes; }

// Where each section of a panel begins.
struct SectionOffsets {
  explicit SectionOffsets(int k) {
    for (int section = 0; section < kLanes; ++section) {
      const int group = reversed_bits(section % kSectionGroups) / kSectionsTogether;
      of[section] = group * section_group_stride(k) + ptrdiff_t{section / kSectionGroups} * kLanes;
    }
  }

  ptrdiff_t of[kLanes];
};

// The number of floats from a vector of a section to its next one.
constexpr ptrdiff_t kStepStride = ptrdiff_t{kSectionsTogether} * kLanes;

size_t panel_size(int k) { return static_cast<size_t>(section_group_stride(k)) * kSectionGroups; }

void pack_panel(const float* x, ptrdiff_t ldx, int rows, int k, float* panel) {
  const SectionOffsets offsets(k);
  for (int i = 0; i < k; i += kLanes, panel += kStepStride) {
    const int count = k - i < kLanes ? k - i : kLanes;
    Floats v[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      v[r] = r < rows ? load_lanes(x + r * ldx + i, count) : Floats{};
    }
    transpose(v);
    for (int section = 0; section < kLanes; ++section) {
      store(v[section], panel + offsets.of[section]);
    }
  }
}

// The sums of a tile. levels[i] has sums over 2^i * kSectionsTogether sections.
template <int P>
struct PanelSums {
  Floats levels[kPanelLevels + 1][kPanelGroups][kPanelGroupRows][P];
};

// Sums of a group of rows that wait to be added: levels[0] to levels[count - 1], to levels[count].
struct WaitingSums {
  int count;
  int group;
};

// Adds vector v of the first Count levels of a group to that of levels[Count], in ascending order.
template <int Count, int P>
inline void add_waiting(PanelSums<P>& sums, int group, int v) {
  const auto vector = [&](int level) -> Floats& { return (&sums.levels[level][group][0][0])[v]; };
  Floats total = vector(Count);
  for (int level = 0; level < Count; ++level) {
    total += vector(level);
  }
  vector(Count) = total;
}

template <int P>
inline void add_waiting(PanelSums<P>& sums, WaitingSums waiting) {
  for (int v = 0; waiting.count > 0 && v < kPanelGroupRows * P; ++v) {
    call_with_constant<kPanelLevels>(
        waiting.count, [&](auto count) { add_waiting<decltype(count)::value>(sums, waiting.group, v); });
  }
}

// Computes the sums of a group of rows over a group of sections, and writes them to `results`. Meanwhile adds the
// `Waiting` levels of group `waiting_group`: additions and stores do not delay the multiplications if they are spread
// among them.
template <FloatType Type, int P, int Waiting>
void panel_sections(const float* x, const float* w, ptrdiff_t panel, int steps, Floats (&results)[kPanelGroupRows][P],
    PanelSums<P>& sums, int waiting_group) {
  constexpr int M = kPanelGroupRows, S = kSectionsTogether;
  Floats acc[S][M][P];
  // Without repeat(), the compiler keeps the array in memory.
  repeat<S * M * P>([&](auto i) {
    constexpr int v = decltype(i)::value;
    acc[v / (M * P)][v / P % M][v % P] = Floats{};
  });
  const auto add_step = [&](ptrdiff_t step) {
    for (int s = 0; s < S; ++s) {
      const ptrdiff_t offset = step * kStepStride + s * kLanes;
      Floats weights[P];
      for (int p = 0; p < P; ++p) {
        weights[p] = load<Floats>(w + offset + p * panel);
      }
      for (int r = 0; r < M; ++r) {
        const Floats element = broadcast(x[offset + r]);
        for (int p = 0; p < P; ++p) {
          acc[s][r][p] = multiply_add<Type>(element, weights[p], acc[s][r][p]);
        }
      }
    }
  };
  int step = 0;
  if constexpr (Waiting > 0) {
    const int overlapped = S == 1 ? 0 : steps < M * P ? steps : M * P; // otherwise the registers do not suffice
    for (; step < overlapped; ++step) {
      add_step(step);
      add_waiting<Waiting>(sums, waiting_group, step);
    }
    for (int v = overlapped; v < M * P; ++v) {
      add_waiting<Waiting>(sums, waiting_group, v);
    }
  }
  // Without this, the loop is so short that its end, which the processor predicts wrongly, takes 3 % of the time.
#pragma GCC unroll 4
  for (; step < steps; ++step) {
    add_step(step);
  }
  repeat<M * P>([&](auto i) {
    constexpr int r = decltype(i)::value / P, p = decltype(i)::value % P;
    results[r][p] = acc[0][r][p];
    if constexpr (S == 2) {
      results[r][p] += acc[1][r][p];
    }
  });
}

// Computes the sums of a tile of a panel of x and P panels of w, for the first `groups` groups of rows. All groups use
// a group of sections of w before the next one, so that they find it in the first-level cache. Prefetches `lines` cache
// lines for each group of rows and of sections, from `ahead` on: a few at a time, because the multiplications wait for
// their operands while many other lines are under way.
template <FloatType Type, int P>
void add_panel_sums(
    const float* x, const float* w, int k, int groups, PanelSums<P>& sums, const char* ahead, ptrdiff_t lines) {
  const ptrdiff_t stride = section_group_stride(k);
  const ptrdiff_t panel = static_cast<ptrdiff_t>(panel_size(k));
  const int steps = steps_of(k);
  WaitingSums waiting = {};
  for (int i = 0; i < kSectionGroups; ++i, x += stride, w += stride) {
    const int level = __builtin_ctz(~static_cast<unsigned>(i)); // that these sums complete
    for (int group = 0; group < groups; ++group) {
      for (ptrdiff_t line = 0; line < lines; ++line, ahead += kCacheLine) {
        prefetch(ahead);
      }
      const auto run = [&](auto count) {
        panel_sections<Type, P, decltype(count)::value - 1>(
            x + group * kPanelGroupRows, w, panel, steps, sums.levels[level][group], sums, waiting.group);
      };
      call_with_constant<kPanelLevels + 1>(waiting.count + 1, run);
      waiting = {level, group};
    }
  }
  add_waiting(sums, waiting);
}

// Where a tile writes its results.
struct PanelResults {
  char* y;
  FloatType type;
  ptrdiff_t ldy;

  char* at(ptrdiff_t row, ptrdiff_t column) const {
    return y + (row * ldy + column) * (type == FloatType::float32 ? 4 : 2);
  }

  // Calls run(line) for the cache lines of these rows and columns.
  template <typename Run>
  void for_lines(int rows, int columns, Run&& run) const {
    for (int r = 0; r < rows; ++r) {
      for (const char* line = at(r, 0); line < at(r, columns); line += kCacheLine) {
        run(line);
      }
    }
  }

  // The results from this row and column on.
  PanelResults from(ptrdiff_t row, ptrdiff_t column) const { return {at(row, column), type, ldy}; }
};

// with_type() for the types of results.
template <typename Run>
inline void with_result_type(FloatType type, Run&& run) {
  with_type<FloatType::bfloat16, FloatType::float16, FloatType::float32>(type, run);
}

// Writes the first `count` lanes of a vector of results.
template <FloatType Type>
inline void write_results(Floats total, char* to, int count) {
  if constexpr (Type == FloatType::float32) {
    auto* floats = static_cast<float*>(static_cast<void*>(to));
    store_lanes(total, floats, count);
  } else {
    auto* halves = static_cast<uint16_t*>(static_cast<void*>(to));
    count == kLanes ? Elements<Type>::store_all(total, halves) : Elements<Type>::store_first(total, halves, count);
  }
}

// Writes the first `rows` rows and `columns` columns of a tile.
template <FloatType Type, int P>
void write_tile(const PanelSums<P>& sums, int rows, int columns, const PanelResults& y) {
  y.for_lines(rows, columns, [](const char* line) { __builtin_prefetch(line, /*for writing*/ 1); });
  for (int r = 0; r < rows; ++r) {
    const Floats* totals = sums.levels[kPanelLevels][r / kPanelGroupRows][r % kPanelGroupRows];
    for (int p = 0; p < P; ++p) {
      const int count = columns - p * kLanes < kLanes ? columns - p * kLanes : kLanes;
      write_results<Type>(totals[p], y.at(r, p * kLanes), count);
    }
  }
}

// Computes a tile of up to kLanes rows and P * kLanes columns of results, one column for each row of P panels of w.
// Writes the first `rows` rows and `columns` columns of the tile: less than the full tile at the edges of y.
template <FloatType Type, int P>
void panel_tile(const float* x, const float* w, int k, int rows, int columns, const PanelResults& y, const char* ahead,
    ptrdiff_t lines) {
  // Otherwise, stores to memory that is not in the cache delay the next tile.
  y.for_lines(rows, columns, [](const char* line) { prefetch(line); });
  PanelSums<P> sums;
  add_panel_sums<Type, P>(x, w, k, (rows + kPanelGroupRows - 1) / kPanelGroupRows, sums, ahead, lines);
  with_result_type(y.type, [&](auto type) { write_tile<decltype(type)::value>(sums, rows, columns, y); });
}

template <FloatType Type>
void multiply_panels_of(const float* x, int m, const float* w, int n, int k, const PanelResults& y, const char* ahead,
    ptrdiff_t ahead_bytes) {
  const ptrdiff_t size = static_cast<ptrdiff_t>(panel_size(k));
  constexpr int block = kPanelsTogether * kLanes;
  constexpr ptrdiff_t steps = kLanes / kSectionsTogether * kPanelGroups; // of a tile: see add_panel_sums()
  const ptrdiff_t tiles = ptrdiff_t{(n + block - 1) / block} * ((m + kLanes - 1) / kLanes);
  const ptrdiff_t lines = (ahead_bytes + tiles * steps * kCacheLine - 1) / (tiles * steps * kCacheLine);
  for (int column = 0; column < n; column += block) {
    const int columns = n - column < block ? n - column : block;
    call_with_constant<kPanelsTogether>((columns + kLanes - 1) / kLanes, [&](auto panels) {
      for (int row = 0; row < m; row += kLanes) {
        const int rows = m - row < kLanes ? m - row : kLanes;
        panel_tile<Type, decltype(panels)::value>(
            x + row / kLanes * size, w + column / kLanes * size, k, rows, columns, y.from(row, column), ahead, lines);
        ahead += lines * steps * kCacheLine;
      }
    });
  }
}

// with_type() for the types of panels.
template <typename Run>
inline void with_panel_type(FloatType type, Run&& run) {
  with_type<FloatType::bfloat16_pair, FloatType::float32>(type, run);
}

void multiply_panels(FloatType type, const float* x, int m, const float* w, int n, int k, void* y, FloatType y_type,
    ptrdiff_t ldy, const char* ahead, ptrdiff_t ahead_bytes) {
  const PanelResults results = {static_cast<char*>(y), y_type, ldy};
  with_panel_type(type, [&](auto constant) {
    multiply_panels_of<decltype(constant)::value>(x, m, w, n, k, results, ahead, ahead_bytes);
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
