// Sums of rows that lie one after the other, with MLX's bits: each goes through its numbers in their order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

#include "mlx/mlx.h"

namespace faststep {

// A lazy array of the same value, for a float32 sum along the last axes on a CPU; none for other operations.
std::optional<mlx::core::array> row_sums_of(const mlx::core::array& a);

// Rows that are summed at the same time: each addition to one sum has to wait for the one before it.
inline constexpr size_t sums_beside = 8;

template <size_t rows, typename Of>
void sums_of_few_rows(const float* x, size_t size, float* sums, Of of) {
  float so_far[rows] = {};
  for (size_t i = 0; i < size; ++i) {
    for (size_t row = 0; row < rows; ++row) {
      so_far[row] += of(x[row * size + i]);
    }
  }
  std::copy_n(so_far, rows, sums);
}

// Of what a function makes of each number.
template <typename Of>
void sums_of_rows(const float* x, size_t rows, size_t size, float* sums, Of of) {
  size_t row = 0;
  for (; row + sums_beside <= rows; row += sums_beside) {
    sums_of_few_rows<sums_beside>(x + row * size, size, sums + row, of);
  }
  for (; row < rows; ++row) {
    sums_of_few_rows<1>(x + row * size, size, sums + row, of);
  }
}

} // namespace faststep
