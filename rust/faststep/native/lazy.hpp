// A lazy graph of MLX's arrays, as `walk` goes through it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "mlx/mlx.h"
#include "walk.hpp"

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

// List the nodes that arrays are computed from, last first.
inline std::vector<mlx::core::array> tape_of(const std::vector<const mlx::core::array*>& arrays) {
  LazyArrays graph;
  std::vector<mlx::core::array> tape;
  for (const auto* node : walk(graph, arrays, bfs_max_width())) {
    tape.push_back(*node);
  }
  return tape;
}

// Gives an operation the module of the one whose place it takes.
void take_module(const mlx::core::array& from, const mlx::core::array& to);

} // namespace faststep
