// Tensors of a buffer, joined by one task of the CPU. MLX's concatenate hands the worker a task for each tensor, which costs
// a microsecond or more: of small tensors, more than to copy them (benches/overhead.rs shows it). In a captured step tensors may be made
// where they are joined.
#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/on_cpu.hpp"
#include "cpu/pace.hpp"
#include "cpu/replay/task.hpp"
#include "status.hpp"
#include "told.hpp"

namespace mx = mlx::core;
using faststep::copy_all;
using faststep::done;
using faststep::not_applicable;
using faststep::OnCpu;
using faststep::part_of;
using faststep::parts_of;

namespace {

class Join : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    if (out.nbytes() >= faststep::join_bytes && faststep::tasks::recording() == nullptr) {
      mx::synchronize(stream());
    }
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([parts = parts_of(inputs), to = out.data<char>(), itemsize = out.itemsize()] {
      copy_all(parts, to, itemsize);
    });
  }

  const char* name() const override {
    return "Join";
  }
};

// Passes on what lies row after row, and copies what does not, as MLX's does.
class Contiguous : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    constexpr size_t spare = 16384; // bytes that a larger buffer may have, as in MLX
    if (in.flags().row_contiguous && in.buffer_size() <= out.nbytes() + spare) {
      out.copy_shared_buffer(in);
      return;
    }
    faststep::copy_rows(in, out, stream());
  }

  const char* name() const override {
    return "Contiguous";
  }
};

// Whether what is still to be computed will lie row after row, in memory of its own.
bool lies_in_rows(const mx::array& a) {
  if (a.status() != mx::array::Status::unscheduled || !a.has_primitive()) {
    return false;
  }
  std::string_view name = a.primitive().name();
  return name == "Matmul" || name == "TurnedProduct" || name == "SumOfRows" || name == "WithRows" || name == "Checked";
}

bool agrees(const mx::array& a, const mx::array& b) {
  bool same = a.dtype() == b.dtype() && a.ndim() == b.ndim();
  for (int axis = 1; same && axis < static_cast<int>(a.ndim()); ++axis) {
    same = a.shape(axis) == b.shape(axis);
  }
  return same;
}

} // namespace

int faststep_contiguous(const void* array, void** contiguous) {
  return faststep::guarded([&] {
    if (mx::default_device() != mx::Device::cpu) {
      return not_applicable;
    }
    const auto& in = faststep::at(array);
    if (lies_in_rows(in)) {
      *contiguous = faststep::owned(in);
      return done;
    }
    auto stream = mx::default_stream(mx::Device::cpu);
    *contiguous = faststep::owned(mx::array(in.shape(), in.dtype(), std::make_shared<Contiguous>(stream), {in}));
    return done;
  });
}

int faststep_join(const void* const* parts, size_t count, void** out) {
  return faststep::guarded([&] {
    if (count == 0 || mx::default_device() != mx::Device::cpu) {
      return not_applicable;
    }
    auto inputs = faststep::list(parts, count);
    auto shape = inputs[0].shape();
    if (shape.empty()) {
      return not_applicable;
    }
    shape[0] = 0;
    for (const auto& in : inputs) {
      if (!agrees(in, inputs[0])) {
        return not_applicable;
      }
      shape[0] += in.shape(0);
    }
    auto dtype = inputs[0].dtype();
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<faststep::Place> places;
    size_t offset = 0;
    for (size_t i = 0; i < count; offset += inputs[i++].nbytes()) {
      places.push_back({i, offset});
    }
    mx::array joined(std::move(shape), dtype, std::make_shared<Join>(stream), std::move(inputs));
    faststep::may_lie_within(joined, std::move(places));
    *out = faststep::owned(std::move(joined));
    return done;
  });
}
