// The private parts of MLX that replay and the clock of operations (op_clock.hpp) need: the members of the encoder that collects kernels into a CUDA graph
// (mlx/backend/cuda/device.h), and two of its functions, which libmlx exports. No other file names any.
//
// `encoder_of` looks the functions up and holds the members against what a kernel of its own leaves in them.
#pragma once

#include <cassert>
#include <functional>
#include <list>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

#define private public
#define protected public
#include "mlx/backend/cuda/device.h"
#undef private
#undef protected

namespace faststep::replay {

namespace mx = mlx::core;

using Encoder = mx::cu::CommandEncoder;

// The encoder of a stream of this thread. Throws where there is none, or where it is not the one that this was written for.
Encoder& encoder_of(mx::Stream stream);

// The driver's queue of a stream of this thread.
CUstream queue_of(mx::Stream stream);

// Whether primitives of that name leave work to the host, or to whoever reads a file or a network.
bool leaves_work_to_host(std::string_view name);

// Submits what the encoder has collected.
void commit(Encoder& encoder);

// Where an array's memory begins on the device.
inline mx::cu::CudaBuffer* buffer_of(const mx::array::Data& data) {
  auto buffer = data.buffer();
  return static_cast<mx::cu::CudaBuffer*>(buffer.ptr());
}

inline void* memory_of(const mx::array::Data& data) {
  auto* buffer = buffer_of(data);
  return buffer ? buffer->data : nullptr;
}

inline void* address_of(const mx::array& array) {
  return static_cast<char*>(memory_of(*array.data_shared_ptr())) + array.offset();
}

// Puts a buffer, which is not MLX's, into the cache of MLX's allocator.
void put_into_cache(mx::cu::CudaBuffer* buffer);

// Takes such buffers out of it, and deletes them. Returns those that have been handed out, in their order, which MLX does
// not count any more, and null for the others.
std::vector<mx::cu::CudaBuffer*> take_from_cache(std::vector<mx::cu::CudaBuffer*> buffers);

// While it lives, arrays of at most 8 bytes get memory that no host has touched: those in MLX's pool for them lie on pages of
// the host, from where each kernel fetches them anew.
class ScalarsApart {
 public:
  ScalarsApart();
  ~ScalarsApart();
  ScalarsApart(const ScalarsApart&) = delete;
  ScalarsApart& operator=(const ScalarsApart&) = delete;

 private:
  std::vector<mx::cu::CudaBuffer*> cached_;
  decltype(mx::cu::SmallSizePool::next_free_) free_;
};

// While it lives, what primitives encode on a stream is collected and never submitted. The encoder has to be idle.
class Recording {
 public:
  explicit Recording(Encoder& encoder);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  // The number of nodes so far.
  size_t nodes() const;
  // What the last primitives needed only while they run.
  std::vector<std::shared_ptr<mx::array::Data>> temporaries();
  CUgraph graph() const {
    return encoder_.graph_;
  }
  // The dependencies that MLX gives the nodes.
  const std::vector<CUgraphNode>& from() const {
    return encoder_.from_nodes_;
  }
  const std::vector<CUgraphNode>& to() const {
    return encoder_.to_nodes_;
  }

 private:
  void clear();
  Encoder& encoder_;
};

} // namespace faststep::replay
