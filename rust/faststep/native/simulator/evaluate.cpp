// The order of evaluation, and who holds what meanwhile: mlx/transforms.cpp (eval_impl), mlx/array.cpp (detach),
// mlx/backend/cpu/eval.cpp, mlx/backend/cuda/eval.cpp.
#include <algorithm>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "simulator/simulator.hpp"

namespace faststep::simulator {

namespace {

constexpr int max_active_tasks = 10;

size_t bfs_max_width() {
  const char* width = std::getenv("MLX_BFS_MAX_WIDTH");
  return width ? std::strtoul(width, nullptr, 10) : 20;
}

} // namespace

// What is to be computed, last things first.
std::vector<Node*> Simulator::tape(const std::vector<Node*>& outputs) {
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

size_t Simulator::evaluate(const Arrays& arrays) {
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

void Simulator::evaluate(Op& op, const Node& last) {
  if (op.primitive->name() == std::string_view("Wait")) { // cpu/join.cpp
    queue_.wait(queue_.finish());
  }
  if (op.primitive->name() == std::string_view("Pace")) { // graph/order.cpp
    queue_.wait(std::exchange(paced_, queue_.finish()));
  }
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

void Simulator::wait(size_t done) {
  queue_.wait(done);
}

void Simulator::limit(size_t bytes) {
  limit_ = std::min(bytes, device_.memory_limit);
}

} // namespace faststep::simulator
