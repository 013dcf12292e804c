// Groups of processes, and the stream on which they exchange arrays.
#pragma once

#include "mlx/distributed/distributed.h"
#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

inline const mx::distributed::Group& group_at(const void* group) {
  return *static_cast<const mx::distributed::Group*>(group);
}

// On a GPU a stream of this thread's own, beside the one that computes.
mx::Stream communication_stream(const mx::distributed::Group& group);

} // namespace faststep
