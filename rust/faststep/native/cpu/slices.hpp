// Sums of arrays that are zero but for a slice: the gradient of an array that is read slice by slice (slices.cpp).
#pragma once

#include <vector>

#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

// A float32 slice: what is in it, its first index, and its steps, which are positive.
struct Slice {
  mx::array values;
  mx::Shape start;
  mx::Shape steps;
};

// A float32 array of this shape, zero but for what is added to it, one slice after the other (lazily).
mx::array sum_of_slices(const mx::Shape& shape, const std::vector<Slice>& slices, mx::Stream stream);

// A float32 array, and to it these slices, one after the other (lazily).
mx::array with_slices(const mx::array& base, const std::vector<Slice>& slices, mx::Stream stream);

} // namespace faststep
