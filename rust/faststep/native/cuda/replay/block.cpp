#include "cuda/replay/block.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace faststep::replay {

namespace {

// An array of at least so many bytes, as MLX allocates it; the kernel that would fill it is thrown away.
mx::array allocated(Encoder& encoder, mx::Stream stream, size_t bytes) {
  constexpr int width = 16384;
  auto height = static_cast<int>(std::max<size_t>(1, (bytes + width - 1) / width));
  auto wide = mx::broadcast_to(mx::array(0, mx::uint8), {height, width}, stream);
  auto block = mx::contiguous(wide, false, stream);
  Recording recording(encoder);
  for (auto* array : {&wide, &block}) {
    std::vector<mx::array> outputs{*array};
    for (auto in : array->inputs()) {
      in.set_status(mx::array::Status::available);
    }
    array->primitive().eval_gpu(array->inputs(), outputs);
  }
  block.detach();
  block.set_status(mx::array::Status::available);
  return block;
}

} // namespace

Block::Block(Encoder& encoder, mx::Stream stream, size_t bytes) : memory_(allocated(encoder, stream, bytes)) {}

Block::~Block() {
  end();
}

Place Block::place(size_t offset, size_t bytes) const {
  return {static_cast<char*>(address_of(memory_)) + offset, bytes, buffer_of(*memory_.data_shared_ptr())->device};
}

void Block::offer(const Place& place) {
  offered_.push_back(new mx::cu::CudaBuffer{place.memory, place.bytes, place.device});
  put_into_cache(offered_.back());
}

bool Block::is_taken() {
  taken_ = take_from_cache(std::exchange(offered_, {}));
  bool all = std::none_of(taken_.begin(), taken_.end(), [](auto* buffer) { return buffer == nullptr; });
  std::erase(taken_, nullptr);
  all_.insert(taken_.begin(), taken_.end());
  return all;
}

void Block::keep() {
  new mx::array(memory_);
}

// MLX's allocator deletes a buffer of no bytes, and does nothing else.
void Block::end() {
  is_taken();
  for (auto* buffer : all_) {
    buffer->size = 0;
  }
  all_.clear();
}

} // namespace faststep::replay
