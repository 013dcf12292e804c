// The graph as MLX has it, and who holds its arrays before and after an evaluation.
#include "simulator/simulator.hpp"

#include <algorithm>
#include <unordered_set>

#include "graph/fuse.hpp"

namespace faststep::simulator {

Simulator::Simulator(const Device& device) : memory(device), device_(device), limit_(device.memory_limit), queue_(memory, device) {}

Node& Simulator::node(const mx::array& array) {
  auto known = by_id_.find(array.id());
  if (known != by_id_.end()) {
    return *known->second;
  }
  // depth first, without recursion: a graph can be deeper than the stack
  std::vector<mx::array> todo{array};
  while (!todo.empty()) {
    auto next = todo.back();
    bool ready = true;
    if (next.status() == mx::array::Status::unscheduled && next.has_primitive()) {
      for (const auto& in : source(next).inputs) {
        if (!by_id_.contains(in.id())) {
          todo.push_back(in);
          ready = false;
        }
      }
    }
    if (ready) {
      todo.pop_back();
      if (!by_id_.contains(next.id())) {
        add(next);
      }
    }
  }
  return *by_id_.at(array.id());
}

// An array, with its siblings, whose inputs are known.
Node& Simulator::add(const mx::array& array) {
  bool lazy = array.status() == mx::array::Status::unscheduled && array.has_primitive();
  if (!lazy) {
    sources_.push_back(array);
    auto& node = nodes_.emplace_back(array, array.id());
    by_id_[array.id()] = &node;
    add_resident(node);
    return node;
  }
  auto& op = ops_.emplace_back();
  auto [primitive, inputs, handles] = source(array);
  op.primitive = primitive;
  op.handles = static_cast<int>(handles);
  for (const auto& in : inputs) {
    op.inputs.push_back(by_id_.at(in.id()));
  }
  for (const auto& out : array.outputs()) {
    sources_.push_back(out);
    auto& node = nodes_.emplace_back(mx::array(out.shape(), out.dtype(), nullptr, {}), out.id());
    node.op = &op;
    by_id_[out.id()] = &node;
    op.outputs.push_back(&node);
  }
  return *by_id_.at(array.id());
}

// An array that is there: its memory is known to the allocator already.
void Simulator::add_resident(Node& node) {
  node.done = true;
  if (node.face.status() == mx::array::Status::unscheduled) {
    return; // a placeholder without a value
  }
  const auto& shared = node.face.data_shared_ptr();
  auto& resident = residents_[shared.get()];
  node.data = resident.lock();
  if (!node.data) {
    node.data = std::make_shared<Buffer>(memory, node.face.buffer_size(), shared->is_owned());
    resident = node.data;
  }
}

void Simulator::begin(const Arrays& given, const Arrays& roots) {
  std::unordered_set<const Node*> values;
  for (const auto* array : given) {
    values.insert(&node(*array));
  }
  for (const auto* array : roots) {
    node(*array);
  }
  for (auto& each : nodes_) {
    bool value = values.contains(&each);
    each.refs = each.degree = 0;
    if (each.op == nullptr) {
      each.refs = !value; // a constant of the graph: whoever made it keeps it
    } else if (!value) {
      each.done = false;
      each.data.reset();
    }
  }
  for (const auto* array : roots) {
    link(node(*array));
  }
}

// The handles that a graph's arrays have to their inputs: each output of an op has its own, unless the op is one of ours.
void Simulator::link(Node& root) {
  std::vector<Node*> todo{&root};
  while (!todo.empty()) {
    auto& next = *todo.back();
    todo.pop_back();
    if (next.done || std::exchange(next.degree, 1) != 0) {
      continue;
    }
    for (auto* out : next.op->outputs) {
      out->degree = 1;
    }
    for (auto* in : next.op->inputs) {
      in->refs += next.op->handles;
      todo.push_back(in);
    }
  }
}

void Simulator::hold(const Arrays& arrays, int handles) {
  for (const auto* array : arrays) {
    auto& held = node(*array);
    if (handles > 0) {
      held.refs += handles;
    } else {
      release(held, -handles);
    }
  }
}

void Simulator::keep(size_t slot, const Arrays& arrays) {
  std::vector<Data> keeps;
  for (const auto* array : arrays) {
    keeps.push_back(node(*array).data);
  }
  kept_[slot] = std::move(keeps);
}

void Simulator::mark(Kind own, Kind before, const Arrays& arrays) {
  std::vector<Op*> todo;
  for (const auto* array : arrays) {
    auto& marked = node(*array);
    if (marked.kind) {
      continue;
    }
    marked.kind = own;
    if (marked.data) {
      memory.mark(*marked.data, own);
    }
    todo.push_back(marked.op);
  }
  while (!todo.empty()) {
    auto* op = todo.back();
    todo.pop_back();
    if (op == nullptr || op->kind) {
      continue;
    }
    op->kind = before;
    for (const auto* in : op->inputs) {
      todo.push_back(in->op);
    }
  }
}

void Simulator::carry(const mx::array& input, const mx::array& output) {
  auto &to = node(input), &from = node(output);
  if (!from.data) {
    return; // nobody has it any more
  }
  if (to.face.shape() == from.face.shape()) {
    to.face = from.face;
  }
  to.data = from.data;
}

void Simulator::release(Node& node, int handles) {
  node.refs -= handles;
  if (node.refs > 0) {
    return;
  }
  if (node.done) {
    node.data.reset();
    return;
  }
  auto dead = [](const Node* out) { return out->refs <= 0; };
  if (std::all_of(node.op->outputs.begin(), node.op->outputs.end(), dead)) {
    for (auto* in : node.op->inputs) {
      release(*in, node.op->handles);
    }
  }
}

} // namespace faststep::simulator
