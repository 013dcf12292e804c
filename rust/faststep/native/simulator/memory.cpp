// MLX's allocators: mlx/backend/no_gpu/allocator.cpp, mlx/backend/cuda/allocator.cpp, mlx/backend/common/buffer_cache.h.
#include <algorithm>
#include <bit>

#include "simulator/simulator.hpp"

namespace faststep::simulator {

namespace {

constexpr size_t cpu_page = 4096;
constexpr size_t gpu_page = 16384;
constexpr size_t gpu_small = 8;

size_t index(Kind kind) {
  return static_cast<size_t>(kind);
}

} // namespace

Buffer::~Buffer() {
  memory.release(*this);
}

Memory::Memory(const Device& device)
    : active(device.active),
      peak(device.active),
      cached(device.cached),
      gpu_(device.gpu != 0),
      cache_limit_(device.cache_limit) {
  by_kind_[index(Kind::others)] = active;
}

size_t Memory::rounded(size_t bytes) const {
  if (!gpu_ || bytes == 0) {
    return bytes;
  }
  if (bytes < gpu_page) {
    return std::max(gpu_small, std::bit_ceil(bytes));
  }
  return (bytes + gpu_page - 1) / gpu_page * gpu_page;
}

// The size of the freed buffer that MLX takes for so many bytes; 0: none fits.
size_t Memory::reused(size_t bytes) {
  auto page = gpu_ ? gpu_page : cpu_page;
  auto found = pool_.lower_bound(bytes);
  if (found == pool_.end() || found->first >= std::min(2 * bytes, bytes + 2 * page)) {
    return 0;
  }
  auto size = found->first;
  if (--found->second == 0) {
    pool_.erase(found);
  }
  cached -= size;
  return size;
}

Data Memory::allocate(size_t bytes) {
  auto size = rounded(bytes);
  if (auto old = reused(size)) {
    size = old;
  }
  active += size;
  by_kind_[index(Kind::others)] += size;
  peak = std::max(peak, active);
  return std::make_shared<Buffer>(*this, size, true);
}

void Memory::mark(Buffer& buffer, Kind kind) {
  by_kind_[index(buffer.kind)] -= buffer.bytes;
  buffer.kind = kind;
  by_kind_[index(kind)] += buffer.bytes;
}

void Memory::release(const Buffer& buffer) {
  auto bytes = buffer.bytes;
  active -= bytes;
  by_kind_[index(buffer.kind)] -= bytes;
  if (bytes > 0 && cached + bytes <= cache_limit_) {
    ++pool_[bytes];
    cached += bytes;
  }
}

} // namespace faststep::simulator
