// Fused kernels that can take over the memory of their inputs.
//
// MLX lets an output take over an input that has one holder (array::is_donatable), but array::make_arrays gives a list of
// the inputs to each output: those of a kernel with several outputs have as many holders, and are never taken over. Here
// the outputs are rewritten, before they are evaluated: what they have in common is one input, an array without a value
// that stands for all of the kernel's, and is the only one to hold them.
//
// Nothing else depends on it: whichever of the outputs is evaluated first, alone or with others, by whatever thread, the
// inputs come before the kernel, and after an error the graph is as good as it was.
#include "graph/fuse.hpp"

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "mlx/backend/cpu/encoder.h"
#include "cpu/float_mode.hpp"
#include "status.hpp"

namespace faststep {

namespace {

mx::allocator::Data nothing() {
  return {mx::allocator::Buffer(nullptr), {}};
}

// Stands for the inputs of a kernel; evaluated, it has them for the kernel to take.
class Inputs : public mx::UnaryPrimitive {
 public:
  explicit Inputs(mx::Stream stream) : UnaryPrimitive(stream) {}

  void eval_cpu(const std::vector<mx::array>&, mx::array& out) override {
    take(out);
  }

  void eval_gpu(const std::vector<mx::array>&, mx::array& out) override {
    take(out);
  }

  const char* name() const override {
    return "Inputs";
  }

  std::vector<mx::array> arrays;

 private:
  // from the array, or the back end would hold on to those that the kernel writes over, until it has done so
  void take(mx::array& out) {
    out.set_data(nothing());
    if (!out.inputs().empty()) { // otherwise it has them: MLX has thrown the error of an operation before, and evaluates it again
      arrays = std::move(out.inputs());
      out.inputs().clear();
    }
  }
};

// Whether FASTSTEP_FLUSH_DENORMALS asks for updates without denormals: moments that fade away stay at 1e-45 for good, and a
// processor computes with such a number at a tenth of its speed. Without them an update has other bits than MLX's.
bool flushes() {
  static const bool asked = [] {
    const char* value = std::getenv("FASTSTEP_FLUSH_DENORMALS");
    return value != nullptr && std::string_view(value) == "1";
  }();
  return asked;
}

// While it lives, what is handed to the CPU's worker is computed without denormals, where that is asked for.
class Flushing {
 public:
  explicit Flushing(mx::Stream stream) : stream_(stream) {
    if (before_) {
      mx::cpu::get_command_encoder(stream_).dispatch([before = before_] {
        *before = float_mode();
        set_float_mode(*before | zeros);
      });
    }
  }

  ~Flushing() {
    if (before_) {
      mx::cpu::get_command_encoder(stream_).dispatch([before = before_] { set_float_mode(*before); });
    }
  }

  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
  mx::Stream stream_;
  std::shared_ptr<uint64_t> before_ = flushes() ? std::make_shared<uint64_t>() : nullptr;
};

// The kernel, of one input that stands for all.
class Fused : public mx::Primitive {
 public:
  Fused(std::shared_ptr<mx::Primitive> kernel, std::shared_ptr<Inputs> inputs)
      : Primitive(kernel->stream()), kernel(std::move(kernel)), inputs_(std::move(inputs)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    if (!handed_over_) {
      Flushing flushing(stream());
      kernel->eval_cpu(inputs_->arrays, outputs);
      keep(inputs[0], outputs);
    }
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    if (!handed_over_) {
      kernel->eval_gpu(inputs_->arrays, outputs);
      keep(inputs[0], outputs);
    }
  }

  const char* name() const override {
    return "Fused";
  }

  const std::shared_ptr<mx::Primitive> kernel;

 private:
  // What no output has taken over has to stay until the kernel has run, as long as back ends keep the memory of inputs.
  void keep(mx::array input, const std::vector<mx::array>& outputs) {
    std::vector<std::shared_ptr<mx::array::Data>> kept;
    for (const auto& in : inputs_->arrays) {
      const auto& data = in.data_shared_ptr();
      auto takes = [&data](const mx::array& out) { return out.data_shared_ptr() == data; };
      if (std::none_of(outputs.begin(), outputs.end(), takes)) {
        kept.push_back(data);
      }
    }
    input.set_data({mx::allocator::Buffer(nullptr), [kept = std::move(kept)](mx::allocator::Buffer) {}});
    inputs_->arrays.clear();
    handed_over_ = true;
  }

  std::shared_ptr<Inputs> inputs_;
  // MLX throws the error of an operation before when it is handed the next thing to do, this kernel's inputs to keep maybe: it
  // evaluates this array again then, of which the kernel has been handed over, and may have written over its inputs.
  bool handed_over_ = false;
};

// On a CPU, outputs of fewer bytes are in its caches, and one more operation takes longer than to make them anew.
constexpr size_t least_bytes = 16 << 10;

bool is_kernel(const mx::array& array) {
  bool lazy = array.status() == mx::array::Status::unscheduled && array.has_primitive() && !array.is_tracer();
  if (!lazy) {
    return false;
  }
  bool small = array.nbytes() < least_bytes && array.primitive().device() == mx::Device::cpu;
  bool worth = (!array.siblings().empty() && !small) || flushes();
  return worth && std::string_view(array.primitive().name()).starts_with("Compiled");
}

void rewrite(const mx::array& array) {
  auto outputs = array.outputs();
  auto inputs = std::make_shared<Inputs>(array.primitive().stream());
  auto fused = std::make_shared<Fused>(array.primitive_ptr(), inputs);
  mx::array all(mx::Shape{0}, mx::bool_, std::move(inputs), array.inputs());
  for (auto& out : outputs) {
    out.inputs() = {all};
    out.primitive_ptr() = fused;
  }
}

} // namespace

Source source(const mx::array& array) {
  auto* fused = dynamic_cast<const Fused*>(&array.primitive());
  if (fused == nullptr) {
    return {array.primitive_ptr(), array.inputs(), array.siblings().size() + 1};
  }
  return {fused->kernel, array.inputs()[0].inputs(), 1};
}

} // namespace faststep

int faststep_fuse(const void* const* arrays, size_t count) {
  return faststep::guarded([&] {
    for (size_t i = 0; i < count; ++i) {
      const auto& array = faststep::at(arrays[i]);
      if (faststep::is_kernel(array)) {
        faststep::rewrite(array);
      }
    }
  });
}

namespace {

constexpr int max_depth = 64;

// What computes an array, from arrays that are known or there: equal for two arrays that the same kernels compute.
class Kinds {
 public:
  explicit Kinds(std::unordered_set<uintptr_t> known) : known_(std::move(known)) {}

  size_t of(const mlx::core::array& array, int depth = 0) {
    auto kind = std::hash<int>{}(static_cast<int>(array.dtype().val()));
    bool lazy = array.status() == mlx::core::array::Status::unscheduled && array.has_primitive();
    if (known_.contains(array.id()) || !lazy || depth == max_depth) {
      return array.ndim() == 0 ? mixed(kind, array.id()) : kind; // a number may be in the kernel's source
    }
    auto made = made_.find(array.id());
    if (made != made_.end()) {
      return made->second;
    }
    auto source = faststep::source(array);
    kind = mixed(kind, std::hash<std::string_view>{}(source.primitive->name()));
    for (const auto& in : source.inputs) {
      kind = mixed(kind, of(in, depth + 1));
    }
    return made_[array.id()] = kind;
  }

 private:
  static size_t mixed(size_t a, size_t b) {
    return (a ^ (b + 0x9e3779b97f4a7c15 + (a << 6) + (a >> 2))) * 0x100000001b3;
  }

  std::unordered_set<uintptr_t> known_;
  std::unordered_map<uintptr_t, size_t> made_;
};

} // namespace

int faststep_kinds(
    const void* const* arrays, size_t count, const void* const* known, size_t known_count, size_t* kinds) {
  return faststep::guarded([&] {
    std::unordered_set<uintptr_t> ids;
    for (size_t i = 0; i < known_count; ++i) {
      ids.insert(faststep::at(known[i]).id());
    }
    Kinds all(std::move(ids));
    for (size_t i = 0; i < count; ++i) {
      kinds[i] = all.of(faststep::at(arrays[i]));
    }
  });
}
