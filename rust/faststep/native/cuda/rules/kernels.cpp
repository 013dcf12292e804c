// Operations of a traced step that CUDA computes by kernels of our own in place of MLX's.
//
// The rules see one operation after another, its inputs before it, and with those that took their place. Sums are in
// float32, in another order than MLX's: the numbers are those of MLX but for rounding.
#include "cuda/rules/rules.hpp"

#include <algorithm>
#include <cstddef>
#include <sstream>

#include "graph/graph.hpp"
#include "graph/rewrite.hpp"
#include "mlx/backend/cuda/cuda.h"
#include "status.hpp"

namespace faststep::rules {

Arrays call(
    const Kernel& kernel,
    const Arrays& inputs,
    const std::vector<mx::Shape>& shapes,
    std::vector<mx::Dtype> dtypes) {
  auto made = mx::fast::cuda_kernel(
      "faststep_" + kernel.name, kernel.inputs, kernel.outputs, kernel.source, kernel.functions, kernel.contiguous)(
      inputs,
      shapes,
      std::move(dtypes),
      {kernel.blocks.first * kernel.threads.first, kernel.blocks.second * kernel.threads.second, 1},
      {kernel.threads.first, kernel.threads.second, 1},
      kernel.constants,
      std::nullopt,
      false,
      mx::Device::gpu);
  is_determined_by_inputs(made[0]);
  return made;
}

std::optional<float> number(const mx::array& a) {
  const auto& scalar = unrepeated(a);
  bool readable = !scalar.has_primitive() && scalar.is_available() && scalar.size() == 1;
  return readable && scalar.dtype() == mx::float32 ? std::optional(*scalar.data<float>()) : std::nullopt;
}

std::string literal(float value) {
  std::ostringstream out;
  out << std::hexfloat << value << "f";
  return out.str();
}

namespace {

class Kernels : public Rewrite {
  Arrays operation(const Arrays& outputs) override {
    if (outputs[0].primitive().stream().device != mx::Device::gpu) {
      return outputs;
    }
    if (outputs.size() > 1) {
      return layer_norm_vjp(outputs).value_or(outputs);
    }
    auto out = outputs[0];
    heads_.read_by(out);
    auto made = column_sum(out);
    if (!made) {
      made = heads_.rewritten(out);
    }
    if (!made) {
      made = softmax_.rewritten(out);
    }
    if (made) {
      hold(*made); // rules know arrays by their ids
    }
    return {made.value_or(out)};
  }

  Heads heads_;
  Softmax softmax_{heads_};
};

} // namespace

} // namespace faststep::rules

int faststep_kernels(const void* const* arrays, size_t count, void** rewritten) {
  return faststep::guarded([&] {
    faststep::rules::Kernels kernels;
    std::vector<faststep::mx::array> all;
    for (size_t i = 0; i < count; ++i) {
      all.push_back(kernels.run(faststep::at(arrays[i])));
    }
    std::transform(all.begin(), all.end(), rewritten, faststep::owned);
  });
}
