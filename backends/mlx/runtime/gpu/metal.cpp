#include "metal.h"

namespace executorch_mlx::gpu {

bool is_metal(mx::Stream stream) { return stream.device == mx::Device::gpu && mx::metal::is_available(); }

} // namespace executorch_mlx::gpu
