// Distance by which MLX runs ahead of its device: mlx/backend/cpu/{encoder.h,eval.cpp}, mlx/scheduler.h,
// mlx/backend/cuda/{eval.cpp,device.cpp,worker.cpp}.
//
// The CPU's worker lets go of an operation's inputs when it has computed it. How fast it is nobody knows before: here it
// does no more than the feeding thread waits for, which takes the most memory that it can take.
//
// A GPU's kernels are gathered into graphs, and what a graph reads is let go of when all of it is done. Feeding a GPU
// usually takes longer than computing, so here a graph is done when the next one is full, and a step before the next one
// begins. Where the GPU falls behind, steps in flight hold more; MLX feeds it no more at `mx.get_memory_limit()`.
#include <iterator>
#include <utility>

#include "simulator/simulator.hpp"

namespace faststep::simulator {

namespace {

constexpr size_t dispatches_per_task = 10;

void append(std::vector<Data>& to, std::vector<Data> from) {
  to.insert(to.end(), std::make_move_iterator(from.begin()), std::make_move_iterator(from.end()));
}

} // namespace

Queue::Queue(Memory& memory, const Device& device) : memory_(memory), device_(device) {}

void Queue::dispatch(Work work, size_t elements, std::vector<Data> keeps) {
  append(keeps, std::move(work.temporaries));
  if (device_.gpu != 0) {
    append(keeps_, std::move(keeps));
    pending_ += work.kernels;
    elements_ += elements;
    if (pending_ > device_.max_ops || (elements_ >> 20) > device_.max_mega) {
      commit();
      wait(done_ + items_.size() - 1);
    }
    return;
  }
  for (; work.kernels > 0; --work.kernels) {
    push({}, 0);
  }
  push(std::move(keeps), work.scratch);
}

size_t Queue::finish() {
  if (device_.gpu != 0) {
    commit();
    wait(done_ + items_.size());
  }
  return done_ + items_.size();
}

// One dispatch of the CPU's.
void Queue::push(std::vector<Data> keeps, size_t scratch) {
  pending_ = (pending_ + 1) % dispatches_per_task;
  tasks_ += pending_ == 0;
  items_.push_back({pending_ == 0, std::move(keeps), scratch});
}

// One graph of a GPU's.
void Queue::commit() {
  items_.push_back({false, std::exchange(keeps_, {}), 0});
  pending_ = elements_ = 0;
}

void Queue::work() {
  const auto& item = items_.front();
  tasks_ -= item.ends_task;
  if (item.scratch > 0) {
    memory_.allocate(item.scratch); // which frees it again
  }
  items_.pop_front();
  ++done_;
}

void Queue::wait(size_t until) {
  while (done_ < until) {
    work();
  }
}

void Queue::wait_for_one() {
  for (auto before = tasks_; before > 1 && tasks_ == before;) {
    work();
  }
}

} // namespace faststep::simulator
