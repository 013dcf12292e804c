// Operations that have kernels of the package's own on a CPU (cpu/attention.cpp, cpu/softmax.cpp, cpu/row_sums.cpp, cpu/convolution.cpp,
// cpu/copied.cpp).
#include <algorithm>
#include <initializer_list>
#include <optional>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/attention.hpp"
#include "cpu/convolution.hpp"
#include "cpu/copied.hpp"
#include "cpu/row_sums.hpp"
#include "cpu/softmax.hpp"
#include "patterns/known.hpp"
#include "graph/rewrite.hpp"
#include "lazy.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

// Replaces attention. Its patterns consist of MLX's operations: this pass comes before `OwnKernels`, which replaces some of them.
class Attentions : public faststep::Rewrite {
 public:
  Attentions(faststep::Sgemm sgemm, faststep::Share share)
      : attention_(sgemm, share, [this](const mx::array& softmax) { return is_alone(softmax); }) {}

 private:
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    const auto& a = outputs[0];
    auto made = a.is_tracer() ? attention_.rewritten(a) : std::nullopt; // uncompiled, others may hold it
    if (!made) {
      return outputs;
    }
    hold(*made); // rules know arrays by their ids
    faststep::take_module(a, *made);
    return {*made};
  }

  // Return true if all users of an array are of this kind, themselves or behind an operation that only passes it on.
  template <typename Are>
  bool use(const mx::array& original, Are are) const {
    auto [count, all] = users(original);
    return count == all.size() && std::all_of(all.begin(), all.end(), [&](const mx::array& a) {
      return faststep::known::passes_on(a) ? use_passed_on(a, original, are) : are(a);
    });
  }

  template <typename Are>
  bool use_passed_on(const mx::array& by, const mx::array& original, Are are) const {
    const auto& inputs = by.inputs();
    auto outputs = by.outputs();
    for (size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].id() == original.id() && (i >= outputs.size() || !use(outputs[i], are))) {
        return false;
      }
    }
    return true;
  }

  // Return true if only an attention and its gradient use a softmax, and the gradient of its input.
  bool is_alone(const mx::array& softmax) const {
    using faststep::known::is;
    auto multiplies = [](const mx::array& a) { return is(a, "Matmul") || is(a, "Transpose"); };
    auto scales = [&](const mx::array& a) {
      return multiplies(a) || ((is(a, "Multiply") || is(a, "Divide")) && use(a, multiplies));
    };
    auto masks = [&](const mx::array& a) { return multiplies(a) || ((is(a, "Multiply") || is(a, "Divide")) && use(a, scales)); };
    auto subtracts = [&](const mx::array& a) { return is(a, "Sum") || (is(a, "Subtract") && use(a, masks)); };
    return use(softmax, [&](const mx::array& a) { return multiplies(a) || (is(a, "Multiply") && use(a, subtracts)); });
  }

  faststep::CpuAttention attention_;
};

// Replaces single operations.
class OwnKernels : public faststep::Rewrite {
 public:
  OwnKernels(faststep::Convolve convolve, faststep::Sgemm sgemm) : convolve_(convolve), sgemm_(sgemm) {}

 private:
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    const auto& a = outputs[0];
    auto made = a.is_tracer() ? own(a) : std::nullopt;
    if (!made) {
      return outputs;
    }
    faststep::take_module(a, *made);
    return {*made};
  }

  std::optional<mx::array> own(const mx::array& a) const {
    auto made = faststep::softmax_of(a);
    if (!made) {
      made = faststep::row_sums_of(a);
    }
    if (!made) {
      made = faststep::convolution_of(a, convolve_);
    }
    return made ? made : faststep::copied_by_rows(a, sgemm_);
  }

  faststep::Convolve convolve_;
  faststep::Sgemm sgemm_;
};

} // namespace

int faststep_own_kernels(
    const void* const* arrays,
    size_t count,
    void (*convolve)(const faststep::Convolution*),
    faststep::Sgemm sgemm,
    faststep::Share share,
    void** rewritten) {
  return faststep::guarded([&] {
    auto roots = faststep::list(arrays, count);
    Attentions attentions(sgemm, share);
    attentions.look(roots);
    OwnKernels kernels(convolve, sgemm);
    for (auto* each : std::initializer_list<faststep::Rewrite*>{&attentions, &kernels}) {
      for (auto& root : roots) {
        root = each->run(root);
      }
    }
    std::transform(roots.begin(), roots.end(), rewritten, faststep::owned);
  });
}
