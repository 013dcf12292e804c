// Operations of a traced step that CUDA computes by kernels of our own in place of MLX's.
//
// The rules see one operation after another, its inputs before it, and with those that took their place. Sums are in
// float32, in another order than MLX's: the numbers are those of MLX but for rounding.
#include "cuda/rules/rules.hpp"

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <unordered_map>

#include "graph/rewrite.hpp"
#include "lazy.hpp"
#include "mlx/backend/cuda/cuda.h"
#include "status.hpp"
#include "told.hpp"

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
    if (auto attention = attention_.rewritten(outputs)) {
      hold((*attention)[0]);
      return *attention;
    }
    if (outputs.size() > 1) {
      auto added = added_to(outputs[0]);
      auto made = layer_norm_vjp(outputs, added);
      if (made && added) {
        sums_.emplace((*made)[0].id(), users(outputs[0]).all[0].id());
        hold((*made)[0]);
      }
      return made.value_or(outputs);
    }
    auto out = outputs[0];
    heads_.read_by(out);
    auto made = relu_.rewritten(out, {[this](const mx::array& a) { return uses(a); }, is_summed(outputs[0])});
    if (!made) {
      made = column_sum(out);
    }
    if (!made) {
      made = layer_norm(out);
    }
    if (!made) {
      made = heads_.rewritten(out);
    }
    if (!made) {
      made = softmax_.rewritten(out);
    }
    if (!made) {
      made = sum(out);
    }
    if (!made) {
      made = small_product(out);
    }
    if (made) {
      hold(*made); // rules know arrays by their ids
      take_module(out, *made);
      take_module(out, unshaped(*made));
    }
    return {made.value_or(out)};
  }

  // Whether the rows of an array, in another shape or not, are summed up.
  bool is_summed(const mx::array& original) const {
    auto all = users(original).all;
    return std::any_of(all.begin(), all.end(), [&](const mx::array& user) {
      bool shapes = unshaped(user).id() != user.id() && user.ndim() > 0 && original.ndim() > 0 &&
          user.shape(-1) == original.shape(-1);
      return sums_rows(user) || (shapes && is_summed(user));
    });
  }

  // What is there already and is added to an array that nobody else uses.
  std::optional<mx::array> added_to(const mx::array& original) const {
    auto [count, all] = users(original);
    if (count != 1 || all.size() != 1 || !is(all[0], "Add") || all[0].primitive().stream().device != mx::Device::gpu) {
      return std::nullopt;
    }
    const auto* user = &all[0];
    const auto& in = user->inputs();
    auto other = place_of(in[0].id() == original.id() ? in[1] : in[0]);
    bool same = other && other->shape() == original.shape() && other->dtype() == original.dtype() &&
        user->shape() == original.shape() && user->dtype() == original.dtype();
    return same ? other : std::nullopt;
  }

  std::optional<mx::array> sum(const mx::array& a) const {
    if (is(a, "Add")) {
      for (const auto& in : a.inputs()) {
        auto found = sums_.find(in.id());
        if (found != sums_.end() && found->second == a.id()) {
          return in;
        }
      }
    }
    return std::nullopt;
  }

  std::unordered_map<std::uintptr_t, std::uintptr_t> sums_; // that have been computed, by the array that is one
  CausalAttention attention_;
  Relu relu_;
  Heads heads_;
  Softmax softmax_{heads_};
};

} // namespace

} // namespace faststep::rules

int faststep_kernels(const void* const* arrays, size_t count, void** rewritten) {
  return faststep::guarded([&] {
    faststep::rules::Kernels kernels;
    kernels.look(faststep::list(arrays, count));
    kernels.run(arrays, count, rewritten);
  });
}
