// Means of squares that are not stored, of whole arrays and of their rows and columns, as Adafactor takes them. The bits are those
// of MLX's CPU, which stores the squares: each sum goes through its numbers in their order.
#include <algorithm>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/on_cpu.hpp"
#include "cpu/row_sums.hpp"
#include "status.hpp"

namespace mx = mlx::core;
using faststep::done;
using faststep::not_applicable;
using faststep::OnCpu;
using faststep::Part;
using faststep::part_of;

namespace {

// The numbers of a part, row after row: copied where they do not lie so.
const float* numbers_of(const Part& part, std::vector<char>& copied) {
  if (part.contiguous) {
    return reinterpret_cast<const float*>(part.data);
  }
  copied.resize(part.bytes);
  faststep::copy_all({part}, copied.data(), sizeof(float));
  return reinterpret_cast<const float*>(copied.data());
}

float reciprocal(size_t size) {
  return static_cast<float>(1.0 / static_cast<double>(size));
}

// Of rows, with `eps` added to each square.
void means_of_rows(const float* x, size_t rows, size_t size, float eps, float* means) {
  faststep::sums_of_rows(x, rows, size, means, [eps](float number) { return number * number + eps; });
  std::transform(means, means + rows, means, [by = reciprocal(size)](float sum) { return sum * by; });
}

void add_to_columns(const float* __restrict__ x, size_t rows, size_t size, float eps, float* __restrict__ sums) {
  for (size_t row = 0; row < rows; ++row, x += size) {
    for (size_t i = 0; i < size; ++i) {
      sums[i] += x[i] * x[i] + eps;
    }
  }
}

// Of a matrix, which is read once: a few rows stay in the cache.
void means_of_both(const float* x, size_t rows, size_t columns, float eps, float* of_rows, float* of_columns) {
  std::fill_n(of_columns, columns, 0.0f);
  for (size_t row = 0; row < rows; row += faststep::sums_beside) {
    auto few = std::min(faststep::sums_beside, rows - row);
    add_to_columns(x + row * columns, few, columns, eps, of_columns);
    means_of_rows(x + row * columns, few, columns, eps, of_rows + row);
  }
  std::transform(of_columns, of_columns + columns, of_columns, [by = reciprocal(rows)](float sum) { return sum * by; });
}

// Of a whole array, or of as many slices along its first axis as there are outputs.
class MeanSquare : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& in = inputs[0];
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto part = part_of(in);
    part.contiguous |= out.size() == 1 && in.flags().contiguous && in.data_size() == in.size(); // whatever their order
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([part = std::move(part), count = out.size(), size = in.size(), to = out.data<float>()] {
      std::vector<char> copied;
      means_of_rows(numbers_of(part, copied), count, size / std::max<size_t>(count, 1), 0.0f, to);
    });
  }

  const char* name() const override {
    return "MeanSquare";
  }
};

// Of the rows of matrices and of their columns, with a number, the second input, added to each square.
class MeanSquares : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto& in = inputs[0];
    for (auto& out : outputs) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    }
    size_t rows = in.shape(-2), columns = in.shape(-1), count = in.size() / std::max<size_t>(rows * columns, 1);
    auto *of_rows = outputs[0].data<float>(), *of_columns = outputs[1].data<float>();
    auto& encoder = mx::cpu::get_command_encoder(stream());
    encoder.dispatch([=, part = part_of(in), eps = inputs[1].data<float>()] {
      std::vector<char> copied;
      const auto* x = numbers_of(part, copied);
      for (size_t i = 0; i < count; ++i) {
        means_of_both(x + i * rows * columns, rows, columns, *eps, of_rows + i * rows, of_columns + i * columns);
      }
    });
  }

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[MeanSquares] expected a stream of the CPU, got one of a GPU");
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }

  const char* name() const override {
    return "MeanSquares";
  }
};

bool applies(const mx::array& array) {
  return mx::default_device() == mx::Device::cpu && array.dtype() == mx::float32 && array.size() > 0;
}

} // namespace

int faststep_mean_square(const void* array, int by_slice, void** mean) {
  return faststep::guarded([&] {
    const auto& in = faststep::at(array);
    if (!applies(in)) {
      return not_applicable;
    }
    mx::Shape shape(by_slice ? in.ndim() : 0, 1);
    if (!shape.empty()) {
      shape[0] = in.shape(0);
    }
    auto primitive = std::make_shared<MeanSquare>(mx::default_stream(mx::Device::cpu));
    *mean = faststep::owned(mx::array(std::move(shape), mx::float32, std::move(primitive), {in}));
    return done;
  });
}

int faststep_mean_squares(const void* array, const void* eps, void** means) {
  return faststep::guarded([&] {
    const auto& in = faststep::at(array);
    if (!applies(in) || in.ndim() < 2) {
      return not_applicable;
    }
    auto rows = in.shape(), columns = in.shape();
    rows.pop_back();
    columns.erase(columns.end() - 2);
    auto primitive = std::make_shared<MeanSquares>(mx::default_stream(mx::Device::cpu));
    auto made = mx::array::make_arrays(
        {std::move(rows), std::move(columns)}, {mx::float32, mx::float32}, std::move(primitive), {in, faststep::at(eps)});
    std::transform(made.begin(), made.end(), means, faststep::owned);
    return done;
  });
}
