// Fused kernels that are computed before a compiler has made them.
#pragma once

#include <memory>

#include "mlx/mlx.h"

namespace faststep {

// MLX's fused kernel as one that can be computed at once; another primitive, and a kernel with an operation that only a compiler
// makes, as it is. The same one each time.
std::shared_ptr<mlx::core::Primitive> in_blocks(const std::shared_ptr<mlx::core::Primitive>& kernel);

// The primitive of an array: in blocks, if it is such a kernel; eight elements at a time, if it is an operation outside of a kernel that
// has such a loop (Exp, Sigmoid, Erf, Tanh, Cosh).
std::shared_ptr<mlx::core::Primitive> by_blocks(const mlx::core::array& array);

} // namespace faststep
