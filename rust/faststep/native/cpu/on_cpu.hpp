// A primitive of our own (join.cpp, sum_of_squares.cpp, simulator/order.cpp).
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

// Base of primitives without options that only the CPU computes.
class OnCpu : public mx::UnaryPrimitive {
 public:
  explicit OnCpu(mx::Stream stream) : UnaryPrimitive(stream) {}

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error(std::string("[") + name() + "] The CPU's.");
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }
};

} // namespace faststep
