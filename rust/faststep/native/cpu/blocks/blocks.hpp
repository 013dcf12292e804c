// Fused kernels that are computed before a compiler has made them.
#pragma once

#include <memory>

#include "mlx/mlx.h"

namespace faststep {

// MLX's fused kernel as one that can be computed at once; another primitive, and a kernel with an operation that only a compiler
// makes, as it is. The same one each time.
std::shared_ptr<mlx::core::Primitive> in_blocks(const std::shared_ptr<mlx::core::Primitive>& kernel);

// The primitive of an array: so, if it is such a kernel, and by vectors, if it is e^x, or computed with it or like it, in an operation of its own.
std::shared_ptr<mlx::core::Primitive> by_blocks(const mlx::core::array& array);

} // namespace faststep
