// Operations that MLX computes by copies of single elements, by copies of rows (copied.cpp).
#pragma once

#include <optional>

#include "mlx/mlx.h"
#include "ffi.hpp"

namespace faststep {

// A lazy array of the same value, computed by copies of rows, or without copies: for x + a b of float32 matrices, products of many of
// them, other shapes and concatenations, on a CPU; none for other operations. Without `sgemm` products are left to MLX.
std::optional<mlx::core::array> copied_by_rows(const mlx::core::array& a, Sgemm sgemm);

} // namespace faststep
