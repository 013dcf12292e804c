// The graph of a trace, written down before MLX's compiler rewrites it: what two traces have in common, which constants
// they have of their own, and who else holds one.
#include "graph/graph.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
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
#include "graph/visit.hpp"
#include "status.hpp"

namespace faststep {

namespace mx = mlx::core;

// One array of a graph. Operations with several results are one node for each, which share the primitive.
struct Node {
  std::shared_ptr<mx::Primitive> primitive; // null: an input or a constant
  std::vector<uint32_t> inputs;
  uint32_t result; // which of the primitive's
  mx::Dtype dtype;
  mx::Shape shape;
  int64_t input; // its number, -1: no input
};

namespace {

using Id = std::uintptr_t;

bool is_leaf(const Node& node) {
  return node.primitive == nullptr && node.input < 0;
}

// Primitives that pass on what they are given, and that MLX never calls equivalent.
bool passes_on(const mx::Primitive& primitive) {
  std::string_view name(primitive.name());
  return name == "CustomTransforms" || name == "Depends";
}

// Facts about primitives, each kept as long as its primitive.
template <typename T>
class Told {
 public:
  void add(const mx::array& array, T what) {
    std::erase_if(all_, [](const auto& item) { return item.second.first.expired(); });
    all_.insert_or_assign(&array.primitive(), std::pair{std::weak_ptr(array.primitive_ptr()), std::move(what)});
  }

  const T* find(const mx::Primitive& primitive) const {
    auto found = all_.find(&primitive);
    return found != all_.end() && !found->second.first.expired() ? &found->second.second : nullptr;
  }

 private:
  std::unordered_map<const mx::Primitive*, std::pair<std::weak_ptr<mx::Primitive>, T>> all_;
};

thread_local Told<bool> determined;
thread_local Told<std::vector<Place>> within;

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

// How many elements lie from the first of an array to its last in memory; none where not all lie behind the first.
size_t span(const mx::array& array) {
  size_t last = 0;
  for (int i = 0; i < static_cast<int>(array.ndim()); ++i) {
    if (array.shape(i) == 0 || array.strides(i) < 0) {
      return 0;
    }
    last += static_cast<size_t>(array.shape(i) - 1) * static_cast<size_t>(array.strides(i));
  }
  return last + 1;
}

bool same_value(const mx::array& a, const mx::array& b) {
  if (a.id() == b.id()) {
    return true;
  }
  if (!a.is_available() || !b.is_available() || a.nbytes() != b.nbytes()) {
    return false;
  }
  if (a.flags().row_contiguous && b.flags().row_contiguous) {
    return std::memcmp(a.data<char>(), b.data<char>(), a.nbytes()) == 0;
  }
  // a broadcast or transposed one by what lies under it, where it lies in the same way
  size_t count = a.shape() == b.shape() && a.strides() == b.strides() ? span(a) : 0;
  return count > 0 && std::memcmp(a.data<char>(), b.data<char>(), count * a.itemsize()) == 0;
}

// mlx::core::array is one shared pointer (mlx/array.h); how many arrays share what it points at is not public.
long holders(const mx::array& array) {
  static_assert(sizeof(mx::array) == sizeof(std::shared_ptr<void>));
  return reinterpret_cast<const std::shared_ptr<void>&>(array).use_count();
}

} // namespace

bool same_primitive(const mx::Primitive& a, const mx::Primitive& b) {
  if (typeid(a) != typeid(b)) {
    return false;
  }
  return a.is_equivalent(b) || same_without_mlx(a, b) || passes_on(a) || (determined.find(a) && determined.find(b));
}

void is_determined_by_inputs(const mx::array& array) {
  determined.add(array, true);
}

void may_lie_within(const mx::array& array, std::vector<Place> inputs) {
  within.add(array, std::move(inputs));
}

const std::vector<Place>& may_lie_within(const mx::Primitive& primitive) {
  static const std::vector<Place> none;
  const auto* found = within.find(primitive);
  return found ? *found : none;
}

class Graph {
 public:
  Graph(const std::vector<mx::array>& inputs, const std::vector<mx::array>& outputs) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      inputs_.emplace(inputs[i].id(), i);
    }
    for (const auto& output : outputs) {
      outputs_.push_back(number(output));
    }
    seen_.clear();
  }

  // Whether the operations are the same. Constants that differ then are added to `varying`. A graph is not the same as itself
  // where it has an operation of which that cannot be told.
  bool compare(const Graph& other, std::vector<uint32_t>& varying) const {
    if (nodes_.size() != other.nodes_.size() || outputs_ != other.outputs_) {
      return false;
    }
    for (uint32_t i = 0; i < nodes_.size(); ++i) {
      const auto &a = nodes_[i], &b = other.nodes_[i];
      bool form = a.inputs == b.inputs && a.result == b.result && a.dtype == b.dtype && a.shape == b.shape &&
          a.input == b.input && (a.primitive == nullptr) == (b.primitive == nullptr);
      bool one = this != &other && a.primitive == b.primitive;
      if (!form || (a.primitive && !one && !same_primitive(*a.primitive, *b.primitive))) {
        return false;
      }
      if (is_leaf(a) && !same_value(constants_.at(i), other.constants_.at(i))) {
        varying.push_back(i);
      }
    }
    return true;
  }

  const mx::array* constant(uint32_t at) const {
    auto found = constants_.find(at);
    return found == constants_.end() ? nullptr : &found->second;
  }

  size_t size() const {
    return nodes_.size();
  }

  size_t bytes() const {
    size_t sum = 0;
    for (const auto& [at, constant] : constants_) {
      sum += constant.nbytes();
    }
    return sum;
  }

  bool determines_gradients() const {
    return std::none_of(nodes_.begin(), nodes_.end(), [](const Node& node) {
      return node.primitive && std::string_view(node.primitive->name()) == "CustomTransforms";
    });
  }

  // Constants, and arrays that are yet to be computed and not from the inputs, that somebody else holds too: there are more
  // handles of them than the graph, and `also`, have.
  std::vector<mx::array> held(const std::vector<mx::array>& outputs, const Graph* also) const {
    std::unordered_map<Id, long> edges;
    std::unordered_set<Id> seen;
    std::vector<mx::array> lazy;
    std::vector<const mx::array*> todo;
    for (const auto& output : outputs) {
      edges[output.id()] = std::numeric_limits<int>::max(); // whoever asks holds it
      todo.push_back(&output);
    }
    while (!todo.empty()) {
      const auto& array = *todo.back();
      todo.pop_back();
      if (!seen.insert(array.id()).second || inputs_.contains(array.id())) {
        continue;
      }
      if (array.has_primitive() && array.siblings().empty() && edges[array.id()] < std::numeric_limits<int>::max()) {
        lazy.push_back(array);
      }
      for (const auto& input : array.inputs()) {
        edges[input.id()] += 1;
        todo.push_back(&input);
      }
      for (const auto& sibling : array.siblings()) { // has a list of the inputs of its own
        if (seen.insert(sibling.id()).second) {
          for (const auto& input : sibling.inputs()) {
            edges[input.id()] += 1;
          }
        }
      }
    }
    if (also != nullptr) {
      for (const auto& [at, array] : also->constants_) {
        edges[array.id()] += 1;
      }
    }
    std::vector<mx::array> found;
    for (const auto& [at, array] : constants_) {
      if (holders(array) > edges[array.id()] + 1) { // one is `constants_`
        found.push_back(array);
      }
    }
    for (const auto& array : lazy) {
      if (holders(array) > edges[array.id()] + 1 && !depends(array)) { // one is `lazy`
        found.push_back(array);
      }
    }
    return found;
  }

 private:
  // Whether an array is computed from the inputs.
  bool depends(const mx::array& root) const {
    std::unordered_set<Id> seen;
    std::vector<const mx::array*> todo{&root};
    while (!todo.empty()) {
      const auto& array = *todo.back();
      todo.pop_back();
      if (inputs_.contains(array.id())) {
        return true;
      }
      if (seen.insert(array.id()).second) {
        for (const auto& input : array.inputs()) {
          todo.push_back(&input);
        }
      }
    }
    return false;
  }

  // The number of an array, behind those of the arrays that it is computed from.
  uint32_t number(const mx::array& root) {
    auto is_new = [this](const mx::array& a) {
      return !seen_.contains(a.id()) && !inputs_.contains(a.id()) && a.has_primitive();
    };
    visit(root, is_new, [this](const mx::array& a) { add(a); });
    return seen_.at(root.id());
  }

  void add(const mx::array& array) {
    auto at = static_cast<uint32_t>(nodes_.size());
    if (!seen_.emplace(array.id(), at).second) {
      return;
    }
    Node node{nullptr, {}, 0, array.dtype(), array.shape(), -1};
    if (auto input = inputs_.find(array.id()); input != inputs_.end()) {
      node.input = static_cast<int64_t>(input->second);
    } else if (array.has_primitive()) {
      node.primitive = array.primitive_ptr();
      node.result = array.siblings().empty() ? 0 : static_cast<uint32_t>(array.sibling_position());
      for (const auto& in : array.inputs()) {
        node.inputs.push_back(seen_.at(in.id()));
      }
    } else {
      constants_.emplace(at, array);
    }
    nodes_.push_back(std::move(node));
  }

  std::vector<Node> nodes_;
  std::vector<uint32_t> outputs_;
  std::unordered_map<Id, size_t> inputs_;
  std::unordered_map<uint32_t, mx::array> constants_;
  std::unordered_map<Id, uint32_t> seen_;
};

namespace {

// Have the operations behind `outputs` read other arrays in the place of those with these ids.
void replace(const std::vector<mx::array>& outputs, const std::unordered_map<Id, const mx::array*>& others) {
  std::unordered_set<Id> seen;
  std::vector<mx::array> todo(outputs.begin(), outputs.end());
  while (!todo.empty()) {
    auto array = std::move(todo.back());
    todo.pop_back();
    if (!seen.insert(array.id()).second) {
      continue;
    }
    for (auto& result : array.outputs()) {
      seen.insert(result.id());
      for (auto& in : result.inputs()) {
        if (auto found = others.find(in.id()); found != others.end()) {
          in = *found->second;
        } else if (result.id() == array.id()) {
          todo.push_back(in);
        }
      }
    }
  }
}

// Arrays between inputs and outputs that somebody holds beside the graph, who will keep a tracer when the trace is done.
// `before`: how many handles of each input there were. Of each output there is one, and one in `outputs`. None is found where
// the graph has functions with gradients of their own: what those hold beside their arguments goes with the graph.
std::vector<mx::array> kept(
    const std::vector<mx::array>& inputs, const size_t* before, const std::vector<mx::array>& outputs) {
  std::unordered_map<Id, long> known;
  std::unordered_set<Id> seen, traced;
  std::vector<const mx::array*> order, todo;
  for (size_t i = 0; i < inputs.size(); ++i) {
    seen.insert(inputs[i].id());
    known[inputs[i].id()] += 1; // in `inputs`
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (traced.insert(inputs[i].id()).second) { // one that stands there twice has been counted with both handles
      known[inputs[i].id()] += static_cast<long>(before[i]);
      order.push_back(&inputs[i]);
    }
  }
  auto meet = [&](const mx::array& array) {
    if (seen.insert(array.id()).second) {
      todo.push_back(&array);
      order.push_back(&array);
    }
  };
  for (const auto& output : outputs) {
    known[output.id()] += 2;
    meet(output);
  }
  while (!todo.empty()) {
    const auto& array = *todo.back();
    todo.pop_back();
    if (array.has_primitive() && std::string_view(array.primitive().name()) == "CustomTransforms") {
      return {};
    }
    for (const auto& input : array.inputs()) {
      known[input.id()] += 1;
      meet(input);
    }
    for (const auto& sibling : array.siblings()) {
      known[sibling.id()] += 1;
      meet(sibling);
    }
  }
  // what depends on no input can be evaluated by whoever holds it
  std::unordered_map<Id, bool> depends;
  for (const auto& input : inputs) {
    depends[input.id()] = true;
  }
  auto is_new = [&](const mx::array& a) { return !depends.contains(a.id()); };
  auto decide = [&](const mx::array& a) {
    const auto& of = a.inputs();
    depends.try_emplace(a.id(), std::any_of(of.begin(), of.end(), [&](const auto& in) { return depends[in.id()]; }));
  };
  std::vector<mx::array> found;
  for (const auto* array : order) {
    if (holders(*array) > known[array->id()]) {
      visit(*array, is_new, decide);
      if (depends[array->id()]) {
        found.push_back(*array);
      }
    }
  }
  return found;
}

bool is_pending(const mx::array& array) {
  return array.status() == mx::array::Status::unscheduled;
}

// Arrays that are yet to be computed, and from no input, which somebody holds beside what the outputs are computed by, but for
// those behind `known`. Of each output there are two handles: who holds one of more looks at it after the trace.
std::vector<mx::array> lasting(
    const std::vector<const mx::array*>& known, const std::vector<const mx::array*>& outputs) {
  if (outputs.empty()) {
    return {};
  }
  // MLX marks tracers, and takes the mark away where it differentiates: one without may be computed from an input too
  auto may_last = [](const mx::array& a) { return a.has_primitive() && is_pending(a) && !a.is_tracer(); };
  std::unordered_map<Id, long> edges;
  std::unordered_set<Id> seen;
  std::vector<const mx::array*> found, todo;
  auto meet = [&](const mx::array& array) {
    if (seen.insert(array.id()).second) {
      todo.push_back(&array);
    }
  };
  auto walk = [&](bool counts) {
    while (!todo.empty()) {
      const auto& array = *todo.back();
      todo.pop_back();
      if (counts && may_last(array)) {
        found.push_back(&array);
      }
      for (const auto* others : {&array.inputs(), &array.siblings()}) {
        for (const auto& other : *others) {
          if (may_last(other)) {
            edges[other.id()] += 1;
          }
          if (other.has_primitive()) {
            meet(other);
          }
        }
      }
    }
  };
  std::for_each(known.begin(), known.end(), [&](const auto* array) { meet(*array); });
  walk(false);
  for (const auto* output : outputs) {
    edges[output->id()] += 2;
    meet(*output);
  }
  walk(true);
  std::unordered_map<Id, bool> depends; // on what has no operation that it could be computed by
  auto is_new = [&](const mx::array& a) { return is_pending(a) && !depends.contains(a.id()); };
  auto decide = [&](const mx::array& a) {
    const auto& of = a.inputs();
    bool one = std::any_of(of.begin(), of.end(), [&](const auto& in) { return depends[in.id()]; });
    depends.try_emplace(a.id(), is_pending(a) && (!a.has_primitive() || one));
  };
  std::vector<mx::array> held;
  for (const auto* array : found) {
    if (holders(*array) > edges[array->id()]) {
      visit(*array, is_new, decide);
      if (!depends[array->id()]) {
        held.push_back(*array);
      }
    }
  }
  return held;
}

// Hand out as many arrays as there is room for, and how many that are.
void give(const std::vector<mx::array>& arrays, void** found, size_t room, size_t* count) {
  *count = std::min(room, arrays.size());
  std::transform(arrays.begin(), arrays.begin() + *count, found, [](const auto& array) { return owned(array); });
}

const Graph& graph_at(const void* graph) {
  return *static_cast<const Graph*>(graph);
}

} // namespace

} // namespace faststep

using faststep::graph_at;
using faststep::guarded;
using faststep::owned;
using faststep::pointers;

int faststep_graph_new(
    const void* const* inputs, size_t n_inputs, const void* const* outputs, size_t n_outputs, void** graph) {
  return guarded([&] {
    *graph = new faststep::Graph(faststep::list(inputs, n_inputs), faststep::list(outputs, n_outputs));
  });
}

void faststep_graph_free(void* graph) noexcept {
  delete static_cast<faststep::Graph*>(graph);
}

size_t faststep_graph_size(const void* graph) noexcept {
  return graph_at(graph).size();
}

size_t faststep_graph_bytes(const void* graph) noexcept {
  return graph_at(graph).bytes();
}

int faststep_graph_compare(const void* a, const void* b, uint32_t* varying, size_t room, size_t* count) {
  return guarded([&] {
    std::vector<uint32_t> found;
    if (!graph_at(a).compare(graph_at(b), found)) {
      return faststep::not_applicable;
    }
    *count = found.size();
    std::copy_n(found.begin(), std::min(room, found.size()), varying);
    return faststep::done;
  });
}

int faststep_graph_constant(const void* graph, uint32_t number, void** constant) {
  return guarded([&] {
    const auto* found = graph_at(graph).constant(number);
    if (found == nullptr) {
      return faststep::not_applicable;
    }
    *constant = owned(*found);
    return faststep::done;
  });
}

bool faststep_graph_determines_gradients(const void* graph) noexcept {
  return graph_at(graph).determines_gradients();
}

int faststep_graph_held(
    const void* graph,
    const void* also,
    const void* const* outputs,
    size_t n,
    void** found,
    size_t room,
    size_t* count) {
  return guarded([&] {
    auto list = faststep::list(outputs, n);
    faststep::give(graph_at(graph).held(list, static_cast<const faststep::Graph*>(also)), found, room, count);
  });
}

int faststep_graph_kept(
    const void* const* inputs,
    const size_t* before,
    size_t n_inputs,
    const void* const* outputs,
    size_t n_outputs,
    void** found,
    size_t room,
    size_t* count) {
  return guarded([&] {
    auto kept = faststep::kept(faststep::list(inputs, n_inputs), before, faststep::list(outputs, n_outputs));
    faststep::give(kept, found, room, count);
  });
}

int faststep_graph_lasting(
    const void* const* known,
    size_t n_known,
    const void* const* outputs,
    size_t n_outputs,
    void** found,
    size_t room,
    size_t* count) {
  return guarded([&] {
    auto lasting = faststep::lasting(pointers(known, n_known), pointers(outputs, n_outputs));
    faststep::give(lasting, found, room, count);
  });
}

int faststep_graph_replace(
    const void* graph,
    const uint32_t* numbers,
    const void* const* inputs,
    size_t n,
    const void* const* outputs,
    size_t n_outputs) {
  return guarded([&] {
    std::unordered_map<std::uintptr_t, const mlx::core::array*> by_id;
    for (size_t i = 0; i < n; ++i) {
      const auto* constant = graph_at(graph).constant(numbers[i]);
      if (constant == nullptr) {
        throw std::out_of_range("no constant of a trace has the number " + std::to_string(numbers[i]));
      }
      by_id.emplace(constant->id(), &faststep::at(inputs[i]));
    }
    faststep::replace(faststep::list(outputs, n_outputs), by_id);
  });
}
