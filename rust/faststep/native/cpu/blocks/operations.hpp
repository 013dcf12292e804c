// A fused kernel by the operations that it consists of.
#pragma once

#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep::blocks {

// Compute a kernel that has no program operation by operation, as MLX does without compilation.
void compute_operations(
    mlx::core::Compiled& kernel, const std::vector<mlx::core::array>& inputs, std::vector<mlx::core::array>& outputs);

} // namespace faststep::blocks
