// Fused kernels that can take over the memory of their inputs (fuse.cpp).
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

// The primitive and the inputs of an array that is not evaluated, and how many handles there are to each of these.
struct Source {
  std::shared_ptr<mx::Primitive> primitive;
  const std::vector<mx::array>& inputs;
  size_t handles;
};

Source source(const mx::array& array);

} // namespace faststep
