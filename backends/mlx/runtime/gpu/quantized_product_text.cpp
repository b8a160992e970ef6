// The text of the kernels that multiply up to 32 vectors by the rows of quantized matrices.
#include "product_text.h"

namespace executorch_mlx::gpu {

namespace {

constexpr char kRow[] = R"(
  struct Row {
    const uint32_t* w;
    const T* scales;
    const T* biases;
  };
)";

// The tiles of a block: it begins with tile blockIdx.x, and goes on with every gridDim.x-th one. A tile has 16 rows:
// 16 of one matrix, or 8 of each of two. In each step, the block multiplies kStep elements of them, 4 * kLoaded in each
// warp. A thread loads elements of two rows.
constexpr char kTilesOfBlock[] = R"(
  constexpr int kWide = 16 / sizeof(T);  // elements of a vector in a load
  constexpr int kLoaded = 128 / kBits;  // elements of a row in a load
  constexpr int kUnits = kLoaded / kWide;
  constexpr int kWarps = kThreads / 32;
  constexpr int kTileRows = 16 / kCount;  // of each matrix
  constexpr uint32_t kTiles = (kRows + kTileRows - 1) / kTileRows;
  constexpr int kStep = 4 * kLoaded * kWarps;
  constexpr int kSteps = (kDepth + kStep - 1) / kStep;
  constexpr int kMaxAhead = kVectors > 8 ? 2 : 4;
  constexpr int kAhead = kSteps < kMaxAhead ? kSteps : kMaxAhead;
  constexpr int kRounds = (kSteps + kAhead - 1) / kAhead;
  constexpr bool kIsWhole = kDepth % (kAhead * kStep) == 0;
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int own = (warp * 4 + lane % 4) * kLoaded;
  Row rows[2];  // the thread's elements of the steps that are loaded next
  int first_step = 0;  // of these
  const auto start_tile = [&](uint32_t tile) {
    const uint32_t row = tile * kTileRows + lane / 4;
    Row found[kCount];
    rows_of(row, found);
    rows[0] = found[0];
    if (kCount == 1) {
      rows_of(row + 8, found);
    }
    rows[1] = found[kCount - 1];
    first_step = 0;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].w += own * kBits / 32;
      rows[half].scales += own / kGroupSize;
      rows[half].biases += own / kGroupSize;
    }
  };
  const auto go_on = [&] {
    first_step += kAhead;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      rows[half].w += kAhead * kStep * kBits / 32;
      rows[half].scales += kAhead * kStep / kGroupSize;
      rows[half].biases += kAhead * kStep / kGroupSize;
    }
  };
  uint4 words[2][kAhead];
  T scales[2][kAhead], biases[2][kAhead];
  const auto load = [&](int slot) {
    const bool fits = kIsWhole || (first_step + slot) * kStep + own < kDepth;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const auto& [w, scale, bias] = rows[half];
      words[half][slot] =
          fits ? *reinterpret_cast<const uint4*>(w + slot * kStep * kBits / 32) : uint4{0, 0, 0, 0};
      scales[half][slot] = fits ? scale[slot * kStep / kGroupSize] : T(0.0f);
      biases[half][slot] = fits ? bias[slot * kStep / kGroupSize] : T(0.0f);
    }
  };
  // The elements of a vector in the order of pairs below.
  const auto paired = [](const uint4& x) {
    const uint32_t b = kBits == 4 ? x.z : x.y, c = kBits == 4 ? x.y : x.z;
    return uint4{(x.x & 0xFFFFu) | b << 16, x.x >> 16 | (b & 0xFFFF0000u), (c & 0xFFFFu) | x.w << 16,
        c >> 16 | (x.w & 0xFFFF0000u)};
  };
  uint32_t tile = blockIdx.x;
  start_tile(tile);
)";

// Pairs the elements of a vector that is in shared memory.
constexpr char kPairVector[] = R"(
  #pragma unroll
  for (int part = 0; part < kParts; ++part) {
    parts[part] = paired(parts[part]);
  }
)";

constexpr char kLoadEarly[] = R"(
  #pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    load(slot);
  }
  wait_for_inputs();
)";

// Makes pairs of T from kWide integers of a row. An integer of 4 bits becomes the end of the number kBase, which is a
// power of two with a unit in the last place of 1. All but the last operation are exact. For 4 bits, a pair has
// elements i and i + 4; for 8 bits, i and i + 2.
constexpr char kUnpack[] = R"(
  const auto fused = [](uint32_t a, uint32_t b, uint32_t c) {  // a * b + c, for pairs
    uint32_t y;
    if constexpr (kIsBfloat16) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    } else {
      asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    }
    return y;
  };
  const auto pair_of = [](uint32_t x) { return x << 16 | x; };
  constexpr uint32_t kBase = kIsBfloat16 ? 0x43004300u : 0x64006400u;  // 128 or 1024
  constexpr uint32_t kMinusBase = kBase | 0x80008000u;
  // An instruction has one constant at most. With the base in a register, one instruction masks integers and adds it.
  const uint32_t base = kBase + static_cast<uint32_t>(reinterpret_cast<uint64_t>(x) >> 63);  // which adds 0
  constexpr uint32_t kMinusBases = kIsBfloat16 ? 0xC508C508u : 0xF440F440u;  // -17 * base
  constexpr uint32_t kOne = kIsBfloat16 ? 0x3F803F80u : 0x3C003C00u;
  constexpr uint32_t kSixteen = kIsBfloat16 ? 0x41804180u : 0x4C004C00u;
  const auto unpack = [&](uint32_t first, uint32_t second, uint32_t scale, uint32_t bias, uint32_t (&pairs)[4]) {
    #pragma unroll
    for (int p = 0; p < 4; ++p) {
      if constexpr (kBits == 4) {
        pairs[p] = fused((first >> 4 * p & 0x000F000Fu) | base, kOne, kMinusBase);
      } else {
        const uint32_t word = p < 2 ? first : second;
        const uint32_t low = (word >> p % 2 * 8 & 0x000F000Fu) | base;
        const uint32_t high = (word >> p % 2 * 8 + 4 & 0x000F000Fu) | base;
        pairs[p] = fused(fused(high, kSixteen, kMinusBases), kOne, low);
      }
      pairs[p] = fused(pairs[p], scale, bias);
    }
  };
)";

// Multiplies the tiles of the block by the vectors, and adds up the sums of its warps. While a thread multiplies the
// last elements of a tile, it loads the first ones of the next tile. It loads the elements of the vectors one unit
// ahead.
constexpr char kSumsOfTiles[] = R"(
  constexpr int kGroups = (kVectors + 7) / 8;  // of vectors
  constexpr int kResults = kTileRows * kVectors;
  constexpr int kBuffers = kVectors > 8 ? 1 : 2;
  __shared__ float sums_of_warp[kBuffers][kWarps][kVectors][16];
  for (int count = 0; tile < kTiles; ++count) {
    const uint32_t first_row = tile * kTileRows;
    tile += gridDim.x;
    float summand = 0.0f;
    if (threadIdx.x < kResults) {
      summand = summand_of(first_row + threadIdx.x % kTileRows, threadIdx.x / kTileRows);
    }
    float sums[kGroups][4];
    #pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      sums[i / 4][i % 4] = 0.0f;
    }
    uint4 next[kGroups];
    const auto load_vectors = [&](int step, int unit) {
      const int i = step * kStep + own + unit * kWide;
      #pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        const int v = group * 8 + lane / 4;
        next[group] = i < kDepth && v < kVectors ? *reinterpret_cast<const uint4*>(vectors + v * kDepth + i)
                                                 : uint4{0, 0, 0, 0};
      }
    };
    load_vectors(0, 0);
    #pragma unroll 1
    for (int round = 0; round < kRounds; ++round) {
      const bool is_last = round + 1 == kRounds;
      const bool loads_next = !is_last || tile < kTiles;
      if (!is_last) {
        go_on();
      } else if (tile < kTiles) {
        start_tile(tile);
      }
      #pragma unroll
      for (int slot = 0; slot < kAhead; ++slot) {
        const int step = round * kAhead + slot;
        uint4 now[2];
        uint32_t scale[2], bias[2];
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          now[half] = words[half][slot];
          scale[half] = pair_of(scales[half][slot].bits);
          bias[half] = pair_of(biases[half][slot].bits);
        }
        if (loads_next) {
          load(slot);
        }
        #pragma unroll
        for (int unit = 0; step < kSteps && unit < kUnits; ++unit) {
          uint4 values[kGroups];
          #pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            values[group] = next[group];
          }
          unit + 1 < kUnits ? load_vectors(step, unit + 1) : load_vectors(step + 1, 0);
          uint32_t low[4], high[4];
          const auto unpack_row = [&](int half, uint32_t (&pairs)[4]) {
            const uint4 w = now[half];
            if constexpr (kBits == 4) {
              unpack(unit == 0 ? w.x : unit == 1 ? w.y : unit == 2 ? w.z : w.w, 0, scale[half], bias[half], pairs);
            } else {
              unpack(unit == 0 ? w.x : w.z, unit == 0 ? w.y : w.w, scale[half], bias[half], pairs);
            }
          };
          unpack_row(0, low);
          unpack_row(1, high);
          #pragma unroll
          for (int group = 0; group < kGroups; ++group) {
            const uint4 pairs = kVectors == 1 ? values[group] : paired(values[group]);
            multiply_add(sums[group], low[0], high[0], low[1], high[1], pairs.x, pairs.y);
            multiply_add(sums[group], low[2], high[2], low[3], high[3], pairs.z, pairs.w);
          }
        }
      }
    }
    auto& buffer = sums_of_warp[count % kBuffers];
    #pragma unroll
    for (int i = 0; i < 4 * kGroups; ++i) {
      const int v = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (v < kVectors) {
        buffer[warp][v][lane / 4 + i % 4 / 2 * 8] = sums[i / 4][i % 4];
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kResults; i += kThreads) {
      const uint32_t r = i % kTileRows, v = i / kTileRows;
      float products[kCount];
      #pragma unroll
      for (int m = 0; m < kCount; ++m) {
        float sum = 0.0f;
        #pragma unroll
        for (int other = 0; other < kWarps; ++other) {
          sum += buffer[other][v][m * 8 + r];
        }
        products[m] = static_cast<float>(static_cast<T>(sum));
      }
      finish(first_row + r, v, products, i < kThreads ? summand : summand_of(first_row + r, v));
    }
    if (kBuffers == 1) {
      __syncthreads();
    }
  }
)";

} // namespace

std::string quantized_product_text(ProductMethod method, const std::string& definitions) {
  const std::string vectors = method == ProductMethod::single
      ? single_vector_text(kLoadEarly, "", kPairVector)
      : std::string(kLoadEarly) + "  const T* const vectors = x;\n";
  return kRow + definitions + kTilesOfBlock + vectors + kUnpack + multiply_tiles_text() + kSumsOfTiles;
}

} // namespace executorch_mlx::gpu
