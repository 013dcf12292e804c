// Softmax and the logarithm of the sum of exponentials along the last axis, of float32: MLX's bits, several numbers at a time.
#pragma once

#include <optional>

#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

// The same (lazily), where a is one of the two, on a CPU.
std::optional<mx::array> softmax_of(const mx::array& a);

} // namespace faststep
