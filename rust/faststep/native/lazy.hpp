// A lazy graph of MLX's arrays, as `walk` goes through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "mlx/mlx.h"

namespace faststep {

struct LazyArrays {
  using Node = const mlx::core::array*;
  size_t inputs(Node node) const {
    return node->inputs().size();
  }
  Node input(Node node, size_t i) const {
    return &node->inputs()[i];
  }
  bool is_done(Node node) const {
    return node->status() != mlx::core::array::Status::unscheduled;
  }
  int& degree(Node node) {
    return degrees[node->id()];
  }
  template <typename F>
  void outputs(Node node, F f) const {
    f(node);
    for (const auto& sibling : node->siblings()) {
      f(&sibling);
    }
  }
  std::unordered_map<std::uintptr_t, int> degrees;
};

// Gives an operation the module of the one whose place it takes.
void take_module(const mlx::core::array& from, const mlx::core::array& to);

} // namespace faststep
