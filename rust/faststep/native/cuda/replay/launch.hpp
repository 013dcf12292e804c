// Work of the driver's, done as an operation of MLX.
#pragma once

#include <functional>

#include "cuda/replay/encoder.hpp"
#include "mlx/mlx.h"

namespace faststep::replay {

// Have MLX come to it on a stream, behind all that was submitted to it. Returns an array without memory, whose event is that of
// the work; throws what the work throws.
mx::array submit(mx::Stream stream, std::function<void(Encoder&)> work);

} // namespace faststep::replay
