#include "cuda/replay/recorder.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <string>
#include <string_view>

#include "cuda/replay/driver.hpp"
#include "graph/graph.hpp"
#include "lazy.hpp"
#include "walk.hpp"

namespace faststep::replay {

namespace {

// Smaller buffers have memory of their own: they are not worth a wait.
constexpr size_t small = 16384;

// Kernels may want a buffer to begin at a multiple of so many bytes.
constexpr size_t alignment = 256;

// The memory of a block, at most so many times the least that a plan takes: more where all of it is little, so that more
// operations run side by side (engine/replay/mod.rs has the same numbers).
constexpr double factor = 1.1, factor_of_little = 8;
constexpr size_t little = size_t{64} << 20;

// Whether an array is all that lies in its memory, as far as it knows.
bool is_whole(const mx::array& a) {
  return a.flags().row_contiguous && a.offset() == 0 && a.data_size() == a.size();
}

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
  auto& [operations, sizes, made, within, plan] = learning_;
  operations.emplace_back();
  for (const auto& result : capture_.results_) {
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

void Recorder::record() {
  run();
  if (evaluations_ != learnt_->made.size()) {
    throw Refused("a step that is another one when it is gone through again");
  }
  connect();
  for (const auto& result : capture_.results_) {
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
    feed([](const Capture& capture) { return capture.feed_->encode_out(capture.results_); });
  } catch (...) {
    if (block_ != nullptr) {
      block_->end(); // while all that lies in it is still there
    }
    throw;
  }
  if (!capture_.from_.empty()) {
    throw Refused("values that take each other's place");
  }
}

std::vector<mx::array> Recorder::tape() {
  LazyArrays arrays;
  std::vector<const mx::array*> outputs;
  for (auto* list : {&capture_.results_, &capture_.from_}) {
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
      if (learnt_->sizes[buffer] > 0) {
        block_->offer(learnt_->plan.offsets[buffer], learnt_->sizes[buffer]);
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
      bool planned = buffer != nullptr && buffer->data != nullptr && buffer->size >= small && buffer->device >= 0;
      learning_.sizes[number] = planned ? buffer->size : 0;
    }
    return;
  }
  if (!block_->is_taken()) {
    throw Refused("a step that takes other memory when it is gone through again");
  }
  auto rest = block_->taken();
  std::vector<size_t> sizes; // of what has been taken, in the order of what is written
  for (const auto& data : writes) {
    auto* buffer = buffer_of(*data);
    if (std::erase(rest, buffer) > 0) {
      hazards_.take(buffer->data, buffer->size);
      sizes.push_back(buffer->size);
    }
  }
  if (!rest.empty()) {
    block_->keep(); // whoever has it may use it
    throw Refused("other work has taken memory while the step was captured");
  }
  // Buffers of one size may have each other's places; one of another size would be written over too early.
  std::vector<size_t> planned;
  for (auto buffer : learnt_->made[evaluations_ - 1]) {
    if (learnt_->sizes[buffer] > 0) {
      planned.push_back(learnt_->sizes[buffer]);
    }
  }
  if (sizes != planned) {
    throw Refused("a step that takes its memory in another order when it is gone through again");
  }
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
    const auto &results = capture_.results_, &carried = capture_.from_;
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
  const auto &from = capture_.from_[i], &into = capture_.into_[i];
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
  auto users = std::count_if(capture_.from_.begin(), capture_.from_.end(), is_source) +
      std::count_if(capture_.results_.begin(), capture_.results_.end(), is_source);
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

// Values go where they belong as soon as nothing reads what is there.
void Recorder::carry() {
  auto &from = capture_.from_, &into = capture_.into_;
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
  const auto &from = capture_.from_, &into = capture_.into_;
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

// A kernel that brings what changes from launch to launch.
void Recorder::feed(Feed::Encoded (*encode)(const Capture&)) {
  auto begin = recording_.nodes();
  auto [reads, writes] = encode(capture_);
  add(begin, reads, writes);
}

// The dependencies of the nodes: within an operation those that MLX gives them, between operations those of the plan.
void Recorder::connect() {
  const auto& driver = replay::driver();
  auto graph = recording_.graph();
  size_t count = recording_.nodes();
  std::vector<CUgraphNode> nodes(count);
  check(driver.cuGraphGetNodes(graph, nodes.data(), &count), "cuGraphGetNodes");
  std::unordered_map<CUgraphNode, size_t> number;
  for (size_t i = 0; i < count; ++i) {
    number[nodes[i]] = i;
  }
  std::vector<size_t> unit(count, SIZE_MAX);
  for (size_t u = 0; u < units_.size(); ++u) {
    std::fill(unit.begin() + static_cast<std::ptrdiff_t>(units_[u].begin),
              unit.begin() + static_cast<std::ptrdiff_t>(units_[u].end), u);
  }
  std::set<std::pair<size_t, size_t>> edges;
  std::vector<bool> first(count, true), last(count, true);
  for (size_t i = 0; i < recording_.from().size(); ++i) {
    auto a = number.at(recording_.from()[i]), b = number.at(recording_.to()[i]);
    if (a >= b) {
      throw Refused("CUDA gives the nodes of a graph in another order than they were made in");
    }
    if (unit[a] == unit[b]) {
      edges.insert({a, b});
      last[a] = first[b] = false;
    }
  }
  std::vector<std::vector<CUgraphNode>> ends(units_.size()); // what the next operations wait for
  std::vector<CUgraphNode> from, to;
  for (auto [a, b] : edges) {
    from.push_back(nodes[a]);
    to.push_back(nodes[b]);
  }
  std::vector<std::vector<size_t>> waits;
  for (auto& unit : units_) {
    waits.push_back(std::move(unit.before));
  }
  waits = direct(std::move(waits));
  for (size_t u = 0; u < units_.size(); ++u) {
    std::vector<CUgraphNode> begins, before;
    for (auto i = units_[u].begin; i < units_[u].end; ++i) {
      if (first[i]) {
        begins.push_back(nodes[i]);
      }
      if (last[i]) {
        ends[u].push_back(nodes[i]);
      }
    }
    for (auto b : waits[u]) {
      before.insert(before.end(), ends[b].begin(), ends[b].end());
    }
    if (begins.size() > 1 && before.size() > 1) {
      CUgraphNode all = nullptr;
      check(driver.cuGraphAddEmptyNode(&all, graph, before.data(), before.size()), "cuGraphAddEmptyNode");
      before = {all};
    }
    if (units_[u].end - units_[u].begin == 1) { // no other node uses that memory before
      for (auto [a, b] : fill_early(nodes[units_[u].begin], units_[u], ends)) {
        from.push_back(a);
        to.push_back(b);
      }
    }
    for (auto b : begins) {
      for (auto a : before) {
        from.push_back(a);
        to.push_back(b);
      }
    }
  }
  if (!from.empty()) {
    check(driver.cuGraphAddDependencies(graph, from.data(), to.data(), from.size()), "cuGraphAddDependencies");
  }
  capture_.info.nodes = count;
  capture_.info.edges = from.size();
  check(driver.cuGraphInstantiateWithFlags(&capture_.exec_, graph, 0), "cuGraphInstantiate");
  check(driver.cuGraphUpload(capture_.exec_, capture_.queue_), "cuGraphUpload");
}

// cuBLAS has its workspace filled with zeros before a product, which then waits for that and not only for its factors. It is
// done beside the operations before it here, as soon as the workspace is free. Returns what waits for what because of that.
std::vector<std::pair<CUgraphNode, CUgraphNode>> Recorder::fill_early(
    CUgraphNode node, const Unit& unit, const std::vector<Nodes>& ends) {
  const auto& driver = replay::driver();
  auto is_of = [&](CUgraphNode each, int wanted) {
    int type = -1;
    return driver.cuGraphNodeGetType(each, &type) == CUDA_SUCCESS && type == wanted;
  };
  std::vector<std::pair<CUgraphNode, CUgraphNode>> edges;
  CUgraph child = nullptr;
  size_t count = 0;
  if (!is_of(node, child_node) || driver.cuGraphChildGraphNodeGetGraph(node, &child) != CUDA_SUCCESS ||
      driver.cuGraphGetNodes(child, nullptr, &count) != CUDA_SUCCESS || count < 2) {
    return edges;
  }
  Nodes inner(count);
  check(driver.cuGraphGetNodes(child, inner.data(), &count), "cuGraphGetNodes");
  for (auto each : inner) {
    Fill fill;
    size_t waits = 1;
    if (!is_of(each, fill_node) || driver.cuGraphNodeGetDependencies(each, nullptr, &waits) != CUDA_SUCCESS || waits > 0 ||
        driver.cuGraphMemsetNodeGetParams(each, &fill) != CUDA_SUCCESS || edges.size() + 1 == count) {
      continue;
    }
    auto bytes = fill.height > 1 ? fill.pitch * fill.height : fill.width * fill.elementSize;
    auto room = std::find_if(unit.rooms.begin(), unit.rooms.end(), [&](const Room& has) {
      return has.begin <= fill.dst && fill.dst + bytes <= has.end;
    });
    if (room == unit.rooms.end()) {
      continue;
    }
    Nodes before;
    for (auto user : room->users) {
      before.insert(before.end(), ends[user].begin(), ends[user].end());
    }
    CUgraphNode early = nullptr;
    check(
        driver.cuGraphAddMemsetNode(&early, recording_.graph(), before.data(), before.size(), &fill, capture_.context_),
        "cuGraphAddMemsetNode");
    check(driver.cuGraphDestroyNode(each), "cuGraphDestroyNode");
    edges.emplace_back(early, node);
  }
  return edges;
}

} // namespace faststep::replay
