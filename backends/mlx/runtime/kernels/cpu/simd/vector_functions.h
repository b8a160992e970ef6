// Functions of vectors: sums, products, SiLU, sigmoid, tanh, the exponentials of softmax, RMSNorm and rotary embedding.
// kernels.h says what each of them computes. Part of kernels.cpp.
#pragma once

#include "vector.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

// exp(x) = mantissa * 2^n. The exponent is n as the bits of a float have it, without the bias.
struct SplitExp {
  Floats mantissa;
  Words exponent;
};

// Cody and Waite's range reduction, exp(x) = 2^n * exp(r) with |r| <= log(2) / 2, and the polynomial of Cephes' expf.
inline SplitExp split_exp(Floats x) {
  constexpr float kRounding = 12582912; // 1.5 * 2^23: adding it rounds to an integer
  const Floats rounded = multiply_add(x, broadcast(1.44269504f), broadcast(kRounding));
  const Floats n = rounded - kRounding;
  const Floats r = multiply_add(n, broadcast(2.12194440e-4f), multiply_add(n, broadcast(-0.693359375f), x));
  constexpr float kCoefficients[] = {
      1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  Floats p = Floats{} + 1.9875691500e-4f;
  for (const float c : kCoefficients) {
    p = multiply_add(p, r, broadcast(c));
  }
  return {multiply_add(p, r * r, r) + 1, (Words)rounded << 23};
}

constexpr float kLowestExponent = -87.33654f; // exp() of lower numbers is not a normal number

inline Floats exp(Floats x) {
  const Floats highest = Floats{} + 88.72283f;
  const Floats lowest = Floats{} + kLowestExponent;
  const auto [mantissa, exponent] = split_exp(x < lowest ? lowest : x);
  // Multiplies by 2^(n - 1) and then by 2. For n = 128, the factor 2^n would be infinite, although the result may be
  // finite.
  const Floats y = mantissa * (Floats)(exponent + (126u << 23)) * 2;
  return x > highest ? Floats{} + __builtin_inff() : y;
}

// exp(x) of every float. Results below the smallest normal number are subnormal.
inline Floats exp_of_any(Floats x) {
  const Floats highest = Floats{} + 89;
  const Floats lowest = Floats{} - 104;
  const Floats v = x < lowest ? lowest : x > highest ? highest : x;
  const auto [mantissa, exponent] = split_exp(v);
  // 2^n may be no normal number: multiplies by 2^(n / 2) twice, or by 2^(n / 2) and 2^(n / 2 + 1) if n is odd.
  const Ints n = (Ints)exponent >> 23;
  const Ints half = n >> 1;
  return mantissa * (Floats)((half + 127) << 23) * (Floats)((n - half + 127) << 23);
}

// exp(x) for x <= 0, with 0 in place of results that are not normal numbers.
inline Floats exp_of_negative(Floats x) {
  const auto [mantissa, exponent] = split_exp(x);
  const Floats y = mantissa * (Floats)(exponent + (127u << 23));
  return x < kLowestExponent ? Floats{} : y;
}

// y[i] = function(x[i]) for i < count. x and y have elements of `type`.
template <typename Function>
inline void map(const void* x, FloatType type, void* y, ptrdiff_t count, const Function& function) {
  with_elements(type, [&](auto elements) {
    using E = decltype(elements);
    map_elements<E, E>(
        static_cast<const typename E::Element*>(x), static_cast<typename E::Element*>(y), count, function);
  });
}

// y[i] = function(a[i], b[i]) for i < count. a, b and y have elements of `type`.
template <typename Function>
inline void map(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count, const Function& function) {
  with_elements(type, [&](auto elements) {
    using E = decltype(elements);
    const auto* as = static_cast<const typename E::Element*>(a);
    const auto* bs = static_cast<const typename E::Element*>(b);
    auto* to = static_cast<typename E::Element*>(y);
    ptrdiff_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
      E::store_all(function(E::load_all(as + i), E::load_all(bs + i)), to + i);
    }
    if (const int left = static_cast<int>(count - i); left > 0) {
      E::store_first(function(E::load_first(as + i, left), E::load_first(bs + i, left)), to + i, left);
    }
  });
}

void add(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count) {
  map(a, b, type, y, count, [](Floats a, Floats b) { return a + b; });
}

void subtract(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count) {
  map(a, b, type, y, count, [](Floats a, Floats b) { return a - b; });
}

void multiply(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count) {
  map(a, b, type, y, count, [](Floats a, Floats b) { return a * b; });
}

inline Floats maximum_of(Floats a, Floats b) { return a > b || a != a ? a : b; }

void maximum(const void* a, const void* b, FloatType type, void* y, ptrdiff_t count) {
  map(a, b, type, y, count, [](Floats a, Floats b) { return maximum_of(a, b); });
}

void exponential(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) { return exp_of_any(v); });
}

inline Floats silu_of(Floats v) { return v / (1 + exp(-v)); }

void silu(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) { return silu_of(v); });
}

void sigmoid(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) { return 1 / (1 + exp(-v)); });
}

// Near 0 with the polynomial of Cephes' tanhf, elsewhere as 1 - 2 / (exp(2 |x|) + 1) with the sign of x.
void tanh(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) {
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

// The probability that a normal random number is greater than x >= 0: exp(-x^2 / 2) times a polynomial of
// t = 1 / (1 + 0.26 x), with a relative error of 7e-8, fitted to erfcx(x / sqrt(2)) / 2 for x <= 20.
inline Floats normal_tail(Floats x) {
  constexpr float kCoefficients[] = {-0.138844728f, 0.223235905f, -0.119416282f, 0.139751181f, 0.059791103f,
      0.10085988f, 0.103310511f, 0.103742443f, 0.0f};
  const Floats u = x > 20 ? Floats{} + 20 : x;
  const Floats t = 1 / multiply_add(u, broadcast(0.26f), broadcast(1));
  Floats p = Floats{} + 0.0275699366f;
  for (const float c : kCoefficients) {
    p = multiply_add(p, t, broadcast(c));
  }
  const Floats square = u * u;
  const Floats rounded_off = multiply_add(u, u, -square); // which exp() would make a relative error of 1e-6
  return p * exp_of_negative(-0.5f * square) * multiply_add(rounded_off, broadcast(-0.5f), broadcast(1));
}

inline Floats gelu_of(Floats v) {
  const Floats tail = normal_tail(v < 0 ? -v : v);
  return v * (v < 0 ? tail : 1 - tail);
}

void gelu(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) { return gelu_of(v); });
}

// 0.5 x (1 + tanh(z)) = x / (1 + exp(-2 z)), where z = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gelu_tanh_of(Floats v) {
  const Floats factor = multiply_add(v * v, broadcast(-2 * 0.7978845608f * 0.044715f), broadcast(-2 * 0.7978845608f));
  return v / (1 + exp(v * factor));
}

void gelu_tanh(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) { return gelu_tanh_of(v); });
}

// Near 0 as x times a polynomial of x^2, fitted for |x| <= 1.
void erf(const void* x, FloatType type, void* y, ptrdiff_t count) {
  map(x, type, y, count, [](Floats v) {
    constexpr float kCoefficients[] = {0.00491755083f, -0.0267113112f, 0.112801798f, -0.37612325f, 1.12837911f};
    const Floats square = v * v;
    Floats p = Floats{} + -0.00056314189f;
    for (const float c : kCoefficients) {
      p = multiply_add(p, square, broadcast(c));
    }
    const Floats magnitude = v < 0 ? -v : v;
    const Floats far = 1 - 2 * normal_tail(magnitude * 1.41421356f);
    return magnitude < 1 ? v * p : v < 0 ? -far : far;
  });
}

void scale(const float* x, float factor, FloatType type, void* y, ptrdiff_t count) {
  with_elements(type, [&](auto elements) {
    using E = decltype(elements);
    map_elements<Elements<FloatType::float32>, E>(
        x, static_cast<typename E::Element*>(y), count, [&](Floats v) { return v * factor; });
  });
}

bool has_nan(const float* x, ptrdiff_t count) {
  Ints found = {};
  ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Floats v = load<Floats>(x + i);
    found |= v != v;
  }
  bool result = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    result |= found[lane] != 0;
  }
  for (; i < count; ++i) {
    result |= x[i] != x[i];
  }
  return result;
}

bool hide_scores(float* x, const bool* mask, ptrdiff_t count, float scale) {
  typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
  Ints found = {};
  ptrdiff_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Ints sees = __builtin_convertvector(load<Bytes>(mask + i), Ints) != 0;
    store(sees ? scale * load<Floats>(x + i) : Floats{} - __builtin_inff(), x + i);
    found |= sees;
  }
  bool result = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    result |= found[lane] != 0;
  }
  for (; i < count; ++i) {
    x[i] = mask[i] ? scale * x[i] : -__builtin_inff();
    result |= mask[i];
  }
  return result;
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
  const auto exp_below_maximum = [&](Floats v) { return exp_of_negative(v - maximum); };
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

// The sum of (x[i] - center)^2 for i < width, or of x[i] if `power` is 1. The order of the additions depends on nothing
// but the width.
template <typename E, int power>
inline float sum_of_powers(const typename E::Element* x, ptrdiff_t width, float center) {
  Floats sums[4] = {};
  const auto add = [&](auto u, Floats v) {
    const Floats difference = v - center;
    sums[u] = power == 1 ? sums[u] + difference : multiply_add(difference, difference, sums[u]);
  };
  ptrdiff_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
    repeat<4>([&](auto u) { add(u, E::load_all(x + i + u * kLanes)); });
  }
  repeat<4>([&](auto u) {
    const ptrdiff_t first = i + u * kLanes;
    if (first + kLanes <= width) {
      add(u, E::load_all(x + first));
    } else if (first < width) {
      Floats v = E::load_first(x + first, static_cast<int>(width - first));
      for (ptrdiff_t lane = width - first; lane < kLanes; ++lane) {
        v[lane] = center;
      }
      add(u, v);
    }
  });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// y = (x - center) * factor * weight + bias for a row of `width` elements.
template <typename E>
inline void normalize(const typename E::Element* x, float center, float factor, const float* weight, const float* bias,
    typename E::Element* y, ptrdiff_t width) {
  const ptrdiff_t whole = width / kLanes * kLanes;
  const auto result = [&](Floats v, auto load_parameters) {
    v = (v - center) * factor;
    v = weight ? v * load_parameters(weight) : v;
    return bias ? v + load_parameters(bias) : v;
  };
  for (ptrdiff_t i = 0; i < whole; i += kLanes) {
    E::store_all(result(E::load_all(x + i), [=](const float* p) { return load<Floats>(p + i); }), y + i);
  }
  if (const int left = static_cast<int>(width - whole); left > 0) {
    const auto load_parameters = [=](const float* p) { return load_partial<Floats>(p + whole, left); };
    E::store_first(result(E::load_first(x + whole, left), load_parameters), y + whole, left);
  }
}

void norm(const void* x, FloatType type, bool subtracts_mean, const float* weight, const float* bias, void* y,
    ptrdiff_t rows, ptrdiff_t width, float eps) {
  with_elements(type, [&](auto elements) {
    using E = decltype(elements);
    const auto* from = static_cast<const typename E::Element*>(x);
    auto* to = static_cast<typename E::Element*>(y);
    for (ptrdiff_t row = 0; row < rows; ++row, from += width, to += width) {
      const float center = subtracts_mean ? sum_of_powers<E, 1>(from, width, 0) / static_cast<float>(width) : 0;
      const float mean_square = sum_of_powers<E, 2>(from, width, center) / static_cast<float>(width);
      normalize<E>(from, center, 1 / __builtin_sqrtf(mean_square + eps), weight, bias, to, width);
    }
  });
}

void rotate(const void* x, FloatType type, const float* cosines, const float* sines, void* y, ptrdiff_t half) {
  with_elements(type, [&](auto elements) {
    using E = decltype(elements);
    const auto* from = static_cast<const typename E::Element*>(x);
    auto* to = static_cast<typename E::Element*>(y);
    const auto first = [](Floats a, Floats b, Floats cosine, Floats sine) {
      return multiply_add(-b, sine, a * cosine);
    };
    const auto second = [](Floats a, Floats b, Floats cosine, Floats sine) {
      return multiply_add(b, cosine, a * sine);
    };
    ptrdiff_t i = 0;
    for (; i + kLanes <= half; i += kLanes) {
      const Floats a = E::load_all(from + i), b = E::load_all(from + half + i);
      const Floats cosine = load<Floats>(cosines + i), sine = load<Floats>(sines + i);
      E::store_all(first(a, b, cosine, sine), to + i);
      E::store_all(second(a, b, cosine, sine), to + half + i);
    }
    if (const int left = static_cast<int>(half - i); left > 0) {
      const Floats a = E::load_first(from + i, left), b = E::load_first(from + half + i, left);
      const Floats cosine = load_partial<Floats>(cosines + i, left), sine = load_partial<Floats>(sines + i, left);
      E::store_first(first(a, b, cosine, sine), to + i, left);
      E::store_first(second(a, b, cosine, sine), to + half + i, left);
    }
  });
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
