// What graph.cpp is told by whoever adds operations to a trace.
#pragma once

#include "mlx/mlx.h"

namespace faststep {

// The array is computed by an operation that its inputs' shapes, dtypes and values determine. MLX calls no two custom kernels
// equivalent, and a user's may differ in what cannot be seen.
void is_determined_by_inputs(const mlx::core::array& array);

} // namespace faststep
