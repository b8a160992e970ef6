#include "product_text.h"

#include "../error.h"
#include "lazy.h"

namespace executorch_mlx::gpu {

namespace {

// The steps in which a warp reads a row. Each thread keeps kAhead loads of a row under way. The first kEarly of them
// are issued before x is ready, so that the block waits for the weights and for x at the same time.
std::string steps_of_warp(int max_ahead) {
  return str("  constexpr int kMaxAhead = ", max_ahead, ";", R"(
  constexpr int kWide = 16 / sizeof(T);
  constexpr int kSteps = (kDepth + 32 * kWide - 1) / (32 * kWide);
  constexpr int kAhead = kSteps < kMaxAhead ? kSteps : kMaxAhead;
  constexpr int kEarly = kAhead < kMaxEarly ? kAhead : kMaxEarly;
  const uint32_t lane = threadIdx.x % 32;
)");
}

// The row of each matrix with which a warp begins, if there is one vector.
const std::string kRowOfWarp = steps_of_warp(6) + R"(
  const uint32_t warps = gridDim.x * (kThreads / 32);
  uint32_t row = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  Row w[kCount];
  rows_of(row, w);
  uint4 weights[kCount][kAhead];
  const auto load = [&](int step, int slot) {
    const int i = (step * 32 + lane) * kWide;
    #pragma unroll
    for (int m = 0; i < kDepth && m < kCount; ++m) {
      weights[m][slot] = *reinterpret_cast<const uint4*>(w[m] + i);
    }
  };
)";

// The kRowsPerWarp rows of a warp, if there are several vectors, which share the loads of the rows. Several rows share
// the loads of the vectors.
const std::string kRowsOfWarp = steps_of_warp(4) + R"(
  const uint32_t first_row = (blockIdx.x * (kThreads / 32) + threadIdx.x / 32) * kRowsPerWarp;
  Row w[kRowsPerWarp][kCount];
  #pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    rows_of(first_row + r, w[r]);
  }
  uint4 weights[kRowsPerWarp][kCount][kAhead];
  const auto load = [&](int step, int slot) {
    const int i = (step * 32 + lane) * kWide;
    #pragma unroll
    for (int r = 0; i < kDepth && r < kRowsPerWarp; ++r) {
      #pragma unroll
      for (int m = 0; m < kCount; ++m) {
        weights[r][m][slot] = *reinterpret_cast<const uint4*>(w[r][m] + i);
      }
    }
  };
)";

// The rows of a tile. In each step, the block multiplies kStep elements of its kTileRows rows, 4 * kWide in each warp.
// A thread loads elements of two rows.
const std::string kRowsOfTile = str("  constexpr int kTileRows = ", kTileRows, ";", R"(
  constexpr int kWide = 16 / sizeof(T);
  constexpr int kWarps = kThreads / 32;
  constexpr int kStep = 4 * kWide * kWarps;
  constexpr int kSteps = (kDepth + kStep - 1) / kStep;
  constexpr int kMaxAhead = kCount == 1 ? 6 : 3;
  constexpr int kAhead = kSteps < kMaxAhead ? kSteps : kMaxAhead;
  constexpr int kEarly = kAhead < kMaxEarly ? kAhead : kMaxEarly;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4;
  const int own = (warp * 4 + lane % 4) * kWide;
  Row w[2][kCount];
  rows_of(blockIdx.x * kTileRows + row, w[0]);
  rows_of(blockIdx.x * kTileRows + row + 8, w[1]);
  uint4 weights[2][kCount][kAhead];
  const auto load = [&](int step, int slot) {
    const int i = step * kStep + own;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      #pragma unroll
      for (int m = 0; m < kCount; ++m) {
        weights[half][m][slot] =
            i < kDepth ? *reinterpret_cast<const uint4*>(w[half][m] + i) : uint4{0, 0, 0, 0};
      }
    }
  };
)");

const std::string kLoadEarly = R"(
  #pragma unroll
  for (int step = 0; step < kEarly; ++step) {
    load(step, step);
  }
  wait_for_inputs();
)";

const std::string kLoadOthers = R"(
  #pragma unroll
  for (int step = kEarly; step < kAhead; ++step) {
    load(step, step);
  }
)";

// Reads the weights of a norm into the threads of a block. This is done before the vector is ready, because the weights
// are not in the L2 cache.
const std::string kReadNorm = R"(
  constexpr int kParts = (kDepth / kWide + kThreads - 1) / kThreads;  // of the vector in each thread
  uint4 factors[kParts];
  #pragma unroll
  for (int part = 0; kNorm && part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    if (kHasAlignedNorm && i < kDepth) {
      factors[part] = *reinterpret_cast<const uint4*>(norm + i);
    }
    #pragma unroll
    for (int j = 0; !kHasAlignedNorm && i < kDepth && j < kWide; ++j) {
      reinterpret_cast<T*>(&factors[part])[j] = norm[i + j];
    }
  }
)";

// Reads a vector into the `parts` of the threads of a block.
const std::string kReadVector = R"(
  uint4 parts[kParts];
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    parts[part] = i < kDepth ? *reinterpret_cast<const uint4*>(vector + i) : uint4{0, 0, 0, 0};
  }
)";

// Replaces a vector in `parts` by its RMSNorm with the weights `factors`.
const std::string kNormalize = str(R"(
  float squares = 0.0f;
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    #pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const float value = static_cast<float>(reinterpret_cast<const T*>(&parts[part])[j]);
      squares += value * value;
    }
  }
)",
    kSumSquares, R"(
  const float scale = rsqrtf(squares / kDepth + __int_as_float(kEps));
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    #pragma unroll
    for (int j = 0; i < kDepth && j < kWide; ++j) {
      T& value = reinterpret_cast<T*>(&parts[part])[j];
      value = static_cast<T>(static_cast<float>(value) * scale);
      const T factor = reinterpret_cast<const T*>(&factors[part])[j];
      value = static_cast<T>(static_cast<float>(factor) * static_cast<float>(value));
    }
  }
)");

// Writes a vector from `parts` to `to`.
const std::string kWriteVector = R"(
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const int i = (part * kThreads + threadIdx.x) * kWide;
    if (i < kDepth) {
      *reinterpret_cast<uint4*>(to + i) = parts[part];
    }
  }
)";

// The products of one vector with the rows of a warp, one after the other. While a thread multiplies the last elements
// of a row, it loads the first ones of the next row. Each lane has a part of every sum. The parts are added in pairs of
// lanes, first of those that are 16 apart.
const std::string kSumsOfRows = R"(
  for (bool has_next = true; has_next; row += warps) {
    has_next = row + warps < kRows;
    const float summand = lane == 0 ? summand_of(row, 0) : 0.0f;
    float sums[kCount], products[kCount];
    #pragma unroll
    for (int m = 0; m < kCount; ++m) {
      sums[m] = 0.0f;
    }
    #pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int slot = step % kAhead;
      uint4 now[kCount];
      #pragma unroll
      for (int m = 0; m < kCount; ++m) {
        now[m] = weights[m][slot];
      }
      if (step + kAhead == kSteps) {
        rows_of(row + warps, w);
      }
      if (step + kAhead < kSteps) {
        load(step + kAhead, slot);
      } else if (has_next) {
        load(slot, slot);
      }
      const int at = (step * 32 + lane) * kWide;
      if (at < kDepth) {
        const uint4 values = *reinterpret_cast<const uint4*>(vectors + at);
        #pragma unroll
        for (int m = 0; m < kCount; ++m) {
          #pragma unroll
          for (int j = 0; j < kWide; ++j) {
            sums[m] += static_cast<float>(reinterpret_cast<const T*>(&values)[j]) *
                static_cast<float>(reinterpret_cast<const T*>(&now[m])[j]);
          }
        }
      }
    }
    #pragma unroll
    for (int m = 0; m < kCount; ++m) {
      #pragma unroll
      for (int other = 16; other > 0; other /= 2) {
        sums[m] += __shfl_xor_sync(0xFFFFFFFFu, sums[m], other);
      }
      products[m] = static_cast<float>(static_cast<T>(sums[m]));
    }
    if (lane == 0) {
      finish(row, 0, products, summand);
    }
  }
)";

// Adds up the products of several vectors with the rows of the warp, in the same order. Element i of vector v is at
// vectors[v * kDepth + i]. Each lane of a pair keeps the sums of half of the vectors, and sends the parts of the
// others.
const std::string kSumsOfWarp = R"(
  constexpr int kPlaces = kVectors > 4 ? 8 : kVectors > 2 ? 4 : kVectors;  // of vectors: a power of two
  float sums[kRowsPerWarp][kCount][kPlaces];
  #pragma unroll
  for (int i = 0; i < kRowsPerWarp * kCount * kPlaces; ++i) {
    sums[i / kPlaces / kCount][i / kPlaces % kCount][i % kPlaces] = 0.0f;
  }
  const int vector_of_lane = lane / (32 / kPlaces);
  const bool is_first_of_vector = lane % (32 / kPlaces) == 0 && vector_of_lane < kVectors;
  float summands[kRowsPerWarp];
  #pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    summands[r] = is_first_of_vector ? summand_of(first_row + r, vector_of_lane) : 0.0f;
  }
  constexpr int kRounds = (kSteps + kAhead - 1) / kAhead;
  #pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    #pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      const int step = round * kAhead + slot;
      uint4 now[kRowsPerWarp][kCount];
      #pragma unroll
      for (int i = 0; i < kRowsPerWarp * kCount; ++i) {
        now[i / kCount][i % kCount] = weights[i / kCount][i % kCount][slot];
      }
      if (step + kAhead < kSteps) {
        load(step + kAhead, slot);
      }
      const int at = (step * 32 + lane) * kWide;
      #pragma unroll
      for (int v = 0; at < kDepth && v < kVectors; ++v) {
        const uint4 values = *reinterpret_cast<const uint4*>(vectors + v * kDepth + at);
        #pragma unroll
        for (int i = 0; i < kRowsPerWarp * kCount; ++i) {
          #pragma unroll
          for (int j = 0; j < kWide; ++j) {
            sums[i / kCount][i % kCount][v] += static_cast<float>(reinterpret_cast<const T*>(&values)[j]) *
                static_cast<float>(reinterpret_cast<const T*>(&now[i / kCount][i % kCount])[j]);
          }
        }
      }
    }
  }
  #pragma unroll
  for (int r = 0; r < kRowsPerWarp; ++r) {
    float products[kCount];
    #pragma unroll
    for (int m = 0; m < kCount; ++m) {
      float (&parts)[kPlaces] = sums[r][m];
      #pragma unroll
      for (int other = 16; other > 0; other /= 2) {
        const int kept = kPlaces * other / 32;
        if (kept == 0) {
          parts[0] += __shfl_xor_sync(0xFFFFFFFFu, parts[0], other);
        }
        #pragma unroll
        for (int v = 0; v < kPlaces / 2; ++v) {
          if (v < kept) {
            const float lower = parts[v], upper = parts[v + kept];
            const bool keeps_upper = lane & other;
            parts[v] = (keeps_upper ? upper : lower) +
                __shfl_xor_sync(0xFFFFFFFFu, keeps_upper ? lower : upper, other);
          }
        }
      }
      products[m] = static_cast<float>(static_cast<T>(parts[0]));
    }
    if (is_first_of_vector) {
      finish(first_row + r, vector_of_lane, products, summands[r]);
    }
  }
)";

// sums [16 rows, 8 vectors] += a [16 rows, 16] @ b [16, 8 vectors], whose elements lie in the registers of the warp.
const std::string kMultiplyTiles = R"(
  const auto multiply_add = [](float (&sums)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                               uint32_t b1) {
    if constexpr (kIsBfloat16) {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    } else {
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
          : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    }
  };
)";

// Adds up the products of the vectors with the rows of the tile. The Tensor Cores multiply 16 rows of 16 elements by 8
// vectors, and expect certain elements in each thread. Which elements of the rows these are does not matter, as long as
// those of the vectors are the same: a thread has eight elements side by side, for two multiplications. It loads those
// of the vectors one step ahead.
const std::string kSumsOfTile = R"(
  constexpr int kGroups = (kVectors + 7) / 8;  // of vectors
  constexpr int kSums = kCount * kGroups * 4;
  __shared__ float sums_of_warp[kWarps][kCount][kVectors][kTileRows];
  float sums[kCount][kGroups][4];
  #pragma unroll
  for (int i = 0; i < kSums; ++i) {
    sums[i / 4 / kGroups][i / 4 % kGroups][i % 4] = 0.0f;
  }
  uint4 next[kGroups];
  const auto load_vectors = [&](int step) {
    const int i = step * kStep + own;
    #pragma unroll
    for (int group = 0; group < kGroups; ++group) {
      const int v = group * 8 + row;
      next[group] = i < kDepth && v < kVectors ? *reinterpret_cast<const uint4*>(vectors + v * kDepth + i)
                                               : uint4{0, 0, 0, 0};
    }
  };
  load_vectors(0);
  constexpr int kRounds = (kSteps + kAhead - 1) / kAhead;
  #pragma unroll 1
  for (int round = 0; round < kRounds; ++round) {
    #pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      const int step = round * kAhead + slot;
      uint4 low[kCount], high[kCount], values[kGroups];
      #pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        values[group] = next[group];
      }
      load_vectors(step + 1);
      #pragma unroll
      for (int m = 0; m < kCount; ++m) {
        low[m] = weights[0][m][slot];
        high[m] = weights[1][m][slot];
      }
      if (step + kAhead < kSteps) {
        load(step + kAhead, slot);
      }
      #pragma unroll
      for (int group = 0; step < kSteps && group < kGroups; ++group) {
        const uint4 x = values[group];
        #pragma unroll
        for (int m = 0; m < kCount; ++m) {
          multiply_add(sums[m][group], low[m].x, high[m].x, low[m].y, high[m].y, x.x, x.y);
          multiply_add(sums[m][group], low[m].z, high[m].z, low[m].w, high[m].w, x.z, x.w);
        }
      }
    }
  }
  #pragma unroll
  for (int i = 0; i < kSums; ++i) {
    const int m = i / 4 / kGroups, group = i / 4 % kGroups, place = i % 4;
    const int v = group * 8 + lane % 4 * 2 + place % 2;
    if (v < kVectors) {
      sums_of_warp[warp][m][v][row + place / 2 * 8] = sums[m][group][place];
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTileRows * kVectors; i += kThreads) {
    const int r = i % kTileRows, v = i / kTileRows;
    float products[kCount];
    #pragma unroll
    for (int m = 0; m < kCount; ++m) {
      float sum = 0.0f;
      #pragma unroll
      for (int other = 0; other < kWarps; ++other) {
        sum += sums_of_warp[other][m][v][r];
      }
      products[m] = static_cast<float>(static_cast<T>(sum));
    }
    finish(blockIdx.x * kTileRows + r, v, products, summand_of(blockIdx.x * kTileRows + r, v));
  }
)";

} // namespace

std::string product_text(ProductMethod method, const std::string& definitions) {
  const std::string row = "  using Row = const T*;\n";
  const std::string several = kLoadEarly + "  const T* const vectors = x;\n" + kLoadOthers;
  switch (method) {
    case ProductMethod::single:
      return row + definitions + kRowOfWarp + single_vector_text(kLoadEarly, kLoadOthers, "") + kSumsOfRows;
    case ProductMethod::few:
      return row + definitions + kRowsOfWarp + several + kSumsOfWarp;
    default:
      return row + definitions + kRowsOfTile + several + kMultiplyTiles + kSumsOfTile;
  }
}

std::string row_text(const std::string& matrix, bool is_quantized) {
  return is_quantized ? str("Row{", matrix, " + begin * kBits / 32, ", matrix, "_scales + begin / kGroupSize, ", matrix,
                            "_biases + begin / kGroupSize}")
                      : matrix + " + begin";
}

std::string single_vector_text(
    const std::string& load_early, const std::string& load_others, const std::string& before_write) {
  return kReadNorm + load_early + R"(
  __shared__ __align__(16) T vectors[kDepth];
  const T* const vector = x;
  T* const to = vectors;
)" + kReadVector +
      load_others + "  if (kNorm) {" + kNormalize + "  }\n" + before_write + kWriteVector + "  __syncthreads();\n";
}

std::string multiply_tiles_text() { return kMultiplyTiles; }

const char* product_attributes(ProductMethod method) {
  return method == ProductMethod::in_tiles ? "__launch_bounds__(kThreads, 2)" : "";
}

std::string norm_text() {
  return R"(
  constexpr int kWide = 16 / sizeof(T);
  const T* const vector = x + blockIdx.x * kDepth;
  T* const to = y + blockIdx.x * kDepth;
)" + kReadNorm +
      "  wait_for_inputs();\n" + kReadVector + kNormalize + kWriteVector;
}

} // namespace executorch_mlx::gpu
