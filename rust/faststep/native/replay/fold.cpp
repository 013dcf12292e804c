#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "mlx/primitives.h"
#include "replay/capture.hpp"

namespace faststep::replay {

void fold(
    const Graph& graph, mx::Stream stream, const std::function<bool(const mx::Primitive&)>& stays_in_the_step) {
  constexpr size_t small = size_t{1} << 20; // what they leave takes memory between launches
  std::unordered_set<const mx::array::Data*> given;
  for (const auto* list : {&graph.into, &graph.fed, &graph.inputs}) {
    for (const auto& array : *list) {
      given.insert(array.data_shared_ptr().get());
    }
  }
  auto is_lazy = [](const mx::array& array) { return array.status() == mx::array::Status::unscheduled; };
  std::unordered_map<std::uintptr_t, bool> same; // by array
  auto is_same = [&](const mx::array& array) {
    return is_lazy(array) ? same.at(array.id()) : !given.contains(array.data_shared_ptr().get());
  };
  auto is_small = [](const mx::array& array) { return array.nbytes() <= small; };
  std::vector<mx::array> folded;
  std::vector<std::pair<mx::array, size_t>> todo;
  for (const auto* roots : {&graph.results, &graph.from}) {
    for (const auto& root : *roots) {
      todo.emplace_back(root, 0);
    }
  }
  while (!todo.empty()) {
    auto& [array, next] = todo.back();
    if (!is_lazy(array) || same.contains(array.id())) {
      todo.pop_back();
      continue;
    }
    if (next < array.inputs().size()) {
      auto in = array.inputs()[next++];
      todo.emplace_back(std::move(in), 0);
      continue;
    }
    auto outputs = array.outputs();
    const auto& inputs = array.inputs();
    bool stays = array.primitive().stream() == stream && !stays_in_the_step(array.primitive()) &&
        std::all_of(outputs.begin(), outputs.end(), is_small) && std::all_of(inputs.begin(), inputs.end(), is_same);
    for (const auto& in : inputs) {
      if (!stays && is_lazy(in) && is_same(in)) {
        folded.push_back(in);
      }
    }
    for (const auto& out : outputs) {
      same[out.id()] = stays;
    }
    todo.pop_back();
  }
  if (!folded.empty()) {
    mx::eval(std::move(folded));
  }
}

} // namespace faststep::replay
