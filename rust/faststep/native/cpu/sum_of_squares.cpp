// The sum of the squares of many arrays, and what follows from it for a step. MLX stores the squares before it adds them up.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/on_cpu.hpp"
#include "status.hpp"

namespace mx = mlx::core;
using faststep::OnCpu;
using faststep::Part;

namespace {

constexpr size_t lanes = 64;
constexpr size_t piece = 128 * lanes;

double sum_of_squares(const float* data, size_t size) {
  float sums[lanes] = {};
  size_t row = 0;
  for (; row + lanes <= size; row += lanes) {
    for (size_t lane = 0; lane < lanes; ++lane) {
      sums[lane] += data[row + lane] * data[row + lane];
    }
  }
  for (size_t i = row; i < size; ++i) {
    sums[i - row] += data[i] * data[i];
  }
  return std::accumulate(std::begin(sums), std::end(sums), 0.0);
}

// The memory of arrays, in whatever order their elements lie.
std::vector<Part> unordered(const std::vector<mx::array>& arrays) {
  auto parts = faststep::parts_of(arrays);
  for (size_t i = 0; i < arrays.size(); ++i) {
    parts[i].contiguous |= arrays[i].flags().contiguous && arrays[i].data_size() == arrays[i].size();
  }
  return parts;
}

// The sum of the squares of parts, of float32. Lanes add up a piece each, and their sums are added in float64: one number
// after the other, as MLX's CPU adds them, a sum over a million is off by a thousandth.
float sum_of_squares(const std::vector<Part>& parts) {
  double sum = 0;
  std::vector<char> copied;
  for (const auto& part : parts) {
    const char* data = part.data;
    if (!part.contiguous) {
      copied.resize(part.bytes);
      faststep::copy_all({part}, copied.data(), sizeof(float));
      data = copied.data();
    }
    const auto* numbers = reinterpret_cast<const float*>(data);
    double of_part = 0;
    for (size_t size = part.bytes / sizeof(float), begin = 0; begin < size; begin += piece) {
      of_part += sum_of_squares(numbers + begin, std::min(piece, size - begin));
    }
    sum += of_part;
  }
  return static_cast<float>(sum);
}

class SumOfSquares : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([parts = unordered(inputs), to = out.data<float>()] { *to = sum_of_squares(parts); });
  }

  const char* name() const override {
    return "SumOfSquares";
  }
};

// Of gradients and a loss behind them: the norm, the factor that clips to it, whether norm and loss are finite and the loss is at
// most its limit, and whether they are not. What clip.rs and guard.rs build of MLX's operations, of which each would be a task.
class Checked : public mx::Primitive {
 public:
  Checked(mx::Stream stream, float max_norm, float max_loss)
      : Primitive(stream), max_norm_(max_norm), max_loss_(max_loss) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (auto& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    auto parts = unordered(inputs);
    const auto* loss = inputs.back().data<float>();
    parts.pop_back();
    auto *norm = outputs[0].data<float>(), *factor = outputs[1].data<float>();
    auto *good = outputs[2].data<bool>(), *bad = outputs[3].data<bool>();
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([=, parts = std::move(parts), max_norm = max_norm_, max_loss = max_loss_] {
      constexpr float most = std::numeric_limits<float>::max();
      *norm = std::sqrt(sum_of_squares(parts));
      auto fits = max_norm / (*norm + 1e-6f);
      *factor = fits > 1 ? 1 : fits; // NaN stays NaN
      *good = *loss <= max_loss && *loss >= -most && *norm <= most;
      *bad = !*good;
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[Checked] expected a stream of the CPU, got one of a GPU");
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& it = static_cast<const Checked&>(other);
    return max_norm_ == it.max_norm_ && max_loss_ == it.max_loss_;
  }

  const char* name() const override {
    return "Checked";
  }

 private:
  float max_norm_;
  float max_loss_;
};

bool is_float32(const mx::array& array) {
  return array.dtype() == mx::float32;
}

} // namespace

int faststep_sum_of_squares(const void* const* arrays, size_t count, void** sum) {
  return faststep::guarded([&] {
    auto inputs = faststep::list(arrays, count);
    if (mx::default_device() != mx::Device::cpu || !std::all_of(inputs.begin(), inputs.end(), is_float32)) {
      return faststep::not_applicable;
    }
    auto stream = mx::default_stream(mx::Device::cpu);
    auto squares = std::make_shared<SumOfSquares>(stream);
    *sum = faststep::owned(mx::array(mx::Shape{}, mx::float32, std::move(squares), std::move(inputs)));
    return faststep::done;
  });
}

int faststep_checked(const void* const* gradients, size_t count, const void* loss, const float* limits, void** made) {
  return faststep::guarded([&] {
    auto inputs = faststep::list(gradients, count);
    inputs.push_back(faststep::at(loss));
    if (mx::default_device() != mx::Device::cpu || !std::all_of(inputs.begin(), inputs.end(), is_float32)) {
      return faststep::not_applicable;
    }
    auto checked = std::make_shared<Checked>(mx::default_stream(mx::Device::cpu), limits[0], limits[1]);
    auto outputs = mx::array::make_arrays(
        std::vector<mx::Shape>(4), {mx::float32, mx::float32, mx::bool_, mx::bool_}, std::move(checked), std::move(inputs));
    std::transform(outputs.begin(), outputs.end(), made, faststep::owned);
    return faststep::done;
  });
}
