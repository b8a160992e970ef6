#include "mlx_internals/internals.h"

#include <executorch/runtime/platform/log.h>
#include <mlx/mlx.h>
#include <unistd.h>

#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "device.h"
#include "mlx_internals/arrays.h"
#include "mlx_internals/cpu_task.h"
#include "mlx_internals/graph.h"

namespace executorch_mlx::internals {

namespace {

bool has_values(const mx::array& x, const std::vector<float>& expected, mx::Stream stream) {
  const auto y = mx::contiguous(mx::flatten(x, stream), /*allow_col_major=*/false, stream);
  mx::eval(y);
  return std::vector<float>(y.data<float>(), y.data<float>() + y.size()) == expected;
}

bool views_work(mx::Stream stream) {
  const mx::array x({0.0F, 1.0F, 2.0F, 3.0F, 4.0F, 5.0F}, {2, 3});
  const bool was_shared = !is_sole_user(x);
  const auto columns = view(x, {2, 2}, {1, 3}, 1); // the transposition of x[:, 1:]
  return !was_shared && !is_sole_user(x) && memory_of(x) == memory_of(columns) &&
      has_values(mx::negative(columns, stream), {-1, -4, -2, -5}, stream);
}

// Whether an allocator that takes pages gives an array in them.
bool pages_work(mx::Stream stream) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const std::shared_ptr<void> pages(std::aligned_alloc(page, page), std::free);
  auto* const numbers = static_cast<float*>(pages.get());
  numbers[2] = 5;
  numbers[3] = 6;
  const auto x = array_in_pages(numbers + 2, {2}, mx::float32, pages);
  return !x || has_values(mx::negative(*x, stream), {-5, -6}, stream);
}

bool memory_works(mx::Stream stream) {
  auto x = new_array({2}, mx::float32);
  x.data<float>()[0] = 1;
  x.data<float>()[1] = 2;
  if (!has_values(x, {1, 2}, stream) || !has_values(mx::negative(x, stream), {-1, -2}, stream)) {
    return false;
  }
  if (!uses_cpu_allocator()) {
    return pages_work(stream);
  }
  const auto numbers = std::make_shared<std::vector<float>>(std::vector<float>{3, 4});
  const auto borrowed = array_in(numbers->data(), {2}, mx::float32, numbers);
  const bool is_kept = numbers.use_count() == 2;
  return is_kept && has_values(mx::negative(borrowed, stream), {-3, -4}, stream);
}

bool graphs_work(mx::Stream stream) {
  const auto range = mx::arange(2, 8, 3, mx::int32, stream);
  const mx::array x({1.0F, 2.0F}, {1, 2});
  const auto transposed = mx::transpose(x, {1, 0}, stream);
  const auto elements = range_of(range);
  return elements && elements->start == 2 && elements->step == 3 && is_lazy(transposed, "Transpose") &&
      !is_lazy(x, "Transpose") && axes_of_transposition(transposed) == std::vector<int>{1, 0} &&
      inputs(transposed)[0].id() == x.id();
}

bool tasks_work(mx::Stream stream) {
  const auto x = mx::negative(mx::array({1.0F, 2.0F}), stream); // lazy
  const auto results = lazy_results("SelfTest", {{2}}, {mx::float32}, {x}, stream,
      [](const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) -> Task {
        return [x = inputs[0].data<float>(), y = outputs[0].data<float>()] {
          y[0] = x[0] + 3;
          y[1] = x[1] * 3;
        };
      });
  return has_values(results[0], {2, -6}, stream);
}

// Why the functions of this folder are not usable, or "".
std::string why_unusable() {
  const char* const value = std::getenv(kVariable);
  if (value != nullptr && std::string_view(value) == "0") {
    return str(kVariable, " is 0");
  }
  if (const auto mismatch = version_mismatch(mx::version()); !mismatch.empty()) {
    return mismatch;
  }
  const ProgramStream used(mx::Device::cpu); // at the first load, when no program runs
  const std::pair<const char*, bool (*)(mx::Stream)> tests[] = {
      {"views", views_work}, {"memory", memory_works}, {"graphs", graphs_work}, {"tasks", tasks_work}};
  for (const auto& [name, works] : tests) {
    try {
      if (!works(used.stream)) {
        return str("the self-test of ", name, " failed");
      }
    } catch (const std::exception& error) {
      return str("the self-test of ", name, " failed: ", error.what());
    }
  }
  return "";
}

} // namespace

bool are_usable() {
  static const bool result = [] {
    const std::string reason = why_unusable();
    if (!reason.empty()) {
      ET_LOG(Error, "MLX: programs run with MLX's public operations only, which is slower: %s", reason.c_str());
    }
    return reason.empty();
  }();
  return result;
}

} // namespace executorch_mlx::internals
