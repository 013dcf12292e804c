// The base of our own primitives on the CPU (join.cpp, pace.cpp, rows.cpp, slices.cpp, sum_of_squares.cpp, turned.cpp).
#pragma once

#include <stdexcept>
#include <string>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

// A primitive without options, of one output.
class OnCpu : public mx::UnaryPrimitive {
 public:
  explicit OnCpu(mx::Stream stream) : UnaryPrimitive(stream) {}

  void eval_gpu(const std::vector<mx::array>&, mx::array&) override {
    throw std::runtime_error(std::string("[") + name() + "] expected a stream of the CPU, got one of a GPU");
  }

  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }
};

} // namespace faststep
