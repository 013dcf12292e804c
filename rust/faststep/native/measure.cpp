// The time of each operation of a lazy graph: they are evaluated one by one, in MLX's order, each to its end.
#include <algorithm>
#include <chrono>
#include <sstream>
#include <string>
#include <unordered_map>
#include <vector>

#include "ffi.hpp"
#include "status.hpp"
#include "walk.hpp"

namespace {

namespace mx = mlx::core;
using faststep::at;

// A lazy graph as `walk` goes through it.
struct LazyArrays {
  using Node = const mx::array*;
  size_t inputs(Node node) const {
    return node->inputs().size();
  }
  Node input(Node node, size_t i) const {
    return &node->inputs()[i];
  }
  bool is_done(Node node) const {
    return node->status() != mx::array::Status::unscheduled;
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

double seconds_of(const mx::array& array) {
  auto began = std::chrono::steady_clock::now();
  mx::eval({array});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// What one evaluation takes beside its operation: the median of many of a scalar's.
double overhead() {
  std::vector<double> taken;
  auto one = mx::array(1.0f);
  for (int i = 0; i < 41; ++i) {
    taken.push_back(seconds_of(mx::negative(one)));
  }
  std::nth_element(taken.begin(), taken.begin() + 20, taken.end());
  return taken[20];
}

std::string described(const mx::array& array) {
  std::ostringstream text;
  text << array.dtype() << ' ' << array.shape();
  return text.str();
}

size_t bytes_of(const mx::array& array) {
  size_t bytes = 0;
  for (const auto& input : array.inputs()) {
    bytes += std::min(input.nbytes(), input.data_size() * input.itemsize()); // what is broadcast is read once
  }
  bytes += array.nbytes();
  for (const auto& sibling : array.siblings()) {
    bytes += sibling.nbytes();
  }
  return bytes;
}

} // namespace

int faststep_measure(
    const void* const* arrays,
    size_t count,
    void (*take)(void* into, const char* name, const char* output, size_t bytes, double seconds),
    void* into) {
  return faststep::guarded([&] {
    auto beside = overhead();
    std::vector<mx::array> tape;
    {
      LazyArrays graph;
      std::vector<const mx::array*> roots;
      for (size_t i = 0; i < count; ++i) {
        roots.push_back(&at(arrays[i]));
      }
      for (const auto* node : faststep::walk(graph, roots, faststep::bfs_max_width())) {
        tape.push_back(*node);
      }
    }
    while (!tape.empty()) { // the last ones are to be computed first
      auto array = std::move(tape.back()); // no longer in the list: its memory can be used again
      tape.pop_back();
      if (array.status() != mx::array::Status::unscheduled) {
        continue; // with a sibling
      }
      std::string name = array.primitive().name(), output = described(array);
      auto bytes = bytes_of(array);
      auto seconds = seconds_of(array);
      take(into, name.c_str(), output.c_str(), bytes, std::max(0.0, seconds - beside));
    }
  });
}
