// The time of each operation of a lazy graph: they are evaluated one by one, in MLX's order, with the device's clock
// between them where it has one, otherwise each to its end; and the module that each belongs to, as far as that is known.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cuda/op_clock.hpp"
#include "cuda/rules/rules.hpp"
#include "ffi.hpp"
#include "lazy.hpp"
#include "status.hpp"

namespace {

namespace mx = mlx::core;
using faststep::at;

double seconds_of(const mx::array& array) {
  auto began = std::chrono::steady_clock::now();
  mx::eval({array});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

// Return the time of one evaluation beside its operation: the median over many evaluations of a scalar.
double overhead() {
  std::vector<double> taken;
  auto one = mx::array(1.0f);
  for (int i = 0; i < 41; ++i) {
    taken.push_back(seconds_of(mx::negative(one)));
  }
  std::nth_element(taken.begin(), taken.begin() + 20, taken.end());
  return taken[20];
}

std::string described(const mx::array& array) {
  std::ostringstream text;
  text << array.dtype() << ' ' << array.shape();
  return text.str();
}

// The modules of operations and of arrays. MLX's compiler keeps the operations that it does not fuse, so that those of
// a trace are known in the graphs that are built of it.
struct Labels {
  struct Made {
    std::shared_ptr<mx::Primitive> kept; // or another operation could get its address
    std::string module;
  };
  std::unordered_map<const mx::Primitive*, Made> operations;
  std::unordered_map<std::uintptr_t, std::string> inputs; // by array
};
thread_local Labels labels;

// Finds the modules of operations without a label, in the order in which they are evaluated: those of the backward pass, of
// the update, and fused ones. One that reads a parameter belongs where that does. One that reads results of operations with
// labels belongs to the latest of those, or, as gradients do, to the operation that read that result first. Views count as
// what they show.
class Modules {
 public:
  std::string of(const mx::array& array) {
    auto found = find(array);
    auto note = [&](const mx::array& output) {
      auto [at, _] = known_.insert_or_assign(output.id(), found);
      if (found.kind == Kind::labelled) {
        at->second.shown = output.id();
      }
    };
    note(array);
    for (const auto& sibling : array.siblings()) {
      note(sibling);
    }
    return found.module;
  }

 private:
  enum class Kind { other, labelled, parameter };
  struct Known {
    Kind kind = Kind::other;
    std::string module;
    size_t order = 0;
    std::uintptr_t shown = 0; // the result of the operation with a label, of which it may be a view
  };

  Known find(const mx::array& array) {
    auto label = labels.operations.find(&array.primitive());
    if (label != labels.operations.end()) {
      for (const auto& input : array.inputs()) {
        auto known = look_up(input);
        if (known && known->kind == Kind::labelled) {
          readers_.try_emplace(known->shown, label->second.module);
        }
      }
      return {Kind::labelled, label->second.module, ++order_};
    }
    std::optional<Known> best;
    for (const auto& input : array.inputs()) {
      auto known = look_up(input);
      if (known && (!best || std::pair(known->kind, known->order) >= std::pair(best->kind, best->order))) {
        best = known;
      }
    }
    if (!best) {
      return {};
    }
    if (array.inputs().size() == 1 && best->kind != Kind::other) {
      return *best;
    }
    auto reader = readers_.find(best->shown);
    bool read = best->kind == Kind::labelled && reader != readers_.end();
    return {Kind::other, read ? reader->second : best->module, ++order_};
  }

  std::optional<Known> look_up(const mx::array& input) const {
    auto made = known_.find(input.id());
    if (made != known_.end()) {
      return made->second;
    }
    auto given = labels.inputs.find(input.id());
    return given == labels.inputs.end() ? std::nullopt
                                        : std::optional<Known>({Kind::parameter, given->second, 0, 0});
  }

  std::unordered_map<std::uintptr_t, Known> known_; // by array
  std::unordered_map<std::uintptr_t, std::string> readers_; // by array: the first that read it
  size_t order_ = 0;
};

size_t bytes_of(const mx::array& array) {
  size_t bytes = 0;
  for (const auto& input : array.inputs()) {
    bytes += std::min(input.nbytes(), input.data_size() * input.itemsize()); // what is broadcast is read once
  }
  bytes += array.nbytes();
  for (const auto& sibling : array.siblings()) {
    bytes += sibling.nbytes();
  }
  return bytes;
}

struct Operation {
  uintptr_t id;
  std::string name, module, output;
  size_t bytes;
  double seconds = 0;
  bool by_events = false;
};

// The name of an operation, and of a kernel with what it was compiled for.
std::string name_of(const mx::Primitive& primitive) {
  std::string name = primitive.name();
  if (name != "CustomKernel") {
    return name;
  }
  name = std::get<0>(static_cast<const mx::fast::CustomKernel&>(primitive).state());
  constexpr std::string_view before = "custom_kernel_";
  return name.substr(name.starts_with(before) ? before.size() : 0);
}

Operation operation_of(const mx::array& array, Modules& modules) {
  auto id = array.id();
  for (const auto& sibling : array.siblings()) {
    id = std::min(id, sibling.id());
  }
  return {id, name_of(array.primitive()), modules.of(array), described(array), bytes_of(array)};
}

// Evaluates operations one after another, and times each.
class Timer {
 public:
  Timer() : clock_(faststep::op_clock()), overhead_(overhead()) {}

  void evaluate(mx::array array, Operation operation) {
    operations.push_back(std::move(operation));
    if (clock_ && clock_->takes(array)) {
      operations.back().by_events = true;
      clock_->evaluate(std::move(array));
      if (clock_->is_full()) {
        finish();
      }
      return;
    }
    finish();
    operations.back().seconds = std::max(0.0, seconds_of(array) - overhead_);
    told_ = operations.size();
  }

  // Waits for the device, and reads its clock.
  void finish() {
    if (clock_) {
      for (auto seconds : clock_->finish()) {
        operations[told_++].seconds = seconds;
      }
    }
  }

  std::vector<Operation> operations;

 private:
  std::unique_ptr<faststep::OpClock> clock_;
  double overhead_;
  size_t told_ = 0; // the operations before that one have their time
};

} // namespace

void faststep::take_module(const mx::array& from, const mx::array& to) {
  auto label = labels.operations.find(&from.primitive());
  if (label != labels.operations.end() && to.has_primitive()) {
    labels.operations.try_emplace(&to.primitive(), Labels::Made{to.primitive_ptr(), label->second.module});
  }
}

int faststep_measure(
    const void* const* arrays,
    size_t count,
    void (*take)(void* into, const faststep::TimedOperation* operation),
    void* into) {
  return faststep::guarded([&] {
    Modules modules;
    Timer timer;
    for (auto tape = faststep::tape_of(faststep::pointers(arrays, count)); !tape.empty();) {
      auto array = std::move(tape.back()); // no longer in the list: its memory can be used again
      tape.pop_back();
      if (array.status() != mx::array::Status::unscheduled) {
        continue; // with a sibling
      }
      auto operation = operation_of(array, modules);
      timer.evaluate(std::move(array), std::move(operation));
    }
    timer.finish();
    for (const auto& each : timer.operations) {
      faststep::TimedOperation told{
          each.id,    each.name.c_str(), each.module.c_str(), each.output.c_str(),
          each.bytes, each.seconds,      each.by_events};
      take(into, &told);
    }
  });
}

int faststep_label(const void* const* arrays, size_t count, const char* module) {
  return faststep::guarded([&] {
    std::vector<const mx::array*> todo;
    for (size_t i = 0; i < count; ++i) {
      todo.push_back(&at(arrays[i]));
    }
    while (!todo.empty()) {
      const auto& array = *todo.back();
      todo.pop_back();
      if (!array.has_primitive()) {
        continue;
      }
      auto [_, is_new] = labels.operations.try_emplace(&array.primitive(), Labels::Made{array.primitive_ptr(), module});
      if (is_new) {
        for (const auto& input : array.inputs()) {
          todo.push_back(&input);
        }
      }
    }
  });
}

int faststep_label_input(const void* array, const char* module) {
  return faststep::guarded([&] { labels.inputs[at(array).id()] = module; });
}

void faststep_labels_clear() noexcept {
  labels = {};
}
