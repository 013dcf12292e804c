#include "cuda/replay/encoder.hpp"

#include <dlfcn.h>

#include <cstdlib>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/scalars.hpp"
#include "exchanges.hpp"
#include "mlx/memory.h"

namespace faststep::replay {

namespace {

// libmlx's own, by the names that its compiler gives them.
struct Exported {
  Encoder& (*get_command_encoder)(mx::Stream);
  void (*commit)(Encoder*);
};

Exported load_exported() {
  auto find = [](const char* name) {
    void* found = dlsym(RTLD_DEFAULT, name);
    if (found == nullptr) { // an extension of Python's: its libraries are not global
      void* library = dlopen("libmlx.so", RTLD_NOW | RTLD_NOLOAD);
      found = library ? dlsym(library, name) : nullptr;
    }
    if (found == nullptr) {
      throw std::runtime_error(std::string("this MLX has no ") + name);
    }
    return found;
  };
  return {
      reinterpret_cast<Encoder& (*)(mx::Stream)>(find("_ZN3mlx4core2cu19get_command_encoderENS0_6StreamE")),
      reinterpret_cast<void (*)(Encoder*)>(find("_ZN3mlx4core2cu14CommandEncoder6commitEv"))};
}

const Exported& exported() {
  static const Exported all = load_exported();
  return all;
}

mx::cu::CudaAllocator& allocator() {
  return static_cast<mx::cu::CudaAllocator&>(mx::allocator::allocator());
}

// One kernel leaves one node, which writes one buffer.
void check_members(Encoder& encoder, mx::Stream stream) {
  mx::synchronize(stream);
  auto probe = mx::arange(0, 4, 1, mx::int32, stream);
  Recording recording(encoder);
  std::vector<mx::array> outputs{probe};
  probe.primitive().eval_gpu(probe.inputs(), outputs);
  auto* buffer = buffer_of(*probe.data_shared_ptr());
  bool known = encoder.node_count_ == 1 && recording.nodes() == 1 && encoder.node_map_.size() == 1 &&
      encoder.node_map_.contains(reinterpret_cast<std::uintptr_t>(buffer)) && encoder.active_outputs_.empty() &&
      encoder.temporaries_.empty() && encoder.from_nodes_.empty();
  if (!known) {
    throw std::runtime_error("MLX's encoder is not the one that replay was written for");
  }
  auto& memory = allocator();
  std::lock_guard lock(memory.mutex_);
  const auto& scalars = memory.scalar_pool_;
  constexpr ptrdiff_t most = 1 << 20; // blocks
  bool pooled = scalars.next_free_ == nullptr ||
      (scalars.next_free_ >= scalars.buffer_ && scalars.next_free_ - scalars.buffer_ < most);
  if (!pooled || memory.active_memory_ != mx::get_active_memory() || memory.buffer_cache_.cache_size() != mx::get_cache_memory()) {
    throw std::runtime_error("MLX's allocator is not the one that replay was written for");
  }
}

} // namespace

Encoder& encoder_of(mx::Stream stream) {
  auto& encoder = exported().get_command_encoder(stream);
  static const bool checked = [&] {
    const char* graphs = std::getenv("MLX_USE_CUDA_GRAPHS");
    if (graphs != nullptr && std::string_view(graphs) == "0") {
      throw std::runtime_error("MLX_USE_CUDA_GRAPHS is 0");
    }
    check_members(encoder, stream);
    return true;
  }();
  static_cast<void>(checked);
  return encoder;
}

CUstream queue_of(mx::Stream stream) {
  return exported().get_command_encoder(stream).stream();
}

bool leaves_work_to_host(std::string_view name) {
  return name.ends_with("FFT") || name.ends_with("Load") || exchanges(name);
}

void put_into_cache(mx::cu::CudaBuffer* buffer) {
  auto& memory = allocator();
  std::lock_guard lock(memory.mutex_);
  memory.buffer_cache_.recycle_to_cache(buffer);
}

std::vector<mx::cu::CudaBuffer*> take_from_cache(std::vector<mx::cu::CudaBuffer*> buffers) {
  auto& memory = allocator();
  std::lock_guard lock(memory.mutex_);
  std::vector<mx::cu::CudaBuffer*> others;
  std::set<mx::cu::CudaBuffer*> offered(buffers.begin(), buffers.end()), found;
  for (auto* buffer : buffers) {
    while (auto* cached = memory.buffer_cache_.reuse_from_cache(buffer->size)) {
      if (offered.contains(cached)) {
        found.insert(cached);
      } else {
        others.push_back(cached);
      }
    }
  }
  for (auto* other : others) {
    memory.buffer_cache_.recycle_to_cache(other);
  }
  for (auto*& buffer : buffers) {
    if (found.contains(buffer)) {
      delete std::exchange(buffer, nullptr);
    } else {
      memory.active_memory_ -= buffer->size;
    }
  }
  return buffers;
}

ScalarsApart::ScalarsApart() {
  auto& memory = allocator();
  std::lock_guard lock(memory.mutex_);
  while (auto* buffer = memory.buffer_cache_.reuse_from_cache(scalar_bytes)) {
    cached_.push_back(buffer);
  }
  free_ = std::exchange(memory.scalar_pool_.next_free_, nullptr);
}

ScalarsApart::~ScalarsApart() {
  auto& memory = allocator();
  std::lock_guard lock(memory.mutex_);
  auto** last = &memory.scalar_pool_.next_free_; // of those that have come back since
  while (*last != nullptr) {
    last = &(*last)->next;
  }
  *last = free_;
  for (auto* buffer : cached_) {
    memory.buffer_cache_.recycle_to_cache(buffer);
  }
}

void commit(Encoder& encoder) {
  exported().commit(&encoder);
}

Recording::Recording(Encoder& encoder) : encoder_(encoder) {
  if (encoder_.node_count_ != 0 || nodes() != 0 || !encoder_.temporaries_.empty()) {
    throw std::runtime_error("MLX's encoder has work that is not submitted");
  }
}

Recording::~Recording() {
  clear();
}

size_t Recording::nodes() const {
  size_t count = 0;
  check(driver().cuGraphGetNodes(encoder_.graph_, nullptr, &count), "cuGraphGetNodes");
  return count;
}

std::vector<std::shared_ptr<mx::array::Data>> Recording::temporaries() {
  return std::exchange(encoder_.temporaries_, {});
}

// The encoder as it was, with an empty graph.
void Recording::clear() {
  driver().cuGraphDestroy(encoder_.graph_.handle_);
  CUgraph graph = nullptr;
  driver().cuGraphCreate(&graph, 0);
  encoder_.graph_.handle_ = graph;
  encoder_.temporaries_.clear();
  encoder_.node_count_ = 0;
  encoder_.in_concurrent_ = false;
  encoder_.from_nodes_.clear();
  encoder_.to_nodes_.clear();
  encoder_.graph_nodes_key_.clear();
  encoder_.graph_deps_key_.clear();
  encoder_.concurrent_nodes_.clear();
  encoder_.active_deps_.clear();
  encoder_.active_outputs_.clear();
  encoder_.node_map_.clear();
  encoder_.bytes_in_graph_ = 0;
  encoder_.is_graph_updatable_ = true;
}

} // namespace faststep::replay
