// Fused kernels that can take over the memory of their inputs (fuse.cpp).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

// What computes an array that is not evaluated, and how many handles there are to each of the inputs.
struct Source {
  std::shared_ptr<mx::Primitive> primitive;
  const std::vector<mx::array>& inputs;
  size_t handles;
};

Source source(const mx::array& array);

} // namespace faststep
