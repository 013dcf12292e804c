// The buffers that the recorded operations read and write: numbered in the first pass, held to the plan in the second.
#include <algorithm>
#include <iterator>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/recorder.hpp"
#include "told.hpp"

namespace faststep::replay {

namespace {

// Smaller buffers have memory of their own: they are not worth a wait.
constexpr size_t small = 16384;

// Kernels may want a buffer to begin at a multiple of so many bytes.
constexpr size_t alignment = 256;

} // namespace

// Memory that an evaluation has allocated: it is learnt, or lies where it was planned.
void Recorder::take(const std::vector<Data>& writes) {
  if (learnt_ == nullptr) {
    auto known = learning_.sizes.size();
    auto& made = learning_.made.emplace_back();
    for (const auto& data : writes) {
      auto number = id(data);
      if (number < known) {
        continue;
      }
      known = number + 1;
      made.push_back(number);
      auto* buffer = buffer_of(*data);
      made_by_[number] = {units_.size(), buffer != nullptr ? buffer->size : 0};
      bool planned = buffer != nullptr && buffer->data != nullptr && buffer->size >= small && buffer->device >= 0;
      learning_.sizes[number] = planned ? buffer->size : 0;
    }
    return;
  }
  if (!block_->is_taken()) {
    throw Refused("a step that takes other memory when it is gone through again");
  }
  // Of those that have been planned: their bytes, and where they are to lie if not in the block.
  std::vector<std::pair<size_t, void*>> planned, found;
  for (auto buffer : learnt_->made[evaluations_ - 1]) {
    if (auto there = place(buffer)) {
      planned.emplace_back(there->bytes, learnt_->sizes[buffer] > 0 ? nullptr : there->memory);
    }
  }
  auto is_there = [&](void* memory) {
    return std::any_of(planned.begin(), planned.end(), [&](const auto& it) { return it.second == memory; });
  };
  auto rest = block_->taken();
  for (const auto& data : writes) { // what has been taken
    auto* buffer = buffer_of(*data);
    if (std::erase(rest, buffer) > 0) {
      bool there = is_there(buffer->data);
      if (!there) {
        hazards_.take(buffer->data, buffer->size);
      }
      found.emplace_back(buffer->size, there ? buffer->data : nullptr);
    }
  }
  if (!rest.empty()) {
    block_->keep(); // whoever has it may use it
    throw Refused("other work has taken memory while the step was captured");
  }
  // Buffers of one size may have each other's places in the block; one of another size would be written over too early.
  if (found != planned) {
    throw Refused("a step that takes its memory in another order when it is gone through again");
  }
}

// The planned memory of a buffer of the first pass, if it has one.
std::optional<Place> Recorder::place(size_t buffer) const {
  if (auto there = learnt_->there.find(buffer); there != learnt_->there.end()) {
    return there->second;
  }
  auto bytes = learnt_->sizes[buffer];
  return bytes > 0 ? std::optional(block_->place(learnt_->plan.offsets[buffer], bytes)) : std::nullopt;
}

// Inputs that are made where an output is to be, if nobody else reads them any more.
void Recorder::lay_within(const mx::array& array, const mx::array& out) {
  if (learnt_ != nullptr || !is_whole(out)) {
    return;
  }
  const auto& sizes = learning_.sizes;
  auto other = id(out.data_shared_ptr());
  for (auto [number, offset] : may_lie_within(array.primitive())) {
    const auto& in = array.inputs()[number];
    const auto& data = in.data_shared_ptr();
    auto holds = [&data](const mx::array& each) { return each.data_shared_ptr() == data; };
    const auto &results = capture_.graph_.results, &carried = capture_.graph_.from;
    bool used = reads_[memory_of(*data)] > 0 || std::any_of(results.begin(), results.end(), holds) ||
        std::any_of(carried.begin(), carried.end(), holds);
    auto buffer = id(data);
    auto bytes = sizes[buffer];
    auto made = made_whole_.find(buffer);
    bool own = made != made_whole_.end() && made->second == in.nbytes(); // it is no part of what has been made
    bool alone = bytes == in.nbytes() || in.nbytes() == out.nbytes(); // no other one lies behind it in its last page
    bool fits = bytes > 0 && offset % alignment == 0 && offset + bytes <= sizes[other] && buffer != other;
    if (!used && own && is_whole(in) && alone && fits && !lies_within_.contains(buffer)) {
      learning_.within.push_back({buffer, other, offset});
      lies_within_.insert(buffer);
    }
  }
}

void Recorder::add(size_t begin, const std::vector<Data>& reads, const std::vector<Data>& writes) {
  auto addresses = [](const std::vector<Data>& all) {
    std::vector<Hazards::Address> addresses;
    for (const auto& data : all) {
      if (auto* memory = memory_of(*data)) {
        addresses.push_back(memory);
      }
    }
    return addresses;
  };
  std::vector<Room> rooms;
  for (const auto& data : writes) {
    auto* buffer = buffer_of(*data);
    if (buffer != nullptr && buffer->data != nullptr) {
      auto from = device_pointer(buffer->data);
      rooms.push_back({from, from + buffer->size, hazards_.users(buffer->data)});
    }
  }
  auto before = hazards_.add(addresses(reads), addresses(writes));
  units_.push_back({begin, recording_.nodes(), std::move(before), std::move(rooms)});
  if (learnt_ == nullptr) {
    auto& operation = learning_.operations.emplace_back();
    std::transform(reads.begin(), reads.end(), std::back_inserter(operation.reads), [this](auto& it) { return id(it); });
    std::transform(writes.begin(), writes.end(), std::back_inserter(operation.writes), [this](auto& it) { return id(it); });
  }
}

// The number of a buffer, as it is learnt: a new one where it has none.
size_t Recorder::id(const Data& data) {
  auto& known = ids_[data.get()];
  if (known.second.expired()) {
    known = {learning_.sizes.size(), data};
    learning_.sizes.push_back(0);
  }
  return known.first;
}

// Memory that nobody else holds is the capture's, once there is a plan: MLX's allocator is not to hand it out again.
void Recorder::let_go(std::vector<Data> all) {
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  for (auto& data : all) {
    auto* buffer = buffer_of(*data);
    if (learnt_ != nullptr && data.use_count() == 1 && buffer != nullptr && buffer->data != nullptr) {
      capture_.kept_.push_back(std::move(data));
    }
  }
}

} // namespace faststep::replay
