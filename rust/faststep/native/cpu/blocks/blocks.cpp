// MLX has a compiler make a library of each fused kernel when it is first needed: a second of g++ before a kernel's first result. Here
// a kernel that is in no library yet is computed block by block, with the same bits. One that is needed again and again is compiled
// meanwhile, and takes over once it is there; but for one whose functions a compiler leaves to the C library, number by number.
// Without a compiler all kernels are computed block by block, those of the user's own mx.compile too.
#include "cpu/blocks/blocks.hpp"

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/primitives.h"
#include "cpu/blocks/operations.hpp"
#include "cpu/blocks/program.hpp"
#include "cpu/on_cpu.hpp"
#include "cpu/replay/task.hpp"
#include "ffi.hpp"
#include "kernel.hpp"

namespace faststep {

namespace mx = mlx::core;

namespace {

// A function of `later.rs`: whether the library with this number is there. Null: all kernels are left to MLX.
bool (*is_made)(uint64_t number) = nullptr;
std::atomic<bool> is_alone = false; // no compiler makes kernels

constexpr int patience = 16; // evaluations, from which on a compiler's second pays

// What MLX's call of the compiler comes to, on this thread.
struct Call {
  KernelCall way = KernelCall::compile;
  bool is_refused = false;
  uint64_t number = 0; // of the library that has been asked for
};

thread_local Call call;
thread_local size_t computed = 0; // evaluations in blocks

class InBlocks : public mx::Compiled {
 public:
  InBlocks(mx::Compiled& kernel, std::shared_ptr<const blocks::Program> program)
      : Compiled(
            kernel.stream(),
            kernel.*arrays_of_kernel()[0],
            kernel.*arrays_of_kernel()[1],
            kernel.*arrays_of_kernel()[2],
            kernel.*constants_of_kernel()),
        program_(std::move(program)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    bool fits = outputs[0].ndim() <= blocks::Program::most_axes;
    if (fits && program_->is_ahead_of_library()) {
      return blocks::Program::dispatch(program_, inputs, outputs, stream());
    }
    bool is_kept = tasks::recording() != nullptr; // as a task that is called again and again
    if (is_kept || !fits) {
      return Compiled::eval_cpu(inputs, outputs);
    }
    ++evaluations_;
    if (!is_compiled_ && (evaluations_ == 1 || evaluations_ == patience)) {
      if (is_computed(evaluations_ == 1 ? KernelCall::look : KernelCall::ask, inputs, outputs)) {
        is_compiled_ = true;
        return;
      }
    } else if (evaluations_ > patience && !is_compiled_) {
      is_compiled_ = is_made(asked_);
    }
    if (is_compiled_) {
      return Compiled::eval_cpu(inputs, outputs);
    }
    ++computed;
    blocks::Program::dispatch(program_, inputs, outputs, stream());
  }

 private:
  // Whether MLX has a library of the kernel, and so has computed it. It allocates nothing before it calls the compiler.
  bool is_computed(KernelCall way, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
    call = {way};
    bool done = true;
    try {
      Compiled::eval_cpu(inputs, outputs);
    } catch (const std::runtime_error&) {
      if (!call.is_refused) {
        call = {};
        throw;
      }
      asked_ = call.number;
      done = false;
    }
    call = {};
    return done;
  }

  std::shared_ptr<const blocks::Program> program_;
  int evaluations_ = 0;
  uint64_t asked_ = 0; // the library's number
  bool is_compiled_ = false;
};

// In place of Compiled::eval_cpu.
void without_compiler(mx::Compiled* kernel, const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) {
  auto program = outputs[0].ndim() <= blocks::Program::most_axes ? blocks::Program::known(*kernel) : nullptr;
  if (program) {
    blocks::Program::dispatch(std::move(program), inputs, outputs, kernel->stream());
  } else {
    blocks::compute_operations(*kernel, inputs, outputs);
  }
}

// An operation that is in no kernel, with MLX's bits: its library calls a function for each element.
class ByVectors : public OnCpu {
 public:
  ByVectors(std::shared_ptr<mx::Primitive> operation, std::shared_ptr<const blocks::Program> program)
      : OnCpu(operation->stream()), operation_(std::move(operation)), program_(std::move(program)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& out) override {
    std::vector<mx::array> outputs{out};
    blocks::Program::dispatch(program_, inputs, outputs, stream());
  }

  const char* name() const override {
    return operation_->name();
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return std::string_view(name()) == other.name();
  }

 private:
  std::shared_ptr<mx::Primitive> operation_;
  std::shared_ptr<const blocks::Program> program_;
};

bool has_vectors(const mx::array& array) {
  std::string_view name = array.primitive().name();
  bool is_known = name == "Exp" || name == "Sigmoid" || name == "Erf" || blocks::is_ahead_of_library(name, array.dtype());
  return is_known && array.dtype() == mx::float32 && array.ndim() > 0 && array.primitive().device() == mx::Device::cpu &&
      dynamic_cast<const OnCpu*>(&array.primitive()) == nullptr;
}

} // namespace

std::shared_ptr<mx::Primitive> by_blocks(const mx::array& array) {
  if (is_made == nullptr || !has_vectors(array)) {
    return in_blocks(array.primitive_ptr());
  }
  mx::array in(array.shape(), mx::float32, nullptr, {});
  mx::array out(array.shape(), mx::float32, array.primitive_ptr(), {in});
  auto program = blocks::Program::of(mx::Compiled(array.primitive().stream(), {in}, {out}, {out}, {}));
  return std::make_shared<ByVectors>(array.primitive_ptr(), std::move(program));
}

std::shared_ptr<mx::Primitive> in_blocks(const std::shared_ptr<mx::Primitive>& kernel) {
  bool is_one = is_made != nullptr && !is_alone && typeid(*kernel) == typeid(mx::Compiled) && kernel->device() == mx::Device::cpu;
  if (!is_one) {
    return kernel;
  }
  struct Made {
    std::weak_ptr<mx::Primitive> of;
    std::shared_ptr<mx::Primitive> kernel;
  };
  // never destroyed: as in casts.cpp
  static thread_local auto& all = *new std::unordered_map<const mx::Primitive*, Made>();
  auto found = all.find(kernel.get());
  if (found == all.end() || found->second.of.expired()) {
    std::erase_if(all, [](const auto& item) { return item.second.of.expired(); });
    auto& compiled = static_cast<mx::Compiled&>(*kernel);
    auto program = blocks::Program::of(compiled);
    auto made = program ? std::make_shared<InBlocks>(compiled, std::move(program)) : kernel;
    found = all.insert_or_assign(kernel.get(), Made{kernel, std::move(made)}).first;
  }
  return found->second.kernel;
}

} // namespace faststep

bool faststep_blocks_begin(bool (*is_made)(uint64_t number)) noexcept {
  bool can = faststep::blocks::can_loop();
  faststep::is_made = can ? is_made : nullptr;
  return can;
}

void* faststep_blocks_alone() noexcept {
  faststep::is_alone = true;
  return reinterpret_cast<void*>(&faststep::without_compiler);
}

size_t faststep_blocks_computed() noexcept {
  return faststep::computed;
}

faststep::KernelCall faststep_kernel_call() noexcept {
  return faststep::call.way;
}

void faststep_kernel_refused(uint64_t number) noexcept {
  faststep::call.is_refused = true;
  faststep::call.number = number;
}
