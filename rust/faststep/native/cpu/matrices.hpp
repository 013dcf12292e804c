// Matrices of an array of several, for BLAS.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "cpu/factor.hpp"

namespace faststep {

namespace mx = mlx::core;

// Offsets of an array's matrices: one for each index of the axes before the last two.
inline std::vector<int64_t> starts_of(const mx::array& a) {
  std::vector<int64_t> starts{0};
  for (int axis = 0; axis < static_cast<int>(a.ndim()) - 2; ++axis) {
    std::vector<int64_t> next;
    for (auto start : starts) {
      for (int64_t i = 0; i < a.shape(axis); ++i) {
        next.push_back(start + i * a.strides(axis));
      }
    }
    starts = std::move(next);
  }
  return starts;
}

// Matrices of which BLAS reads each where it lies.
struct Matrices {
  explicit Matrices(const mx::array& a) : data(a.data<float>()), starts(starts_of(a)) {
    is_transposed = !lies_by_rows(a);
    auto n = a.ndim();
    ld = static_cast<int>(is_transposed ? lead(a, n - 1, n - 2) : lead(a, n - 2, n - 1));
  }

  static bool lies_by_rows(const mx::array& a) {
    return lies(a, a.ndim() - 2, a.ndim() - 1);
  }

  static bool lies_by_columns(const mx::array& a) {
    return lies(a, a.ndim() - 1, a.ndim() - 2);
  }

  // From row `row` on, of the matrix of that number.
  const float* from(size_t at, int64_t row) const {
    return data + starts[at] + row * (is_transposed ? 1 : ld);
  }

  int order(bool turned = false) const {
    return is_transposed == turned ? plain : transposed_by_blas;
  }

  const float* data;
  std::vector<int64_t> starts;
  bool is_transposed;
  int ld;

 private:
  // Return true if a matrix is contiguous along `inner`, with a stride along `outer` that BLAS takes.
  static bool lies(const mx::array& a, size_t outer, size_t inner) {
    return (a.shape()[inner] == 1 || a.strides()[inner] == 1) &&
        (a.shape()[outer] == 1 || (a.strides()[outer] >= a.shape()[inner] && a.strides()[outer] <= INT32_MAX));
  }

  static int64_t lead(const mx::array& a, size_t outer, size_t inner) {
    return a.shape()[outer] == 1 ? a.shape()[inner] : a.strides()[outer];
  }
};

} // namespace faststep
