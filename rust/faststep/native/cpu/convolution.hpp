// Convolutions by patches of images (convolution.cpp).
#pragma once

#include <optional>

#include "mlx/mlx.h"
#include "ffi.hpp"

namespace faststep {

using Convolve = void (*)(const Convolution*);

// An array of a trace on a CPU that is a convolution, or the gradient of one's weights, computed by `convolve`; none where it is neither.
std::optional<mlx::core::array> convolution_of(const mlx::core::array& a, Convolve convolve);

} // namespace faststep
