// Element-wise operations on blocks of memory, with the bits of MLX's.
#pragma once

#include <optional>
#include <string_view>

#include "mlx/mlx.h"

namespace faststep::blocks {

namespace mx = mlx::core;

// Computes n elements. An input may be one element for all of them, where the loop was asked for that; the output may be an input.
using Loop = void (*)(char* out, const char* const* in, int n);

// The loop of an operation by the name that a kernel's source calls it: `dtype` is that of its operands (a Select's second one), bit
// i of `single` says that operand i is one element for all. Null: there is none.
Loop loop_of(std::string_view operation, mx::Dtype dtype, unsigned single);

// Return whether the loop of an operation is faster than a compiled kernel: eight elements at a time, where that calls the C library for
// each.
bool is_ahead_of_library(std::string_view operation, mx::Dtype dtype);

// The loop that converts elements; null: there is none.
Loop cast_of(mx::Dtype from, mx::Dtype to);

// The loop that copies elements of so many bytes.
Loop copy_of(size_t itemsize, bool single);

// Whether this processor runs them.
bool can_loop();

} // namespace faststep::blocks
