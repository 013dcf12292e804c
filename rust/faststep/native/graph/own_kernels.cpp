// Operations that have kernels of the package's own on a CPU (cpu/softmax.cpp, cpu/convolution.cpp, cpu/copied.cpp).
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/convolution.hpp"
#include "cpu/copied.hpp"
#include "cpu/softmax.hpp"
#include "graph/rewrite.hpp"
#include "lazy.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

class OwnKernels : public faststep::Rewrite {
 public:
  OwnKernels(faststep::Convolve convolve, faststep::Sgemm sgemm) : convolve_(convolve), sgemm_(sgemm) {}

 private:
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    const auto& a = outputs[0];
    if (!a.is_tracer()) {
      return outputs; // uncompiled, others may hold it
    }
    auto made = faststep::softmax_of(a);
    if (!made) {
      made = faststep::convolution_of(a, convolve_);
    }
    if (!made) {
      made = faststep::copied_by_rows(a, sgemm_);
    }
    if (!made) {
      return outputs;
    }
    faststep::take_module(a, *made);
    return {*made};
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
    void** rewritten) {
  return faststep::guarded([&] { OwnKernels(convolve, sgemm).run(arrays, count, rewritten); });
}
