// The order of evaluation, and who holds what meanwhile: mlx/transforms.cpp (eval_impl), mlx/array.cpp (detach),
// mlx/backend/cpu/eval.cpp, mlx/backend/cuda/eval.cpp.
#include <algorithm>
#include <string_view>
#include <utility>

#include "cpu/gather.hpp"
#include "cpu/pace.hpp"
#include "mlx/backend/common/utils.h"
#include "simulator/rules.hpp"
#include "simulator/simulator.hpp"
#include "walk.hpp"

namespace faststep::simulator {

namespace {

constexpr int max_active_tasks = 10;

// The nodes as `walk` goes through them.
struct Nodes {
  using Node = simulator::Node*;
  size_t inputs(Node node) const {
    return node->op->inputs.size();
  }
  Node input(Node node, size_t i) const {
    return node->op->inputs[i];
  }
  bool is_done(Node node) const {
    return node->done;
  }
  int& degree(Node node) const {
    return node->degree;
  }
  template <typename F>
  void outputs(Node node, F f) const {
    for (auto* out : node->op->outputs) {
      f(out);
    }
  }
};

// Lay an array out row after row in memory that there is.
void rows_in(Node& node, Data memory) {
  const auto& shape = node.face.shape();
  lay_out(node, std::move(memory), node.face.size(), mx::make_contiguous_strides(shape), rows_of(shape));
}

Work joined(const Op& op, Data memory) {
  rows_in(*op.outputs.front(), std::move(memory));
  return {0, {}};
}

} // namespace

// List the nodes to compute, last first.
std::vector<Node*> Simulator::tape(const std::vector<Node*>& outputs) {
  for (auto& each : nodes_) {
    each.degree = 0;
  }
  Nodes nodes;
  return walk(nodes, outputs, bfs_max_width());
}

size_t Simulator::evaluate(const Arrays& arrays, bool one_by_one) {
  std::vector<Node*> outputs;
  for (const auto* array : arrays) {
    outputs.push_back(&node(*array));
    ++outputs.back()->refs;
  }
  auto order = tape(outputs);
  one_by_one = one_by_one && device_.gpu == 0;
  if (one_by_one) {
    gather(order);
  }
  for (auto last = order.rbegin(); last != order.rend(); ++last) {
    auto& op = *(*last)->op;
    evaluate(op, **last);
    if (one_by_one) {
      queue_.wait(queue_.finish());
      move(op);
    }
  }
  rooms_.clear();
  parts_.clear();
  std::vector<Data> keeps;
  for (auto* output : outputs) {
    keeps.push_back(output->data);
  }
  queue_.dispatch({0, {}}, 0, std::move(keeps));
  auto done = queue_.finish();
  for (auto* output : outputs) {
    release(*output, 1);
  }
  return done;
}

// The joins of a tape, and their parts.
void Simulator::gather(const std::vector<Node*>& order) {
  for (const auto* node : order) {
    if (is_join(*node->op->primitive)) {
      rooms_.emplace(node->op, Room{node->face.nbytes(), 0, nullptr, {}});
      for (const auto* part : node->op->inputs) {
        parts_.emplace(part, node->op);
      }
    }
  }
}

// What an operation has computed of a join moves to its place.
void Simulator::move(const Op& op) {
  for (auto* out : op.outputs) {
    auto part = parts_.find(out);
    if (part == parts_.end() || !out->data) {
      continue;
    }
    auto& room = rooms_.at(part->second);
    room.ready += out->face.nbytes();
    room.waiting.push_back(out);
    if (!has_room(room.ready, room.bytes)) {
      continue;
    }
    if (!room.memory) {
      room.memory = memory.allocate(room.bytes);
    }
    for (auto* waiting : std::exchange(room.waiting, {})) {
      rows_in(*waiting, room.memory);
    }
  }
}

void Simulator::evaluate(Op& op, const Node& last) {
  std::string_view name = op.primitive->name();
  if (name == "Wait" || (name == "Join" && last.face.nbytes() >= join_bytes)) { // cpu/pace.cpp, cpu/join.cpp
    queue_.wait(queue_.finish());
  }
  if (name == "Pace") {
    queue_.wait(std::exchange(paced_, queue_.finish()));
  }
  auto room = rooms_.find(&op);
  bool has_room = room != rooms_.end() && room->second.memory;
  auto work = has_room ? joined(op, std::move(room->second.memory)) : run(memory, op);
  mark(op, work);
  std::vector<Data> keeps;
  size_t elements = 0;
  for (auto* in : op.inputs) {
    elements += in->face.data_size();
    if (in->data != last.data) {
      keeps.push_back(in->data);
    }
  }
  for (auto* out : op.outputs) {
    out->done = true;
    if (out != &last && out->data != last.data) {
      keeps.push_back(out->data);
    }
  }
  queue_.dispatch(std::move(work), elements, std::move(keeps));
  auto full = [this] { return memory.active > limit_ && queue_.tasks() > 1; };
  if (queue_.tasks() > max_active_tasks || full()) {
    do {
      queue_.wait_for_one();
    } while (full());
  }
  for (auto* in : op.inputs) {
    release(*in, op.handles);
  }
  for (auto* out : op.outputs) {
    release(*out, 0);
  }
}

// Mark the memory that an operation takes or writes over with its kind. Memory that it only views keeps the kind that it had,
// unless the view has one of its own.
void Simulator::mark(const Op& op, const Work& work) {
  auto kind = op.kind.value_or(Kind::others);
  auto id = op.outputs.front()->id;
  for (auto* out : op.outputs) {
    id = std::min(id, out->id);
    auto reads = [out](const Node* in) { return in->data == out->data; };
    bool views = work.kernels == 0 && std::any_of(op.inputs.begin(), op.inputs.end(), reads);
    if (out->data && (out->kind || !views)) {
      memory.mark(*out->data, out->kind.value_or(kind));
    }
  }
  for (const auto& data : work.temporaries) {
    memory.mark(*data, kind);
  }
  if (recorded) {
    auto& held = recorded->emplace_back(Held{id, {}, memory.cached});
    const auto& bytes = memory.by_kind();
    std::copy(bytes.begin(), bytes.end(), held.bytes);
  }
}

void Simulator::wait(size_t done) {
  queue_.wait(done);
}

void Simulator::limit(size_t bytes) {
  if (device_.gpu == 0 && bytes < device_.memory_limit) {
    queue_.wait(queue_.finish());
    return;
  }
  limit_ = std::min(bytes, device_.memory_limit);
}

} // namespace faststep::simulator
