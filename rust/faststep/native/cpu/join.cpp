// Tensors of a buffer, joined by one task of the CPU. MLX's concatenate hands the worker a task for each tensor, which costs a
// microsecond or more: of small tensors, more than to copy them (benches/overhead.rs shows it). The gradient of a linear
// layer is the transpose of a product: here it is computed as the product of the transposes, and what is another transpose
// is turned by tiles; MLX copies it row by row, each element from another cache line. And the sum of the squares of many
// arrays, which MLX stores on its way. Every pointer is an mlx::core::array, as in mlx_array.ctx.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iterator>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/on_cpu.hpp"
#include "graph/transposed.hpp"

namespace mx = mlx::core;
using faststep::OnCpu;
using faststep::is_matrix;
using faststep::transposed;

namespace {

struct Part {
  const char* data;
  size_t bytes;
  bool contiguous;
  mx::Shape shape; // of one that is not contiguous
  mx::Strides strides;
};

// The transpose of a matrix in memory: what lies at from[row + column * ld], to row after row.
template <typename T>
struct Turn {
  const T* from;
  int64_t ld;
  int rows;
  int columns;
  T* to;

  void copy() const {
    constexpr int tile = 64;
    for (int row = 0; row < rows; row += tile) {
      for (int column = 0; column < columns; column += tile) {
        copy(row, std::min(rows, row + tile), column, std::min(columns, column + tile));
      }
    }
  }

 private:
  // by four rows at a time, and four columns of them
  void copy(int row, int last_row, int column, int last_column) const {
    for (; row + 4 <= last_row; row += 4) {
      int next = column;
      if constexpr (sizeof(T) == 4) {
        for (; next + 4 <= last_column; next += 4) {
          four_by_four(from + row + next * ld, to + static_cast<int64_t>(row) * columns + next);
        }
      }
      singly(row, row + 4, next, last_column);
    }
    singly(row, last_row, column, last_column);
  }

  void singly(int row, int last_row, int column, int last_column) const {
    for (; row < last_row; ++row) {
      for (int at = column; at < last_column; ++at) {
        to[static_cast<int64_t>(row) * columns + at] = from[row + at * ld];
      }
    }
  }

  void four_by_four(const T* in, T* out) const {
    using Four = uint32_t __attribute__((vector_size(16)));
    Four a, b, c, d;
    std::memcpy(&a, in, 16);
    std::memcpy(&b, in + ld, 16);
    std::memcpy(&c, in + 2 * ld, 16);
    std::memcpy(&d, in + 3 * ld, 16);
    Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), more_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), more_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    Four turned[] = {
        __builtin_shufflevector(ab, cd, 0, 1, 4, 5),
        __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
        __builtin_shufflevector(more_ab, more_cd, 0, 1, 4, 5),
        __builtin_shufflevector(more_ab, more_cd, 2, 3, 6, 7)};
    for (const auto& row : turned) {
      std::memcpy(out, &row, 16);
      out += columns;
    }
  }
};

// Copies what the axes from this one on span; returns where the next element goes.
template <typename T>
T* copy(const T* from, const Part& part, size_t axis, T* to) {
  if (axis == part.shape.size()) {
    *to = *from;
    return to + 1;
  }
  int64_t stride = part.strides[axis];
  if (axis + 2 == part.shape.size() && stride == 1) {
    Turn<T>{from, part.strides[axis + 1], part.shape[axis], part.shape[axis + 1], to}.copy();
    return to + static_cast<int64_t>(part.shape[axis]) * part.shape[axis + 1];
  }
  if (axis + 1 == part.shape.size()) {
    for (int i = 0; i < part.shape[axis]; ++i) {
      *to++ = from[i * stride];
    }
    return to;
  }
  for (int i = 0; i < part.shape[axis]; ++i) {
    to = copy(from + i * stride, part, axis + 1, to);
  }
  return to;
}

template <typename T>
void copy_all(const std::vector<Part>& parts, char* to) {
  for (const auto& part : parts) {
    if (part.contiguous) {
      std::memcpy(to, part.data, part.bytes);
    } else {
      copy(reinterpret_cast<const T*>(part.data), part, 0, reinterpret_cast<T*>(to));
    }
    to += part.bytes;
  }
}

void copy_all(const std::vector<Part>& parts, char* to, size_t itemsize) {
  switch (itemsize) {
    case 1:
      return copy_all<uint8_t>(parts, to);
    case 2:
      return copy_all<uint16_t>(parts, to);
    case 4:
      return copy_all<uint32_t>(parts, to);
    default:
      return copy_all<uint64_t>(parts, to);
  }
}

Part part_of(const mx::array& array) {
  bool contiguous = array.flags().row_contiguous;
  Part part{array.data<char>(), array.nbytes(), contiguous, {}, {}};
  if (!contiguous) {
    part.shape = array.shape();
    part.strides = array.strides();
  }
  return part;
}

std::vector<Part> parts_of(const std::vector<mx::array>& arrays) {
  std::vector<Part> parts;
  parts.reserve(arrays.size());
  std::transform(arrays.begin(), arrays.end(), std::back_inserter(parts), part_of);
  return parts;
}

class Join : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
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
    out.set_data(mx::allocator::malloc(out.nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch(
        [part = part_of(in), to = out.data<char>(), itemsize = out.itemsize()] { copy_all({part}, to, itemsize); });
  }

  const char* name() const override {
    return "Contiguous";
  }
};

// The sum of the squares of all inputs, of float32. Lanes add up a piece each, and their sums are added in float64: one
// number after the other, as MLX's CPU adds them, a sum over a million is off by a thousandth.
class SumOfSquares : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.set_data(mx::allocator::malloc(out.nbytes()));
    auto parts = parts_of(inputs);
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
          copy_all<uint32_t>({part}, copied.data());
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

mx::array turned(const mx::array& a) {
  const auto* in = transposed(a);
  return in ? *in : mx::transpose(a);
}

// Whether (a b)^T and b^T a^T have the same bits here: each element is the same sum, but the kernels of OpenBLAS for some
// processors (Haswell, Zen) add up rows and columns in another order.
bool turns_exactly() {
  static const bool exact = [] {
    for (auto [m, n, k] : {std::array{70, 30, 50}, std::array{64, 96, 40}, std::array{10, 64, 8}}) {
      std::vector<float> values(static_cast<size_t>(k) * (m + n));
      uint32_t state = 1;
      for (auto& value : values) {
        state = state * 1664525u + 1013904223u;
        value = static_cast<float>(state >> 8) / (1 << 23) - 1.0f;
      }
      mx::array a(values.begin(), {k, m});
      mx::array b(values.begin() + static_cast<ptrdiff_t>(k) * m, {k, n});
      auto product = mx::transpose(mx::matmul(mx::transpose(a), b));
      auto same = mx::array_equal(product, mx::matmul(mx::transpose(b), a));
      if (!same.item<bool>()) {
        return false;
      }
    }
    return true;
  }();
  return exact;
}

// (a b)^T as b^T a^T, which lies row after row, where that has the same bits. Nothing: another transpose. What is none is
// left as it is.
std::optional<mx::array> straight_product(const mx::array& a) {
  const auto* product = transposed(a);
  if (!product) {
    return a;
  }
  if (!is_matrix(*product, "Matmul") || (a.dtype() == mx::float32 && !turns_exactly())) {
    return std::nullopt;
  }
  const auto& factors = product->inputs();
  bool matrices = factors[0].ndim() == 2 && factors[1].ndim() == 2;
  return matrices ? std::optional(mx::matmul(turned(factors[1]), turned(factors[0]))) : std::nullopt;
}

// The gradient of a matrix: a product, or of one that is used more than once a sum of them, one added after the other.
mx::array straight(const mx::array& a) {
  std::vector<mx::array> terms;
  auto first = a;
  for (; is_matrix(first, "Add"); first = mx::array(first.inputs()[0])) {
    terms.push_back(first.inputs()[1]);
  }
  terms.push_back(first);
  bool turns = false;
  for (auto& term : terms) {
    auto made = straight_product(term);
    if (!made || (terms.size() > 1 && is_matrix(term, "Add"))) {
      return a; // what would not lie as the others do, or is no row of terms
    }
    turns |= made->id() != term.id();
    term = *made;
  }
  if (!turns) {
    return a;
  }
  auto sum = terms.back();
  for (auto term = terms.rbegin() + 1; term != terms.rend(); ++term) {
    sum = mx::add(sum, *term);
  }
  return sum;
}

// From so many bytes on, what has been joined is waited for.
constexpr size_t wait_bytes = 128 << 10;

// Passes an array on when the worker has computed all that it has been handed so far. MLX hands it about a hundred
// operations at once; what they read would still be held while the update allocates: the tensors that have been joined, and
// the old parameters, over which the update could not write the new ones.
class Wait : public OnCpu {
 public:
  using OnCpu::OnCpu;

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    mx::synchronize(stream());
    out.copy_shared_buffer(inputs[0]);
  }

  const char* name() const override {
    return "Wait";
  }
};

std::vector<mx::array> list(const void* const* arrays, size_t count) {
  std::vector<mx::array> all;
  all.reserve(count);
  std::transform(arrays, arrays + count, std::back_inserter(all), [](const void* array) {
    return *static_cast<const mx::array*>(array);
  });
  return all;
}

} // namespace

extern "C" {

// A gradient that lies row after row, if it can be computed so. Null: it is as good as it is; or an exception.
void* faststep_straight(const void* array) {
  try {
    const auto& in = *static_cast<const mx::array*>(array);
    if (mx::default_device() != mx::Device::cpu) {
      return nullptr;
    }
    auto made = straight(in);
    return made.id() == in.id() ? nullptr : new mx::array(std::move(made));
  } catch (const std::exception&) {
    return nullptr;
  }
}

// An array row after row. Null: MLX has to do it, because the default device is none that this knows; or an exception.
void* faststep_contiguous(const void* array) {
  try {
    if (mx::default_device() != mx::Device::cpu) {
      return nullptr;
    }
    const auto& in = *static_cast<const mx::array*>(array);
    auto stream = mx::default_stream(mx::Device::cpu);
    return new mx::array(in.shape(), in.dtype(), std::make_shared<Contiguous>(stream), {in});
  } catch (const std::exception&) {
    return nullptr;
  }
}

// The sum of the squares of arrays, a float32 scalar. Null: MLX has to do it, because they are not of float32, or the default
// device is none that this knows; or an exception.
void* faststep_sum_of_squares(const void* const* arrays, size_t count) {
  try {
    auto inputs = list(arrays, count);
    auto is_known = [](const mx::array& in) { return in.dtype() == mx::float32; };
    if (mx::default_device() != mx::Device::cpu || !std::all_of(inputs.begin(), inputs.end(), is_known)) {
      return nullptr;
    }
    auto stream = mx::default_stream(mx::Device::cpu);
    return new mx::array(mx::Shape{}, mx::float32, std::make_shared<SumOfSquares>(stream), std::move(inputs));
  } catch (const std::exception&) {
    return nullptr;
  }
}

// Joins arrays of one dtype, which agree in all axes but the first, along it. Null: concatenate has to do it, because they
// do not agree, or the default device is none that Join knows; or an exception.
void* faststep_join(const void* const* parts, size_t count) {
  try {
    if (count == 0 || mx::default_device() != mx::Device::cpu) {
      return nullptr;
    }
    auto inputs = list(parts, count);
    auto shape = inputs[0].shape();
    if (shape.empty()) {
      return nullptr;
    }
    shape[0] = 0;
    for (const auto& in : inputs) {
      bool agrees = in.dtype() == inputs[0].dtype() && in.ndim() == shape.size();
      for (size_t axis = 1; agrees && axis < shape.size(); ++axis) {
        agrees = in.shape(axis) == shape[axis];
      }
      if (!agrees) {
        return nullptr;
      }
      shape[0] += in.shape(0);
    }
    auto dtype = inputs[0].dtype();
    auto stream = mx::default_stream(mx::Device::cpu);
    mx::array joined(shape, dtype, std::make_shared<Join>(stream), std::move(inputs));
    if (joined.nbytes() < wait_bytes) {
      return new mx::array(std::move(joined));
    }
    return new mx::array(std::move(shape), dtype, std::make_shared<Wait>(stream), {std::move(joined)});
  } catch (const std::exception&) {
    return nullptr;
  }
}
}
