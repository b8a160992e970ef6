// What the threads of a group on the CPU share: see group.h.
#pragma once

extern "C" {
void gpu_wait_for_group();
void gpu_wait_for_warp(); // 32 threads, a SIMD-group of Metal
void* gpu_warp_memory(); // 64 bytes for each thread of the warp
unsigned gpu_lane();
unsigned gpu_thread();
unsigned gpu_group();
unsigned gpu_threads();
unsigned gpu_groups();
}

constexpr unsigned kWarpSlot = 64; // bytes

// The value that each lane passes, by lane. Valid until the next call.
template <typename T>
struct OfWarp {
  explicit OfWarp(T value) {
    gpu_wait_for_warp(); // until all have read what an earlier exchange has left
    at(gpu_lane()) = value;
    gpu_wait_for_warp();
  }
  T& at(unsigned lane) { return *reinterpret_cast<T*>(static_cast<char*>(gpu_warp_memory()) + lane * kWarpSlot); }
};
