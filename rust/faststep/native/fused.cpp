// Fused kernels that can take over the memory of their inputs.
//
// MLX lets an output take over an input that has one holder (array::is_donatable), but array::make_arrays gives a list of
// the inputs to each output: those of a kernel with several outputs have as many holders, and are never taken over. Here
// the outputs are rewritten, before they are evaluated: what they have in common is one input, an array without a value
// that stands for all of the kernel's, and is the only one to hold them.
//
// Nothing else depends on it: whichever of the outputs is evaluated first, alone or with others, by whatever thread, the
// inputs come before the kernel, and after an error the graph is as good as it was.
#include "fused.hpp"

#include <algorithm>
#include <exception>
#include <string_view>
#include <utility>

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
    arrays = std::move(out.inputs());
    out.inputs().clear();
  }
};

// The kernel, of one input that stands for all.
class Fused : public mx::Primitive {
 public:
  Fused(std::shared_ptr<mx::Primitive> kernel, std::shared_ptr<Inputs> inputs)
      : Primitive(kernel->stream()), kernel(std::move(kernel)), inputs_(std::move(inputs)) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    kernel->eval_cpu(inputs_->arrays, outputs);
    keep(inputs[0], outputs);
  }

  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    kernel->eval_gpu(inputs_->arrays, outputs);
    keep(inputs[0], outputs);
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
  }

  std::shared_ptr<Inputs> inputs_;
};

bool is_kernel(const mx::array& array) {
  bool lazy = array.status() == mx::array::Status::unscheduled && array.has_primitive() && !array.is_tracer();
  return lazy && !array.siblings().empty() && std::string_view(array.primitive().name()).starts_with("Compiled");
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

// Let the kernels that compute these arrays take over their inputs. Nonzero: an exception; the arrays can be evaluated.
extern "C" int faststep_fuse(const void* const* arrays, size_t count) {
  try {
    for (size_t i = 0; i < count; ++i) {
      const auto& array = *static_cast<const mlx::core::array*>(arrays[i]);
      if (faststep::is_kernel(array)) {
        faststep::rewrite(array);
      }
    }
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
