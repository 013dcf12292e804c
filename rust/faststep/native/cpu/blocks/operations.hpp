// A fused kernel by the operations that it consists of.
#pragma once

#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep::blocks {

// What MLX computes where nothing is compiled, for a kernel without a program: one operation after the other.
void compute_operations(
    mlx::core::Compiled& kernel, const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs);

} // namespace faststep::blocks
