// The fused kernels of a lazy graph, asked for before it is evaluated: rust/faststep/src/mlx/kernels/cuda.rs.
#include <exception>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lazy.hpp"
#include "mlx/backend/cuda/cuda.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "status.hpp"
#include "walk.hpp"

namespace {

namespace mx = mlx::core;

// Evaluates fused kernels, each once, on arrays of one element.
class Trials {
 public:
  void add(const mx::array& array) {
    auto& primitive = array.primitive();
    bool fused = std::string_view(primitive.name()).starts_with("Compiled");
    if (!fused || primitive.stream() != stream_ ||
        !known_.insert(static_cast<const mx::Compiled&>(primitive).lib_name()).second) {
      return;
    }
    std::vector<mx::array> inputs, outputs;
    for (const auto& in : array.inputs()) {
      inputs.push_back(one(in.ndim(), in.dtype()));
    }
    for (const auto& out : array.outputs()) {
      outputs.emplace_back(mx::Shape(out.ndim(), 1), out.dtype(), nullptr, std::vector<mx::array>{});
    }
    try {
      primitive.eval_gpu(inputs, outputs);
    } catch (const std::exception&) {
      return; // it is being compiled; where it cannot be, MLX says so when it needs it
    }
    outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
  }

  // Wait for those that were compiled already: their outputs' memory must not be used again before.
  void wait() const {
    if (!outputs_.empty()) {
      mx::synchronize(stream_);
    }
  }

 private:
  const mx::array& one(size_t ndim, mx::Dtype dtype) {
    const int value = 1;
    auto [found, is_new] = ones_.try_emplace({ndim, dtype.val()}, &value, mx::Shape(ndim, 1), dtype);
    return found->second;
  }

  mx::Stream stream_ = mx::default_stream(mx::Device::gpu);
  std::set<std::string> known_;
  std::map<std::pair<size_t, mx::Dtype::Val>, mx::array> ones_;
  std::vector<mx::array> outputs_;
};

} // namespace

int faststep_ask_kernels(const void* const* arrays, size_t count) {
  return faststep::guarded([&] {
    if (!mx::cu::is_available()) {
      return;
    }
    std::vector<const mx::array*> outputs;
    for (size_t i = 0; i < count; ++i) {
      outputs.push_back(&faststep::at(arrays[i]));
    }
    faststep::LazyArrays graph;
    Trials trials;
    for (const auto* array : faststep::walk(graph, outputs, faststep::bfs_max_width())) {
      trials.add(*array);
    }
    trials.wait();
  });
}
