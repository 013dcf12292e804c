// Products with quantized weights by way of float32 (quantized.cpp).
#pragma once

#include <cstddef>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "ffi.hpp"

namespace faststep {

namespace mx = mlx::core;

// Functions of src/mlx/quantized: how many numbers a product needs beside its arrays, and the product itself.
struct Functions {
  size_t (*scratch)(const QuantizedProduct*);
  int (*run)(const QuantizedProduct*);
};

// The bytes that such a product needs while it runs; 0 for other primitives.
size_t scratch_of(const mx::Primitive& primitive, const std::vector<mx::array>& inputs, const mx::array& out);

} // namespace faststep
