// Sums of rows by an index: the gradient of a table of embeddings (rows.cpp).
#pragma once

#include <utility>
#include <vector>

#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

// Rows and where they are added: integers of any shape, and for each of them one row of the table.
using Addends = std::pair<mx::array, mx::array>;

// A float32 table of this shape, zero but for what is added to it: all of the first addends row after row, then the sums by row
// of the others, one list after the other (lazily).
mx::array sum_of_rows(const mx::Shape& shape, const std::vector<Addends>& addends, mx::Stream stream);

// A float32 table, and to it the sums by row of addends, one list after the other (lazily).
mx::array with_rows(const mx::array& table, const std::vector<Addends>& addends, mx::Stream stream);

} // namespace faststep
