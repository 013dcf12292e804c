// The fused kernels of a graph that MLX has compiled become such as can be computed before a compiler has made them.
#include <cstddef>
#include <cstdint>
#include <unordered_set>

#include "mlx/mlx.h"
#include "cpu/blocks/blocks.hpp"
#include "graph/visit.hpp"
#include "status.hpp"

namespace faststep {

namespace {

void take_blocks(const mx::array& root, std::unordered_set<std::uintptr_t>& seen) {
  auto is_new = [&seen](const mx::array& array) {
    return array.has_primitive() && array.status() == mx::array::Status::unscheduled && !seen.contains(array.id());
  };
  visit(root, is_new, [&](const mx::array& array) {
    if (is_new(array)) {
      auto kernel = by_blocks(array);
      for (auto& out : array.outputs()) {
        seen.insert(out.id());
        out.primitive_ptr() = kernel;
      }
    }
  });
}

} // namespace

} // namespace faststep

int faststep_blocks(const void* const* arrays, size_t count) {
  return faststep::guarded([&] {
    std::unordered_set<std::uintptr_t> seen;
    for (size_t i = 0; i < count; ++i) {
      faststep::take_blocks(faststep::at(arrays[i]), seen);
    }
  });
}
