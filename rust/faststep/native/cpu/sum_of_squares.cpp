// The sum of the squares of many arrays. MLX stores the squares before it adds them up.
#include <algorithm>
#include <cstddef>
#include <iterator>
#include <memory>
#include <numeric>
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

namespace {

// The sum of the squares of all inputs, of float32. Lanes add up a piece each, and their sums are added in float64: one
// number after the other, as MLX's CPU adds them, a sum over a million is off by a thousandth.
class SumOfSquares : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto parts = faststep::parts_of(inputs);
    for (size_t i = 0; i < inputs.size(); ++i) {
      parts[i].contiguous |= inputs[i].flags().contiguous && inputs[i].data_size() == inputs[i].size(); // in whatever order
    }
    mx::cpu::get_command_encoder(stream()).dispatch([parts = std::move(parts), to = out.data<float>()] {
      double sum = 0;
      std::vector<char> copied;
      for (const auto& part : parts) {
        const char* data = part.data;
        if (!part.contiguous) {
          copied.resize(part.bytes);
          faststep::copy_all({part}, copied.data(), sizeof(float));
          data = copied.data();
        }
        sum += sum_of(reinterpret_cast<const float*>(data), part.bytes / sizeof(float));
      }
      *to = static_cast<float>(sum);
    });
  }

  const char* name() const override {
    return "SumOfSquares";
  }

 private:
  static constexpr size_t lanes = 64;
  static constexpr size_t piece = 128 * lanes;

  static double sum_of(const float* data, size_t size) {
    double sum = 0;
    for (size_t begin = 0; begin < size; begin += piece) {
      sum += sum_of_piece(data + begin, std::min(piece, size - begin));
    }
    return sum;
  }

  static double sum_of_piece(const float* data, size_t size) {
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
};

} // namespace

int faststep_sum_of_squares(const void* const* arrays, size_t count, void** sum) {
  return faststep::guarded([&] {
    auto inputs = faststep::list(arrays, count);
    auto is_known = [](const mx::array& in) { return in.dtype() == mx::float32; };
    if (mx::default_device() != mx::Device::cpu || !std::all_of(inputs.begin(), inputs.end(), is_known)) {
      return faststep::not_applicable;
    }
    auto stream = mx::default_stream(mx::Device::cpu);
    auto squares = std::make_shared<SumOfSquares>(stream);
    *sum = faststep::owned(mx::array(mx::Shape{}, mx::float32, std::move(squares), std::move(inputs)));
    return faststep::done;
  });
}
