// What graph.cpp is told by whoever adds operations to a trace.
#pragma once

#include "mlx/mlx.h"

namespace faststep {

// The array is computed by an operation that its inputs' shapes, dtypes and values determine. MLX calls no two custom kernels
// equivalent, and a user's may differ in what cannot be seen.
void is_determined_by_inputs(const mlx::core::array& array);

// The array may be written over the operation's first input: its kernel reads there nothing that another thread writes.
void may_write_over_first_input(const mlx::core::array& array);
bool writes_over_first_input(const mlx::core::Primitive& primitive);

} // namespace faststep
