// The pass through the graph: each operation is encoded in MLX's order, its buffers are noted (buffers.cpp), values that belong
// into static arrays go there (in_place.cpp), and what is recorded becomes one graph (dependencies.cpp).
#include "cuda/replay/recorder.hpp"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>

#include "lazy.hpp"
#include "walk.hpp"

namespace faststep::replay {

namespace {

// The memory of a block, at most so many times the least that a plan takes: more where all of it is little, so that more
// operations run side by side (engine/replay/mod.rs has the same numbers).
constexpr double factor = 1.1, factor_of_little = 8;
constexpr size_t little = size_t{64} << 20;

} // namespace

// An array that is being evaluated, and the memory that it reads and writes.
struct Recorder::Evaluation {
  mx::array array;
  std::vector<mx::array> outputs;
  std::vector<Data> reads, writes;
};

Recorder::Recorder(Capture& capture, Encoder& encoder, const Learnt* learnt, Block* block)
    : capture_(capture), recording_(encoder), learnt_(learnt), block_(block) {}

Learnt Recorder::learn() {
  run();
  leave_room();
  auto& [operations, sizes, made, within, there, plan] = learning_;
  operations.emplace_back();
  for (const auto& result : capture_.graph_.results) {
    operations.back().reads.push_back(id(result.data_shared_ptr())); // which stays
  }
  // Buffers of one size that an evaluation makes may get each other's places: none is done with before all are.
  std::vector<size_t> last(sizes.size());
  for (size_t i = 0; i < operations.size(); ++i) {
    for (const auto* buffers : {&operations[i].reads, &operations[i].writes}) {
      for (auto buffer : *buffers) {
        last[buffer] = i;
      }
    }
  }
  for (const auto& buffers : made) {
    std::map<size_t, std::vector<size_t>> by_size;
    for (auto buffer : buffers) {
      by_size[sizes[buffer]].push_back(buffer);
    }
    for (const auto& [size, alike] : by_size) {
      auto later = [&](size_t a, size_t b) { return last[a] < last[b]; };
      auto& reads = operations[last[*std::max_element(alike.begin(), alike.end(), later)]].reads;
      reads.insert(reads.end(), alike.begin(), alike.end());
    }
  }
  auto all = std::accumulate(sizes.begin(), sizes.end(), size_t{0});
  plan = replay::plan(operations, sizes, within, all <= little ? factor_of_little : factor);
  return std::move(learning_);
}

// MLX's allocator would hand out the place of a small buffer to another one of its size that the same evaluation makes, where that
// has no place: then it is copied.
void Recorder::leave_room() {
  for (const auto& buffers : learning_.made) {
    std::set<size_t> others;
    for (auto buffer : buffers) {
      if (learning_.sizes[buffer] == 0 && !learning_.there.contains(buffer)) {
        others.insert(made_by_.at(buffer).bytes);
      }
    }
    for (auto buffer : buffers) {
      if (auto there = learning_.there.find(buffer); there != learning_.there.end() && others.contains(there->second.bytes)) {
        learning_.there.erase(there);
      }
    }
  }
}

void Recorder::record() {
  run();
  if (evaluations_ != learnt_->made.size()) {
    throw Refused("a step that is another one when it is gone through again");
  }
  connect();
  for (const auto& result : capture_.graph_.results) {
    capture_.kept_.push_back(result.data_shared_ptr());
  }
  auto& kept = capture_.kept_;
  std::sort(kept.begin(), kept.end());
  kept.erase(std::unique(kept.begin(), kept.end()), kept.end());
  std::set<void*> given; // memory of what the graph reads is not its own, whoever has a view of it
  for (const auto& fixed : capture_.fixed_) {
    given.insert(fixed.memory);
  }
  capture_.info.bytes = learnt_->plan.bytes;
  for (const auto& data : kept) {
    auto* buffer = buffer_of(*data);
    bool own = !given.contains(buffer->data) && !block_->has(buffer);
    capture_.info.bytes += own ? buffer->size : 0;
  }
}

void Recorder::run() {
  auto tape = this->tape();
  try {
    count(tape);
    feed([](const Capture& capture) { return capture.feed_->encode_in(); });
    while (!tape.empty()) {
      auto array = std::move(tape.back());
      tape.pop_back();
      evaluate(std::move(array));
    }
    carry();
    feed([](const Capture& capture) { return capture.feed_->encode_out(capture.graph_.results); });
  } catch (...) {
    if (block_ != nullptr) {
      block_->end(); // while all that lies in it is still there
    }
    throw;
  }
  if (!capture_.graph_.from.empty()) {
    throw Refused("values that take each other's place");
  }
}

std::vector<mx::array> Recorder::tape() {
  LazyArrays arrays;
  std::vector<const mx::array*> outputs;
  for (auto* list : {&capture_.graph_.results, &capture_.graph_.from}) {
    for (const auto& array : *list) {
      outputs.push_back(&array);
    }
  }
  std::vector<mx::array> tape;
  for (const auto* array : walk(arrays, outputs, bfs_max_width())) {
    tape.push_back(*array);
  }
  return tape;
}

// How often memory is still to be read, and what is there before.
void Recorder::count(const std::vector<mx::array>& tape) {
  std::set<void*> known;
  for (const auto& array : tape) {
    auto name = std::string(array.primitive().name());
    if (array.primitive().stream() != capture_.stream_) {
      throw Refused(name + " runs on another stream or device");
    }
    if (leaves_work_to_host(name)) {
      throw Refused(name + " leaves work to the host");
    }
    for (const auto& in : array.inputs()) {
      if (in.status() == mx::array::Status::unscheduled) {
        ++consumers_[in.id()];
        continue;
      }
      auto* memory = memory_of(*in.data_shared_ptr());
      ++reads_[memory];
      if (known.insert(memory).second) {
        capture_.fixed_.push_back({in.data_shared_ptr(), memory});
      }
      if (learnt_ == nullptr) {
        id(in.data_shared_ptr());
      }
    }
  }
}

void Recorder::evaluate(mx::array array) {
  Evaluation evaluation{std::move(array), {}, {}, {}};
  try {
    evaluate(evaluation);
  } catch (...) {
    if (block_ != nullptr) {
      block_->end();
    }
    throw;
  }
}

// As gpu::eval does it (mlx/backend/cuda/eval.cpp), without submitting anything.
void Recorder::evaluate(Evaluation& evaluation) {
  auto& [array, outputs, reads, writes] = evaluation;
  if (learnt_ != nullptr) {
    if (evaluations_ == learnt_->made.size()) {
      throw Refused("a step that has become longer when it is gone through again");
    }
    for (auto buffer : learnt_->made[evaluations_]) {
      if (auto there = place(buffer)) {
        block_->offer(*there);
      }
    }
  }
  ++evaluations_;
  auto begin = recording_.nodes();
  outputs = array.outputs();
  if (std::string_view(array.primitive().name()) == "Contiguous" && array.inputs()[0].flags().row_contiguous) {
    outputs[0].copy_shared_buffer(array.inputs()[0]); // MLX copies what lies in a larger buffer
  } else {
    array.primitive().eval_gpu(array.inputs(), outputs);
  }
  // not before: an array whose memory somebody holds is not taken over
  for (const auto& in : array.inputs()) {
    if (in.data_shared_ptr()) {
      reads.push_back(in.data_shared_ptr());
      --reads_[memory_of(*in.data_shared_ptr())];
    }
  }
  if (recording_.nodes() < begin) {
    throw Refused(std::string(array.primitive().name()) + " submits its work");
  }
  for (auto& out : outputs) {
    out.set_status(mx::array::Status::evaluated);
    if (out.data_shared_ptr()) {
      writes.push_back(out.data_shared_ptr());
      reads_[memory_of(*out.data_shared_ptr())] += consumers_[out.id()];
    }
  }
  auto temporaries = recording_.temporaries();
  writes.insert(writes.end(), temporaries.begin(), temporaries.end());
  temporaries.clear();
  take(writes);
  for (const auto& out : outputs) {
    if (learnt_ == nullptr && out.data_shared_ptr() && is_whole(out)) {
      made_whole_.emplace(id(out.data_shared_ptr()), out.nbytes()); // who comes first has made it
    }
  }
  if (recording_.nodes() > begin) {
    add(begin, reads, writes);
    remember(array, outputs);
    lay_within(array, outputs[0]);
  }
  outputs.clear();
  array.detach();
  { auto last = std::move(array); }
  reads.insert(reads.end(), std::make_move_iterator(writes.begin()), std::make_move_iterator(writes.end()));
  writes.clear();
  carry();
  let_go(std::move(reads));
}

// A kernel that brings what changes from launch to launch.
void Recorder::feed(Feed::Encoded (*encode)(const Capture&)) {
  auto begin = recording_.nodes();
  auto [reads, writes] = encode(capture_);
  add(begin, reads, writes);
  let_go(std::move(writes));
}

} // namespace faststep::replay
