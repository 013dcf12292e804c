// The order of evaluation, and who holds what meanwhile: mlx/transforms.cpp (eval_impl), mlx/array.cpp (detach),
// mlx/backend/cpu/eval.cpp, mlx/backend/cuda/eval.cpp.
#include "plan.hpp"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <unordered_set>

namespace faststep::plan {

namespace {

constexpr int max_active_tasks = 10;

size_t bfs_max_width() {
  const char* width = std::getenv("MLX_BFS_MAX_WIDTH");
  return width ? std::strtoul(width, nullptr, 10) : 20;
}

} // namespace

Plan::Plan(const Device& device) : memory(device), device_(device), queue_(device) {}

Node& Plan::node(const mx::array& array) {
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
      for (const auto& in : next.inputs()) {
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
Node& Plan::add(const mx::array& array) {
  bool lazy = array.status() == mx::array::Status::unscheduled && array.has_primitive();
  if (!lazy) {
    sources_.push_back(array);
    auto& node = nodes_.emplace_back(array);
    by_id_[array.id()] = &node;
    settle(node);
    return node;
  }
  auto& op = ops_.emplace_back();
  op.primitive = array.primitive_ptr();
  for (const auto& in : array.inputs()) {
    op.inputs.push_back(by_id_.at(in.id()));
  }
  for (const auto& out : array.outputs()) {
    sources_.push_back(out);
    auto& node = nodes_.emplace_back(mx::array(out.shape(), out.dtype(), nullptr, {}));
    node.op = &op;
    by_id_[out.id()] = &node;
    op.outputs.push_back(&node);
  }
  return *by_id_.at(array.id());
}

// An array that is there: its memory is known to the allocator already.
void Plan::settle(Node& node) {
  node.done = true;
  if (node.face.status() == mx::array::Status::unscheduled) {
    return; // a placeholder without a value
  }
  const auto& shared = node.face.data_shared_ptr();
  auto& resident = residents_.try_emplace(shared.get(), Resident{node.face, {}, 0}).first->second;
  node.data = resident.data.lock();
  if (!node.data) {
    node.data = memory.adopt(node.face.buffer_size(), shared->is_owned(), Use::elsewhere);
    resident.data = node.data;
  }
  ++resident.arrays;
}

void Plan::mark(const Arrays& arrays, Use use) {
  for (const auto* array : arrays) {
    auto& marked = node(*array);
    marked.use = use;
    if (marked.data) {
      memory.retag(*marked.data, use);
    }
  }
}

void Plan::begin(const Arrays& given, const Arrays& roots) {
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
  queue_.shift();
  foreign_.clear();
  for (const auto& [_, resident] : residents_) {
    auto data = resident.data.lock();
    if (data && resident.array.data_shared_ptr().use_count() > resident.arrays) {
      foreign_.push_back(data);
    }
  }
  for (const auto* array : roots) {
    link(node(*array));
  }
}

// The handles that a graph's arrays have to their inputs: each output of an op has its own.
void Plan::link(Node& root) {
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
      in->refs += static_cast<int>(next.op->outputs.size());
      todo.push_back(in);
    }
  }
}

void Plan::hold(const Arrays& arrays, int handles) {
  for (const auto* array : arrays) {
    auto& held = node(*array);
    if (handles > 0) {
      held.refs += handles;
    } else {
      release(held, -handles);
    }
  }
}

void Plan::keep(const Arrays& arrays) {
  std::vector<Data> keeps;
  for (const auto* array : arrays) {
    keeps.push_back(node(*array).data);
  }
  kept_ = std::move(keeps);
}

void Plan::carry(const mx::array& input, const mx::array& output) {
  auto &to = node(input), &from = node(output);
  if (!from.data) {
    return; // nobody has it any more
  }
  if (to.face.shape() == from.face.shape()) {
    to.face = from.face;
  }
  to.data = from.data;
  memory.retag(*to.data, to.use);
}

void Plan::release(Node& node, int handles) {
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
      release(*in, static_cast<int>(node.op->outputs.size()));
    }
  }
}

// What is to be computed, last things first.
std::vector<Node*> Plan::tape(const std::vector<Node*>& outputs) {
  for (auto& each : nodes_) {
    each.degree = 0;
  }
  std::vector<const std::vector<Node*>*> todo{&outputs};
  while (!todo.empty()) {
    const auto& inputs = *todo.back();
    todo.pop_back();
    for (auto* in : inputs) {
      if (in->done) {
        continue;
      }
      if (in->degree == 0) {
        todo.push_back(&in->op->inputs);
      }
      for (auto* out : in->op->outputs) {
        ++out->degree;
      }
    }
  }
  // breadth first with a limit to the width
  auto width = bfs_max_width();
  std::vector<Node*> tape;
  std::vector<std::pair<const std::vector<Node*>*, size_t>> later{{&outputs, 0}};
  for (size_t i = 0; i < tape.size() || !later.empty();) {
    std::pair<const std::vector<Node*>*, size_t> next;
    if (i < tape.size()) {
      next = {&tape[i++]->op->inputs, 0};
    } else {
      next = later.back();
      later.pop_back();
    }
    for (auto& [inputs, j] = next; j < inputs->size(); ++j) {
      auto* in = (*inputs)[j];
      if (in->done) {
        continue;
      }
      if (tape.size() - i >= width) {
        later.push_back(next);
        break;
      }
      for (auto* out : in->op->outputs) {
        --out->degree;
      }
      if (in->degree == 0) {
        tape.push_back(in);
      }
    }
  }
  return tape;
}

size_t Plan::evaluate(const Arrays& arrays) {
  std::vector<Node*> outputs;
  for (const auto* array : arrays) {
    outputs.push_back(&node(*array));
    ++outputs.back()->refs;
  }
  auto order = tape(outputs);
  for (auto last = order.rbegin(); last != order.rend(); ++last) {
    evaluate(*(*last)->op, **last);
  }
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

void Plan::evaluate(Op& op, const Node& last) {
  auto work = run(memory, op);
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
    if (out->use != Use::activation) {
      memory.retag(*out->data, out->use);
    }
    if (out != &last && out->data != last.data) {
      keeps.push_back(out->data);
    }
  }
  queue_.dispatch(std::move(work), elements, std::move(keeps));
  auto full = [this] { return memory.active > device_.memory_limit && queue_.tasks() > 1; };
  if (queue_.tasks() > max_active_tasks || full()) {
    do {
      queue_.wait_for_one();
    } while (full());
  }
  for (auto* in : op.inputs) {
    release(*in, static_cast<int>(op.outputs.size()));
  }
  for (auto* out : op.outputs) {
    release(*out, 0);
  }
}

void Plan::wait(size_t done) {
  queue_.wait(done);
}

} // namespace faststep::plan
