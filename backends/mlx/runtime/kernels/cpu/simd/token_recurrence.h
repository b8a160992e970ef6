// Recurrences over the tokens of a sequence, one token after the other: see GatedRecurrence and SelectiveScan in
// kernels.h. Part of kernels.cpp.
//
// The tokens are processed one after the other, and each sum is added in a fixed order. So the results have the same
// bits however the tokens are divided into calls.
#pragma once

#include "vector_functions.h"

namespace executorch_mlx::EXECUTORCH_MLX_ISA {

namespace {

constexpr int kWideColumnVectors = kRegisters / 4;
constexpr int kColumnVectors = 2;

// Up to this number of tokens, reading the state takes longer than the arithmetic. Wide tiles read longer pieces of
// its rows. More tokens get tiles that fit into the first-level cache.
constexpr int kFewTokens = 2;

int recurrence_columns(int tokens) { return (tokens <= kFewTokens ? kWideColumnVectors : kColumnVectors) * kLanes; }

// exp(x), and 0 where exp(x) would be less than the smallest normal number.
inline Floats decay_factor(Floats x) { return x < -87.33654f ? Floats{} : exp(x); }

inline void copy_elements(const float* from, ptrdiff_t stride, ptrdiff_t count, float* to) {
  if (stride == 1) {
    __builtin_memcpy(to, from, count * sizeof(float));
    return;
  }
  for (ptrdiff_t i = 0; i < count; ++i) {
    to[i] = from[i * stride];
  }
}

inline void fill_zeros(float* to, ptrdiff_t count) { __builtin_memset(to, 0, count * sizeof(float)); }

// The part of a token that all columns of the state share.
struct PreparedToken {
  float* query; // [size]
  float* key; // [size]
  float* decay; // [size], or one number
  float* decayed_key; // [size]: key * decay
};

inline PreparedToken prepared_token(const GatedRecurrence& r, int index) {
  float* at = r.scratch + index * 4 * ptrdiff_t{r.size};
  return {at, at + r.size, at + 2 * r.size, at + 3 * r.size};
}

inline void prepare(const GatedRecurrence& r, int token, const PreparedToken& to) {
  const auto copy = [&](const TokenVectors& x, int count, float* to) {
    copy_elements(x.data + token * x.token_stride, x.stride, count, to);
  };
  copy(r.query, r.size, to.query);
  copy(r.key, r.size, to.key);
  const int decays = r.decays_by_channel ? r.size : 1;
  copy(r.decay, decays, to.decay);
  map(to.decay, FloatType::float32, to.decay, decays, decay_factor);
  for (int i = 0; i < r.size; ++i) {
    to.decayed_key[i] = to.key[i] * to.decay[r.decays_by_channel ? i : 0];
  }
}

// Runs V vectors of columns of the state, from `first` on. If there are fewer than kLanes columns, V is 1.
//
// The next state is state * decay + key ⊗ error. With the delta rule, the error is beta * (value - decayed key @
// state). The pass over the state that computes the output of a token also computes decayed key @ state for the next
// token.
template <int V, bool HasBeta, bool DecaysByChannel>
void recur_columns(const GatedRecurrence& r, int first, int columns) {
  const auto load_columns = [&](const float* from) {
    return V > 1 || columns >= kLanes ? load<Floats>(from) : load_partial<Floats>(from, columns);
  };
  const auto store_columns = [&](Floats x, float* to) {
    V > 1 || columns >= kLanes ? store(x, to) : store_partial(x, to, columns);
  };
  PreparedToken now = prepared_token(r, 0), next = prepared_token(r, 1);
  prepare(r, 0, now);
  const float* state = r.state + first;
  ptrdiff_t state_stride = r.state_stride;
  Floats held[V]; // decayed key @ state
  repeat<V>([&](auto v) { held[v.value] = Floats{}; });
  for (int i = 0; HasBeta && i < r.size; ++i) {
    const Floats key = broadcast(now.decayed_key[i]);
    repeat<V>([&](auto v) {
      const Floats x = load_columns(state + i * state_stride + v.value * kLanes);
      held[v.value] = multiply_add(key, x, held[v.value]);
    });
  }
  for (int token = 0; token < r.tokens; ++token) {
    if (token + 1 < r.tokens) {
      prepare(r, token + 1, next);
    } else {
      fill_zeros(next.decayed_key, r.size);
    }
    Floats error[V], sums[V], next_held[V];
    const float* value = r.value.data + token * r.value.token_stride + first * r.value.stride;
    const Floats beta = broadcast(HasBeta ? r.beta.data[token * r.beta.token_stride] : 1.0f);
    repeat<V>([&](auto v) {
      constexpr int at = v.value * kLanes;
      if (r.value.stride == 1) {
        error[v.value] = load_columns(value + at);
      } else {
        float lanes[kLanes] = {};
        const int count = V > 1 || columns >= kLanes ? kLanes : columns;
        copy_elements(value + at * r.value.stride, r.value.stride, count, lanes);
        error[v.value] = load<Floats>(lanes);
      }
      if constexpr (HasBeta) {
        error[v.value] = beta * (error[v.value] - held[v.value]);
      }
      sums[v.value] = next_held[v.value] = Floats{};
    });
    Floats decay = broadcast(now.decay[0]);
    for (int i = 0; i < r.size; ++i) {
      const Floats key = broadcast(now.key[i]), query = broadcast(now.query[i]);
      const Floats next_key = broadcast(HasBeta ? next.decayed_key[i] : 0.0f);
      if constexpr (DecaysByChannel) {
        decay = broadcast(now.decay[i]);
      }
      repeat<V>([&](auto v) {
        constexpr int at = v.value * kLanes;
        const Floats decayed = load_columns(state + i * state_stride + at) * decay;
        const Floats x = multiply_add(key, error[v.value], decayed);
        store_columns(x, r.next + first + i * r.next_stride + at);
        sums[v.value] = multiply_add(query, x, sums[v.value]);
        if constexpr (HasBeta) {
          next_held[v.value] = multiply_add(next_key, x, next_held[v.value]);
        }
      });
    }
    repeat<V>([&](auto v) {
      store_columns(sums[v.value], r.y + token * r.y_stride + first + v.value * kLanes);
      held[v.value] = next_held[v.value];
    });
    state = r.next + first;
    state_stride = r.next_stride;
    const PreparedToken done = now;
    now = next;
    next = done;
  }
}

template <bool HasBeta, bool DecaysByChannel>
void recur(const GatedRecurrence& r) {
  int first = 0;
  for (; first + kWideColumnVectors * kLanes <= r.columns; first += kWideColumnVectors * kLanes) {
    recur_columns<kWideColumnVectors, HasBeta, DecaysByChannel>(r, first, kWideColumnVectors * kLanes);
  }
  for (; first + kColumnVectors * kLanes <= r.columns; first += kColumnVectors * kLanes) {
    recur_columns<kColumnVectors, HasBeta, DecaysByChannel>(r, first, kColumnVectors * kLanes);
  }
  for (; first < r.columns; first += kLanes) {
    const int columns = r.columns - first < kLanes ? r.columns - first : kLanes;
    recur_columns<1, HasBeta, DecaysByChannel>(r, first, columns);
  }
}

void gated_recurrence(const GatedRecurrence& r) {
  if (r.beta.data != nullptr) {
    return r.decays_by_channel ? recur<true, true>(r) : recur<true, false>(r);
  }
  r.decays_by_channel ? recur<false, true>(r) : recur<false, false>(r);
}

int scan_channels() { return kLanes; }

// A channel has a state of `size` numbers. Each lane of a vector holds another number, so that a sum over them needs no
// other channel.
void selective_scan(const SelectiveScan& s) {
  const int whole = (s.size + kLanes - 1) / kLanes * kLanes;
  float* key = s.scratch;
  float* query = s.scratch + whole;
  fill_zeros(s.scratch, 2 * whole); // the lanes after the last number
  const float* state = s.state;
  for (int token = 0; token < s.tokens; ++token, state = s.next) {
    copy_elements(s.key.data + token * s.key.token_stride, s.key.stride, s.size, key);
    copy_elements(s.query.data + token * s.query.token_stride, s.query.stride, s.size, query);
    float steps[kLanes] = {}, inputs[kLanes] = {};
    copy_elements(s.step.data + token * s.step.token_stride, s.step.stride, s.channels, steps);
    copy_elements(s.x.data + token * s.x.token_stride, s.x.stride, s.channels, inputs);
    Floats sums_of[kLanes];
    for (int c = 0; c < kLanes; ++c) {
      Floats total = {};
      const Floats step = broadcast(steps[c]), input = step * broadcast(inputs[c]);
      for (int i = 0; c < s.channels && i < s.size; i += kLanes) {
        const ptrdiff_t at = ptrdiff_t{c} * s.size + i;
        const int count = s.size - i < kLanes ? s.size - i : kLanes;
        const Floats rates = load_lanes(s.rates + at, count), old = load_lanes(state + at, count);
        const Floats decayed = old * decay_factor(step * rates);
        Floats x = multiply_add(input, load<Floats>(key + i), decayed);
        store_lanes(x, s.next + at, count);
        if (count < kLanes) {
          x = load_partial<Floats>(s.next + at, count); // zeros in the other lanes, also if `input` is infinite
        }
        total = multiply_add(x, load<Floats>(query + i), total);
      }
      sums_of[c] = total;
    }
    store_partial(sums<kLanes>(sums_of), s.y + token * s.y_stride, s.channels);
  }
}

} // namespace

} // namespace executorch_mlx::EXECUTORCH_MLX_ISA
