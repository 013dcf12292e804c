// Groups of processes that exchange arrays.
#pragma once

#include "mlx/distributed/distributed.h"
#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

inline const mx::distributed::Group& group_at(const void* group) {
  return *static_cast<const mx::distributed::Group*>(group);
}

// The sum of an array on a CPU, in messages of so many elements.
mx::array in_messages(const mx::distributed::Group& group, const mx::array& whole, size_t message, mx::Stream stream);

} // namespace faststep
