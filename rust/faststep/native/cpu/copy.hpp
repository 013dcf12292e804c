// Copies of arrays by the CPU's worker.
#pragma once

#include <cstddef>
#include <vector>

#include "mlx/mlx.h"

namespace faststep {

namespace mx = mlx::core;

// The memory of an evaluated array.
struct Part {
  const char* data;
  size_t bytes;
  bool contiguous;
  mx::Shape shape; // of one that is not contiguous
  mx::Strides strides;
};

Part part_of(const mx::array& array);
std::vector<Part> parts_of(const std::vector<mx::array>& arrays);

// Copy parts one after the other, each row after row; one that lies there already stays.
void copy_all(const std::vector<Part>& parts, char* to, size_t itemsize);

// Have the stream's worker copy an array, row after row, into new memory of another one.
void copy_rows(const mx::array& in, mx::array& out, mx::Stream stream);

// Have the stream's worker copy an array, row after row, into memory that is freed behind the tasks handed over next.
mx::array temporary_rows(const mx::array& in, mx::Stream stream);

// Rows of an array that begin at an axis.
struct RowsFrom {
  size_t axis;
  size_t count;
  size_t bytes; // of each
};

// Copy parts beside each other, each of them to a piece of every row.
void copy_beside(const std::vector<Part>& parts, const RowsFrom& rows, char* to, size_t itemsize);

} // namespace faststep
