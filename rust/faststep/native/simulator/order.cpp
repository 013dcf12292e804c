// Order in which the gradients of a loss are computed. MLX evaluates what an output needs as late as it can: a weight's
// gradient, which only the update reads, comes last, and keeps until then what it is made of: the activations of all
// layers, those that checkpointing computes once more as well. Here the backward pass of a layer waits for the
// gradients of the layer behind it, where these are smaller than what they are made of. Values stay what they are.
//
// MLX hands the CPU's worker about fifty operations before it waits for one, and allocates what they write. Large ones are
// handed over in portions: a portion when the one before the last is done, so that the worker always has work; one that takes
// much, as an unfolded image does, when all before it is done.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/pace.hpp"
#include "graph/transposed.hpp"
#include "graph/visit.hpp"
#include "simulator/rules.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

// Least bytes of an operation's inputs for which an operation more is worth it.
constexpr size_t least_bytes = 128 << 10;

// An operation more in so many bytes of activations costs nothing that can be measured.
constexpr size_t portion = 2 << 20;

// Bytes that take a worker so long to fill that it may wait for more to do: two such portions are not under way at once.
constexpr size_t large_portion = 4 * portion;

constexpr int nobody = -1;

// A primitive with its arrays. Each comes after those that it reads.
struct Op {
  struct Input {
    size_t op;
    size_t bytes;
  };
  std::vector<mx::array> outputs;
  std::vector<Input> inputs; // those that the trace computes
  std::vector<size_t> readers;
  size_t level = 0; // the length of the longest way to it
  int owner = nobody; // the gradient that alone needs it
  // Of what is owned:
  std::optional<size_t> ready; // the last op that it waits for, of those that are not
  size_t reads = 0; // the bytes of what it is made of that is not
  size_t passes = 0; // the most bytes that it is made by way of, as a product for each row that an expert has got
  bool done = false; // its evaluation is requested as soon as it is ready, or that of what it is made into

  size_t bytes() const {
    auto add = [](size_t sum, const mx::array& out) { return sum + out.nbytes(); };
    return std::accumulate(outputs.begin(), outputs.end(), size_t{0}, add);
  }

  std::string_view name() const {
    return outputs[0].primitive().name();
  }

  bool is_elementwise() const {
    return faststep::simulator::is_elementwise(name());
  }
};

// The ops behind some gradients.
class Graph {
 public:
  Graph(const std::vector<mx::array>& gradients, bool is_whole) : is_whole_(is_whole) {
    for (const auto& gradient : gradients) {
      add(gradient);
      if (is_computed(gradient)) {
        roots_.insert(by_id_.at(gradient.id()));
      }
    }
    for (size_t i = 0; i < ops_.size(); ++i) {
      for (const auto& in : ops_[i].inputs) {
        ops_[in.op].readers.push_back(i);
      }
    }
    own();
    for (auto& op : ops_) {
      prepare(op);
    }
  }

  void put_in_order() {
    std::map<size_t, std::vector<mx::array>> due; // by the op after which they are
    for (auto op = ops_.rbegin(); op != ops_.rend(); ++op) {
      if (op->owner == nobody || !op->ready) {
        continue;
      }
      auto asks = [&](size_t reader) { return ops_[reader].done && ops_[reader].ready == op->ready; };
      op->done = std::any_of(op->readers.begin(), op->readers.end(), asks);
      bool whole = op->readers.empty() || !op->is_elementwise();
      auto frees = std::max(op->reads, op->passes);
      if (!op->done && whole && frees >= least_bytes && frees > op->bytes()) {
        op->done = true;
        due[*op->ready].push_back(op->outputs[0]);
      }
    }
    for (const auto& [op, arrays] : due) {
      delay(op, arrays);
    }
  }

  // Everything large is handed over in portions.
  void pace() {
    auto order = by_turn();
    auto stream = mx::default_stream(mx::Device::cpu);
    std::vector<size_t> first, bytes{0}; // of each portion, after one that begins with the step
    for (auto at : order) {
      const auto& op = ops_[at];
      bool can_wait = !op.is_elementwise() && op.outputs[0].primitive().stream() == stream;
      if (can_wait && bytes.back() + memory(op) >= portion) {
        first.push_back(at);
        bytes.push_back(0);
      }
      bytes.back() += memory(op);
    }
    for (size_t i = 0; i < first.size(); ++i) {
      auto& op = ops_[first[i]];
      const auto& inputs = op.outputs[0].inputs();
      auto in = std::find_if(inputs.begin(), inputs.end(), [this](const mx::array& in) { return is_computed(in); });
      if (in == inputs.end()) { // the first op of a step: the step before may be under way
        in = std::find_if(inputs.begin(), inputs.end(), [](const mx::array& in) { return in.is_tracer(); });
      }
      bool large = bytes[i] + bytes[i + 1] >= large_portion;
      auto pace = large ? faststep::waited(stream) : faststep::paced(stream);
      replace(op, *in, mx::array(in->shape(), in->dtype(), std::move(pace), {*in}));
    }
  }

 private:
  // List the ops about as they are computed: those of a gradient when it is asked for, or last.
  std::vector<size_t> by_turn() const {
    std::vector<size_t> turn(ops_.size()), order(ops_.size());
    for (size_t i = ops_.size(); i-- > 0;) {
      const auto& op = ops_[i];
      if (op.owner == nobody) {
        turn[i] = op.level;
      } else if (op.done) {
        turn[i] = ops_[*op.ready].level;
      } else {
        turn[i] = op.readers.empty() ? ops_.size() : turn[op.readers[0]];
      }
    }
    std::iota(order.begin(), order.end(), 0);
    auto key = [&](size_t i) { return std::tuple(turn[i], ops_[i].owner != nobody, ops_[i].level); };
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return key(a) < key(b); });
    return order;
  }

  // Return whether it gives elements that are seen more than once a place each.
  static bool is_unfolded(const Op& op) {
    auto is_named = [](const mx::array& a, std::string_view name) { return a.has_primitive() && a.primitive().name() == name; };
    const auto& in = op.outputs[0].inputs()[0];
    return op.name() == "Reshape" && (is_named(in, "AsStrided") || is_named(in, "Broadcast"));
  }

  // Return the bytes of the op's results: none of a view, and of what is fused with all that reads it.
  size_t stored(const Op& op) const {
    if (faststep::simulator::is_view(op.name())) {
      return is_unfolded(op) ? op.bytes() : 0;
    }
    auto is_fused = [this](size_t reader) { return ops_[reader].is_elementwise(); };
    bool fused = op.is_elementwise() && std::all_of(op.readers.begin(), op.readers.end(), is_fused);
    return fused ? 0 : op.bytes();
  }

  // Return the bytes that computing the op allocates. A convolution unfolds its input.
  size_t memory(const Op& op) const {
    if (op.name() != "Convolution") {
      return stored(op);
    }
    const auto& weight = op.outputs[0].inputs()[1];
    auto channels = std::max<size_t>(1, weight.shape(0)) * std::max<size_t>(1, weight.shape(-1));
    return op.bytes() + op.bytes() / std::max(1, op.outputs[0].shape(-1)) * (weight.size() / channels) * weight.shape(-1);
  }

  static void replace(Op& reader, const mx::array& old, const mx::array& by) {
    auto id = old.id();
    for (auto& sibling : reader.outputs) {
      std::replace_if(
          sibling.inputs().begin(), sibling.inputs().end(), [id](const mx::array& in) { return in.id() == id; }, by);
    }
  }

  // Return whether the trace computes it. Uncompiled, nothing is: others may hold what would be rewritten.
  bool is_computed(const mx::array& array) const {
    return by_id_.contains(array.id());
  }

  void add(const mx::array& root) {
    auto is_left_out = [this](const mx::array& a) { return !a.has_primitive() || !(is_whole_ || a.is_tracer()); };
    auto depends = [this](const mx::array& in) { return in.is_tracer() || is_computed(in); };
    auto is_new = [&](const mx::array& a) { return !seen_.contains(a.id()) && !is_left_out(a); };
    faststep::visit(root, is_new, [&](const mx::array& a) {
      const auto& inputs = a.inputs();
      bool is_traced = is_whole_ ? std::any_of(inputs.begin(), inputs.end(), depends) : a.is_tracer();
      if (seen_.insert(a.id()).second && !is_left_out(a) && is_traced) {
        add_op(a);
      }
    });
  }

  void add_op(const mx::array& array) {
    Op op;
    op.outputs = array.outputs();
    for (const auto& in : array.inputs()) {
      if (auto known = by_id_.find(in.id()); known != by_id_.end()) {
        op.inputs.push_back({known->second, in.nbytes()});
        op.level = std::max(op.level, ops_[known->second].level + 1);
      }
    }
    for (const auto& out : op.outputs) {
      seen_.insert(out.id());
      by_id_[out.id()] = ops_.size();
    }
    ops_.push_back(std::move(op));
  }

  void own() {
    for (size_t i = ops_.size(); i-- > 0;) {
      auto& op = ops_[i];
      if (op.readers.empty()) {
        op.owner = static_cast<int>(i);
        continue;
      }
      auto owner = ops_[op.readers[0]].owner;
      auto agrees = [&](size_t reader) { return ops_[reader].owner == owner; };
      if (!roots_.contains(i) && std::all_of(op.readers.begin(), op.readers.end(), agrees)) {
        op.owner = owner;
      }
    }
  }

  void prepare(Op& op) {
    for (const auto& in : op.inputs) {
      const auto& read = ops_[in.op];
      bool shared = read.owner == nobody;
      auto ready = shared ? std::optional(in.op) : read.ready;
      op.reads += shared ? in.bytes : read.reads;
      op.passes = shared ? op.passes : std::max({op.passes, read.passes, stored(read)});
      if (ready && (!op.ready || ops_[*ready].level > ops_[*op.ready].level)) {
        op.ready = ready;
      }
    }
  }

  // Make the readers of the op wait for the arrays. Elementwise ones do not wait, but their own readers: they are fused
  // with what they read.
  void delay(size_t op, const std::vector<mx::array>& arrays) {
    std::vector<size_t> todo{op};
    std::unordered_set<size_t> seen{op};
    while (!todo.empty()) {
      auto at = todo.back();
      todo.pop_back();
      std::vector<size_t> fused, others;
      for (auto reader : ops_[at].readers) {
        if (ops_[reader].owner == nobody && seen.insert(reader).second) {
          (ops_[reader].is_elementwise() ? fused : others).push_back(reader);
        }
      }
      for (const auto& out : ops_[at].outputs) {
        delay(out, others, arrays);
      }
      if (others.empty()) { // or what reads them most likely reads what waits too
        todo.insert(todo.end(), fused.begin(), fused.end());
      }
    }
  }

  // Whoever reads the array waits; what it has been made to wait for before, all do.
  void delay(const mx::array& array, const std::vector<size_t>& readers, const std::vector<mx::array>& arrays) {
    auto late = late_.find(array.id());
    if (late != late_.end()) {
      auto& inputs = late->second.inputs();
      inputs.insert(inputs.end(), arrays.begin(), arrays.end());
    }
    for (auto reader : readers) {
      const auto& inputs = ops_[reader].outputs[0].inputs();
      auto is_read = [&array](const mx::array& in) { return in.id() == array.id(); };
      if (std::any_of(inputs.begin(), inputs.end(), is_read)) {
        if (late == late_.end()) {
          late = late_.emplace(array.id(), mx::depends({array}, arrays)[0]).first;
          by_id_.emplace(late->second.id(), by_id_.at(array.id()));
        }
        replace(ops_[reader], array, late->second);
      }
    }
  }

  bool is_whole_; // or it is what MLX still marks as traced when it has differentiated: the backward pass
  std::vector<Op> ops_;
  std::unordered_set<size_t> roots_;
  std::unordered_set<std::uintptr_t> seen_;
  std::unordered_map<std::uintptr_t, size_t> by_id_;
  std::unordered_map<std::uintptr_t, mx::array> late_; // the array that is read in the place of one, by its id
};

} // namespace

int faststep_order(const void* const* gradients, size_t count) {
  return faststep::guarded([&] {
    std::vector<mx::array> all;
    for (size_t i = 0; i < count; ++i) {
      const auto& gradient = faststep::at(gradients[i]);
      const auto* turned = faststep::transposed(gradient);
      all.push_back(turned ? *turned : gradient);
    }
    bool is_on_cpu = mx::default_device() == mx::Device::cpu;
    Graph graph(all, is_on_cpu);
    graph.put_in_order();
    if (is_on_cpu) {
      graph.pace();
    }
  });
}
