// The order in which MLX evaluates what arrays are computed from: mlx/transforms.cpp (eval_impl).
#pragma once

#include <cstddef>
#include <cstdlib>
#include <optional>
#include <utility>
#include <vector>

namespace faststep {

inline size_t bfs_max_width() {
  const char* width = std::getenv("MLX_BFS_MAX_WIDTH");
  return width ? std::strtoul(width, nullptr, 10) : 20;
}

// List the nodes to compute for some outputs, last first: breadth first with a limit to the width. A graph has
//   Node                      a handle to an array
//   size_t inputs(Node)       how many inputs it has, and each of them
//   Node input(Node, size_t)
//   bool is_done(Node)        whether it is there
//   int& degree(Node)         a number of its own, 0 at first: that of its consumers that are not in the list
//   void outputs(Node, f)     calls f for each output of its operation, itself as well
template <typename Graph>
std::vector<typename Graph::Node> walk(Graph& graph, const std::vector<typename Graph::Node>& outputs, size_t width) {
  using Node = typename Graph::Node;
  using At = std::optional<Node>; // none: the list of the outputs
  auto size = [&](const At& at) { return at ? graph.inputs(*at) : outputs.size(); };
  auto input = [&](const At& at, size_t i) { return at ? graph.input(*at, i) : outputs[i]; };

  std::vector<At> todo{std::nullopt};
  while (!todo.empty()) {
    auto at = todo.back();
    todo.pop_back();
    for (size_t i = 0, n = size(at); i < n; ++i) {
      auto in = input(at, i);
      if (graph.is_done(in)) {
        continue;
      }
      if (graph.degree(in) == 0) {
        todo.push_back(in);
      }
      graph.outputs(in, [&](Node out) { ++graph.degree(out); });
    }
  }

  std::vector<Node> tape;
  std::vector<std::pair<At, size_t>> later{{std::nullopt, 0}};
  for (size_t i = 0; i < tape.size() || !later.empty();) {
    std::pair<At, size_t> next;
    if (i < tape.size()) {
      next = {tape[i++], 0};
    } else {
      next = later.back();
      later.pop_back();
    }
    auto& [at, j] = next;
    for (size_t n = size(at); j < n; ++j) {
      auto in = input(at, j);
      if (graph.is_done(in)) {
        continue;
      }
      if (tape.size() - i >= width) {
        later.push_back(next);
        break;
      }
      graph.outputs(in, [&](Node out) { --graph.degree(out); });
      if (graph.degree(in) == 0) {
        tape.push_back(in);
      }
    }
  }
  return tape;
}

} // namespace faststep
