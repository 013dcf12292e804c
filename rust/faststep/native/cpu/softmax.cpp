// MLX computes the exponentials one by one (mlx/backend/cpu/softmax.cpp, logsumexp.cpp): up to a third of a small transformer's
// step. Sums are added in its order.
#include "cpu/softmax.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "cpu/copy.hpp"
#include "cpu/exp.hpp"
#include "cpu/on_cpu.hpp"

namespace faststep {

namespace {

#if defined(__x86_64__)

constexpr size_t lane_bytes = exp_lanes * sizeof(float);

FASTSTEP_AVX2 float largest(const float* in, int count) {
  auto all = _mm256_set1_ps(-std::numeric_limits<float>::infinity());
  int i = 0;
  for (; i + exp_lanes <= count; i += exp_lanes) {
    all = _mm256_max_ps(_mm256_loadu_ps(in + i), all);
  }
  float lanes[exp_lanes];
  std::memcpy(lanes, &all, lane_bytes);
  return std::max(*std::max_element(std::begin(lanes), std::end(lanes)), *std::max_element(in + std::min(i, count - 1), in + count));
}

// The exponentials of numbers less the largest one of their row.
FASTSTEP_AVX2 void exponentials(const float* in, int count, float most, float* out) {
  auto all = _mm256_set1_ps(most);
  int i = 0;
  for (; i + exp_lanes <= count; i += exp_lanes) {
    _mm256_storeu_ps(out + i, exp_of(_mm256_sub_ps(_mm256_loadu_ps(in + i), all)));
  }
  if (i < count) {
    auto bytes = static_cast<size_t>(count - i) * sizeof(float);
    float rest[exp_lanes] = {};
    std::memcpy(rest, in + i, bytes);
    _mm256_storeu_ps(rest, exp_of(_mm256_sub_ps(_mm256_loadu_ps(rest), all)));
    std::memcpy(out + i, rest, bytes);
  }
}

// One after the other, as MLX adds them.
float added(const float* numbers, int count, float sum) {
  for (int i = 0; i < count; ++i) {
    sum += numbers[i];
  }
  return sum;
}

void softmax(const float* in, float* out, size_t rows, int count) {
  for (; rows > 0; --rows, in += count, out += count) {
    exponentials(in, count, largest(in, count), out);
    float factor = 1 / added(out, count, 0);
    for (int i = 0; i < count; ++i) {
      out[i] *= factor;
    }
  }
}

void log_sum_exp(const float* in, float* out, size_t rows, int count) {
  constexpr int piece = 256; // of a row, whose exponentials nobody keeps
  float room[piece];
  for (; rows > 0; --rows, in += count, ++out) {
    float most = largest(in, count), sum = 0;
    for (int from = 0; from < count; from += piece) {
      auto rest = std::min(count - from, piece);
      exponentials(in + from, rest, most, room);
      sum = added(room, rest, sum);
    }
    *out = std::isinf(most) ? most : std::log(sum) + most;
  }
}

#else

void softmax(const float*, float*, size_t, int) {}

void log_sum_exp(const float*, float*, size_t, int) {}

#endif

bool has_rows(const mx::array& x) {
  return x.flags().contiguous && x.strides().back() == 1;
}

class Softmax : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    const auto& x = inputs[0];
    const float* from = nullptr;
    if (!has_rows(x)) {
      copy_rows(x, out, stream());
      from = out.data<float>();
    } else {
      if (x.is_donatable()) {
        out.copy_shared_buffer(x);
      } else {
        out.set_data(mx::allocator::malloc(x.data_size() * x.itemsize()), x.data_size(), x.strides(), x.flags());
      }
      from = x.data<float>();
    }
    auto count = x.shape().back();
    mx::cpu::get_command_encoder(stream()).dispatch(
        [from, to = out.data<float>(), rows = out.data_size() / static_cast<size_t>(count), count] {
          softmax(from, to, rows, count);
        });
  }

  const char* name() const override {
    return "Softmax";
  }
};

class LogSumExp : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    auto x = inputs[0];
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (!has_rows(x)) {
      x = temporary_rows(x, stream());
    }
    auto count = x.shape().back();
    if (x.flags().row_contiguous) {
      out.set_data(mx::allocator::malloc(out.nbytes()));
    } else {
      auto strides = x.strides();
      for (auto& stride : strides) {
        stride /= count;
      }
      auto flags = x.flags();
      bool by_columns = strides[0] == 1;
      for (size_t i = 1; by_columns && i < strides.size(); ++i) {
        auto size = out.shape(static_cast<int>(i));
        by_columns = size == 1 || strides[i - 1] == size * strides[i];
      }
      flags.col_contiguous = by_columns;
      auto size = x.data_size() / static_cast<size_t>(count);
      out.set_data(mx::allocator::malloc(x.nbytes() / static_cast<size_t>(count)), size, std::move(strides), flags);
    }
    encoder.dispatch([from = x.data<float>(), to = out.data<float>(), rows = x.data_size() / static_cast<size_t>(count), count] {
      log_sum_exp(from, to, rows, count);
    });
  }

  const char* name() const override {
    return "LogSumExp";
  }
};

} // namespace

std::optional<mx::array> softmax_of(const mx::array& a) {
  std::string_view name = a.primitive().name();
  bool fits = a.dtype() == mx::float32 && a.inputs().size() == 1 && a.inputs()[0].dtype() == mx::float32 &&
      a.inputs()[0].ndim() > 0 && a.inputs()[0].size() > 0 && a.primitive().stream().device == mx::Device::cpu;
  if (!fits || (name != "Softmax" && name != "LogSumExp") || !can_compute_exp()) {
    return std::nullopt;
  }
  auto stream = a.primitive().stream();
  auto own = name == "Softmax" ? std::static_pointer_cast<mx::Primitive>(std::make_shared<Softmax>(stream))
                               : std::static_pointer_cast<mx::Primitive>(std::make_shared<LogSumExp>(stream));
  return mx::array(a.shape(), a.dtype(), std::move(own), a.inputs());
}

} // namespace faststep
