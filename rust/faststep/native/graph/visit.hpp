// The way through a lazy graph on which each operation comes behind its inputs.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace faststep {

// Call `leave` with an array when that has been done with its inputs, those first of whose arrays `enter` is true. An array
// that several operations read comes as often. No recursion: a graph can be deeper than the stack.
template <typename Enter, typename Leave>
void visit(const mlx::core::array& root, Enter enter, Leave leave) {
  std::vector<std::pair<mlx::core::array, size_t>> path{{root, 0}};
  while (!path.empty()) {
    auto& [array, next] = path.back();
    if (next < array.inputs().size() && enter(std::as_const(array))) {
      auto input = array.inputs()[next++];
      path.emplace_back(std::move(input), 0); // the references above are gone
      continue;
    }
    leave(std::as_const(array));
    path.pop_back();
  }
}

} // namespace faststep
