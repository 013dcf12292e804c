// Queries about operations of a lazy graph, by the names and states of their primitives.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "mlx/mlx.h"
#include "mlx/primitives.h"

namespace faststep::known {

namespace mx = mlx::core;

inline bool is(const mx::array& a, std::string_view primitive) {
  return a.has_primitive() && a.primitive().name() == primitive;
}

// Return true if an operation only orders others: its outputs are its first inputs.
inline bool passes_on(const mx::array& a) {
  return is(a, "Pace") || is(a, "Wait") || is(a, "Depends");
}

// What an operation reads, behind what only passes it on.
const mx::array& input(const mx::array& a, size_t i);

// The array that another one repeats along some axes, or the array itself.
inline const mx::array& unrepeated(const mx::array& a) {
  return is(a, "Broadcast") ? input(a, 0) : a;
}

// The array that another one has in another shape, or the array itself.
inline const mx::array& unshaped(const mx::array& a) {
  return is(a, "Reshape") || is(a, "Flatten") || is(a, "Unflatten") ? unshaped(input(a, 0)) : a;
}

// The value of a scalar of a floating dtype, if it is there.
std::optional<float> number(const mx::array& a);

// The array that another one is a multiple of, and the factor; the array itself and 1 where no such number is known.
std::pair<const mx::array*, float> without_factor(const mx::array& a);

// The matrix of which another one is the transpose, or all in an array.
const mx::array* swapped_back(const mx::array& a);
bool are_swapped(const mx::array& a, const mx::array& b);

// Whether row i of a mask of these positions shows the columns up to i + columns - rows.
bool shows_causal(const mx::array& mask, int rows, int columns);

// Whether a mask that is added to scores hides all but these.
bool adds_causal(const mx::array& mask, int rows, int columns);

} // namespace faststep::known
