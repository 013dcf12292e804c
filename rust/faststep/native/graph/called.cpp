// The graph of one call of a function with tracers in the places of its inputs: compared with the graphs that are known, and made
// again over other arrays.
//
//   Walk       the arrays of a graph in MLX's own order, with the references to each that the graph has; owns nothing
//   CallGraph  the operations of a graph on numbered arrays, and behind them those of its gradients; and those that pick from an axis
//              by whole numbers of the batch, which MLX does not check
//
// An array has more handles than the graph where somebody holds it. Such arrays are outputs of the graph beside its roots.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "ffi.hpp"
#include "graph/graph.hpp"
#include "status.hpp"

namespace faststep::called {

namespace {

using Arrays = std::vector<mx::array>;
using Number = uint32_t;
constexpr Number none = std::numeric_limits<Number>::max();

// The number of handles of an array: mx::array is one shared pointer (mlx/array.h).
uint32_t holders(const mx::array& array) {
  static_assert(sizeof(mx::array) == sizeof(std::shared_ptr<void>));
  return static_cast<uint32_t>(reinterpret_cast<const std::shared_ptr<void>&>(array).use_count());
}

bool is_pending(const mx::array& array) {
  return array.has_primitive() && array.status() == mx::array::Status::unscheduled;
}

// A scalar whose value is there: a constant of the graph until it differs.
bool is_number(const mx::array& array) {
  return array.ndim() == 0 && array.is_available();
}

bool same_number(const mx::array& a, const mx::array& b) {
  return std::memcmp(a.data<char>(), b.data<char>(), a.itemsize()) == 0;
}

// Copy a number into a new array: one that is an input of the step too would be no constant of it.
mx::array own_number(const mx::array& array) {
  mx::array own(mx::allocator::malloc(array.itemsize()), mx::Shape{}, array.dtype());
  std::memcpy(own.data<char>(), array.data<char>(), array.itemsize());
  return own;
}

// Its gradients are Python functions, which no primitive shows.
bool is_custom(const mx::Primitive& primitive) {
  return std::string_view(primitive.name()) == "CustomTransforms";
}

// Numbers of arrays by id, with open addressing: one table for each thread, whose entries are those of the newest walk.
class Numbers {
 public:
  void clear() {
    ++walk_;
    count_ = 0;
  }

  Number find(uintptr_t id) const {
    for (size_t at = hash(id);; at = (at + 1) & mask_) {
      if (slots_[at].walk != walk_) {
        return none;
      }
      if (slots_[at].id == id) {
        return slots_[at].number;
      }
    }
  }

  void add(uintptr_t id, Number number) {
    if (2 * ++count_ > slots_.size()) {
      grow();
    }
    size_t at = hash(id);
    while (slots_[at].walk == walk_) {
      at = (at + 1) & mask_;
    }
    slots_[at] = {id, number, walk_};
  }

 private:
  struct Slot {
    uintptr_t id = 0;
    Number number = 0;
    uint64_t walk = 0;
  };

  size_t hash(uintptr_t id) const {
    return ((id >> 4) * 0x9E3779B97F4A7C15u >> 20) & mask_;
  }

  void grow() {
    auto old = std::exchange(slots_, std::vector<Slot>(2 * slots_.size()));
    mask_ = slots_.size() - 1;
    count_ = 1;
    for (const auto& slot : old) {
      if (slot.walk == walk_) {
        add(slot.id, slot.number);
      }
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(1024);
  size_t mask_ = 1023, count_ = 0;
  uint64_t walk_ = 1;
};

} // namespace

// The graph behind some roots. Arrays are numbered: first the tracers, then each behind what it is computed from, in the order
// in which mx::vjp visits them, on which the order of its sums depends.
class Walk {
 public:
  // An operation and its outputs, which have successive numbers; or a leaf, whose array has no primitive.
  struct Step {
    const mx::array* array;
    Number first;
    uint32_t edge;
  };
  std::vector<const mx::array*> arrays;
  std::vector<uint32_t> handles; // of each array, those that the graph has
  std::vector<Step> steps;
  std::vector<Number> edges, roots;
  size_t traced, results;

  // `results`: so many of the first roots are outputs in any case, whoever holds them.
  Walk(const std::vector<const mx::array*>& tracers, size_t results) : traced(tracers.size()), results(results) {
    numbers_.clear();
    for (const auto* tracer : tracers) {
      put(*tracer, 0);
    }
  }

  void add_roots(const std::vector<const mx::array*>& outputs) {
    for (const auto* output : outputs) {
      visit(*output);
      roots.push_back(number(*output));
    }
  }

 private:
  static Number number(const mx::array& array) {
    return numbers_.find(array.id());
  }

  void visit(const mx::array& root) {
    if (number(root) != none) {
      return;
    }
    std::vector<std::pair<const mx::array*, size_t>> stack{{&root, 0}};
    while (!stack.empty()) {
      auto& [array, next] = stack.back();
      if (array->has_primitive() && next < array->inputs().size()) {
        const auto& input = array->inputs()[next++];
        if (number(input) == none) {
          stack.emplace_back(&input, 0);
        }
      } else {
        add(*array);
        stack.pop_back();
      }
    }
  }

  void add(const mx::array& array) {
    if (number(array) != none) {
      return; // met again below itself: a sibling of what has been added meanwhile
    }
    steps.push_back({&array, static_cast<Number>(arrays.size()), static_cast<uint32_t>(edges.size())});
    const auto& siblings = array.siblings();
    if (!array.has_primitive() || siblings.empty()) {
      put(array, 0);
    } else { // each sibling has a list of all others, and one of the inputs
      auto at = static_cast<size_t>(array.sibling_position());
      for (size_t i = 0; i < at; ++i) {
        put(siblings[i], siblings.size());
      }
      put(array, siblings.size());
      for (size_t i = at; i < siblings.size(); ++i) {
        put(siblings[i], siblings.size());
      }
    }
    if (array.has_primitive()) {
      for (const auto& input : array.inputs()) {
        Number at = number(input);
        edges.push_back(at);
        handles[at] += static_cast<uint32_t>(siblings.size()) + 1;
      }
    }
  }

  void put(const mx::array& array, size_t siblings) {
    numbers_.add(array.id(), static_cast<Number>(arrays.size()));
    arrays.push_back(&array);
    handles.push_back(static_cast<uint32_t>(siblings));
  }

  static thread_local Numbers numbers_;
};

thread_local Numbers Walk::numbers_;

namespace {

// The most operations from the batch to the whole numbers of a pick, and the most picks of a graph.
constexpr size_t most_before_a_pick = 16, most_picks = 8;

// Numbers of handles that the caller has: one of each tracer and of each root. Results are outputs in any case,
// and have none here.
std::vector<uint32_t> owned_in(const Walk& walk) {
  std::vector<uint32_t> own(walk.arrays.size());
  std::fill_n(own.begin(), walk.traced, 1);
  for (size_t i = walk.results; i < walk.roots.size(); ++i) {
    ++own[walk.roots[i]];
  }
  for (size_t i = 0; i < walk.results; ++i) {
    own[walk.roots[i]] = none;
  }
  return own;
}

// Arrays of a walk that somebody holds beside the graph and the caller.
std::vector<Number> held_in(const Walk& walk) {
  auto own = owned_in(walk);
  std::vector<Number> held;
  for (Number i = 0; i < walk.arrays.size(); ++i) {
    bool counts = own[i] != none && (i < walk.traced || walk.arrays[i]->has_primitive());
    if (counts && holders(*walk.arrays[i]) > walk.handles[i] + own[i]) {
      held.push_back(i);
    }
  }
  return held;
}

// True for each array of a walk that is computed from a tracer.
std::vector<bool> depends_in(const Walk& walk) {
  std::vector<bool> depends(walk.arrays.size());
  std::fill_n(depends.begin(), walk.traced, true);
  for (size_t i = 0; i < walk.steps.size(); ++i) {
    const auto& step = walk.steps[i];
    size_t end = i + 1 < walk.steps.size() ? walk.steps[i + 1].edge : walk.edges.size();
    bool any = false;
    for (size_t at = step.edge; at < end; ++at) {
      any |= depends[walk.edges[at]];
    }
    size_t last = i + 1 < walk.steps.size() ? walk.steps[i + 1].first : walk.arrays.size();
    std::fill(depends.begin() + step.first, depends.begin() + static_cast<std::ptrdiff_t>(last), any);
  }
  return depends;
}

} // namespace

class CallGraph {
 public:
  // Labels of a cross entropy, or rows of an embedding.
  struct Pick {
    Number numbers, tracer; // the array that picks, and the first array of the batch that it is computed from
    int64_t length; // of the axis
    bool from_end; // numbers below zero count from the end
    std::vector<size_t> steps; // from the batch to that array
  };

  // Of a call, up to its roots: before it is differentiated, which takes handles of its arrays.
  CallGraph(const Walk& walk)
      : traced_(walk.traced), arrays_(walk.arrays.size()), forward_(walk.steps.size()), edges_(walk.edges),
        roots_(walk.roots), held_(held_in(walk)), handles_(walk.handles) {
    std::erase_if(held_, [this](Number number) { return number < traced_; });
    auto own = owned_in(walk);
    for (Number i = 0; i < arrays_; ++i) {
      handles_[i] = own[i] == none ? none : handles_[i] + own[i];
    }
    add(walk);
    for (const auto* array : walk.arrays) {
      call_.push_back(*array);
    }
  }

  // Go on to gradients, behind so many roots: those of before, or with a later random key.
  void add_gradients(const Walk& walk, size_t roots) {
    auto behind = walk.roots.begin() + static_cast<std::ptrdiff_t>(roots);
    roots_.assign(walk.roots.begin(), behind);
    gradients_.assign(behind, walk.roots.end());
    edges_ = walk.edges;
    add(walk);
    for (size_t i = call_.size(); custom_ && i < walk.arrays.size(); ++i) {
      call_.push_back(*walk.arrays[i]);
    }
  }

  // Compare with another call: the same operations, and gradients where Python functions make some of them. Constants that have
  // another value are inputs from here on.
  bool equals(const CallGraph& other) {
    size_t count = custom_ ? steps_.size() : forward_; // leaves of gradients matter where Python functions may make them
    bool form = traced_ == other.traced_ && arrays_ == other.arrays_ && forward_ == other.forward_ && roots_ == other.roots_ &&
        custom_ == other.custom_ && (!custom_ || (gradients_ == other.gradients_ && steps_.size() == other.steps_.size()));
    if (!form || !std::includes(held_.begin(), held_.end(), other.held_.begin(), other.held_.end())) {
      return false;
    }
    for (Number i = 0; i < traced_; ++i) {
      if (shapes_[i] != other.shapes_[i] || dtypes_[i] != other.dtypes_[i]) {
        return false;
      }
    }
    std::vector<size_t> differing;
    size_t leaf = 0;
    for (size_t i = 0; i < count; ++i) {
      const auto &step = steps_[i], &its = other.steps_[i];
      if (!step.has_form_of(its) || !std::equal(edges_.begin() + step.edge, edges_.begin() + step.edge + step.edges, other.edges_.begin() + its.edge)) {
        return false;
      }
      for (Number out = step.first; out < step.first + step.outputs; ++out) {
        if (shapes_[out] != other.shapes_[out] || dtypes_[out] != other.dtypes_[out]) {
          return false;
        }
      }
      if (step.primitive == nullptr) {
        differs(leaf++, other.call_[step.first], differing);
      } else if (!same(*step.primitive, *its.primitive, custom_)) {
        return false;
      }
    }
    inputs_are(differing, [&](Number number) { return &other.call_[number]; });
    held_arrays_ = other.at(held_);
    return true;
  }

  // Keep it, without the arrays of the call.
  void keep() {
    held_arrays_ = at(held_);
    inputs_are({}, [&](Number number) { return &call_[number]; });
    call_.clear();
  }

  // Find the picks by arrays of the batch: so many tracers from this one on.
  void find_picks(Number first, Number count) {
    constexpr Number fixed = none - 1; // computed from constants alone
    std::vector<Number> from(arrays_, none);
    std::vector<size_t> made_by(arrays_, steps_.size());
    for (Number i = first; i < first + count; ++i) {
      from[i] = mx::issubdtype(dtypes_[i], mx::inexact) ? none : i;
    }
    size_t leaf = 0;
    for (size_t i = 0; i < forward_ && picks_.size() < most_picks; ++i) {
      const auto& step = steps_[i];
      made_by[step.first] = i;
      if (step.primitive == nullptr) {
        from[step.first] = leaves_[leaf++].is_constant ? fixed : none;
        continue;
      }
      add_pick(step, from, made_by);
      Number all = fixed;
      for (uint32_t at = step.edge; at < step.edge + step.edges; ++at) {
        Number of = from[edges_[at]];
        all = of == none || all == none ? none : std::min(all, of);
      }
      from[step.first] = step.outputs == 1 && !called::is_custom(*step.primitive) ? all : none;
    }
  }

  const std::vector<Pick>& picks() const {
    return picks_;
  }

  // The least and the greatest number of each pick, int64 scalars, over other arrays in the places of the batch's. Those of a pick whose
  // constants have become inputs are of no number: 0.
  Arrays extremes(const void* const* batch, Number first) const {
    Arrays found;
    for (const auto& pick : picks_) {
      std::unordered_map<Number, mx::array> made;
      auto array_at = [&](Number number) { return made.contains(number) ? made.at(number) : faststep::at(batch[number - first]); };
      bool known = true;
      for (auto i : pick.steps) {
        const auto& step = steps_[i];
        if (step.primitive == nullptr) {
          const auto& leaf = leaf_at(step.first);
          known &= leaf.is_constant;
          made.emplace(step.first, leaf.array);
          continue;
        }
        Arrays in;
        for (uint32_t at = step.edge; at < step.edge + step.edges; ++at) {
          in.push_back(array_at(edges_[at]));
        }
        made.emplace(step.first, mx::array(shapes_[step.first], dtypes_[step.first], step.primitive, std::move(in)));
      }
      auto numbers = known ? mx::astype(array_at(pick.numbers), mx::int64) : mx::array(int64_t{0}, mx::int64);
      found.push_back(mx::min(numbers));
      found.push_back(mx::max(numbers));
    }
    return found;
  }

  // Compare without a table of ids, twice as fast, a graph of which nobody holds anything but the roots: follow the
  // recorded edges from these on, and write down which array each number is. An array that stood for two numbers would have
  // more handles than either has here; so has one that somebody holds, which is left to `compare`.
  bool follow(const std::vector<const mx::array*>& tracers, const std::vector<const mx::array*>& roots) {
    if (custom_ || tracers.size() != traced_ || roots.size() != roots_.size()) {
      return false;
    }
    static thread_local std::vector<const mx::array*> at;
    at.assign(arrays_, nullptr);
    auto put = [&](Number number, const mx::array& array) {
      if (at[number] == nullptr) {
        at[number] = &array;
      }
      return at[number]->id() == array.id();
    };
    auto fits = [&](Number number) {
      return has_form(*at[number], number) &&
          (handles_[number] == none || holders(*at[number]) == handles_[number]);
    };
    for (Number i = 0; i < traced_; ++i) {
      put(i, *tracers[i]);
    }
    for (size_t i = 0; i < roots.size(); ++i) {
      if (!put(roots_[i], *roots[i])) {
        return false;
      }
      for (size_t j = 0; j < i; ++j) {
        if (roots_[i] != roots_[j] && roots[i]->id() == roots[j]->id()) {
          return false;
        }
      }
    }
    std::vector<size_t> differing;
    size_t leaf = forward_leaves_;
    for (size_t i = forward_; i-- > 0;) {
      const auto& step = steps_[i];
      Number used = step.first;
      while (at[used] == nullptr) { // one of several outputs, at least, is there
        ++used;
      }
      const auto& array = *at[used];
      if (array.has_primitive() != (step.primitive != nullptr)) {
        return false;
      }
      if (step.primitive == nullptr) {
        if (!has_form(array, used)) {
          return false;
        }
        differs(--leaf, array, differing);
        continue;
      }
      const auto &siblings = array.siblings(), &inputs = array.inputs();
      if (siblings.size() + 1 != step.outputs || inputs.size() != step.edges ||
          !same(*step.primitive, array.primitive(), false)) {
        return false;
      }
      if (!siblings.empty()) {
        uint32_t position = used - step.first;
        if (static_cast<uint32_t>(array.sibling_position()) != position) {
          return false;
        }
        for (uint32_t j = 0; j < siblings.size(); ++j) {
          if (!put(step.first + j + (j >= position), siblings[j])) {
            return false;
          }
        }
      }
      for (Number out = step.first; out < step.first + step.outputs; ++out) {
        if (!fits(out)) {
          return false;
        }
      }
      for (size_t j = 0; j < inputs.size(); ++j) {
        if (!put(edges_[step.edge + j], inputs[j])) {
          return false;
        }
      }
    }
    for (Number i = 0; i < traced_; ++i) {
      if (!fits(i)) {
        return false;
      }
    }
    std::reverse(differing.begin(), differing.end());
    inputs_are(differing, [&](Number number) { return at[number]; });
    held_arrays_.clear();
    for (auto number : held_) {
      held_arrays_.push_back(*at[number]);
    }
    return true;
  }

  // The leaves of the graph that was compared last which are no constants, in order. Those of the gradients are constants all.
  Arrays take_inputs() {
    return std::exchange(inputs_, {});
  }

  // Number of leaves that are inputs.
  size_t inputs() const {
    return static_cast<size_t>(
        std::count_if(leaves_.begin(), leaves_.end(), [](const auto& leaf) { return !leaf.is_constant; }));
  }

  // Numbers of outputs: roots, arrays that somebody holds, gradients.
  size_t roots() const {
    return roots_.size();
  }
  size_t held() const {
    return held_.size();
  }
  size_t gradients() const {
    return gradients_.size();
  }

  // True if a Python function makes a gradient: the graph is to be compared with its gradients.
  bool is_custom() const {
    return custom_;
  }

  // The arrays of the call that was compared last which are outputs because somebody holds them, or held them once.
  Arrays take_held() {
    return std::exchange(held_arrays_, {});
  }

  // All outputs over other arrays in the place of the tracers and of the inputs.
  void replay(const void* const* traced, size_t n_traced, const void* const* inputs, size_t n_inputs, void** outputs) const {
    if (n_traced != traced_ || n_inputs != this->inputs()) {
      throw std::invalid_argument("a known graph was made again over another number of arrays");
    }
    auto made = list(traced, n_traced);
    made.reserve(shapes_.size());
    size_t leaf = 0, input = 0;
    for (const auto& step : steps_) {
      if (step.primitive == nullptr) {
        const auto& known = leaves_[leaf++];
        made.push_back(known.is_constant ? known.array : faststep::at(inputs[input++]));
        continue;
      }
      Arrays in;
      in.reserve(step.edges);
      for (uint32_t i = step.edge; i < step.edge + step.edges; ++i) {
        in.push_back(made[edges_[i]]);
      }
      if (step.outputs == 1) {
        made.emplace_back(shapes_[step.first], dtypes_[step.first], step.primitive, std::move(in));
      } else {
        std::vector<mx::Shape> shapes(shapes_.begin() + step.first, shapes_.begin() + step.first + step.outputs);
        std::vector<mx::Dtype> dtypes(dtypes_.begin() + step.first, dtypes_.begin() + step.first + step.outputs);
        for (auto& out : mx::array::make_arrays(std::move(shapes), dtypes, step.primitive, in)) {
          made.push_back(std::move(out));
        }
      }
    }
    for (const auto* numbers : {&roots_, &held_, &gradients_}) {
      for (auto number : *numbers) {
        *outputs++ = owned(made[number]);
      }
    }
  }

 private:
  struct Step {
    std::shared_ptr<mx::Primitive> primitive; // null: a leaf
    Number first;
    uint32_t outputs, edge, edges;

    bool has_form_of(const Step& other) const {
      return first == other.first && outputs == other.outputs && edge == other.edge && edges == other.edges &&
          (primitive == nullptr) == (other.primitive == nullptr);
    }
  };

  // An array that is no tracer: a number that was the same at each call, or an input. Behind the roots, a constant.
  struct Leaf {
    Number number;
    bool is_constant;
    mx::array array; // of a constant its value, else none
  };

  // Add the rest of a walk.
  void add(const Walk& walk) {
    for (size_t i = shapes_.size(); i < walk.arrays.size(); ++i) {
      shapes_.push_back(walk.arrays[i]->shape());
      dtypes_.push_back(walk.arrays[i]->dtype());
    }
    for (size_t i = steps_.size(); i < walk.steps.size(); ++i) {
      add(walk.steps[i]);
    }
  }

  void add(const Walk::Step& step) {
    const auto& array = *step.array;
    bool forward = steps_.size() < forward_;
    if (!array.has_primitive()) {
      bool constant = (!forward && !custom_) || is_number(array); // MLX's own gradients make the same leaves each time
      auto value = !constant ? mx::array(0) : is_number(array) ? own_number(array) : array;
      leaves_.push_back({step.first, constant, std::move(value)});
      forward_leaves_ += forward;
      steps_.push_back({nullptr, step.first, 1, step.edge, 0});
      return;
    }
    steps_.push_back(
        {array.primitive_ptr(),
         step.first,
         static_cast<uint32_t>(array.siblings().size()) + 1,
         step.edge,
         static_cast<uint32_t>(array.inputs().size())});
    custom_ |= forward && called::is_custom(array.primitive());
  }

  const Leaf& leaf_at(Number number) const {
    return *std::find_if(leaves_.begin(), leaves_.end(), [&](const auto& leaf) { return leaf.number == number; });
  }

  // Add the picks of an operation. `from`: of each array the array of the batch that it is computed from, if from the batch alone.
  void add_pick(const Step& step, const std::vector<Number>& from, const std::vector<size_t>& made_by) {
    std::string_view name = step.primitive->name();
    const auto* inputs = edges_.data() + step.edge;
    auto add = [&](Number numbers, int axis, int size, bool from_end) {
      auto steps = steps_before(numbers, made_by);
      const auto& shape = shapes_[numbers];
      bool empty = std::find(shape.begin(), shape.end(), 0) != shape.end();
      if (from[numbers] < traced_ && !empty && steps.size() <= most_before_a_pick) {
        picks_.push_back({numbers, from[numbers], shapes_[inputs[0]][axis] - size + 1, from_end, std::move(steps)});
      }
    };
    if (name == "GatherAxis") {
      int axis = static_cast<const mx::GatherAxis&>(*step.primitive).state();
      add(inputs[1], axis, 1, shapes_[inputs[1]][axis] != 1);
    } else if (name == "Gather") {
      auto [axes, sizes] = static_cast<const mx::Gather&>(*step.primitive).state();
      for (size_t i = 0; i < axes.size(); ++i) {
        add(inputs[1 + i], axes[i], sizes[axes[i]], true);
      }
    } else if (name == "CrossEntropy") {
      add(inputs[1], static_cast<int>(shapes_[inputs[0]].size()) - 1, 1, false);
    }
  }

  // The operations from which an array is computed, in order.
  std::vector<size_t> steps_before(Number number, const std::vector<size_t>& made_by) const {
    std::vector<size_t> steps;
    std::vector<Number> stack{number};
    while (!stack.empty() && steps.size() <= most_before_a_pick) {
      size_t i = made_by[stack.back()];
      stack.pop_back();
      if (i < steps_.size() && std::find(steps.begin(), steps.end(), i) == steps.end()) {
        steps.push_back(i);
        stack.insert(stack.end(), edges_.begin() + steps_[i].edge, edges_.begin() + steps_[i].edge + steps_[i].edges);
      }
    }
    std::sort(steps.begin(), steps.end());
    return steps;
  }

  Arrays at(const std::vector<Number>& numbers) const {
    Arrays found;
    for (auto number : numbers) {
      found.push_back(call_[number]);
    }
    return found;
  }

  static bool same(mx::Primitive& a, mx::Primitive& b, bool whole) {
    if (&a == &b) {
      return true;
    }
    bool custom = called::is_custom(a);
    return a.stream() == b.stream() && (custom ? whole && called::is_custom(b) : same_primitive(a, b));
  }

  bool has_form(const mx::array& array, Number at) const {
    return array.shape() == shapes_[at] && array.dtype() == dtypes_[at];
  }

  void differs(size_t leaf, const mx::array& array, std::vector<size_t>& differing) const {
    const auto& known = leaves_[leaf];
    if (known.is_constant && (!is_number(array) || !same_number(known.array, array))) {
      differing.push_back(leaf);
    }
  }

  template <typename At>
  void inputs_are(const std::vector<size_t>& differing, At array_at) {
    for (auto leaf : differing) {
      leaves_[leaf].is_constant = false;
      leaves_[leaf].array = mx::array(0);
    }
    inputs_.clear();
    for (const auto& leaf : leaves_) {
      if (!leaf.is_constant) {
        inputs_.push_back(*array_at(leaf.number));
      }
    }
  }

  size_t traced_, arrays_, forward_, forward_leaves_ = 0; // tracers; up to the roots: arrays, steps, leaves
  bool custom_ = false;
  std::vector<Number> edges_, roots_, held_, gradients_;
  std::vector<uint32_t> handles_; // of each array up to the roots, those that the graph and the caller have; of a result none
  std::vector<mx::Shape> shapes_;
  std::vector<mx::Dtype> dtypes_;
  std::vector<Step> steps_;
  std::vector<Leaf> leaves_;
  std::vector<Pick> picks_;
  Arrays call_; // arrays of the call that made it, until it is kept
  Arrays inputs_, held_arrays_; // of the call that was compared last
};

namespace {

CallGraph& graph_of(void* graph) {
  return *static_cast<CallGraph*>(graph);
}

const CallGraph& graph_of(const void* graph) {
  return *static_cast<const CallGraph*>(graph);
}

void give(const Arrays& arrays, void** out) {
  std::transform(arrays.begin(), arrays.end(), out, [](const auto& array) { return owned(array); });
}

} // namespace

} // namespace faststep::called

using faststep::guarded;
using faststep::owned;
using faststep::pointers;
using faststep::called::CallGraph;
using faststep::called::graph_of;
using faststep::called::Walk;

int faststep_in_tracing(void (*work)(void*), void* context) {
  return guarded([&] {
    auto function = [&](const std::vector<mlx::core::array>&) -> std::vector<mlx::core::array> {
      work(context);
      return {};
    };
    mlx::core::vjp(function, std::vector<mlx::core::array>(), std::vector<mlx::core::array>()); // of nothing: for the flags that it sets meanwhile
  });
}

int faststep_tracer(const void* array, void** tracer) {
  return guarded([&] {
    auto made = mlx::core::copy(faststep::at(array)); // on the default stream, on which `depends` of a checkpoint goes on
    made.set_tracer(true);
    *tracer = owned(std::move(made));
  });
}

int faststep_tracer_is_read(const void* tracer) noexcept {
  return faststep::at(tracer).status() != mlx::core::array::Status::unscheduled;
}

int faststep_differentiate(
    const void* const* parameters,
    const void* const* tracers,
    size_t n,
    const void* const* outputs,
    size_t n_outputs,
    void** gradients) {
  return guarded([&] {
    auto list = faststep::list(outputs, n_outputs);
    std::vector<int> numbers(n);
    std::iota(numbers.begin(), numbers.end(), 0);
    auto function = [&](const std::vector<mlx::core::array>& inner) { // the graph is there: put these under it
      for (size_t i = 0; i < n; ++i) {
        auto& tracer = const_cast<mlx::core::array&>(faststep::at(tracers[i]));
        if (!tracer.has_primitive()) { // evaluated behind a gradient within the function, as MLX's own tracers are
          tracer.primitive_ptr() = mlx::core::copy(inner[i]).primitive_ptr();
        }
        tracer.inputs() = {inner[i]};
      }
      return list;
    };
    if (n == 0) {
      return;
    }
    faststep::called::give(mlx::core::value_and_grad(function, numbers)(faststep::list(parameters, n)).second, gradients);
  });
}

void faststep_tracers_end(const void* const* tracers, size_t n) noexcept {
  for (size_t i = 0; i < n; ++i) {
    const_cast<mlx::core::array&>(faststep::at(tracers[i])).set_tracer(false);
  }
}

// Evaluate arrays that somebody holds and that are computed from no tracer, as any loop would. A step evaluates such tracers too, as
// the parameters are written over.
int faststep_call_settle(
    const void* const* tracers, size_t n_tracers, const void* const* roots, size_t n_roots, size_t results, int is_step) {
  return guarded([&] {
    Walk walk(pointers(tracers, n_tracers), results);
    walk.add_roots(pointers(roots, n_roots));
    auto depends = faststep::called::depends_in(walk);
    std::vector<mlx::core::array> lasting;
    bool are_held = false;
    for (auto number : faststep::called::held_in(walk)) {
      are_held |= number < walk.traced;
      if (!depends[number] && faststep::called::is_pending(*walk.arrays[number])) {
        lasting.push_back(*walk.arrays[number]);
      }
    }
    if (are_held && is_step != 0) { // all of them: of those that the graph does not have it is not known who holds them
      auto all = faststep::list(tracers, n_tracers);
      lasting.insert(lasting.end(), all.begin(), all.end());
    }
    if (!lasting.empty()) {
      mlx::core::eval(std::move(lasting));
    }
  });
}

int faststep_call_graph_new(
    const void* const* tracers, size_t n_tracers, const void* const* roots, size_t n_roots, size_t results, void** graph) {
  return guarded([&] {
    Walk walk(pointers(tracers, n_tracers), results);
    walk.add_roots(pointers(roots, n_roots));
    *graph = new CallGraph(walk);
  });
}

int faststep_call_graph_add_gradients(
    void* graph,
    const void* const* tracers,
    size_t n_tracers,
    const void* const* roots,
    size_t n_roots,
    const void* const* gradients,
    size_t n_gradients) {
  return guarded([&] {
    Walk walk(pointers(tracers, n_tracers), n_roots);
    walk.add_roots(pointers(roots, n_roots));
    walk.add_roots(pointers(gradients, n_gradients));
    graph_of(graph).add_gradients(walk, n_roots);
  });
}

void faststep_call_graph_keep(void* graph) noexcept {
  graph_of(graph).keep();
}

int faststep_call_graph_find_picks(void* graph, size_t first, size_t count) {
  return guarded([&] { graph_of(graph).find_picks(static_cast<uint32_t>(first), static_cast<uint32_t>(count)); });
}

void faststep_call_graph_pick(const void* graph, size_t which, size_t* tracer, int64_t* length, int* from_end) noexcept {
  const auto& pick = faststep::called::graph_of(graph).picks()[which];
  *tracer = pick.tracer;
  *length = pick.length;
  *from_end = pick.from_end ? 1 : 0;
}

int faststep_call_graph_extremes(const void* graph, const void* const* batch, size_t first, void** extremes) {
  return guarded([&] { faststep::called::give(graph_of(graph).extremes(batch, static_cast<uint32_t>(first)), extremes); });
}

void faststep_call_graph_free(void* graph) noexcept {
  delete static_cast<CallGraph*>(graph);
}

int faststep_call_graph_follow(
    void* graph, const void* const* tracers, size_t n_tracers, const void* const* roots, size_t n_roots) {
  return guarded([&] {
    bool same = graph_of(graph).follow(pointers(tracers, n_tracers), pointers(roots, n_roots));
    return same ? faststep::done : faststep::not_applicable;
  });
}

int faststep_call_graph_equals(void* graph, const void* other) {
  return guarded([&] { return graph_of(graph).equals(graph_of(other)) ? faststep::done : faststep::not_applicable; });
}

size_t faststep_call_graph_count(const void* graph, int of) noexcept {
  const auto& it = graph_of(graph);
  size_t counts[] = {it.roots(), it.held(), it.gradients(), it.inputs(), it.is_custom(), it.picks().size()};
  return counts[of];
}

int faststep_call_graph_inputs(void* graph, void** inputs) {
  return guarded([&] { faststep::called::give(graph_of(graph).take_inputs(), inputs); });
}

int faststep_call_graph_held(void* graph, void** held) {
  return guarded([&] { faststep::called::give(graph_of(graph).take_held(), held); });
}

int faststep_call_graph_replay(
    const void* graph, const void* const* traced, size_t n_traced, const void* const* inputs, size_t n_inputs, void** outputs) {
  return guarded([&] { graph_of(graph).replay(traced, n_traced, inputs, n_inputs, outputs); });
}

void faststep_array_detach(const void* array) noexcept {
  auto& node = const_cast<mlx::core::array&>(faststep::at(array));
  if (node.has_primitive()) {
    node.detach(); // its siblings too, each of which is filled if somebody holds it
  }
  node.set_tracer(false);
}

int faststep_array_fill(const void* array, const void* value) {
  return guarded([&] {
    auto node = faststep::at(array);
    const auto& from = faststep::at(value);
    if (node.id() == from.id() || node.status() != mlx::core::array::Status::unscheduled) {
      return; // the loss has read it
    }
    if (node.shape() != from.shape() || node.dtype() != from.dtype()) {
      throw std::invalid_argument("an array of a loss was given a value of another form");
    }
    if (node.has_primitive()) {
      node.detach(); // an earlier value
    }
    if (faststep::called::is_pending(from)) { // becomes a copy of it
      node.inputs() = {from};
      node.primitive_ptr() = mlx::core::copy(from).primitive_ptr();
    } else {
      node.copy_shared_buffer(from);
      node.set_status(from.status());
      node.attach_event(from.event());
    }
  });
}
