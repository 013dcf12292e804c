// The memory of a plan, and MLX's allocator handing it out.
#pragma once

#include <cstddef>
#include <unordered_set>
#include <vector>

#include "cuda/replay/encoder.hpp"

namespace faststep::replay {

// The memory of a buffer: in a block, or in a static array.
struct Place {
  void* memory;
  size_t bytes;
  int device; // -1: memory that a host may read
};

// One array of MLX's with so many bytes. While it is recorded, buffers in it lie in the cache of MLX's allocator for whoever
// asks for their sizes next.
class Block {
 public:
  // `encoder` has to be idle.
  Block(Encoder& encoder, mx::Stream stream, size_t bytes);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // A place in it.
  Place place(size_t offset, size_t bytes) const;
  // Another buffer to be handed out, in it or elsewhere.
  void offer(const Place& place);
  // Return whether all that has been offered since the last call has been handed out; the rest is taken back.
  bool is_taken();
  // Return those that were handed out before that.
  const std::vector<mx::cu::CudaBuffer*>& taken() const {
    return taken_;
  }
  // Return whether a buffer is one of those that have been handed out.
  bool has(mx::cu::CudaBuffer* buffer) const {
    return all_.contains(buffer);
  }
  // Its memory stays for good.
  void keep();
  // Nothing more is handed out: whoever has a buffer may let go of it, and MLX's allocator leaves it alone.
  void end();

 private:
  mx::array memory_;
  std::vector<mx::cu::CudaBuffer*> offered_, taken_;
  std::unordered_set<mx::cu::CudaBuffer*> all_; // that have been handed out
};

} // namespace faststep::replay
