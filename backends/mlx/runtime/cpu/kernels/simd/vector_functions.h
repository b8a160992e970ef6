// Functions of vectors: sums, products, SiLU, sigmoid, tanh, the exponentials of softmax, RMSNorm and rotary embedding.
// kernels.h says what each of them computes. Part of kernels.cpp.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// exp(x) = 2^n * exp(r): Cody and Waite's range reduction to |r| <= log(2) / 2, and the polynomial of Cephes' expf.
inline Floats exp(Floats x) {
  constexpr float kRounding = 12582912;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats highest = Floats{} + 88.72283f;
  const Floats lowest = Floats{} - 87.33654f;
  const Floats clamped = x < lowest ? lowest : x;
  const Floats rounded = multiply_add(clamped, broadcast(1.44269504f), broadcast(kRounding));
  const Floats n = rounded - kRounding;
  const Floats r = multiply_add(n, broadcast(2.12194440e-4f), multiply_add(n, broadcast(-0.693359375f), clamped));
  constexpr float kCoefficients[] = {
      1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  Floats p = Floats{} + 1.9875691500e-4f;
  for (const float c : kCoefficients) {
    p = multiply_add(p, r, broadcast(c));
  }
  const Floats mantissa = multiply_add(p, r * r, r) + 1;
  // Multiplies by 2^(n - 1) and then by 2. For n = 128, the factor 2^n would be infinite, although the result may be
  // finite.
  const Words half = ((Words)rounded << 23) + (126u << 23);
  const Floats y = mantissa * (Floats)half * 2;
  return x > highest ? Floats{} + __builtin_inff() : y;
}

// y[i] = function(x[i]) for i < count.
template <typename Function>
inline void map(const float* x, float* y, ptrdiff_t count, const Function& function) {
  ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = function(load<Floats>(x + i));
    __builtin_memcpy(y + i, &v, sizeof(v));
  }
  if (i < count) {
    const Floats v = function(load_partial<Floats>(x + i, static_cast<int>(count - i)));
    __builtin_memcpy(y + i, &v, (count - i) * sizeof(float));
  }
}

// y[i] = function(a[i], b[i]) for i < count.
template <typename Function>
inline void map(const float* a, const float* b, float* y, ptrdiff_t count, const Function& function) {
  ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    store(function(load<Floats>(a + i), load<Floats>(b + i)), y + i);
  }
  if (const int left = static_cast<int>(count - i); left > 0) {
    store_partial(function(load_partial<Floats>(a + i, left), load_partial<Floats>(b + i, left)), y + i, left);
  }
}

void add(const float* a, const float* b, float* y, ptrdiff_t count) {
  map(a, b, y, count, [](Floats a, Floats b) { return a + b; });
}

void subtract(const float* a, const float* b, float* y, ptrdiff_t count) {
  map(a, b, y, count, [](Floats a, Floats b) { return a - b; });
}

void multiply(const float* a, const float* b, float* y, ptrdiff_t count) {
  map(a, b, y, count, [](Floats a, Floats b) { return a * b; });
}

void maximum(const float* a, const float* b, float* y, ptrdiff_t count) {
  map(a, b, y, count, [](Floats a, Floats b) { return a > b || a != a ? a : b; });
}

void silu(const float* x, float* y, ptrdiff_t count) {
  map(x, y, count, [](Floats v) { return v / (1 + exp(-v)); });
}

void sigmoid(const float* x, float* y, ptrdiff_t count) {
  map(x, y, count, [](Floats v) { return 1 / (1 + exp(-v)); });
}

// Near 0 with the polynomial of Cephes' tanhf, elsewhere as 1 - 2 / (exp(2 |x|) + 1) with the sign of x.
void tanh(const float* x, float* y, ptrdiff_t count) {
  map(x, y, count, [](Floats v) {
    constexpr float kCoefficients[] = {2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f, -3.33332819422e-1f};
    const Floats square = v * v;
    Floats p = Floats{} - 5.70498872745e-3f;
    for (const float c : kCoefficients) {
      p = multiply_add(p, square, broadcast(c));
    }
    const Floats near_zero = v * multiply_add(square, p, broadcast(1));
    const Floats magnitude = v < 0 ? -v : v;
    const Floats far = 1 - 2 / (exp(2 * magnitude) + 1);
    return magnitude < 0.625f ? near_zero : v < 0 ? -far : far;
  });
}

float softmax_numerators(float* x, ptrdiff_t count, float scale) {
  const ptrdiff_t whole = count / kLanes * kLanes;
  Floats highest = Floats{} - __builtin_inff();
  for (ptrdiff_t i = 0; i < whole; i += kLanes) {
    const Floats v = scale * load<Floats>(x + i);
    store(v, x + i);
    highest = v > highest ? v : highest;
  }
  float maximum = highest[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    maximum = highest[lane] > maximum ? highest[lane] : maximum;
  }
  for (ptrdiff_t i = whole; i < count; ++i) {
    x[i] *= scale;
    maximum = x[i] > maximum ? x[i] : maximum;
  }
  const auto exp_below_maximum = [&](Floats v) {
    const Floats difference = v - maximum;
    return difference < -87.33654f ? Floats{} : exp(difference);
  };
  Floats sums = {};
  for (ptrdiff_t i = 0; i < whole; i += kLanes) {
    const Floats v = exp_below_maximum(load<Floats>(x + i));
    __builtin_memcpy(x + i, &v, sizeof(v));
    sums += v;
  }
  if (const int left = static_cast<int>(count - whole); left > 0) {
    store_partial(exp_below_maximum(load_partial<Floats>(x + whole, left)), x + whole, left);
    sums += load_partial<Floats>(x + whole, left);
  }
  return sum(sums);
}

void rms_norm(const float* x, const float* weight, float* y, ptrdiff_t rows, ptrdiff_t width, float eps) {
  for (ptrdiff_t row = 0; row < rows; ++row, x += width, y += width) {
    Floats squares[4] = {};
    const auto add_square = [&](int u, Floats v) { squares[u] = multiply_add(v, v, squares[u]); };
    ptrdiff_t i = 0;
    for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
      for (int u = 0; u < 4; ++u) {
        add_square(u, load<Floats>(x + i + u * kLanes));
      }
    }
    for (int u = 0; i < width; ++u, i += kLanes) {
      add_square(u, load_lanes(x + i, width - i < kLanes ? static_cast<int>(width - i) : kLanes));
    }
    const float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    const float factor = 1 / __builtin_sqrtf(total / static_cast<float>(width) + eps);
    for (ptrdiff_t j = 0; j < width; ++j) {
      y[j] = weight ? x[j] * factor * weight[j] : x[j] * factor;
    }
  }
}

void rotate(const float* x, const float* cosines, const float* sines, float* y, ptrdiff_t half) {
  for (ptrdiff_t i = 0; i < half; i += kLanes) {
    const int count = half - i < kLanes ? static_cast<int>(half - i) : kLanes;
    const Floats a = load_lanes(x + i, count), b = load_lanes(x + half + i, count);
    const Floats cosine = load_lanes(cosines + i, count), sine = load_lanes(sines + i, count);
    store_lanes(multiply_add(-b, sine, a * cosine), y + i, count);
    store_lanes(multiply_add(b, cosine, a * sine), y + half + i, count);
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
