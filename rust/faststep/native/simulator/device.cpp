// The device that a plan is made for: what MLX's allocator says, and the limits of mlx/backend/cuda/device.cpp.
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>

#ifdef __linux__
#include <sys/sysinfo.h>
#endif

#include "mlx/memory.h"
#include "simulator/simulator.hpp"
#include "status.hpp"

using namespace faststep::simulator;

namespace {

size_t number(const char* name, size_t otherwise) {
  const char* text = std::getenv(name);
  return text ? std::strtoul(text, nullptr, 10) : otherwise;
}

size_t property(const mx::Device& device, const char* name) {
  const auto& info = mx::device_info(device);
  auto found = info.find(name);
  auto* value = found == info.end() ? nullptr : std::get_if<size_t>(&found->second);
  return value ? *value : 0;
}

// Kernels in one CUDA graph, and the millions of elements that they read.
std::pair<size_t, size_t> graph_limits(const mx::Device& device) {
  switch (10 * property(device, "compute_capability_major") + property(device, "compute_capability_minor")) {
    case 80:
      return {20, 400};
    case 90:
    case 100:
    case 120:
      return {100, 1000};
    case 121:
      return {20, 25};
    default:
      return {20, 100};
  }
}

// MLX's own, which it tells only whoever sets another.
size_t cache_limit() {
  auto limit = mx::set_cache_limit(SIZE_MAX);
  mx::set_cache_limit(limit);
  return limit;
}

size_t total_memory(const mx::Device& device) {
  if (device == mx::Device::gpu) {
    auto total = property(device, "total_memory");
    return total ? total : property(device, "memory_size");
  }
#ifdef __linux__
  struct sysinfo info;
  if (sysinfo(&info) == 0) {
    return info.totalram * info.mem_unit;
  }
#endif
  return 0;
}

} // namespace

int faststep_simulator_device(Device* out, size_t* memory) {
  return faststep::guarded([&] {
    const auto& device = mx::default_device();
    auto [ops, mega] = graph_limits(device);
    *out = {
        device == mx::Device::gpu,
        mx::get_active_memory(),
        mx::get_cache_memory(),
        cache_limit(),
        mx::get_memory_limit(),
        number("MLX_MAX_OPS_PER_BUFFER", ops),
        number("MLX_MAX_MB_PER_BUFFER", mega)};
    *memory = total_memory(device);
  });
}
