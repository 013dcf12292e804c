// Pacing of the thread that hands operations to the CPU's worker: MLX hands over about fifty before it waits for one, and
// allocates what they write.
#include "cpu/pace.hpp"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <numeric>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "cpu/on_cpu.hpp"
#include "cpu/replay/task.hpp"
#include "status.hpp"

namespace faststep {

namespace {

// Number of places that the calling thread has marked, and of those that the worker has passed.
struct Progress {
  size_t dispatched = 0;
  std::atomic<size_t> done = 0;
};

class Pace : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.copy_shared_buffer(inputs[0]);
    pace(stream());
  }

  const char* name() const override {
    return "Pace";
  }
};

// Passes arrays on when the worker is done with all before them. What that reads would still be held while the update allocates
// otherwise: the tensors that have been joined, and the old parameters, over which the update could not write the new ones.
class Wait : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    if (tasks::recording() == nullptr) {
      mx::synchronize(stream());
    }
    for (size_t i = 0; i < inputs.size(); ++i) {
      outputs[i].copy_shared_buffer(inputs[i]);
    }
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[Wait] expected a stream of the CPU, got one of a GPU");
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

  const char* name() const override {
    return "Wait";
  }
};

} // namespace

void pace(mx::Stream stream) {
  if (tasks::recording() != nullptr) {
    return; // nothing runs, and memory is planned
  }
  static thread_local std::unordered_map<int, std::shared_ptr<Progress>> all; // a stream belongs to one thread
  auto& progress = all[stream.index];
  if (!progress) {
    progress = std::make_shared<Progress>();
  }
  auto before = progress->dispatched;
  mx::cpu::get_command_encoder(stream).dispatch([progress = progress, mine = before + 1] {
    progress->done = mine;
    progress->done.notify_all();
  });
  ++progress->dispatched; // it may throw the error of an operation before
  for (size_t done = progress->done; done < before; done = progress->done) {
    progress->done.wait(done);
  }
}

std::shared_ptr<mx::Primitive> paced(mx::Stream stream) {
  return std::make_shared<Pace>(stream);
}

std::shared_ptr<mx::Primitive> waited(mx::Stream stream) {
  return std::make_shared<Wait>(stream);
}

} // namespace faststep

int faststep_paced(const void* array, void** paced) {
  return faststep::guarded([&] {
    const auto& in = faststep::at(array);
    if (in.nbytes() < faststep::update_bytes || mlx::core::default_device() != mlx::core::Device::cpu) {
      return faststep::not_applicable;
    }
    auto pace = faststep::paced(mlx::core::default_stream(mlx::core::Device::cpu));
    *paced = faststep::owned(mlx::core::array(in.shape(), in.dtype(), std::move(pace), {in}));
    return faststep::done;
  });
}

int faststep_wait(const void* const* arrays, size_t count, void** waited) {
  return faststep::guarded([&] {
    auto inputs = faststep::list(arrays, count);
    auto add = [](size_t sum, const mlx::core::array& in) { return sum + in.nbytes(); };
    auto bytes = std::accumulate(inputs.begin(), inputs.end(), size_t{0}, add);
    if (bytes < faststep::wait_bytes || mlx::core::default_device() != mlx::core::Device::cpu) {
      return faststep::not_applicable;
    }
    std::vector<mlx::core::Shape> shapes;
    std::vector<mlx::core::Dtype> dtypes;
    for (const auto& in : inputs) {
      shapes.push_back(in.shape());
      dtypes.push_back(in.dtype());
    }
    auto stream = mlx::core::default_stream(mlx::core::Device::cpu);
    auto made = mlx::core::array::make_arrays(std::move(shapes), dtypes, faststep::waited(stream), inputs);
    std::transform(made.begin(), made.end(), waited, faststep::owned);
    return faststep::done;
  });
}
