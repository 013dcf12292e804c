// A lazy graph made anew from what it begins with, operation by operation.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "graph/visit.hpp"
#include "status.hpp"

namespace faststep {

class Rewrite {
 public:
  virtual ~Rewrite() = default;

  // Learn who uses which array, where a rule asks for it: before the first of these arrays is run.
  void look(const std::vector<mlx::core::array>& roots) {
    std::unordered_set<std::uintptr_t> seen;
    auto path = roots;
    for (const auto& root : roots) {
      ++users_[root.id()].count;
    }
    while (!path.empty()) {
      auto a = path.back();
      path.pop_back();
      if (!is_pending(a) || !seen.insert(a.outputs()[0].id()).second) {
        continue;
      }
      for (const auto& input : a.inputs()) {
        auto& users = users_[input.id()];
        ++users.count;
        users.all.push_back(a);
        path.push_back(input);
      }
    }
  }

  // The array that takes an array's place.
  mlx::core::array run(const mlx::core::array& root) {
    auto is_new = [this](const mlx::core::array& a) { return known_.count(a.id()) == 0 && is_pending(a); };
    visit(root, is_new, [this](const mlx::core::array& a) { resolve(mlx::core::array(a)); });
    return known_.at(root.id());
  }

  // Those that take the places of several, which then belong to the caller.
  void run(const void* const* roots, size_t count, void** places) {
    std::vector<mlx::core::array> all;
    for (size_t i = 0; i < count; ++i) {
      all.push_back(run(at(roots[i])));
    }
    std::transform(all.begin(), all.end(), places, owned);
  }

 protected:
  // The array that takes the place of one that is there, or is an input of the trace.
  virtual mlx::core::array leaf(const mlx::core::array& a) {
    return a;
  }

  // The arrays that take the place of an operation's outputs, whose inputs have been replaced.
  virtual std::vector<mlx::core::array> operation(const std::vector<mlx::core::array>& outputs) = 0;

  // Operations that use an array, as the graph was.
  struct Users {
    size_t count = 0; // the caller of the rewrite counts, too
    std::vector<mlx::core::array> all; // what they make
  };

  Users users(const mlx::core::array& original) const {
    auto found = users_.find(original.id());
    return found == users_.end() ? Users{} : found->second;
  }

  // How many operations use the arrays that this one has taken the place of.
  size_t uses(const mlx::core::array& place) const {
    auto found = uses_.find(place.id());
    return found == uses_.end() ? 0 : found->second;
  }

  // The array that takes the place of another one, if that has been reached.
  std::optional<mlx::core::array> place_of(const mlx::core::array& original) const {
    auto found = known_.find(original.id());
    return found == known_.end() ? std::nullopt : std::optional(found->second);
  }

  // Keeps an array for as long as this lives: an id is that of another array once the first is gone.
  void hold(const mlx::core::array& a) {
    held_.push_back(a);
  }

 private:
  static bool is_pending(const mlx::core::array& a) {
    return a.has_primitive() && a.status() == mlx::core::array::Status::unscheduled;
  }

  // Everything that the array is made of is known.
  void resolve(const mlx::core::array& a) {
    if (known_.count(a.id()) != 0) {
      return;
    }
    if (!is_pending(a)) {
      know({a}, {leaf(a)});
      return;
    }
    auto outputs = a.outputs();
    for (auto& output : outputs) {
      for (auto& input : output.inputs()) {
        input = known_.at(input.id());
      }
    }
    know(outputs, operation(outputs));
  }

  void know(const std::vector<mlx::core::array>& arrays, const std::vector<mlx::core::array>& places) {
    for (size_t i = 0; i < arrays.size(); ++i) {
      known_.emplace(arrays[i].id(), places[i]);
      uses_[places[i].id()] += users(arrays[i]).count;
      hold(arrays[i]);
    }
  }

  std::unordered_map<std::uintptr_t, mlx::core::array> known_;
  std::unordered_map<std::uintptr_t, Users> users_; // by the array as it was
  std::unordered_map<std::uintptr_t, size_t> uses_; // by the array in its place
  std::vector<mlx::core::array> held_;
};

} // namespace faststep
