#include "cuda/op_clock.hpp"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/replay/driver.hpp"

namespace faststep {

namespace mx = mlx::core;
using replay::check;
using replay::driver;

OpClock::OpClock(mx::Stream stream) : stream_(stream), encoder_(replay::encoder_of(stream)) {
  mx::synchronize(stream);
}

OpClock::~OpClock() {
  try {
    submit(); // after an error: MLX must not submit a graph whose events are gone
  } catch (const std::exception&) { // the error before it is told
  }
  for (auto event : events_) {
    driver().cuEventDestroy(event);
  }
}

bool OpClock::takes(const mx::array& array) const {
  return array.primitive().stream() == stream_ && !replay::leaves_work_to_host(array.primitive().name());
}

// As gpu::eval does it (mlx/backend/cuda/eval.cpp).
void OpClock::evaluate(mx::array array) {
  for (auto in : array.inputs()) {
    if (in.event().valid() && in.event().stream() != stream_) {
      in.wait();
    }
  }
  auto outputs = array.outputs();
  array.primitive().eval_gpu(array.inputs(), outputs);
  for (const auto& in : array.inputs()) {
    if (in.data_shared_ptr() != array.data_shared_ptr()) {
      encoder_.add_temporary(in);
    }
  }
  for (const auto& sibling : array.siblings()) {
    encoder_.add_temporary(sibling);
  }
  for (auto& out : outputs) {
    out.set_status(mx::array::Status::evaluated);
  }
  auto all = nodes();
  if (all.size() < nodes_) {
    throw std::runtime_error(std::string(array.primitive().name()) + " submits its work: it cannot be timed by events");
  }
  std::vector<CUgraphNode> own(all.begin() + static_cast<std::ptrdiff_t>(nodes_), all.end());
  if (own.empty()) {
    ends_.push_back(0);
  } else {
    if (last_ == nullptr) { // two events with nothing between them: what an event takes
      last_ = record({record({})});
    }
    for (auto node : own) {
      encoder_.from_nodes_.push_back(last_);
      encoder_.to_nodes_.push_back(node);
    }
    last_ = record(own);
    ends_.push_back(recorded_ - 1);
    nodes_ = nodes().size();
  }
  array.detach();
}

bool OpClock::is_full() const {
  return encoder_.node_count_ > encoder_.max_ops_per_graph_ ||
      (encoder_.bytes_in_graph_ >> 20) > static_cast<size_t>(encoder_.max_mb_per_graph_);
}

std::vector<double> OpClock::finish() {
  submit();
  std::vector<double> found;
  auto ends = std::exchange(ends_, {});
  for (auto end : ends) {
    found.push_back(end == 0 ? 0.0 : std::max(0.0, seconds(end - 1, end) - seconds(0, 1)));
  }
  return found;
}

// An instance of the graph that MLX keeps for the next one of its kind would have the events in it.
void OpClock::submit() {
  bool any = std::exchange(last_, nullptr) != nullptr;
  recorded_ = nodes_ = 0;
  if (any) {
    encoder_.is_graph_updatable_ = false;
  }
  replay::commit(encoder_);
  mx::synchronize(stream_);
}

std::vector<CUgraphNode> OpClock::nodes() const {
  size_t count = 0;
  check(driver().cuGraphGetNodes(encoder_.graph_, nullptr, &count), "cuGraphGetNodes");
  std::vector<CUgraphNode> all(count);
  if (count > 0) {
    check(driver().cuGraphGetNodes(encoder_.graph_, all.data(), &count), "cuGraphGetNodes");
  }
  return all;
}

CUgraphNode OpClock::record(const std::vector<CUgraphNode>& after) {
  if (recorded_ == events_.size()) {
    CUevent event = nullptr;
    check(driver().cuEventCreate(&event, 0), "cuEventCreate");
    events_.push_back(event);
  }
  CUgraphNode node = nullptr;
  auto event = events_[recorded_++];
  check(
      driver().cuGraphAddEventRecordNode(&node, encoder_.graph_, after.data(), after.size(), event),
      "cuGraphAddEventRecordNode");
  return node;
}

double OpClock::seconds(size_t from, size_t to) const {
  float milliseconds = 0;
  check(driver().cuEventElapsedTime(&milliseconds, events_[from], events_[to]), "cuEventElapsedTime");
  return 1e-3 * milliseconds;
}

std::unique_ptr<OpClock> op_clock() {
  auto device = mx::default_device();
  if (device != mx::Device::gpu) {
    return nullptr;
  }
  try {
    return std::make_unique<OpClock>(mx::default_stream(device));
  } catch (const std::runtime_error&) { // Metal, or another MLX: every operation is waited for, and the profile says so
    return nullptr;
  }
}

} // namespace faststep
