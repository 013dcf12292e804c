// Transposes in a lazy graph.
#pragma once

#include <string_view>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

// Whether a matrix is still to be computed by that primitive.
inline bool is_matrix(const mlx::core::array& a, std::string_view primitive) {
  return a.ndim() == 2 && a.has_primitive() && a.primitive().name() == primitive;
}

// What a matrix is the transpose of, if it is one.
inline const mlx::core::array* transposed(const mlx::core::array& a) {
  bool turns = is_matrix(a, "Transpose") &&
      static_cast<const mlx::core::Transpose&>(a.primitive()).state() == std::vector<int>{1, 0};
  return turns ? &a.inputs()[0] : nullptr;
}

} // namespace faststep
