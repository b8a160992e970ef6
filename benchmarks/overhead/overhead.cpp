// Measures the overhead of the delegate: times a .pte through ExecuTorch and the same graph written with
// mlx::core, in alternating calls, and prints the median time of each in microseconds.
//
//   overhead_benchmark MODEL.pte ROWS COLUMNS LAYERS CALLS
//
// The graph applies x = tanh(x * 0.5 + 0.25) LAYERS times to a float32 array [ROWS, COLUMNS].

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <mlx/mlx.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace mx = mlx::core;
using executorch::extension::from_blob;
using executorch::extension::Module;

namespace {

template <typename Call>
double measure_us(Call&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count();
}

double median(std::vector<double>& values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

} // namespace

int main(int argc, char** argv) {
  if (argc != 6) {
    std::fprintf(stderr, "usage: %s MODEL.pte ROWS COLUMNS LAYERS CALLS\n", argv[0]);
    return 2;
  }
  const int rows = std::atoi(argv[2]), columns = std::atoi(argv[3]);
  const int layers = std::atoi(argv[4]), calls = std::atoi(argv[5]);
  std::vector<float> input(size_t(rows) * columns), output(input.size());
  for (size_t i = 0; i < input.size(); ++i) {
    input[i] = 0.001f * float(i % 1000);
  }

  Module module(argv[1]);
  auto tensor = from_blob(input.data(), {rows, columns});
  const float* delegate_output = nullptr;
  const auto run_delegate = [&] {
    auto result = module.forward(tensor);
    if (!result.ok()) {
      std::fprintf(stderr, "forward failed: %d\n", int(result.error()));
      std::exit(1);
    }
    delegate_output = result->at(0).toTensor().const_data_ptr<float>();
  };

  // Like the delegate, this creates constants once and copies input and output in every call.
  const mx::array half(0.5f), quarter(0.25f);
  const auto run_mlx = [&] {
    mx::array x(input.data(), {rows, columns}, mx::float32);
    for (int i = 0; i < layers; ++i) {
      x = mx::tanh(mx::add(mx::multiply(x, half), quarter));
    }
    mx::eval(x);
    std::memcpy(output.data(), x.data<float>(), output.size() * sizeof(float));
  };

  constexpr int kWarmUpCalls = 20;
  std::vector<double> delegate_times, mlx_times;
  for (int i = 0; i < kWarmUpCalls + calls; ++i) {
    const double delegate_time = measure_us(run_delegate), mlx_time = measure_us(run_mlx);
    if (i >= kWarmUpCalls) {
      delegate_times.push_back(delegate_time);
      mlx_times.push_back(mlx_time);
    }
  }
  for (size_t i = 0; i < output.size(); ++i) {
    if (!(std::abs(delegate_output[i] - output[i]) <= 1e-6f)) { // a fused kernel may round otherwise
      std::fprintf(stderr, "element %zu: got %g, expected %g\n", i, delegate_output[i], output[i]);
      return 1;
    }
  }
  std::printf("%.2f %.2f\n", median(delegate_times), median(mlx_times));
}
