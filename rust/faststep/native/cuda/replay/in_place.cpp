// Static arrays get their next values within the graph: from the fused kernel that computes them, which is given another
// pointer, or else by a copy.
#include <algorithm>
#include <cstring>
#include <string_view>

#include "cuda/replay/driver.hpp"
#include "cuda/replay/recorder.hpp"

namespace faststep::replay {

// Who wrote what may be written in place.
void Recorder::remember(const mx::array& array, const std::vector<mx::array>& outputs) {
  bool fused = std::string_view(array.primitive().name()).starts_with("Compiled");
  if (!fused || units_.back().end - units_.back().begin != 1) {
    return;
  }
  Kernel kernel{units_.size() - 1, {}};
  for (const auto& in : array.inputs()) {
    bool fits = in.size() == outputs[0].size() && in.data_size() == in.size();
    bool by_element = fits && in.flags().row_contiguous && in.offset() == 0;
    kernel.inputs.push_back({memory_of(*in.data_shared_ptr()), in.nbytes(), by_element});
  }
  for (const auto& out : outputs) {
    if (out.flags().row_contiguous && out.data_size() == out.size()) {
      kernels_[memory_of(*out.data_shared_ptr())] = kernel;
    }
  }
}

// A fused kernel writes the value where it belongs, instead of a copy after it.
bool Recorder::write_in_place(size_t i) {
  const auto &from = capture_.graph_.from[i], &into = capture_.graph_.into[i];
  auto *source = memory_of(*from.data_shared_ptr()), *target = memory_of(*into.data_shared_ptr());
  auto made = kernels_.find(source);
  bool whole = from.offset() == 0 && into.offset() == 0 && from.flags().row_contiguous &&
      into.flags().row_contiguous && from.nbytes() == into.nbytes() && into.data_size() == into.size();
  if (made == kernels_.end() || !whole || source == target || reads_[source] > 0) {
    return false;
  }
  auto is_source = [source](const mx::array& array) {
    return array.status() != mx::array::Status::unscheduled && memory_of(*array.data_shared_ptr()) == source;
  };
  auto users = std::count_if(capture_.graph_.from.begin(), capture_.graph_.from.end(), is_source) +
      std::count_if(capture_.graph_.results.begin(), capture_.graph_.results.end(), is_source);
  const auto& [unit, inputs] = made->second;
  bool safe = std::all_of(inputs.begin(), inputs.end(), [&](const Kernel::Input& in) {
    return in.memory != target || (in.by_element && in.bytes == into.nbytes());
  });
  // the pointer last: a kernel that reads the target has it twice then, and the first one cannot be put back
  if (users != 1 || !safe || !hazards_.may_redirect(unit, source, target) ||
      !replace_pointer(units_[unit].begin, source, target)) {
    return false;
  }
  auto before = hazards_.redirect(unit, source, target);
  if (learnt_ == nullptr) {
    learning_.operations[unit].writes.push_back(id(into.data_shared_ptr()));
  }
  units_[unit].before.insert(units_[unit].before.end(), before->begin(), before->end());
  return true;
}

// Give a kernel another pointer in the place of one that it has once.
bool Recorder::replace_pointer(size_t number, void* from, void* into) const {
  const auto& driver = replay::driver();
  if (driver.cuFuncGetParamInfo == nullptr) {
    return false;
  }
  size_t count = recording_.nodes();
  std::vector<CUgraphNode> nodes(count);
  check(driver.cuGraphGetNodes(recording_.graph(), nodes.data(), &count), "cuGraphGetNodes");
  KernelNode kernel;
  if (driver.cuGraphKernelNodeGetParams(nodes[number], &kernel) != CUDA_SUCCESS || kernel.func == nullptr ||
      kernel.kernelParams == nullptr) {
    return false;
  }
  std::vector<std::vector<char>> values;
  std::vector<void*> pointers;
  size_t found = 0;
  for (size_t offset = 0, size = 0;
       driver.cuFuncGetParamInfo(kernel.func, values.size(), &offset, &size) == CUDA_SUCCESS;) {
    const auto* bytes = static_cast<const char*>(kernel.kernelParams[values.size()]);
    values.emplace_back(bytes, bytes + size);
    if (size == sizeof(void*) && std::memcmp(values.back().data(), &from, size) == 0) {
      std::memcpy(values.back().data(), &into, size);
      ++found;
    }
  }
  if (found != 1) {
    return false;
  }
  for (auto& value : values) {
    pointers.push_back(value.data());
  }
  kernel.kernelParams = pointers.data();
  return driver.cuGraphKernelNodeSetParams(nodes[number], &kernel) == CUDA_SUCCESS;
}

// Values go where they belong as soon as nothing reads what is there.
void Recorder::carry() {
  auto &from = capture_.graph_.from, &into = capture_.graph_.into;
  for (size_t i = 0; i < from.size();) {
    if (!is_free(i)) {
      ++i;
      continue;
    }
    if (!write_in_place(i)) {
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
