// Operations on rows that have kernels of the package's own on a CPU (cpu/softmax.cpp).
#include <algorithm>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"
#include "cpu/softmax.hpp"
#include "graph/rewrite.hpp"
#include "lazy.hpp"
#include "status.hpp"

namespace mx = mlx::core;

namespace {

class RowKernels : public faststep::Rewrite {
  std::vector<mx::array> operation(const std::vector<mx::array>& outputs) override {
    auto made = outputs[0].is_tracer() ? faststep::softmax_of(outputs[0]) : std::nullopt;
    if (!made) {
      return outputs; // uncompiled, others may hold it
    }
    faststep::take_module(outputs[0], *made);
    return {*made};
  }
};

} // namespace

int faststep_row_kernels(const void* const* arrays, size_t count, void** rewritten) {
  return faststep::guarded([&] { RowKernels().run(arrays, count, rewritten); });
}
