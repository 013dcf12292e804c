// Static arrays get their next values within the graph: these are made there, or else copied.
#include <algorithm>
#include <string_view>
#include <utility>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/recorder.hpp"

namespace faststep::replay {

// Keep the inputs of a fused kernel.
void Recorder::remember(const mx::array& array, const std::vector<mx::array>& outputs) {
  bool fused = std::string_view(array.primitive().name()).starts_with("Compiled");
  auto is_row = [](const mx::array& out) { return out.flags().row_contiguous && out.data_size() == out.size(); };
  if (!fused || units_.back().end - units_.back().begin != 1 || !std::all_of(outputs.begin(), outputs.end(), is_row)) {
    return;
  }
  auto& inputs = fused_[units_.size() - 1];
  for (const auto& in : array.inputs()) {
    bool fits = in.size() == outputs[0].size() && in.data_size() == in.size();
    bool by_element = fits && in.flags().row_contiguous && in.offset() == 0;
    inputs.push_back({memory_of(*in.data_shared_ptr()), in.nbytes(), by_element});
  }
}

// In the first pass: a buffer of which the value belongs into a static array is to lie there from the beginning, where whoever
// reads what is there before has done so by then, or is the fused kernel that writes it, element by element.
bool Recorder::lay_there(size_t i) {
  const auto &from = capture_.graph_.from[i], &into = capture_.graph_.into[i];
  const auto& data = from.data_shared_ptr();
  auto *source = memory_of(*data), *target = memory_of(*into.data_shared_ptr());
  auto is_source = [source](const mx::array& array) {
    return array.status() != mx::array::Status::unscheduled && memory_of(*array.data_shared_ptr()) == source;
  };
  auto holders = std::count_if(capture_.graph_.from.begin(), capture_.graph_.from.end(), is_source) +
      std::count_if(capture_.graph_.results.begin(), capture_.graph_.results.end(), is_source);
  auto buffer = id(data);
  auto made = made_whole_.find(buffer);
  bool whole = is_whole(from) && is_whole(into) && made != made_whole_.end() && made->second == from.nbytes();
  auto made_by = made_by_.find(buffer);
  if (!whole || from.nbytes() != into.nbytes() || reads_[source] > 0 || holders != 1 || made_by == made_by_.end() ||
      made_by->second.unit >= units_.size() || lies_within_.contains(buffer)) {
    return false;
  }
  auto [first, bytes] = made_by->second;
  auto by_element = [&](const Input& in) { return in.memory != target || (in.by_element && in.bytes == into.nbytes()); };
  auto users = hazards_.users(target);
  bool free = std::all_of(users.begin(), users.end(), [&](size_t user) {
    auto kernel = fused_.find(user);
    bool writes = user == first && kernel != fused_.end();
    return user < first || (writes && std::all_of(kernel->second.begin(), kernel->second.end(), by_element));
  });
  if (!free) {
    return false;
  }
  auto device = buffer_of(*into.data_shared_ptr())->device;
  learning_.there[buffer] = {target, bytes, device};
  learning_.sizes[buffer] = 0;
  learning_.operations[first].writes.push_back(id(into.data_shared_ptr()));
  // with what lies within it, where nobody has used that memory before
  std::erase_if(learning_.within, [&](const Within& it) {
    if (it.other != buffer) {
      return false;
    }
    if (users.empty()) {
      auto* place = static_cast<char*>(target) + it.offset;
      learning_.there[it.buffer] = {place, std::exchange(learning_.sizes[it.buffer], 0), device};
    }
    return true;
  });
  return true;
}

// Values go where they belong as soon as nothing reads what is there.
void Recorder::carry() {
  auto &from = capture_.graph_.from, &into = capture_.graph_.into;
  for (size_t i = 0; i < from.size();) {
    if (!is_free(i)) {
      ++i;
      continue;
    }
    if (learnt_ != nullptr || !lay_there(i)) {
      copy(from[i], into[i]);
    }
    std::vector<Data> done{from[i].data_shared_ptr()};
    from.erase(from.begin() + static_cast<std::ptrdiff_t>(i));
    into.erase(into.begin() + static_cast<std::ptrdiff_t>(i));
    let_go(std::move(done));
    i = 0;
  }
}

bool Recorder::is_free(size_t i) const {
  const auto &from = capture_.graph_.from, &into = capture_.graph_.into;
  if (from[i].status() == mx::array::Status::unscheduled) {
    return false;
  }
  auto* memory = memory_of(*into[i].data_shared_ptr());
  auto reads = reads_.find(memory);
  if (reads != reads_.end() && reads->second > 0) {
    return false;
  }
  for (size_t k = 0; k < from.size(); ++k) {
    bool there = k != i && from[k].status() != mx::array::Status::unscheduled;
    if (there && memory_of(*from[k].data_shared_ptr()) == memory) {
      return false;
    }
  }
  return true;
}

void Recorder::copy(const mx::array& from, const mx::array& into) {
  auto *source = address_of(from), *target = address_of(into);
  if (source == target || from.nbytes() == 0) {
    return;
  }
  if (!from.flags().row_contiguous || !into.flags().row_contiguous || from.nbytes() != into.nbytes()) {
    throw Refused("a value that does not lie as the one before it");
  }
  auto begin = recording_.nodes();
  Copy copy;
  copy.srcDevice = device_pointer(source);
  copy.dstDevice = device_pointer(target);
  copy.WidthInBytes = copy.srcPitch = copy.dstPitch = from.nbytes();
  CUgraphNode node = nullptr;
  check(
      driver().cuGraphAddMemcpyNode(&node, recording_.graph(), nullptr, 0, &copy, capture_.context_),
      "cuGraphAddMemcpyNode");
  add(begin, {from.data_shared_ptr()}, {into.data_shared_ptr()});
}

} // namespace faststep::replay
