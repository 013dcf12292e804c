// Order in which the gradients of a loss are computed. MLX evaluates what an output needs as late as it can: a weight's
// gradient, which only the update reads, comes last, and keeps until then what it is made of: the activations of all
// layers, those that checkpointing computes once more as well. Here the backward pass of a layer waits for the
// gradients of the layer behind it, where these are smaller than what they are made of. Values stay what they are.
//
// MLX hands the CPU's worker about fifty operations before it waits for one, and allocates what they write. Large ones are
// handed over in portions: a portion when the one before the last is done, so that the worker always has work.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/on_cpu.hpp"
#include "graph/transposed.hpp"
#include "simulator/rules.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

// Least bytes of an operation's inputs for which an operation more is worth it.
constexpr size_t least_bytes = 128 << 10;

// An operation more in so many bytes of activations costs nothing that can be measured.
constexpr size_t portion = 2 << 20;

constexpr int nobody = -1;

// Number of times that arrays have been passed on, by the thread that hands over and by the worker.
struct Progress {
  size_t dispatched = 0;
  std::atomic<size_t> done = 0;
};

// Passes an array on; waits until the worker has come to where it was passed on the last time.
class Pace : public faststep::OnCpu {
 public:
  Pace(mx::Stream stream, std::shared_ptr<Progress> progress) : OnCpu(stream), progress_(std::move(progress)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    out.copy_shared_buffer(inputs[0]);
    auto before = progress_->dispatched++;
    mx::cpu::get_command_encoder(stream()).dispatch([progress = progress_, mine = before + 1] {
      progress->done = mine;
      progress->done.notify_all();
    });
    for (size_t done = progress_->done; done < before; done = progress_->done) {
      progress_->done.wait(done);
    }
  }

  const char* name() const override {
    return "Pace";
  }

 private:
  std::shared_ptr<Progress> progress_;
};

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

// Return whether the trace computes it. Uncompiled, nothing is: others may hold what would be rewritten.
bool is_computed(const mx::array& array) {
  return array.has_primitive() && array.is_tracer();
}

// The ops behind some gradients.
class Graph {
 public:
  explicit Graph(const std::vector<mx::array>& gradients) {
    for (const auto& gradient : gradients) {
      if (is_computed(gradient)) {
        add(gradient);
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
      if (!op->done && whole && op->reads >= least_bytes && op->reads > op->bytes()) {
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
    std::vector<size_t> order(ops_.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) { return ops_[a].level < ops_[b].level; });
    auto stream = mx::default_stream(mx::Device::cpu);
    auto progress = std::make_shared<Progress>();
    size_t sum = 0;
    for (auto at : order) {
      auto& op = ops_[at];
      sum += memory(op);
      bool can_wait = op.owner == nobody && !op.inputs.empty() && !op.is_elementwise();
      if (sum < portion || !can_wait || op.outputs[0].primitive().stream() != stream) {
        continue;
      }
      sum = 0;
      const auto& inputs = op.outputs[0].inputs();
      auto in = *std::find_if(inputs.begin(), inputs.end(), is_computed);
      replace(op, in, mx::array(in.shape(), in.dtype(), std::make_shared<Pace>(stream, progress), {in}));
    }
  }

 private:
  // Return the bytes that computing the op allocates. A convolution unfolds its input.
  size_t memory(const Op& op) const {
    if (faststep::simulator::is_view(op.name())) {
      return 0;
    }
    auto is_fused = [this](size_t reader) { return ops_[reader].is_elementwise(); };
    if (op.is_elementwise() && std::all_of(op.readers.begin(), op.readers.end(), is_fused)) {
      return 0;
    }
    if (op.name() != "Convolution") {
      return op.bytes();
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

  // depth first, without recursion: a graph can be deeper than the stack
  void add(const mx::array& root) {
    std::vector<mx::array> todo{root};
    while (!todo.empty()) {
      auto next = todo.back();
      auto is_new = [this](const mx::array& in) { return is_computed(in) && !by_id_.contains(in.id()); };
      auto before = todo.size();
      if (!by_id_.contains(next.id())) {
        std::copy_if(next.inputs().begin(), next.inputs().end(), std::back_inserter(todo), is_new);
      }
      if (todo.size() > before) {
        continue;
      }
      todo.pop_back();
      if (!by_id_.contains(next.id())) {
        add_op(next);
      }
    }
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
        }
        replace(ops_[reader], array, late->second);
      }
    }
  }

  std::vector<Op> ops_;
  std::unordered_set<size_t> roots_;
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
    Graph graph(all);
    graph.put_in_order();
    if (mx::default_device() == mx::Device::cpu) {
      graph.pace();
    }
  });
}
