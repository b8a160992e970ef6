// Times one .pte through ExecuTorch and the same graph built by hand with mlx::core, call by
// call in turn, and prints the median of each in microseconds.
//
//   overhead_benchmark MODEL.pte ROWS COLUMNS LAYERS CALLS
//
// The graph is LAYERS times x = tanh(x * 0.5 + 0.25), on a float32 array ROWS x COLUMNS.

#include <executorch/extension/module/module.h>
#include <executorch/extension/tensor/tensor.h>
#include <mlx/mlx.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace mx = mlx::core;
using executorch::extension::from_blob;
using executorch::extension::Module;

namespace {

template <typename Call>
double microseconds(Call&& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
  return spent.count();
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
  const float* delegated = nullptr;
  const auto through_executorch = [&] {
    auto result = module.forward(tensor);
    if (!result.ok()) {
      std::fprintf(stderr, "forward failed: %d\n", int(result.error()));
      std::exit(1);
    }
    delegated = result->at(0).toTensor().const_data_ptr<float>();
  };

  // Constants are made once, as a loaded program has them; input and output are copied at every
  // call, as a delegate has to.
  const mx::array half(0.5f), quarter(0.25f);
  const auto by_hand = [&] {
    mx::array x(input.data(), {rows, columns}, mx::float32);
    for (int i = 0; i < layers; ++i) {
      x = mx::tanh(mx::add(mx::multiply(x, half), quarter));
    }
    mx::eval(x);
    std::memcpy(output.data(), x.data<float>(), output.size() * sizeof(float));
  };

  std::vector<double> executorch_times, hand_times;
  for (int i = 0; i < calls + 20; ++i) {
    const double a = microseconds(through_executorch), b = microseconds(by_hand);
    if (i >= 20) {
      executorch_times.push_back(a);
      hand_times.push_back(b);
    }
  }
  for (size_t i = 0; i < output.size(); ++i) {
    if (delegated[i] != output[i]) {
      std::fprintf(stderr, "element %zu differs: %g and %g\n", i, delegated[i], output[i]);
      return 1;
    }
  }
  std::printf("%.2f %.2f\n", median(executorch_times), median(hand_times));
}
