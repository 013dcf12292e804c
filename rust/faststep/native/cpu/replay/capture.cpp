#include "cpu/replay/capture.hpp"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cpu/float_mode.hpp"
#include "exchanges.hpp"
#include "told.hpp"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/primitives.h"
#include "mlx/scheduler.h"
#include "mlx/version.h"

namespace faststep::tasks {

namespace {

// Whether primitives of that name read a file, or wait for other processes.
bool waits_for_others(std::string_view name) {
  return name.ends_with("Load") || exchanges(name);
}

// How the worker of a stream computes.
uint64_t float_mode_of(mx::Stream stream) {
  auto mode = std::make_shared<uint64_t>();
  mx::scheduler::enqueue(stream, [mode] { *mode = float_mode(); });
  mx::synchronize(stream);
  return *mode;
}

// The calling thread computes so, as long as it lives.
class FloatMode {
 public:
  explicit FloatMode(uint64_t mode) : before_(float_mode()) {
    set_float_mode(mode);
  }
  ~FloatMode() {
    set_float_mode(before_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  uint64_t before_;
};

// Closures, and what is done in their place, are those of one version.
void check_version() {
  auto built = std::to_string(MLX_VERSION_MAJOR) + '.' + std::to_string(MLX_VERSION_MINOR) + '.' +
      std::to_string(MLX_VERSION_PATCH);
  std::string loaded = mx::version();
  if (loaded != built) {
    throw Refused("this was made for MLX " + built + ", and " + loaded + " is loaded");
  }
}

bool is_whole(const mx::array& a) {
  return a.flags().row_contiguous && a.offset() == 0 && a.data_size() == a.size();
}

const void* memory_of(const mx::array& array) {
  const auto& data = array.data_shared_ptr();
  return data ? data->buffer().ptr() : nullptr;
}

void copy(const mx::array& from, const mx::array& into) {
  if (!from.flags().row_contiguous || !into.flags().row_contiguous || from.nbytes() != into.nbytes()) {
    throw std::logic_error("a replay copies arrays of one size that lie row after row");
  }
  std::memcpy(const_cast<char*>(into.data<char>()), from.data<char>(), from.nbytes());
}

} // namespace

struct Capture::Kernel {
  struct Input {
    const void* memory;
    bool by_element; // row after row, from the beginning of its memory, element by element of the outputs
  };
  std::vector<Input> inputs;
};

Capture::Capture(Graph graph) : graph_(std::move(graph)), stream_(mx::default_stream(mx::Device::cpu)) {}

Capture::~Capture() = default;

void Capture::record(const std::vector<Recorded*>& learns, size_t threads) {
  threads_ = threads;
  auto &first = static_cast<Capture&>(*learns.at(0)), &second = static_cast<Capture&>(*learns.at(1));
  for (auto* each : {&first, &second, this}) {
    replay::fold(each->graph_, stream_, [](const mx::Primitive& primitive) { return waits_for_others(primitive.name()); });
  }
  float_mode_ = float_mode_of(stream_);
  check_version();

  Allocations apart;
  first.go_through(apart, nullptr);
  auto homes = first.homes(apart);

  std::unordered_set<size_t> held; // the evaluations that make them
  std::transform(homes.begin(), homes.end(), std::inserter(held, held.end()), [](const Home& home) { return home.evaluation; });
  Allocations natural;
  second.go_through(natural, &held);
  natural.find_constants();
  second.plan(natural, homes, graph_.into, *this);

  go_through(*memory_, &held);
  memory_->finish();
  bring_home(homes);
  units = replay::direct(std::move(units));
  hazards_ = {};
  uses_.clear();
  constants_.assign(memory_->fixed(), memory_->fixed() + fixed_bytes_);
  info.nodes = tasks_.size();
  info.bytes += fixed_bytes_;
  for (const auto& array : graph_.into) {
    kept_.push_back(array.data_shared_ptr());
  }
  graph_.from.clear();
  graph_.into.clear();
  graph_.fed.clear();
  graph_.inputs.clear();
}

// As cpu::eval does it (mlx/backend/cpu/eval.cpp), without running anything.
void Capture::go_through(Allocations& allocations, const std::unordered_set<size_t>* held) {
  std::vector<const mx::array*> outputs;
  for (auto* list : {&graph_.results, &graph_.from}) {
    for (const auto& array : *list) {
      outputs.push_back(&array);
    }
  }
  auto tape = tape_of(outputs);
  for (auto& array : tape) {
    std::string name = array.primitive().name();
    if (array.primitive().stream() != stream_) {
      throw Refused(name + " runs on another stream or device");
    }
    if (waits_for_others(name)) {
      throw Refused(name + " waits for others");
    }
    for (auto in : array.inputs()) {
      if (in.status() != mx::array::Status::unscheduled) {
        in.wait();
        kept_.push_back(in.data_shared_ptr()); // nor does MLX write over what somebody holds
      }
    }
  }
  Recording recording(stream_);
  Allocations::Scope scope(allocations);
  for (size_t number = 0; !tape.empty(); ++number) {
    auto array = std::move(tape.back());
    tape.pop_back();
    allocations.next(number);
    evaluate(std::move(array), number, held == nullptr || held->contains(number), allocations, recording);
  }
  tasks_ = std::move(recording.tasks);
}

void Capture::evaluate(
    mx::array array, size_t number, bool holds, const Allocations& allocations, Recording& recording) {
  auto outputs = array.outputs();
  std::vector<Data> held;
  if (holds) {
    for (const auto& in : array.inputs()) {
      held.push_back(in.data_shared_ptr());
    }
  }
  auto before = recording.tasks.size(), known = allocations.buffers().size();
  array.primitive().eval_cpu(array.inputs(), outputs);
  for (auto made = known; made < allocations.buffers().size(); ++made) {
    if (!allocations.is_home(made)) {
      hazards_.take(allocations.memory(made), allocations.room(made));
    }
  }
  auto temporaries = std::exchange(mx::cpu::get_command_encoder(stream_).temporaries(), {});
  std::string_view name = array.primitive().name();
  if (recording.refused != nullptr) {
    throw Refused(std::string(name) + ": " + recording.refused);
  }
  if (recording.tasks.size() > before) {
    Kernel kernel;
    for (const auto& in : array.inputs()) {
      last_reads_[memory_of(in)] = number;
      kernel.inputs.push_back({memory_of(in), in.size() == outputs[0].size() && is_whole(in)});
    }
    for (auto [input, offset] : may_lie_within(array.primitive())) {
      if (const auto& in = array.inputs()[input]; is_whole(in) && is_whole(outputs[0])) {
        parts_.push_back({memory_of(in), memory_of(outputs[0]), in.nbytes(), offset, number});
      }
    }
    if (name.starts_with("Compiled")) {
      kernels_.emplace(number, std::move(kernel));
    }
    Use use;
    std::transform(array.inputs().begin(), array.inputs().end(), std::back_inserter(use.reads), memory_of);
    std::transform(outputs.begin(), outputs.end(), std::back_inserter(use.writes), memory_of);
    for (auto made = known; made < allocations.buffers().size(); ++made) {
      use.writes.push_back(allocations.memory(made)); // what it needs meanwhile, too
    }
    add_unit(recording.tasks.size(), std::move(use));
  }
  for (auto& out : outputs) {
    out.set_status(mx::array::Status::available);
  }
  outputs.clear();
  array.detach();
}

void Capture::add_unit(size_t end, Use use) {
  ends_.push_back(end);
  units.push_back(hazards_.add(use.reads, use.writes));
  uses_.push_back(std::move(use));
}

// What a static array gets may be made in its memory, where it has memory of its own and nobody reads what is there any more.
std::vector<Capture::Home> Capture::homes(const Allocations& allocations) const {
  std::vector<Home> homes;
  std::unordered_set<size_t> known;
  for (size_t i = 0; i < graph_.from.size(); ++i) {
    const auto &from = graph_.from[i], &into = graph_.into[i];
    auto number = allocations.find(memory_of(from));
    if (number == Allocations::never || !is_whole(from) || !is_whole(into) || !into.data_shared_ptr()->is_owned()) {
      continue;
    }
    const auto& buffer = allocations.buffers()[number];
    bool fits = buffer.bytes == from.nbytes() && buffer.bytes == into.nbytes();
    if (fits && may_be_written(i, buffer.evaluation) && known.insert(number).second) {
      homes.push_back({buffer.evaluation, allocations.order(number), i});
    }
  }
  return homes;
}

bool Capture::may_be_written(size_t i, size_t evaluation) const {
  const auto* memory = memory_of(graph_.into[i]);
  if (is_given(memory)) {
    return false;
  }
  auto last = last_reads_.find(memory);
  if (last == last_reads_.end() || last->second < evaluation) {
    return true;
  }
  auto kernel = kernels_.find(evaluation);
  if (last->second > evaluation || kernel == kernels_.end()) {
    return false;
  }
  const auto& inputs = kernel->second.inputs;
  return std::all_of(inputs.begin(), inputs.end(), [memory](const Kernel::Input& in) { return in.memory != memory || in.by_element; });
}

// Return true if a result of the step, or the next value of a static array, lies in that memory.
bool Capture::is_given(const void* memory) const {
  auto is_there = [memory](const mx::array& array) { return memory_of(array) == memory; };
  return std::any_of(graph_.from.begin(), graph_.from.end(), is_there) ||
      std::any_of(graph_.results.begin(), graph_.results.end(), is_there);
}

// Buffers that are made where others will be.
std::vector<replay::Within> Capture::within(const Allocations& allocations, const replay::Sizes& sizes) const {
  std::vector<replay::Within> within;
  std::unordered_set<size_t> known;
  for (const auto& part : parts_) {
    auto buffer = allocations.find(part.memory), other = allocations.find(part.other);
    bool are_placed = buffer != Allocations::never && other != Allocations::never && sizes[buffer] > 0 && sizes[other] > 0;
    bool fits = are_placed && allocations.buffers()[buffer].bytes == part.bytes &&
        part.offset + part.bytes <= allocations.buffers()[other].bytes;
    if (fits && last_reads_.at(part.memory) == part.evaluation && !is_given(part.memory) && known.insert(buffer).second) {
      within.push_back({buffer, other, part.offset});
    }
  }
  return within;
}

// Gives `records` the memory for what this pass has allocated.
void Capture::plan(
    const Allocations& allocations,
    std::vector<Home>& homes,
    const std::vector<mx::array>& into,
    Capture& records) const {
  constexpr size_t little = 64; // so few bytes are not worth a place that others may have, too
  constexpr double factor = 1.1; // of the least memory, so that more units run side by side
  const auto& buffers = allocations.buffers();
  std::vector<Allocations::Place> places(buffers.size());
  std::erase_if(homes, [&](const Home& home) {
    auto number = allocations.find(memory_of(graph_.from[home.carried]));
    bool is_its = number != Allocations::never && buffers[number].evaluation == home.evaluation &&
        allocations.order(number) == home.order && buffers[number].bytes == into[home.carried].nbytes() &&
        !buffers[number].constant;
    if (is_its) {
      places[number].home = &into[home.carried];
    }
    return !is_its;
  });
  auto room = [](const Allocations::Buffer& buffer) {
    return (buffer.bytes + alignment - 1) / alignment * alignment + alignment;
  };
  replay::Sizes sizes(buffers.size()); // of those that share bytes
  size_t fixed = 0;
  for (size_t i = 0; i < buffers.size(); ++i) {
    places[i].bytes = buffers[i].bytes;
    if (places[i].home != nullptr) {
      continue;
    }
    if (buffers[i].constant || buffers[i].bytes <= little) {
      places[i].offset = fixed;
      fixed += room(buffers[i]);
    } else {
      sizes[i] = room(buffers[i]);
    }
  }
  auto parts = within(allocations, sizes);
  auto least = [&](const std::vector<replay::Within>& parts) {
    return replay::plan(operations(allocations), sizes, parts, 1).bytes;
  };
  if (!parts.empty() && least(parts) > least({})) { // what they are parts of takes memory from the first of them on
    parts.clear();
  }
  for (const auto& part : parts) {
    places[part.buffer].is_part = true;
  }
  auto plan = replay::plan(operations(allocations), sizes, parts, records.threads_ > 1 ? factor : 1);
  for (size_t i = 0; i < buffers.size(); ++i) {
    if (sizes[i] > 0) {
      places[i].offset = fixed + plan.offsets[i];
    }
  }
  records.memory_ = std::make_unique<Allocations>(fixed + plan.bytes, std::move(places));
  records.fixed_bytes_ = fixed;
  records.info.bytes = records.memory_->own_bytes();
}

// The units, and what reads the rest.
std::vector<replay::Operation> Capture::operations(const Allocations& allocations) const {
  std::vector<replay::Operation> operations(uses_.size() + 1);
  auto add = [&](const void* memory, std::vector<size_t>& numbers) {
    if (auto number = allocations.find(memory); number != Allocations::never) {
      numbers.push_back(number);
    }
  };
  for (size_t i = 0; i < uses_.size(); ++i) {
    for (const auto* memory : uses_[i].reads) {
      add(memory, operations[i].reads);
    }
    for (const auto* memory : uses_[i].writes) {
      add(memory, operations[i].writes);
    }
  }
  for (const auto* list : {&graph_.results, &graph_.from}) {
    for (const auto& array : *list) {
      add(memory_of(array), operations.back().reads);
    }
  }
  return operations;
}

// The other values are copied when all else is done.
void Capture::bring_home(const std::vector<Home>& homes) {
  for (size_t i = 0; i < graph_.from.size(); ++i) {
    const auto &from = graph_.from[i], &into = graph_.into[i];
    auto is_its = [i](const Home& home) { return home.carried == i; };
    if (std::any_of(homes.begin(), homes.end(), is_its) || from.data_shared_ptr() == into.data_shared_ptr()) {
      continue;
    }
    auto is_static = [&from](const mx::array& other) { return other.data_shared_ptr() == from.data_shared_ptr(); };
    if (std::any_of(graph_.into.begin(), graph_.into.end(), is_static)) {
      throw Refused("values that take each other's place");
    }
    if (!from.flags().row_contiguous || from.nbytes() != into.nbytes()) {
      throw Refused("a value that does not lie as the one before it");
    }
    tasks_.emplace_back([source = from.data<char>(), target = const_cast<char*>(into.data<char>()), bytes = from.nbytes()] {
      std::memcpy(target, source, bytes);
    });
    add_unit(tasks_.size(), {{memory_of(from)}, {memory_of(into)}});
  }
}

void Capture::run(replay::Runner runner) {
  FloatMode mode(float_mode_);
  std::memcpy(memory_->fixed(), constants_.data(), constants_.size());
  if (std::exchange(has_run_, true)) {
    runner.run(runner.context);
  } else {
    for (auto& task : tasks_) {
      task.run_first();
    }
  }
  if (failure_) {
    std::rethrow_exception(std::exchange(failure_, nullptr));
  }
}

bool Capture::run_unit(size_t number) {
  FloatMode mode(float_mode_);
  try {
    for (auto task = number == 0 ? 0 : ends_[number - 1]; task < ends_[number]; ++task) {
      tasks_[task].run();
    }
    return true;
  } catch (...) {
    std::lock_guard lock(failing_);
    failure_ = std::current_exception();
    return false;
  }
}

std::vector<mx::array> Capture::launch(
    const std::vector<mx::array>& from, const std::vector<mx::array>& into, replay::Runner runner) {
  tasks::copy(from, into);
  failed_ = true; // what is written over would be half done
  run(runner);
  failed_ = false;
  std::vector<mx::array> given{mx::array(true)};
  for (const auto& result : graph_.results) {
    mx::array copy(mx::allocator::malloc(result.nbytes()), result.shape(), result.dtype());
    faststep::tasks::copy({result}, {copy});
    given.push_back(std::move(copy));
  }
  return given;
}

void copy(const std::vector<mx::array>& from, const std::vector<mx::array>& into) {
  for (size_t i = 0; i < from.size(); ++i) {
    auto source = from[i];
    if (source.status() == mx::array::Status::unscheduled) {
      throw std::logic_error("a replay copies evaluated arrays");
    }
    source.wait();
    copy(source, into[i]);
  }
}

} // namespace faststep::tasks
