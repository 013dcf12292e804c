// The transpose of a product, row after row (turned.cpp).
#pragma once

#include "mlx/mlx.h"
#include "ffi.hpp"

namespace faststep {

// (a b)^T of matrices of float32 with elements, on a CPU, with the bits that MLX gives a b.
mlx::core::array turned_product(const mlx::core::array& a, const mlx::core::array& b, Sgemm sgemm);

} // namespace faststep
