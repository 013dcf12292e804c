// Facts about operations of our own that nobody can see in their primitives: told where an operation is made.
#pragma once

#include <cstddef>
#include <vector>

#include "mlx/mlx.h"

namespace faststep {

// The array is computed by an operation that its inputs' shapes, dtypes and values determine. MLX calls no two custom kernels
// equivalent, and a user's may differ in what cannot be seen.
void is_determined_by_inputs(const mlx::core::array& array);
bool is_determined_by_inputs(const mlx::core::Primitive& primitive);

// An input that may lie where a part of an operation's first output will: so many bytes behind its beginning.
struct Place {
  size_t input, offset;
};

// The operation's kernel writes nothing there that another thread of it may still read.
void may_lie_within(const mlx::core::array& array, std::vector<Place> inputs);
const std::vector<Place>& may_lie_within(const mlx::core::Primitive& primitive);

} // namespace faststep
