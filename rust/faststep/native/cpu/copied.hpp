// Operations that MLX computes by copies of single elements, by copies of rows (copied.cpp).
#pragma once

#include <optional>

#include "mlx/mlx.h"
#include "ffi.hpp"

namespace faststep {

// The same (lazily), where a is c + a b of matrices of float32, or a concatenation, on a CPU. `sgemm` may be null.
std::optional<mlx::core::array> copied_by_rows(const mlx::core::array& a, Sgemm sgemm);

} // namespace faststep
