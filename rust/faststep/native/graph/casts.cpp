// Casts that are part of a fused kernel.
//
// MLX fuses no more than some operations on top of each other (max_compile_depth in mlx/compile.cpp). The update of weights in
// half precision has one more: the gradient is cast to float32 to be clipped, by a kernel of its own, and read again at twice
// the size. Such a cast is put into the kernel that reads it, which gives the same bits.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/blocks/blocks.hpp"
#include "kernel.hpp"
#include "status.hpp"

namespace faststep {

namespace {

bool is_lazy(const mx::array& array) {
  return array.status() == mx::array::Status::unscheduled && array.has_primitive() && !array.is_tracer();
}

// Whether an input of a kernel is a cast that makes more bytes of as many elements as the kernel has.
bool is_cast(const mx::array& in, const mx::array& out) {
  return is_lazy(in) && std::string_view(in.primitive().name()) == "AsType" && in.size() == out.size() && in.ndim() > 0 &&
      in.inputs()[0].itemsize() < in.itemsize();
}

// A kernel that casts these of its inputs itself.
std::shared_ptr<mx::Primitive> with_casts(
    mx::Compiled& kernel, const std::vector<mx::array>& given, const std::vector<size_t>& casts) {
  auto [is_input, is_output, is_operation] = arrays_of_kernel();
  auto inputs = kernel.*is_input, outputs = kernel.*is_output;
  auto constants = kernel.*constants_of_kernel();
  std::vector<mx::array> tape;
  std::unordered_map<uintptr_t, mx::array> instead;
  for (auto i : casts) {
    auto wide = inputs[i];
    inputs[i] = mx::array(wide.shape(), given[i].inputs()[0].dtype(), nullptr, {});
    tape.emplace_back(wide.shape(), wide.dtype(), given[i].primitive_ptr(), std::vector<mx::array>{inputs[i]});
    instead.emplace(wide.id(), tape.back());
  }
  for (const auto& array : kernel.*is_operation) {
    auto in = array.inputs();
    bool changes = false;
    for (auto& each : in) {
      if (auto found = instead.find(each.id()); found != instead.end()) {
        each = found->second;
        changes = true;
      }
    }
    tape.push_back(changes ? mx::array(array.shape(), array.dtype(), array.primitive_ptr(), std::move(in)) : array);
    if (changes) {
      instead.emplace(array.id(), tape.back());
    }
  }
  for (auto& out : outputs) {
    if (auto found = instead.find(out.id()); found != instead.end()) {
      out = found->second;
    }
  }
  return in_blocks(std::make_shared<mx::Compiled>(
      kernel.stream(), std::move(inputs), std::move(outputs), std::move(tape), std::move(constants)));
}

// The same for each call of a trace, whose kernels are the same.
std::shared_ptr<mx::Primitive> known_with_casts(
    const std::shared_ptr<mx::Primitive>& kernel, const std::vector<mx::array>& given, const std::vector<size_t>& casts) {
  struct Made {
    std::weak_ptr<mx::Primitive> of;
    std::vector<size_t> casts;
    std::shared_ptr<mx::Primitive> kernel;
  };
  // never destroyed: a kernel may hold Python functions, and the interpreter is gone when a thread's objects are destroyed
  static thread_local auto& all = *new std::unordered_map<const mx::Primitive*, Made>();
  auto found = all.find(kernel.get());
  if (found == all.end() || found->second.of.expired() || found->second.casts != casts) {
    std::erase_if(all, [](const auto& item) { return item.second.of.expired(); });
    auto made = with_casts(static_cast<mx::Compiled&>(*kernel), given, casts);
    found = all.insert_or_assign(kernel.get(), Made{kernel, casts, std::move(made)}).first;
  }
  return found->second.kernel;
}

void take_in_casts(const mx::array& array) {
  if (!is_lazy(array) || dynamic_cast<const mx::Compiled*>(&array.primitive()) == nullptr) {
    return;
  }
  auto given = array.inputs();
  std::vector<size_t> casts;
  for (size_t i = 0; i < given.size(); ++i) {
    if (is_cast(given[i], array)) {
      casts.push_back(i);
    }
  }
  if (casts.empty()) {
    return;
  }
  auto kernel = known_with_casts(array.primitive_ptr(), given, casts);
  for (auto& out : array.outputs()) {
    for (auto i : casts) {
      out.inputs()[i] = given[i].inputs()[0];
    }
    out.primitive_ptr() = kernel;
  }
}

} // namespace

} // namespace faststep

int faststep_fuse_casts(const void* const* arrays, size_t count) {
  return faststep::guarded([&] {
    for (size_t i = 0; i < count; ++i) {
      faststep::take_in_casts(faststep::at(arrays[i]));
    }
  });
}
