// Products with quantized weights by way of float32 (quantized.cpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

// A product, as src/quantized.rs describes its fields.
struct Call {
  size_t dtype, mode, bits, group, transposed;
  size_t rows, inner, columns;
  size_t weights, inputs, pairs;
  const void* x;
  const uint8_t* w;
  const void* scales;
  const void* biases;
  const uint32_t* left;
  const uint32_t* right;
  void* out;
  float* scratch;
};

// Those of src/quantized.rs: how many numbers a product needs beside its arrays, and the product.
struct Functions {
  size_t (*scratch)(const Call*);
  int (*run)(const Call*);
};

// The bytes that such a product needs while it runs; 0: it is none.
size_t scratch_of(const mx::Primitive& primitive, const std::vector<mx::array>& inputs, const mx::array& out);

} // namespace faststep
