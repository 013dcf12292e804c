// Memory of the host for the scalars that a launch gives: the device writes it, and a host reads it where it is.
#pragma once

#include <cstddef>

#include "mlx/mlx.h"

namespace faststep::replay {

namespace mx = mlx::core;

inline constexpr size_t scalar_bytes = 8;

// Memory for an array of at most so many bytes, which any thread may let go of. Whoever writes it does so on the stream on
// which whatever had it before was written.
mx::allocator::Data scalar();

} // namespace faststep::replay
