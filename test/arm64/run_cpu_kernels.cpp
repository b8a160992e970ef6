// For test_arm64_kernels.py: runs products and the sampler with each instruction set that this processor supports.
//
// Prints a line for each product: the instruction set, the name of the product, a hash of the bits of the results,
// whether each row has the same bits alone and among others, and whether the results are near those in double
// precision. Then prints a line for each instruction set with the tokens of 1,000 seeds.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "instruction_set.h"
#include "matmul.h"
#include "sample.h"

namespace {

using executorch_mlx::FloatType;
namespace kernel = executorch_mlx::kernel;

constexpr int kRows = 15;

// The same numbers on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint32_t word() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 32);
  }

  float number() { return static_cast<float>(static_cast<int32_t>(word())) * 0x1p-31f; } // in [-1, 1)

 private:
  uint64_t state_;
};

// A float16 or bfloat16 number in [-1, -1/2] or [1/2, 1], and its value.
uint16_t half(Random& random, FloatType type) {
  const uint32_t word = random.word();
  const uint32_t sign = word >> 31 << 15;
  return static_cast<uint16_t>(
      type == FloatType::float16 ? sign | 0x3800u | (word & 0x3ffu) : sign | 0x3f00u | (word & 0x7fu));
}

double value_of(const void* data, FloatType type, size_t i) {
  if (type == FloatType::float32) {
    return static_cast<const float*>(data)[i];
  }
  const uint32_t bits = static_cast<const uint16_t*>(data)[i];
  const int mantissa_bits = type == FloatType::float16 ? 10 : 7, bias = type == FloatType::float16 ? 15 : 127;
  const int exponent = static_cast<int>(bits >> mantissa_bits & (type == FloatType::float16 ? 31 : 255)) - bias;
  const double magnitude =
      std::ldexp(1 + (bits & ((1 << mantissa_bits) - 1)) * std::ldexp(1, -mantissa_bits), exponent);
  return bits >> 15 ? -magnitude : magnitude;
}

// `count` numbers of `type`.
std::vector<uint8_t> numbers(Random& random, FloatType type, size_t count) {
  std::vector<uint8_t> result(count * 4);
  for (size_t i = 0; i < count; ++i) {
    if (type == FloatType::float32) {
      const float x = random.number();
      std::memcpy(&result[4 * i], &x, 4);
    } else {
      const uint16_t x = half(random, type);
      std::memcpy(&result[2 * i], &x, 2);
    }
  }
  return result;
}

uint64_t hash_of(const std::vector<float>& y) {
  uint64_t hash = 14695981039346656037u;
  for (const float value : y) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    hash = (hash ^ bits) * 1099511628211u;
  }
  return hash;
}

// Computes `rows` rows of a product, from row `first` on.
using Product = std::function<void(int first, int rows, float* y)>;

void report(
    const std::string& name, int n, const Product& product, const std::vector<double>& expected, double tolerance) {
  std::vector<float> y(kRows * n), parts(kRows * n);
  product(0, kRows, y.data());
  bool is_same = true;
  for (const int length : {1, 2, 4, 7}) {
    for (int row = 0; row < kRows; row += length) {
      product(row, std::min(length, kRows - row), parts.data() + row * n);
    }
    is_same &= std::memcmp(y.data(), parts.data(), y.size() * sizeof(float)) == 0;
  }
  bool is_near = true;
  for (size_t i = 0; i < y.size(); ++i) {
    is_near &= std::abs(y[i] - expected[i]) <= tolerance;
  }
  std::printf("%s %s %016llx %d %d\n", kernel::instruction_set(), name.c_str(),
      static_cast<unsigned long long>(hash_of(y)), is_same, is_near);
}

// y = x @ w.T in double precision.
std::vector<double> product_of(
    const std::function<double(int, int)>& x, const std::function<double(int, int)>& w, int n, int k) {
  std::vector<double> y(kRows * n);
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < n; ++c) {
      for (int i = 0; i < k; ++i) {
        y[r * n + c] += x(r, i) * w(c, i);
      }
    }
  }
  return y;
}

void report_quantized(int bits, int group_size, FloatType x_type) {
  constexpr int n = 83;
  const int k = 3 * 128, groups = k / group_size;
  Random random(bits * 1000 + group_size);
  std::vector<uint32_t> w(n * k * bits / 32);
  for (auto& word : w) {
    word = random.word();
  }
  const auto scales = numbers(random, FloatType::float32, n * groups);
  const auto biases = numbers(random, FloatType::float32, n * groups);
  const auto x = numbers(random, x_type, kRows * k);
  const size_t x_size = x_type == FloatType::float32 ? 4 : 2;
  kernel::QuantizedMatmul matrix{.w = w.data(),
      .scales = scales.data(),
      .biases = biases.data(),
      .scale_type = FloatType::float32,
      .bits = bits,
      .group_size = group_size,
      .n = n,
      .k = k,
      .type = x_type};
  std::vector<float> panels(kernel::integer_panels_size(matrix) / sizeof(float));
  kernel::pack_integer_panels(matrix, panels.data());
  const auto expected = product_of([&](int r, int i) { return value_of(x.data(), x_type, r * k + i); },
      [&](int c, int i) {
        const uint32_t q = w[(c * k + i) * bits / 32] >> (i * bits % 32) & ((1u << bits) - 1);
        const int group = c * groups + i / group_size;
        return q * value_of(scales.data(), FloatType::float32, group) +
            value_of(biases.data(), FloatType::float32, group);
      },
      n, k);
  double largest = 0;
  for (const double y : expected) {
    largest = std::max(largest, std::abs(y));
  }
  const auto run = [&](const char* name, auto multiply, bool is_packed, double tolerance) {
    const Product product = [&](int first, int rows, float* y) {
      auto p = matrix;
      std::vector<uint16_t> halves(rows * n);
      p.x = x.data() + first * k * x_size;
      p.m = rows;
      p.y = x_size == 4 ? static_cast<void*>(y) : halves.data();
      p.integer_panels = is_packed ? panels.data() : nullptr;
      multiply(&p, 1);
      for (int i = 0; x_size == 2 && i < rows * n; ++i) {
        y[i] = static_cast<float>(value_of(halves.data(), x_type, i));
      }
    };
    std::ostringstream full;
    full << name << "_" << bits << "_" << group_size << "_" << static_cast<int>(x_type);
    report(full.str(), n, product, expected, tolerance * largest);
  };
  const double rounding = x_type == FloatType::float32 ? 1e-6 : x_type == FloatType::float16 ? 1e-3 : 1e-2;
  run("integers", kernel::int8_matmul, false, 2e-2);
  run("packed_integers", kernel::int8_matmul, true, 2e-2);
  run("wide_integers", kernel::integer_matmul, true, rounding);
  run("quantized", kernel::quantized_matmul, false, rounding);
}

void report_halves(FloatType type, FloatType x_type, int k) {
  constexpr int n = 37;
  Random random(k);
  const auto x = numbers(random, x_type, kRows * k), w = numbers(random, type, n * k);
  const size_t x_size = x_type == FloatType::float32 ? 4 : 2;
  const auto* elements = reinterpret_cast<const uint16_t*>(w.data());
  std::vector<float> panels(kernel::panels_size(type, n, k) / sizeof(float));
  if (!panels.empty()) {
    kernel::pack_panels(w.data(), type, n, k, panels.data());
  }
  const auto expected = product_of([&](int r, int i) { return value_of(x.data(), x_type, r * k + i); },
      [&](int c, int i) { return value_of(w.data(), type, c * k + i); }, n, k);
  const Product product = [&](int first, int rows, float* y) {
    const kernel::HalfMatmul p{x.data() + first * k * x_size, elements, type, k, 1, rows, n, k, y, x_type,
        FloatType::float32, rows % 2 == 0 && !panels.empty() ? panels.data() : nullptr};
    kernel::half_matmul(&p, 1);
  };
  std::ostringstream name;
  name << "halves_" << static_cast<int>(type) << "_" << static_cast<int>(x_type) << "_" << k;
  report(name.str(), n, product, expected, 1e-6 * k);
}

void print_tokens() {
  constexpr int kVocabulary = 4003, kSeeds = 1000;
  std::printf("%s tokens", kernel::instruction_set());
  for (int64_t seed = 0; seed < kSeeds; ++seed) {
    Random random(seed % 16);
    std::vector<float> logits(kVocabulary);
    for (auto& logit : logits) {
      const float x = random.number();
      logit = 12 * x * x * x;
    }
    constexpr float kTemperatures[] = {0.8f, 1.3f, 1.2f, 1.0f, 0.0f};
    const int setting = static_cast<int>(seed % 5);
    const float temperature = kTemperatures[setting], top_p = setting == 2 ? 0.95f : 1.0f;
    const float min_p = setting == 3 ? 0.001f : 0.0f;
    const int64_t top_k = setting == 1 ? 400 : 0, key = seed * 2654435761;
    int64_t token = -1;
    kernel::sample({logits.data(), FloatType::float32, 1, kVocabulary, {&temperature, false}, {&top_p, false},
        {&key, false}, {&top_k, false}, {&min_p, false}, &token});
    std::printf(" %lld", static_cast<long long>(token));
  }
  std::printf("\n");
}

} // namespace

int main() {
  std::istringstream names(kernel::instruction_sets());
  for (std::string name; std::getline(names >> std::ws, name, ',');) {
    kernel::use_instruction_set(name.c_str());
    for (const int bits : {4, 8}) {
      for (const int group_size : {32, 128}) {
        for (const auto type : {FloatType::float32, FloatType::float16, FloatType::bfloat16}) {
          report_quantized(bits, group_size, type);
        }
      }
    }
    for (const auto type : {FloatType::float16, FloatType::bfloat16}) {
      for (const auto x_type : {FloatType::float32, type}) {
        report_halves(type, x_type, 514);
        report_halves(type, x_type, 77);
      }
    }
    print_tokens();
  }
}
