// Fused kernels that are computed before a compiler has made them.
#pragma once

#include <memory>

#include "mlx/mlx.h"

namespace faststep {

// MLX's fused kernel as one that can be computed at once; another primitive, and a kernel with an operation that only a compiler
// makes, as it is. The same one each time.
std::shared_ptr<mlx::core::Primitive> in_blocks(const std::shared_ptr<mlx::core::Primitive>& kernel);

} // namespace faststep
