#include "cuda/replay/scalars.hpp"

#include <array>
#include <deque>
#include <mutex>
#include <vector>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/encoder.hpp"

namespace faststep::replay {

namespace {

// It grows with the number of scalars that are held at once, and is never freed: arrays may outlive everything else.
class Pool {
 public:
  mx::cu::CudaBuffer* take() {
    std::lock_guard lock(mutex_);
    if (free_.empty()) {
      grow();
    }
    auto* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  void give_back(mx::cu::CudaBuffer* buffer) {
    std::lock_guard lock(mutex_);
    free_.push_back(buffer);
  }

 private:
  static constexpr size_t block = 512;
  using Block = std::array<mx::cu::CudaBuffer, block>;

  void grow() {
    constexpr unsigned portable = 1, device_map = 2; // CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP
    void* memory = nullptr;
    check(driver().cuMemHostAlloc(&memory, block * scalar_bytes, portable | device_map), "cuMemHostAlloc");
    auto& buffers = blocks_.emplace_back();
    for (size_t i = 0; i < block; ++i) {
      buffers[i] = {static_cast<char*>(memory) + i * scalar_bytes, scalar_bytes, -1}; // -1: the host's too
      free_.push_back(&buffers[i]);
    }
  }

  std::mutex mutex_;
  std::deque<Block> blocks_;
  std::vector<mx::cu::CudaBuffer*> free_;
};

Pool& pool() {
  static auto& all = *new Pool;
  return all;
}

} // namespace

mx::allocator::Data scalar() {
  auto give_back = [](mx::allocator::Buffer buffer) {
    pool().give_back(static_cast<mx::cu::CudaBuffer*>(buffer.ptr()));
  };
  return {mx::allocator::Buffer(pool().take()), give_back};
}

} // namespace faststep::replay
