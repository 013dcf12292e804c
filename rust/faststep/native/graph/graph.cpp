// The lazy graph of a trace, before MLX's compiler rewrites it: its size, which operations are the same, what reads what.
#include "graph/graph.hpp"

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/distributed/primitives.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "fast_primitives.hpp"
#include "status.hpp"
#include "told.hpp"

namespace faststep {

namespace mx = mlx::core;

namespace {

using Id = std::uintptr_t;

// Primitives that pass on what they are given, and that MLX never calls equivalent.
bool passes_on(const mx::Primitive& primitive) {
  std::string_view name(primitive.name());
  return name == "CustomTransforms" || name == "Depends";
}

// Of primitives of one class, which is known by its name: not all have type information outside of MLX.
template <typename T>
bool have_same_state(const mx::Primitive& a, const mx::Primitive& b) {
  return static_cast<const T&>(a).state() == static_cast<const T&>(b).state();
}

// The same of those that have no `is_equivalent` of MLX's.
bool same_without_mlx(const mx::Primitive& a, const mx::Primitive& b) {
  std::string_view name(a.name());
  for (std::string_view without_state : {"Log1p", "Expm1", "SegmentedMM", "QRF", "LUF", "GatedDeltaUpdate"}) {
    if (name == without_state) {
      return true;
    }
  }
  for (std::string_view collective : {"AllReduce", "AllGather", "ReduceScatter"}) { // what they reduce by is in the name
    if (name.ends_with(collective)) {
      using Collective = mx::distributed::DistPrimitive;
      auto group = [](const mx::Primitive& one) { return static_cast<const Collective&>(one).group().raw_group(); };
      return name == b.name() && group(a) == group(b);
    }
  }
  return (name == "SVD" && have_same_state<mx::SVD>(a, b)) || (name == "Inverse" && have_same_state<mx::Inverse>(a, b)) ||
         (name == "Cholesky" && have_same_state<mx::Cholesky>(a, b)) ||
         (name == "CustomKernel" && have_same_state<mx::fast::CustomKernel>(a, b));
}

} // namespace

bool same_primitive(const mx::Primitive& a, const mx::Primitive& b) {
  if (typeid(a) != typeid(b)) {
    return false;
  }
  return a.is_equivalent(b) || same_without_mlx(a, b) || passes_on(a) || (is_determined_by_inputs(a) && is_determined_by_inputs(b));
}

namespace {

// The number of operations from inputs to outputs.
size_t size(const std::vector<const mx::array*>& inputs, const std::vector<const mx::array*>& outputs) {
  std::unordered_set<Id> seen;
  for (const auto* input : inputs) {
    seen.insert(input->id());
  }
  size_t count = 0;
  std::vector<const mx::array*> todo(outputs);
  while (!todo.empty()) {
    const auto& array = *todo.back();
    todo.pop_back();
    if (!seen.insert(array.id()).second || !array.has_primitive()) {
      continue;
    }
    ++count;
    for (const auto& sibling : array.siblings()) {
      seen.insert(sibling.id());
    }
    for (const auto& input : array.inputs()) {
      todo.push_back(&input);
    }
  }
  return count;
}

// Have the operations behind `outputs` read `to` in the place of `from`, but for the ones that make `to` of it.
void read_instead(
    const std::vector<const mx::array*>& from,
    const std::vector<const mx::array*>& to,
    const std::vector<mx::array>& outputs) {
  std::unordered_map<Id, const mx::array*> others;
  std::unordered_set<Id> makers, seen;
  for (size_t i = 0; i < from.size(); ++i) {
    bool direct = std::any_of(to[i]->inputs().begin(), to[i]->inputs().end(), [&](const auto& in) {
      return in.id() == from[i]->id();
    });
    if (direct && to[i]->siblings().empty()) {
      others.emplace(from[i]->id(), to[i]);
      makers.insert(to[i]->id());
    }
  }
  std::vector<mx::array> todo(outputs);
  while (!todo.empty()) {
    auto array = std::move(todo.back());
    todo.pop_back();
    if (!seen.insert(array.id()).second) {
      continue;
    }
    bool makes = makers.contains(array.id());
    for (auto& result : array.outputs()) {
      seen.insert(result.id());
      for (auto& in : result.inputs()) {
        todo.push_back(in);
        if (auto other = others.find(in.id()); other != others.end() && !makes) {
          in = *other->second;
          todo.push_back(in);
        }
      }
    }
  }
}

} // namespace

} // namespace faststep

using faststep::guarded;
using faststep::pointers;

size_t faststep_graph_size(
    const void* const* inputs, size_t n_inputs, const void* const* outputs, size_t n_outputs) noexcept {
  return faststep::size(pointers(inputs, n_inputs), pointers(outputs, n_outputs));
}

int faststep_graph_read_instead(
    const void* const* from, const void* const* to, size_t n, const void* const* outputs, size_t n_outputs) {
  return guarded([&] {
    faststep::read_instead(pointers(from, n), pointers(to, n), faststep::list(outputs, n_outputs));
  });
}
