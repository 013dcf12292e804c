// Copies of arrays, transposes by tiles: MLX copies them row by row, each element from another cache line.
#include "cpu/copy.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "mlx/backend/cpu/encoder.h"

namespace faststep {

namespace {

// The transpose of a matrix in memory: what lies at from[row + column * ld], to row after row.
template <typename T>
struct Turn {
  const T* from;
  int64_t ld;
  int rows;
  int columns;
  T* to;

  void copy() const {
    constexpr int tile = 64;
    for (int row = 0; row < rows; row += tile) {
      for (int column = 0; column < columns; column += tile) {
        copy(row, std::min(rows, row + tile), column, std::min(columns, column + tile));
      }
    }
  }

 private:
  // by four rows at a time, and four columns of them
  void copy(int row, int last_row, int column, int last_column) const {
    for (; row + 4 <= last_row; row += 4) {
      int next = column;
      if constexpr (sizeof(T) == 4) {
        for (; next + 4 <= last_column; next += 4) {
          four_by_four(from + row + next * ld, to + static_cast<int64_t>(row) * columns + next);
        }
      }
      singly(row, row + 4, next, last_column);
    }
    singly(row, last_row, column, last_column);
  }

  void singly(int row, int last_row, int column, int last_column) const {
    for (; row < last_row; ++row) {
      for (int at = column; at < last_column; ++at) {
        to[static_cast<int64_t>(row) * columns + at] = from[row + at * ld];
      }
    }
  }

  void four_by_four(const T* in, T* out) const {
    using Four = uint32_t __attribute__((vector_size(16)));
    Four a, b, c, d;
    std::memcpy(&a, in, 16);
    std::memcpy(&b, in + ld, 16);
    std::memcpy(&c, in + 2 * ld, 16);
    std::memcpy(&d, in + 3 * ld, 16);
    Four ab = __builtin_shufflevector(a, b, 0, 4, 1, 5), more_ab = __builtin_shufflevector(a, b, 2, 6, 3, 7);
    Four cd = __builtin_shufflevector(c, d, 0, 4, 1, 5), more_cd = __builtin_shufflevector(c, d, 2, 6, 3, 7);
    Four turned[] = {
        __builtin_shufflevector(ab, cd, 0, 1, 4, 5),
        __builtin_shufflevector(ab, cd, 2, 3, 6, 7),
        __builtin_shufflevector(more_ab, more_cd, 0, 1, 4, 5),
        __builtin_shufflevector(more_ab, more_cd, 2, 3, 6, 7)};
    for (const auto& row : turned) {
      std::memcpy(out, &row, 16);
      out += columns;
    }
  }
};

// Copies what the axes from this one on span; returns where the next element goes.
template <typename T>
T* copy(const T* from, const Part& part, size_t axis, T* to) {
  if (axis == part.shape.size()) {
    *to = *from;
    return to + 1;
  }
  int64_t stride = part.strides[axis];
  if (axis + 2 == part.shape.size() && stride == 1) {
    Turn<T>{from, part.strides[axis + 1], part.shape[axis], part.shape[axis + 1], to}.copy();
    return to + static_cast<int64_t>(part.shape[axis]) * part.shape[axis + 1];
  }
  if (axis + 1 == part.shape.size()) {
    if (stride == 1) {
      return std::copy_n(from, part.shape[axis], to);
    }
    for (int i = 0; i < part.shape[axis]; ++i) {
      *to++ = from[i * stride];
    }
    return to;
  }
  for (int i = 0; i < part.shape[axis]; ++i) {
    to = copy(from + i * stride, part, axis + 1, to);
  }
  return to;
}

template <typename T>
void copy_all(const std::vector<Part>& parts, char* to) {
  for (const auto& part : parts) {
    if (!part.contiguous) {
      copy(reinterpret_cast<const T*>(part.data), part, 0, reinterpret_cast<T*>(to));
    } else if (part.data != to) {
      std::memcpy(to, part.data, part.bytes);
    }
    to += part.bytes;
  }
}

// The offset of a row of a part, in elements.
int64_t offset_of(const Part& part, size_t axis, size_t row) {
  int64_t at = 0;
  while (axis-- > 0) {
    auto length = static_cast<size_t>(part.shape[axis]);
    at += static_cast<int64_t>(row % length) * part.strides[axis];
    row /= length;
  }
  return at;
}

template <typename T>
void copy_beside(const std::vector<Part>& parts, const RowsFrom& rows, char* to) {
  for (const auto& part : parts) {
    auto bytes = part.bytes / rows.count;
    for (size_t row = 0; row < rows.count; ++row) {
      auto* piece = to + row * rows.bytes;
      if (part.contiguous) {
        std::memcpy(piece, part.data + row * bytes, bytes);
      } else {
        const auto* from = reinterpret_cast<const T*>(part.data) + offset_of(part, rows.axis, row);
        copy(from, part, rows.axis, reinterpret_cast<T*>(piece));
      }
    }
    to += bytes;
  }
}

} // namespace

void copy_beside(const std::vector<Part>& parts, const RowsFrom& rows, char* to, size_t itemsize) {
  switch (itemsize) {
    case 1:
      return copy_beside<uint8_t>(parts, rows, to);
    case 2:
      return copy_beside<uint16_t>(parts, rows, to);
    case 4:
      return copy_beside<uint32_t>(parts, rows, to);
    default:
      return copy_beside<uint64_t>(parts, rows, to);
  }
}

void copy_all(const std::vector<Part>& parts, char* to, size_t itemsize) {
  switch (itemsize) {
    case 1:
      return copy_all<uint8_t>(parts, to);
    case 2:
      return copy_all<uint16_t>(parts, to);
    case 4:
      return copy_all<uint32_t>(parts, to);
    default:
      return copy_all<uint64_t>(parts, to);
  }
}

Part part_of(const mx::array& array) {
  bool contiguous = array.flags().row_contiguous;
  Part part{array.data<char>(), array.nbytes(), contiguous, {}, {}};
  if (!contiguous) {
    part.shape = array.shape();
    part.strides = array.strides();
  }
  return part;
}

std::vector<Part> parts_of(const std::vector<mx::array>& arrays) {
  std::vector<Part> parts;
  parts.reserve(arrays.size());
  std::transform(arrays.begin(), arrays.end(), std::back_inserter(parts), part_of);
  return parts;
}

void copy_rows(const mx::array& in, mx::array& out, mx::Stream stream) {
  out.set_data(mx::allocator::malloc(out.nbytes()));
  mx::cpu::get_command_encoder(stream).dispatch(
      [part = part_of(in), to = out.data<char>(), itemsize = out.itemsize()] { copy_all({part}, to, itemsize); });
}

mx::array temporary_rows(const mx::array& in, mx::Stream stream) {
  mx::array copied(in.shape(), in.dtype(), nullptr, {});
  copy_rows(in, copied, stream);
  mx::cpu::get_command_encoder(stream).add_temporary(copied);
  return copied;
}

} // namespace faststep
