// The parts of MLX's fused kernel, which are its private members.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep {

namespace mx = mlx::core;

using KernelArrays = const std::vector<mx::array> mx::Compiled::*;
using KernelIds = const std::unordered_set<uintptr_t> mx::Compiled::*;

template <KernelArrays... are>
struct OpenKernelArrays { // what an explicit instantiation names may be private
  friend std::array<KernelArrays, sizeof...(are)> arrays_of_kernel() {
    return {are...};
  }
};

template <KernelIds are>
struct OpenKernelIds {
  friend KernelIds constants_of_kernel() {
    return are;
  }
};

// Its inputs and outputs, and the operations between them.
std::array<KernelArrays, 3> arrays_of_kernel();
// The inputs that are numbers in its source.
KernelIds constants_of_kernel();

template struct OpenKernelArrays<&mx::Compiled::inputs_, &mx::Compiled::outputs_, &mx::Compiled::tape_>;
template struct OpenKernelIds<&mx::Compiled::constant_ids_>;

} // namespace faststep
