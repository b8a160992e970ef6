#include "process_group.h"

#include <mlx/distributed/ops.h>

#include "call/evaluation.h"
#include "device.h"
#include "error.h"

namespace executorch_mlx {

const mx::distributed::Group& process_group() {
  static const mx::distributed::Group group = mx::distributed::init(/*strict=*/false);
  return group;
}

void check_group(int rank, int size) {
  const auto& group = process_group();
  if (group.rank() != rank || group.size() != size) {
    fail(
        Error::InvalidArgument, "the program is for process ", rank, " of a group of ", size, ", this is process ",
        group.rank(), " of ", group.size());
  }
}

mx::Stream communication_stream(mx::Stream stream) {
  const bool is_on_gpu = stream.device == mx::Device::gpu && mx::distributed::is_available("nccl");
  return is_on_gpu ? stream : shared_stream(mx::Device::cpu);
}

void share(void* data, size_t size) {
  const auto& group = process_group();
  std::vector<int32_t> bytes(size, 0);
  if (group.rank() == 0) {
    const auto* begin = static_cast<const uint8_t*>(data);
    std::copy(begin, begin + size, bytes.begin());
  }
  const mx::Stream stream = communication_stream(shared_stream(mx::default_device()));
  // The sum of the bytes of rank 0 and the zeros of all others.
  auto sum = mx::distributed::all_sum(
      mx::array(bytes.begin(), mx::Shape{static_cast<int>(size)}, mx::int32), group, stream);
  evaluate({sum}, stream);
  for (size_t i = 0; i < size; ++i) {
    static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(sum.data<int32_t>()[i]);
  }
}

} // namespace executorch_mlx
